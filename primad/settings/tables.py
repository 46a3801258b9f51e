"""Options of a command in the configuration file: a table named after the command, with a key per option.

    [serve]
    model = "hf:Qwen/Qwen3-8B-GGUF:Q4_K_M"
    context = 16384
    any_model = true

Options on the command line override the table. Keys of the device itself are above all tables (``settings/config.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primad.errors import ConfigError, printable
from primad.settings.config import KEYS, ConfigFile
from primad.settings.old_names import NEW_KEYS
from primad.settings.quantities import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionTable:
    """The ``values`` of the table ``name`` in ``file``."""

    name: str
    file: Path
    values: Mapping[str, Any]

    def error(self, key: str, what: str) -> ConfigError:
        """Return the error about an invalid ``key``."""
        return ConfigError(f"{self.where(key)}: {printable(what)}")

    def where(self, key: str) -> str:
        """The place of ``key``, for a message about it."""
        return f"'{key}' in [{printable(self.name)}] of {self.file}"


def option_table(name: str, known: Collection[str], stored: ConfigFile) -> OptionTable:
    """Return the table of command ``name``, with options ``known``, in the file ``stored``. Raises ``ConfigError``."""
    file, values = stored.path, stored.values.get(name, {})
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: '{name}' must be a table; write [{name}] above its options")
    values = {new if (new := NEW_KEYS.get(key, "")) in known else key: value for key, value in values.items()}
    table = OptionTable(name=name, file=file, values=values)
    for key in values:
        if key in known:
            continue
        if key in KEYS:
            raise table.error(key, "is a key of this device; put it above all tables")
        raise table.error(key, f"no option of primad {name}{did_you_mean(key, known)}")
    return table
