"""The library of models on the command line: the model that a name means, and its settings in ``models.toml``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from primad.cli.grouped import names_of
from primad.cli.options import RopeOptions
from primad.cli.run_options import DraftOptions, RunOptions, SamplingOptions
from primad.errors import PrimadError
from primad.settings.config import Config, ConfigFile, load_config, models_folder
from primad.settings.tables import OptionTable

if TYPE_CHECKING:
    from primad.library.library import Library, LibraryModel

ModelFolders = Annotated[
    list[Path] | None,
    typer.Option(
        "--models",
        help="A folder with GGUF files, to use them by name; repeatable.",
        metavar="FOLDER",
        show_default=False,
    ),
]
MODEL_OPTIONS: Final = {
    "lora",
    "alias",
    "any_model",
    "chat_template",
    "mmproj",
    "image_min_tokens",
    "image_max_tokens",
    "tool_parser",
    "context_shift",
} | names_of(RunOptions, DraftOptions, SamplingOptions, RopeOptions)
"""Options of ``serve`` that may be in ``models.toml``."""


def library_of(config: Config) -> Library:
    """The library of this device, with the names that ``models.toml`` adds. Raises ``ConfigError`` for an invalid line
    there."""
    from primad.library.headers import HeaderCache
    from primad.library.library import read_library
    from primad.library.places import model_places
    from primad.library.settings import read_model_tables

    aliases = read_model_tables(config.home, MODEL_OPTIONS).aliases
    places = model_places(config.models, models_folder(config.home), os.environ, Path.home(), sys.platform)
    return read_library(places, HeaderCache(config.home / "library.json")).with_aliases(aliases)


def pinned_in(library: Library, config: Config) -> dict[str, LibraryModel | None]:
    """The names of models that ``models.toml`` keeps loaded, with the model that each means; None where it is not
    exactly one usable model."""
    from primad.library.settings import read_model_tables

    return {key: _unless_wrong(library, key) for key in read_model_tables(config.home, MODEL_OPTIONS).pinned}


def _unless_wrong(library: Library, key: str) -> LibraryModel | None:
    """The model that a table of ``models.toml`` is for; None where it is not exactly one usable model."""
    try:
        return library.find(key)
    except PrimadError:
        return None


def tables_of(model: LibraryModel, library: Library, config: Config) -> list[OptionTable]:
    """The tables of ``models.toml`` for a model of ``library``, the strongest last. Raises ``ConfigError``."""
    from primad.library.settings import read_model_tables

    return read_model_tables(config.home, MODEL_OPTIONS).of(lambda key: _unless_wrong(library, key) == model)


def stored_values(option: str, library: Library, config: Config) -> dict[str, Any]:
    """The value of ``option`` in ``models.toml`` for each model of ``library``, by its name. Raises ``ConfigError``."""
    from primad.library.settings import DEFAULTS, read_model_tables

    tables = [each for each in read_model_tables(config.home, MODEL_OPTIONS).tables if option in each.values]
    of_all = {model.name: each.values[option] for each in tables if each.name == DEFAULTS for model in library.models}
    meant = {each.name: _unless_wrong(library, each.name) for each in tables if each.name != DEFAULTS}
    own = {model.name: each.values[option] for each in tables if (model := meant.get(each.name)) is not None}
    return of_all | own


def is_path(given: Path) -> bool:
    """Whether ``given`` is a file, or cannot be a name: then the library is not consulted."""
    return given.suffix.lower() == ".gguf" or given.is_absolute() or (given.exists() and not given.is_dir())


def settings_for(model: str, flags: dict[str, Any], stored: ConfigFile) -> list[OptionTable]:
    """The tables of ``models.toml``, next to the configuration file ``stored``, for the value of ``--model``, the
    strongest last.

    Raises ``ConfigError``.
    """
    from primad.library.settings import models_toml, read_model_tables

    home = stored.path.parent
    if not models_toml(home).exists():
        return []
    return read_model_tables(home, MODEL_OPTIONS).of(_same_as(model, flags, stored))


def _same_as(model: str, flags: dict[str, Any], stored: ConfigFile) -> Callable[[str], bool]:
    """Return a test whether a table's name means ``model``: by the library, or for a file by its name."""
    from primad.head.model.options import model_id

    given = Path(model)
    if is_path(given):
        return lambda key: key.casefold() in (model_id(given).casefold(), model.casefold())

    library = library_of(load_config(flags, stored=stored))
    found = _unless_wrong(library, model)  # the command itself reports what is wrong with its model
    return lambda key: (
        key.casefold() == model.casefold() or (found is not None and _unless_wrong(library, key) == found)
    )
