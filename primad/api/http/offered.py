"""Finds offered models by name, and describes their state in a line. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from primad.api.answering.models import OfferedModel
from primad.errors import RequestError, printable
from primad.library.names import meant, nearest
from primad.settings.quantities import show_progress

MAX_NAMED: Final = 50
"""Limit of the names in an error."""


def find_offered(name: str, offered: Sequence[OfferedModel]) -> OfferedModel:
    """Return the model of ``offered`` that ``name`` means. Raises ``RequestError`` with the available names if there is
    none (404), or with the candidates if there are several (400)."""
    names = [each.names for each in offered]
    found = [offered[place] for place in meant(name, names)]
    if len(found) == 1:
        return found[0]
    shown = printable(name, 200)
    if found:
        raise RequestError(f"the model '{shown}' may be {_listed(found)}; send one of these names", param="model")
    like = nearest(name, names)
    hint = f"; did you mean {' or '.join(like)}?" if like else ";"
    raise RequestError(
        f"the model '{shown}' is not offered here{hint} there are: {_listed(offered) or 'none'}",
        status=404,
        code="model_not_found",
        param="model",
    )


def find_embedder(name: str | None, offered: Sequence[OfferedModel]) -> OfferedModel | None:
    """Return the embedding model that ``name`` means; without a name the only one, None if there is none. Raises
    ``RequestError`` as above, and for a model that generates text."""
    makers = [each for each in offered if each.embeds]
    if name is None and len(makers) < 2:
        return makers[0] if makers else None
    found = None if name is None else find_offered(name, offered)
    if found is None or not found.embeds:
        what = "there are several embedding models" if found is None else f"'{found.id}' is no embedding model"
        raise RequestError(f"{what}; embedding models: {_listed(makers) or 'none'}", param="model")
    return found


def check_writer(model: OfferedModel) -> None:
    """Raise ``RequestError`` for an embedding model."""
    if model.embeds:
        raise RequestError(f"the model '{model.id}' is an embedding model; name a text model", param="model")


def is_offered(name: str, offered: Sequence[OfferedModel]) -> bool:
    """Whether ``name`` means any of the ``offered`` models."""
    return bool(meant(name, [each.names for each in offered]))


class ShownModel(Protocol):
    """The state of a model."""

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def progress(self) -> float | None: ...
    @property
    def expected_s(self) -> float | None: ...


def state_line(model: ShownModel) -> str:
    """Return the state of ``model`` for people: ``qwen3: loading, 40 %, about 12 s left``."""
    parts = [printable(model.detail) or str(model.state), *show_progress(model.progress, model.expected_s)]
    return f"{printable(model.id)}: {', '.join(parts)}"


def _listed(models: Sequence[OfferedModel]) -> str:
    more = f" and {len(models) - MAX_NAMED} more" if len(models) > MAX_NAMED else ""
    return ", ".join(each.id for each in models[:MAX_NAMED]) + more
