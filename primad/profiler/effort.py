"""How thoroughly a device is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TYPES: Final = ("Q4_K", "Q6_K", "Q4_0", "Q4_1", "Q5_K", "Q5_0", "Q8_0", "IQ4_XS", "F16")
"""Quantisation types of weights. The first is the one that thread counts and fixed costs are measured with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Runs of each trial by the rows of its steps, and what the trials compute. The default takes about a minute."""

    types: tuple[str, ...] = TYPES
    decode_runs: int = 6
    batch_runs: int = 3
    prefill_runs: int = 2
    cpu_weights: int = 100_000_000
    """Weights of a trial on the CPU: much beside the fixed costs, little enough to compute 512 rows often."""
    repeats_s: float = 10.0
    """Trials whose runs disagree are repeated within this time: something else was running."""
