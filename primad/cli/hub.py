"""Models by name on the command line: where they lie, and fetched where they are not here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from primad.cli.output import err
from primad.errors import ConfigError
from primad.settings.config import Config, models_folder

if TYPE_CHECKING:
    from primad.gguf.hub import HubName, KeptModel


def model_path(given: Path, load: Callable[[], Config], *, fetches: bool = True, otherwise: str = "") -> Path:
    """The file that ``--model`` means: a path, or a model by name, which is fetched unless it is here.

    Where it lies the configuration says, which is loaded for a name alone. Raises ``ConfigError``, also for a model that is
    not here where nothing ``fetches``, with what could be done ``otherwise``; ``DiskError``, ``ModelError``.
    """
    from primad.gguf.hub import hub_name, kept

    name = hub_name(given.as_posix())
    if name is None:
        return given
    config = load()
    found = kept(name, models_folder(config.home))
    if found is None and not fetches:
        raise ConfigError(f"{name}: is not here; primad pull {name} fetches it{otherwise}")
    return (found or fetched(name, config)).files[0]


def fetched(name: HubName, config: Config) -> KeptModel:
    """``name`` from the hub, with bars on a terminal. Raises as ``model_path``."""
    if not err.is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read where the hub's library is imported
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from rich.progress import Progress

    from primad.gguf.hub import fetch

    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        tasks = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done)

        return fetch(name, models_folder(config.home), advance)
