"""How thoroughly a device is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Runs of each trial by the rows of its steps, and what the trials compute. The default takes about a minute."""

    decode_runs: int = 6
    batch_runs: int = 3
    prefill_runs: int = 2
    cpu_weights: int = 100_000_000
    """Weights of a trial on the CPU: much beside the fixed costs, little enough to compute 512 rows often."""
    repeats_s: float = 10.0
    """Trials whose runs disagree are repeated within this time: something else was running."""
