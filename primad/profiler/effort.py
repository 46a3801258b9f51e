"""How long a device is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

TYPES: Final = ("Q4_K", "Q6_K", "Q8_0", "F16", "Q4_0", "Q5_K", "Q4_1", "Q5_0", "IQ4_XS")
"""Quantisation types of weights, the most common first. Thread counts and fixed costs are measured with the first."""
MORE_COMPARED: Final = ("Q3_K", "Q2_K", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "Q5_1", "IQ4_NL", "BF16")
"""Types that are also compared if there is time: how many of their rows are bit-identical to single rows. A type that
is not known to be exact computes neither draft tokens nor several requests in a step."""
STEPS_BESIDE_TYPES: Final = 4
"""Memory, threads, layers, disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The time that measuring may take, and the types to measure within it.

    The budget is time, not work: a slow device measures less, in the end fewer types, but takes no longer.
    """

    seconds: float = 26.0
    types: tuple[str, ...] = TYPES
    is_quick: bool = False
    """The result serves until there is time for more; extra buffers are not tried."""

    @property
    def steps(self) -> int:
        """The number of measurements, one after another."""
        return STEPS_BESIDE_TYPES + len(self.types)


QUICK: Final = Effort(seconds=6.0, types=TYPES[:2], is_quick=True)
"""For a first start."""


class Budget:
    """``seconds`` from now on."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock() + seconds

    @property
    def left_s(self) -> float:
        """The time left; below 0 if it was overdrawn."""
        return self._until - self._clock()

    def less(self, seconds: float) -> Budget:
        """The budget without its last ``seconds``."""
        return Budget(self.left_s - seconds, self._clock)

    def part(self, share: float) -> Budget:
        """A budget of ``share`` of the time left."""
        return Budget(max(0.0, self.left_s) * share, self._clock)
