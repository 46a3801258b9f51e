"""The offered models by name, and their state in a line; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from primad.api.answering.models import ModelState, OfferedModel
from primad.errors import RequestError, printable
from primad.library.names import meant, nearest

MAX_NAMED: Final = 50
"""Names in an error."""


def find_offered(name: str, offered: Sequence[OfferedModel]) -> OfferedModel:
    """The model of ``offered`` that ``name`` means. Raises ``RequestError`` with the names that there are (404), or with
    those that it may mean (400)."""
    names = [each.names for each in offered]
    found = [offered[place] for place in meant(name, names)]
    usable = [each for each in found if each.state is not ModelState.FAILED] or found
    if len(usable) == 1:
        return usable[0]
    shown = printable(name, 200)
    if usable:
        raise RequestError(f"the model '{shown}' may be {_listed(usable)}; send one of these names", param="model")
    like = nearest(name, names)
    hint = f"; did you mean {' or '.join(like)}?" if like else ";"
    raise RequestError(
        f"the model '{shown}' is not offered here{hint} there are: {_listed(offered) or 'none'}",
        status=404,
        code="model_not_found",
        param="model",
    )


def is_offered(name: str, offered: Sequence[OfferedModel]) -> bool:
    """Whether ``name`` means any of them."""
    return bool(meant(name, [each.names for each in offered]))


def state_line(model: OfferedModel) -> str:
    """The state of ``model`` for people: ``qwen3: loading, 40 %, about 12 s left``."""
    parts = [printable(model.detail) or model.state.value]
    if model.progress is not None:
        parts.append(f"{100 * model.progress:.0f} %")
    if model.expected_s is not None:
        parts.append(f"about {model.expected_s:.0f} s left")
    return f"{printable(model.id)}: {', '.join(parts)}"


def _listed(models: Sequence[OfferedModel]) -> str:
    more = f" and {len(models) - MAX_NAMED} more" if len(models) > MAX_NAMED else ""
    return ", ".join(each.id for each in models[:MAX_NAMED]) + more
