"""The embedding process: ``python -m primad.engine.embedding_process`` embeds texts for its daemon.

It ends when its standard input closes, even during a computation: then the daemon is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from primad.system.children.reply_stream import answer_tasks

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


def main() -> None:
    """Answer tasks until standard input ends."""
    answer_tasks(msgspec.msgpack.Decoder(EmbeddingTask), _Process().answer)


if __name__ == "__main__":
    main()
