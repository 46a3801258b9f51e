"""Room for one more model: decides which loaded models have to go."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

from halda import Infeasible
from primad.errors import PlanError

WORSE: Final = 1.25
"""A plan alongside loaded models may take at most this many times as long as a plan on devices without the idle
ones."""


async def who_goes(
    objective_s: Callable[[Collection[str]], Awaitable[float]], idle: Sequence[str], busy: Sequence[str]
) -> frozenset[str]:
    """Return the models that go for a new one: as few as needed, the first of ``idle`` first. Models of ``busy``, which
    serve requests, go only if there is no plan otherwise.

    ``objective_s`` returns the objective of a plan once the given models are gone. Raises ``PlanError`` or
    ``Infeasible`` if there is no plan.
    """

    async def without(gone: Collection[str]) -> float:
        try:
            return await objective_s(gone)
        except (PlanError, Infeasible):
            return math.inf

    beside = await without(())
    if idle and (limit := WORSE * await without(idle)) < math.inf:
        for number in range(len(idle)):
            found = beside if number == 0 else await without(idle[:number])
            if found <= limit:
                return frozenset(idle[:number])
        return frozenset(idle)
    if beside < math.inf:
        return frozenset()
    for number in range(1, len(busy)):
        if await without((*idle, *busy[:number])) < math.inf:
            return frozenset((*idle, *busy[:number]))
    await objective_s((*idle, *busy))
    return frozenset((*idle, *busy))
