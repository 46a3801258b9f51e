"""A command's options in groups: a parameter that is a dataclass of options stands for the options in it.

Typer reads the options of a command off its signature, one parameter an option. A group (a class with a ``PANEL``, the
title that ``--help`` shows) is shared by several commands and keeps signatures short. A field's name is the option's
name.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.models import OptionInfo


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` for Typer, with each option as a parameter; the groups are built when it is called."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            groups[parameter.name] = kind
            parameters += _options(kind)
        else:
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

    def flat(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
            for name, kind in groups.items()
        }
        command(**given, **made)

    flat.__name__, flat.__doc__, flat.__module__ = command.__name__, command.__doc__, command.__module__  # ty: ignore
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # ty: ignore
    return flat


def names_of(*kinds: Any) -> set[str]:
    """The names of the options of the groups ``kinds``."""
    return {field.name for kind in kinds for field in dataclasses.fields(kind)}


def flags(*groups: Any) -> dict[str, Any]:
    """The options of the groups by name, as ``load_config`` takes them."""
    return {field.name: getattr(group, field.name) for group in groups for field in dataclasses.fields(group)}


def replaced(group: Any, values: Mapping[str, Any]) -> Any:
    """Return ``group`` with those of ``values`` that are its options, converted as the command line would."""
    hints = get_type_hints(type(group))
    own = {field.name: values[field.name] for field in dataclasses.fields(group) if field.name in values}
    for name, value in own.items():
        if isinstance(value, str) and Path in (hints[name], *get_args(hints[name])):
            own[name] = Path(value)
    return dataclasses.replace(group, **own)


def _options(kind: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=_in_panel(hints[field.name], kind.PANEL),
        )


def _in_panel(annotation: Any, panel: str) -> Any:
    """The option, shown under the title ``panel``."""
    assert get_origin(annotation) is Annotated, f"{annotation}: an option is Annotated[type, typer.Option(...)]"
    kind, option = get_args(annotation)
    assert isinstance(option, OptionInfo)
    shown = copy.copy(option)
    shown.rich_help_panel = panel
    return Annotated[kind, shown]
