"""A strict fake of the embedding model: a few texts with vectors of three numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from primad.errors import RequestError

VECTORS = {"sea": [0.6, 0.8, 0.0], "ship": [0.8, 0.6, 0.0], "tree": [0.0, 0.0, 1.0]}


class FakeEmbeddings:
    """Unknown texts get the vector of the second axis; each text counts as two tokens; empty ones are refused."""

    name, created, max_text_tokens, width = "small", 7, 512, 3

    def __init__(self) -> None:
        self.cuts: list[bool] = []

    def status(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "alive": True,
            "rss_bytes": 70_000_000,
            "starts": 2,
            "requests": 9,
            "errors": 1,
            "tokens": 120,
            "waiting": 3,
            "compute_s": 1.5,
        }

    async def embed(
        self, texts: Sequence[str | list[int]], called: Callable[[int], str], *, cuts: bool = False, owner: str = ""
    ) -> tuple[list[bytes], int]:
        self.cuts.append(cuts)
        for index, text in enumerate(texts):
            if not text:
                raise RequestError(f"{called(index)}: is empty", param=called(index))
        rows = [VECTORS.get(text, [0.0, 1.0, 0.0]) if isinstance(text, str) else [0.0, 1.0, 0.0] for text in texts]
        return [np.array(row, "<f4").tobytes() for row in rows], 2 * len(texts)
