"""The commands of ``primad`` as Typer has them, with help in which every word is of use.

Typer shows a type behind each option, and behind a flag ``<bool>``, which nobody can type there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_without_type(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_without_type(super().get_params(ctx))


def _flags_without_type(params: Iterable[Any]) -> list[Any]:
    """All of ``params``, among them those that Typer adds: ``--help`` and the two of completion."""
    params = list(params)
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class CommandGroup(typer.Typer):
    """A group of commands."""

    def __init__(self, **how: Any) -> None:
        super().__init__(cls=_Group, rich_markup_mode="markdown", **how)

    def command(self, name: str | None = None, **how: Any) -> Callable[[Any], Any]:
        """As Typer's own."""
        return super().command(name, cls=_Command, **how)
