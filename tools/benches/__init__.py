"""The benches of ``tools/bench``, one file each: what is measured, in which order, and the targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tools.benches import (
    api,
    copies,
    http,
    hybrids,
    memory,
    models,
    pictures,
    predict,
    published,
    ring,
    serve,
    solve,
    speculate,
    tensor,
)
from tools.lab.harness import Bench

BENCHES: Final[Mapping[str, Bench]] = {
    "ring": ring.BENCH,
    "memory": memory.BENCH,
    "api": api.BENCH,
    "serve": serve.BENCH,
    "speculate": speculate.BENCH,
    "copies": copies.BENCH,
    "hybrids": hybrids.BENCH,
    "models": models.BENCH,
    "pictures": pictures.BENCH,
    "predict": predict.BENCH,
    "solve": solve.BENCH,
    "paper": solve.PAPER,
    "http": http.BENCH,
    "tensor": tensor.BENCH,
    "published": published.BENCH,
}
