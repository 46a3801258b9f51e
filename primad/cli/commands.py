"""The commands of ``primad`` for Typer, with shorter help.

Typer shows a type after each option, and ``<bool>`` after a flag, which cannot be typed. For commands with dozens of
options ``--help`` shows the few that a home needs, and ``--help-all`` all of them in sections. Options of ``serve`` and
``plan`` may also be in a table of the configuration file (``settings/tables.py``), or of ``models.toml`` for a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from primad.errors import ConfigError
from primad.settings.config import ConfigFile, config_file
from primad.settings.tables import OptionTable, option_table

_BRIEF: Final = "primad.brief"
_ALL: Final = "primad.all"
_ORIGINS: Final = "primad.origins"
CONFIG_FILE: Final = "primad.config_file"
"""Key in a command's context of the configuration file that was read."""


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.meta[_ALL] = True
        context.get_help()  # rich prints it
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option("--help-all", callback=_show_all, is_eager=True, help="Show all options, in sections, and exit."),
]


class _Command(TyperCommand):
    shown: frozenset[str] = frozenset()
    """Parameters that ``--help`` shows; if empty, all."""
    table: frozenset[str] = frozenset()
    """Parameters allowed in the command's table of the configuration file."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = _flags_without_type(super().get_params(ctx))
        if not ctx.meta.get(_BRIEF):
            return params
        return [param for param in params if param.name in self.shown or param.name in ("help", "help_all")]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta[_BRIEF] = bool(self.shown) and not ctx.meta.get(_ALL)
        try:
            super().format_help(ctx, formatter)
        finally:
            ctx.meta[_BRIEF] = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.table and not ctx.resilient_parsing:
            ctx.default_map = _from_file(self, ctx, args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as exc:
            place = _origin(exc, ctx.meta.get(_ORIGINS, {}))
            if place is None or type(exc) is not ConfigError:
                raise
            raise ConfigError(f"{place}: {exc}") from exc


def _origin(error: ConfigError, origins: Mapping[str, OptionTable]) -> str | None:
    """The file, table and key of the option that ``error`` names; None if it was typed."""
    named = (name for name in origins if re.match(rf"--{name.replace('_', '-')}[ :]", str(error)))
    return next((origins[name].where(name) for name in named), None)


def _from_file(command: _Command, context: Any, args: list[str]) -> dict[str, Any]:
    """The values in the configuration file's table of ``command``. Raises ``ConfigError``, as for the command line."""
    context.meta[CONFIG_FILE] = config_file({"home": _typed(args, "--home")})
    table = option_table(command.name or "", command.table, context.meta[CONFIG_FILE])
    values: dict[str, Any] = {}
    origins: dict[str, OptionTable] = {}
    for each in (table, *_of_model(command, table, args, context.meta[CONFIG_FILE])):
        found, _ = _read(command, context, each)
        values |= found
        origins |= dict.fromkeys(found, each)
    typed = {word.partition("=")[0] for word in args}
    given = {param.name for param in command.params if typed & {*param.opts, *param.secondary_opts}}
    context.meta[_ORIGINS] = {name: each for name, each in origins.items() if name not in given}
    return values


def _read(command: _Command, context: Any, table: OptionTable) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of ``table`` for options of ``command``, unparsed and parsed."""
    values: dict[str, Any] = {}
    parsed: dict[str, Any] = {}
    for param in command.params:
        if param.name not in table.values or param.name not in command.table:
            continue
        value = table.values[param.name]
        values[param.name] = [value] if getattr(param, "multiple", False) and not isinstance(value, list) else value
        try:
            parsed[param.name] = param.process_value(context, values[param.name])
        except typer.BadParameter as exc:
            raise table.error(param.name, exc.message) from exc
    return values, parsed


def untyped_values(context: typer.Context, tables: Iterable[OptionTable]) -> dict[str, Any]:
    """The values of ``tables``, later ones first, for options of the command of ``context`` that were not typed.

    Raises ``ConfigError``.
    """
    command = context.command
    assert isinstance(command, _Command), "CommandGroup made it"
    found: dict[str, Any] = {}
    for table in tables:
        found |= _read(command, context, table)[1]
    typed = {name for name in found if is_typed(context, name)}
    return {name: value for name, value in found.items() if name not in typed}


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether the option ``name`` is on the command line, or in the environment."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _of_model(command: _Command, table: OptionTable, args: list[str], stored: ConfigFile) -> list[OptionTable]:
    """The settings in ``models.toml`` of the model that is typed, or named in ``table``."""
    model = _typed(args, "--model") or table.values.get("model")
    if "model" not in command.table or not isinstance(model, str):
        return []
    from primad.cli.library import settings_for

    return settings_for(model, {"home": _typed(args, "--home"), "models": tuple(_all_typed(args, "--models"))}, stored)


def _typed(args: list[str], option: str) -> str | None:
    """The first value of ``option`` among ``args``, before they are parsed."""
    return next(_all_typed(args, option), None)


def _all_typed(args: list[str], option: str) -> Iterator[str]:
    for place, word in enumerate(args):
        if word == option and place + 1 < len(args):
            yield args[place + 1]
        elif word.startswith(f"{option}="):
            yield word.partition("=")[2]


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_without_type(super().get_params(ctx))


def _flags_without_type(params: Iterable[Any]) -> list[Any]:
    """All of ``params``, including those that Typer adds: ``--help`` and the two of completion."""
    params = list(params)
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class CommandGroup(typer.Typer):
    """A group of commands."""

    def __init__(self, **how: Any) -> None:
        super().__init__(cls=_Group, rich_markup_mode="markdown", **how)

    @cached_property
    def built(self) -> Any:
        """The Typer group that parses and calls, with the commands known at first access.

        Building it takes a twentieth of a second; Typer would do so for each call.
        """
        return get_command(self)

    def __call__(self, *args: Any, **how: Any) -> Any:
        return self.built(*args, **how)

    def command(
        self, name: str | None = None, *, shown: Iterable[str] = (), table: Iterable[str] = (), **how: Any
    ) -> Callable[[Any], Any]:
        """Like Typer's own. ``--help`` shows the parameters ``shown`` (if empty, all); those of ``table`` may be in the
        configuration file."""
        cls = type("_Command", (_Command,), {"shown": frozenset(shown), "table": frozenset(table)})
        return super().command(name, cls=cls, **how)
