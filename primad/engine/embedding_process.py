"""The embedding process: ``python -m primad.engine.embedding_process`` answers each line on standard input with one line.

It ends with its standard input, whatever it computes: then whoever asked is gone.
"""

from __future__ import annotations

import os
import sys
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from primad.engine.embedding_messages import (
    CheckTexts,
    EmbeddedText,
    EmbedderFailed,
    EmbedderReady,
    EmbeddingReply,
    EmbeddingTask,
    EmbedText,
    LoadEmbedder,
    TextRefused,
    TextsChecked,
)
from primad.errors import EngineError
from primad.system.children.reply_stream import STACK_BYTES, answer_stream

if TYPE_CHECKING:
    from primad.engine.embedder import Embedder


class _Process:
    def __init__(self) -> None:
        self._embedder: Embedder | None = None

    def answer(self, task: EmbeddingTask) -> EmbeddingReply:
        try:
            match task:
                case LoadEmbedder():
                    return self._load(task)
                case CheckTexts():
                    return self._check(task)
                case EmbedText():
                    return self._embed(task)
        except EngineError as exc:
            return EmbedderFailed(str(exc))

    def _load(self, task: LoadEmbedder) -> EmbedderReady:
        import psutil

        from primad.engine.embedder import Embedder  # only this process loads llama.cpp

        self._embedder = Embedder(task.path, threads=task.threads)
        held = psutil.Process().memory_info().rss
        return EmbedderReady(width=self._embedder.width, max_text_tokens=self._embedder.max_text_tokens, bytes=held)

    def _check(self, task: CheckTexts) -> TextsChecked | TextRefused:
        assert self._embedder is not None
        tokens = 0
        for index, text in enumerate(task.texts):
            try:
                tokens += len(self._embedder.read(text, cuts=task.cuts))
            except ValueError as exc:
                return TextRefused(index=index, error=str(exc))
        return TextsChecked(tokens=tokens)

    def _embed(self, task: EmbedText) -> EmbeddedText:
        assert self._embedder is not None
        vector = self._embedder.embed(self._embedder.read(task.text, cuts=task.cuts))
        return EmbeddedText(vector=vector.astype("<f4").tobytes())


def _read(tasks: SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        tasks.put(line)
    os._exit(0)


def _work(tasks: SimpleQueue[bytes], answers: BinaryIO) -> None:
    process, decoder = _Process(), msgspec.json.Decoder(EmbeddingTask)
    try:
        while True:
            answers.write(msgspec.json.encode(process.answer(decoder.decode(tasks.get()))) + b"\n")
            answers.flush()
    finally:  # nothing but a mistake of ours: nobody is to wait for an answer that does not come
        os._exit(1)


def main() -> None:
    """Answer tasks until standard input ends."""
    tasks = SimpleQueue[bytes]()
    with answer_stream() as answers:
        threading.stack_size(STACK_BYTES)
        threading.Thread(target=_work, args=(tasks, answers), daemon=True).start()
        _read(tasks)


if __name__ == "__main__":
    main()
