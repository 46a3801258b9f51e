"""A daemon's side of its process for pictures: starts it with the first picture, and again after a crash."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Final

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
from primad.errors import EngineError, RingError
from primad.system.children.asked_child import AskedChild
from primad.system.children.spawn import environment

TIMEOUT_S: Final = 120.0
"""The process counts as hanging when a picture takes longer."""
CLOSED: Final = "the model is unloaded, or primad is stopping"
_PROCESS: Final = "the process for images"
_decoder = msgspec.msgpack.Decoder(PictureReply)
logger = logging.getLogger(__name__)


class EncoderChild:
    """Encodes with the encoder of ``load``, one picture at a time. ``began`` gets the id of each process."""

    def __init__(
        self, load: LoadEncoder, *, began: Callable[[int], None] = lambda _: None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.load = load
        """What the next process loads."""
        self._began, self._timeout_s = began, timeout_s
        self._child: AskedChild | None = None
        self._closed = False
        self._reported: set[str] = set()
        """Errors of the encoder that were logged; each is logged once."""
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """The process id, while there is a process."""
        return None if self._child is None else self._child.pid

    async def encode(self, data: bytes) -> EncodedPicture | PictureRefused:
        """Return the encoding of the file ``data``, or why it is refused.

        Raises ``EngineError`` if the encoder cannot be loaded, ``EndedError`` if its process ended, ``RingError`` if it
        hung; the next picture starts it again.
        """
        if self._closed:
            raise RingError(CLOSED)
        if self._child is None or not self._child.is_alive:
            await self._load()
        reply = await self._ask(EncodePicture(data))
        assert isinstance(reply, EncodedPicture | PictureRefused)
        return reply

    async def close(self) -> None:
        """End the process for good, whatever it is doing."""
        self._closed = True
        await self.end()

    async def end(self) -> None:
        """End the process; the next picture starts it again."""
        child, self._child = self._child, None
        if child is not None:
            await child.end()

    async def _load(self) -> None:
        await self.end()
        load = self.load
        variables = environment({"OMP_PROC_BIND": "false"} | os.environ, load.threads, 0, gpu=bool(load.gpu))
        self._child = await AskedChild.start("primad.engine.pictures.process", variables, _PROCESS)
        if self._closed:
            await self.end()
            raise RingError(CLOSED)
        self.starts += 1
        self._began(self._child.pid)
        assert isinstance(await self._ask(load), EncoderReady)

    async def _ask(self, task: PictureTask) -> PictureReply:
        """Ask the process. If this fails before the reply arrives, end the process: the reply would be taken for
        another's."""
        assert self._child is not None
        try:
            reply: PictureReply = _decoder.decode(await self._child.answer(task, _PROCESS, self._timeout_s))
        except BaseException:
            await self.end()
            raise
        if isinstance(reply, EncoderFailed):
            await self.end()
            if reply.error not in self._reported:
                self._reported.add(reply.error)
                logger.warning("%s: %s", self.load.path, reply.error)
            raise EngineError(reply.error)
        return reply
