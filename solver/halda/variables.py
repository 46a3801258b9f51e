"""Variables and expressions of PuLP that all integer programs use. Times are in milliseconds."""

from __future__ import annotations

from typing import Any, Final

MS: Final = 1000.0
Expression = Any
"""A PuLP expression; PuLP has no types."""


def positive(problem: Any, name: str) -> Any:
    """Add a variable of at least 0."""
    return problem.add_variable(name, 0)
