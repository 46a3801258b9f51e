"""Options of a command in the configuration file: a table with its name, and keys as the options are called.

    [serve]
    model = "hf:Qwen/Qwen3-8B-GGUF:Q4_K_M"
    context = 16384
    any_model = true

What is typed wins over the table. Keys of the device itself stand above all tables (``settings/config.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primad.errors import ConfigError, printable
from primad.settings.config import KEYS, ConfigFile
from primad.settings.quantities import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionTable:
    """The ``values`` of the table ``name`` in ``file``."""

    name: str
    file: Path
    values: Mapping[str, Any]

    def error(self, key: str, what: str) -> ConfigError:
        """``key`` cannot be as it is."""
        return ConfigError(f"{self.where(key)}: {printable(what)}")

    def where(self, key: str) -> str:
        """The place of ``key``, for a line about it."""
        return f"'{key}' in [{printable(self.name)}] of {self.file}"


def option_table(name: str, known: Collection[str], stored: ConfigFile) -> OptionTable:
    """The table of command ``name``, whose options are ``known``, in the file ``stored``. Raises ``ConfigError``."""
    file, values = stored.path, stored.values.get(name, {})
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: '{name}' is the table of that command; write [{name}] above its options")
    table = OptionTable(name=name, file=file, values=values)
    for key in values:
        if key in known:
            continue
        if key in KEYS:
            raise table.error(key, "is a key of this device; it stands above all tables")
        raise table.error(key, f"no option of primad {name}{did_you_mean(key, known)}")
    return table
