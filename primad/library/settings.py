"""Settings of models: ``models.toml`` in the home folder, with options of ``primad serve`` for a model, or for all.

    [defaults]
    kv_type = "q8_0"

    ["llama3.2:1b"]
    context = 16384
    alias = ["small", "quick"]

A table's name means a model as ``--model`` does. The command line takes precedence, then the model's table, then
``[defaults]``, then the tables of ``config.toml``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from primad.errors import ConfigError, printable
from primad.settings.config import toml_file
from primad.settings.quantities import did_you_mean, parse_yes_no
from primad.settings.tables import OptionTable

DEFAULTS: Final = "defaults"
PINNED: Final = "pinned"
_NAMES: Final = "alias"


@dataclass(frozen=True, slots=True)
class ModelTables:
    """The tables of ``models.toml``, in its order."""

    tables: tuple[OptionTable, ...] = ()

    def of(self, is_meant: Callable[[str], bool]) -> list[OptionTable]:
        """Return the defaults, then the tables of the model whose names satisfy ``is_meant``: a later one takes
        precedence."""
        own = [each for each in self.tables if each.name != DEFAULTS and is_meant(each.name)]
        return [*(each for each in self.tables if each.name == DEFAULTS), *own]

    @property
    def aliases(self) -> Mapping[str, tuple[str, ...]]:
        """Additional names of models, by the table's name."""
        return {
            each.name: tuple(filter(None, map(str.strip, each.values[_NAMES].split(","))))
            for each in self.tables
            if _NAMES in each.values
        }

    @property
    def pinned(self) -> tuple[str, ...]:
        """The names of models that stay loaded."""
        return tuple(each.name for each in self.tables if each.values.get(PINNED))


def models_toml(home: Path) -> Path:
    """Return the path of the file in ``home``."""
    return home / "models.toml"


def read_model_tables(home: Path, known: Collection[str]) -> ModelTables:
    """Return the settings in ``home``, empty without the file; ``known`` are the options that it may contain.

    Raises ``ConfigError`` that names file, table and key.
    """
    file = models_toml(home)
    tables = []
    for name, values in toml_file(file).values.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: '{name}' is above all tables; write [{DEFAULTS}] or [\"MODEL\"] above it")
        table = OptionTable(name=name, file=file, values=dict(values))
        for key in values:
            if key not in known and key != PINNED:
                raise ConfigError(f"{table.where(printable(key, 80))}: is no setting of a model{_choice(key, known)}")
        tables.append(OptionTable(name=name, file=file, values=_checked(table)))
    return ModelTables(tuple(tables))


def _choice(key: str, known: Collection[str]) -> str:
    return did_you_mean(key, known) or f"; there are {', '.join(sorted({*known, PINNED}))}"


def _checked(table: OptionTable) -> dict[str, Any]:
    """Return the values of ``table``, with ``alias`` as on the command line; other values are checked by their
    options."""
    values = dict(table.values)
    if PINNED in values:
        values[PINNED] = parse_yes_no(values[PINNED], f"'{PINNED}' in [{table.name}] of {table.file}")
    if (names := values.get(_NAMES)) is not None:
        listed = names if isinstance(names, list) else [names]
        if table.name == DEFAULTS or not all(isinstance(each, str) and each.strip() for each in listed):
            raise table.error(_NAMES, 'is a name of one model, or a list of them: ["small", "quick"]')
        values[_NAMES] = ",".join(listed)
    return values
