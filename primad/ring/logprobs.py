"""Log-probabilities of a model's next token, from its logits."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities (vocabulary,) of ``logits``."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - math.log(float(np.exp(shifted).sum()))


def most_likely(logprobs: NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` most likely tokens with their log-probabilities, best first, ties by token."""
    count = min(count, len(logprobs))
    if count == 0:
        return ()
    best = np.argpartition(-logprobs, count - 1)[:count]
    ordered = sorted(best.tolist(), key=lambda token: (-logprobs[token], token))
    return tuple((int(token), float(logprobs[token])) for token in ordered)
