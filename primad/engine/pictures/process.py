"""The picture process: ``python -m primad.engine.pictures.process`` encodes pictures for its daemon.

It ends when its standard input closes, even during a computation: then the daemon is gone.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import msgspec

from primad.engine.pictures.messages import (
    EncodedPicture,
    EncodePicture,
    EncoderFailed,
    EncoderReady,
    LoadEncoder,
    PictureRefused,
    PictureReply,
    PictureTask,
)
from primad.errors import EngineError
from primad.system.children.reply_stream import answer_tasks

if TYPE_CHECKING:
    from primad.engine.pictures.encoder import PictureEncoder

MORE_BYTES: Final = 4 << 30
"""Memory that a process on the CPU may use beyond its weights: it must end before the machine runs out of memory."""


class _Process:
    def __init__(self) -> None:
        self._encoder: PictureEncoder | None = None

    def answer(self, task: PictureTask) -> PictureReply:
        try:
            match task:
                case LoadEncoder():
                    return self._load(task)
                case EncodePicture():
                    return self._encode(task)
        except EngineError as exc:
            return EncoderFailed(str(exc))

    def _load(self, task: LoadEncoder) -> EncoderReady:
        import psutil

        from primad.engine.pictures.encoder import PictureEncoder  # only this process loads libmtmd

        self._encoder = PictureEncoder(
            task.path,
            task.model,
            threads=task.threads,
            min_tokens=task.min_tokens,
            max_tokens=task.max_tokens,
            gpu=task.gpu,
        )
        memory = psutil.Process().memory_info()
        if not task.gpu:  # a GPU driver reserves tens of GB of addresses when it first computes
            _limit(memory.vms + MORE_BYTES)
        return EncoderReady(width=self._encoder.width, bytes=memory.rss)

    def _encode(self, task: EncodePicture) -> EncodedPicture | PictureRefused:
        assert self._encoder is not None
        try:
            return self._encoder.encode(task.data)
        except ValueError as exc:
            return PictureRefused(str(exc))


def _limit(size_bytes: int) -> None:
    """Limit this process's address space to ``size_bytes``, where the system supports it."""
    if sys.platform != "win32":
        import resource

        _, maximum = resource.getrlimit(resource.RLIMIT_AS)
        if maximum == resource.RLIM_INFINITY or size_bytes < maximum:
            resource.setrlimit(resource.RLIMIT_AS, (size_bytes, maximum))


def main() -> None:
    """Answer tasks until standard input ends."""
    answer_tasks(msgspec.msgpack.Decoder(PictureTask), _Process().answer)


if __name__ == "__main__":
    main()
