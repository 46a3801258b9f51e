"""Models by name on the command line: found in the home folder, or downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from primad.cli.library import is_path, library_of
from primad.cli.output import err
from primad.errors import ConfigError, PrimadError, printable
from primad.settings.config import Config, models_folder
from primad.settings.quantities import show_bytes

if TYPE_CHECKING:
    from primad.gguf.header import Header
    from primad.gguf.hub import HubName, KeptModel, OnBytes
    from primad.gguf.ranged import RangedModel
    from primad.library.library import LibraryModel


def model_path(given: Path, load: Callable[[], Config], *, fetches: bool = True, otherwise: str = "") -> Path:
    """Return the file of ``--model``: a path, a model of the library, or one of the hub, which is downloaded if
    missing.

    The configuration, loaded only for names, says where. Raises ``ConfigError``, also for a missing model if not
    ``fetches``, with the alternative ``otherwise``; ``DiskError``, ``ModelError``.
    """
    from primad.gguf.hub import hub_name, kept, kept_header

    name = hub_name(given.as_posix())
    if name is None:
        model = library_model(given, load)
        return given if model is None else model.files[0]
    config = load()
    found = kept(name, models_folder(config.home))
    if found is None and (elsewhere := _elsewhere(name, config)) is not None:
        return elsewhere
    if found is None and not fetches and (header := kept_header(name, models_folder(config.home))) is not None:
        return header.parts[0]
    if found is None and not fetches:
        raise ConfigError(f"{name}: not downloaded; primad pull {name} fetches it{otherwise}")
    return (found or fetched(name, config)).files[0]


def library_model(given: Path, load: Callable[[], Config]) -> LibraryModel | None:
    """Return the model that ``given`` names; None if that is a file, a folder, or a model of the hub.

    Raises ``ConfigError`` for a name that matches no model or several, ``ModelError`` for a model that cannot be used.
    """
    from primad.gguf.hub import hub_name

    text = given.as_posix()
    if is_path(given) or hub_name(text) is not None:
        return None
    library = library_of(load())
    found = library.find(text)
    if found is not None or given.exists():
        return found
    close = library.nearest(text)
    here = f"; similar names: {', '.join(close)}" if close else ""
    try:
        check_path(given)
    except ConfigError as exc:
        raise ConfigError(f"{exc}{here}") from exc
    raise ConfigError(
        f"{printable(text)}: no such file, nor a model of this name here{here}; 'primad models' lists all"
    )


def _elsewhere(name: HubName, config: Config) -> Path | None:
    """The file of the hub's model ``name`` in another program's store, by exactly this name."""
    text = f"{name.repository}:{name.quantisation}" if name.quantisation else name.repository
    try:
        found = library_of(config).find(text)
    except PrimadError:  # several, or an unusable one: treated as missing
        return None
    is_it = found is not None and text.casefold() in map(str.casefold, found.names)
    return found.files[0] if found is not None and is_it else None


def check_path(given: Path) -> None:
    """Suggest a value of ``--model`` if ``given`` is not a file but another program's or site's name of a model.

    Raises ``ConfigError``. A missing file is reported when it is opened.
    """
    from primad.gguf.hub import PREFIX, repository_in
    from primad.gguf.published import meant

    text = given.as_posix()
    if given.suffix.lower() == ".gguf" or given.exists():
        return
    if (repository := repository_in(text)) is not None:
        raise ConfigError(f"{text}: no such file; prefix a model of the hub with {PREFIX}: {PREFIX}{repository}")
    models = meant(text)
    if models:
        names = ", ".join(f"{model.hub} ({show_bytes(model.file_bytes)})" for model in models)
        raise ConfigError(f"{text}: no such file; by name, as --model takes it, this is {names}")
    if ":" in text:
        raise ConfigError(
            f"{text}: no such file, nor a model of this name here; give a GGUF file, or a model of Hugging Face's hub "
            "such as hf:Qwen/Qwen3-8B-GGUF:Q4_K_M"
        )


def served_model(given: Path, config: Config, *, whole: bool, several: bool) -> Path | RangedModel:
    """Return the file that ``serve`` uses: a file, or only the header of a model by name that is not downloaded.

    In the latter case each device downloads its own layers. The whole file is downloaded if one device serves it
    (``whole``), if the hub has no byte ranges, or if the model cannot be cut or is not certified. Raises as
    ``model_path``, and ``NotCutError`` for the latter if ``several`` devices were requested.
    """
    from primad.gguf.architectures.table import NotCutError
    from primad.gguf.hub import header_of, hub_name, kept
    from primad.gguf.hub_ranges import HubError

    name = hub_name(given.as_posix())
    if name is not None and not whole and kept(name, models_folder(config.home)) is None:
        if (elsewhere := _elsewhere(name, config)) is not None:
            return elsewhere
        quieten()
        try:
            found = header_of(name, models_folder(config.home))
            _check_cut(found.header, config)
        except HubError as exc:
            why = str(exc)
        except NotCutError as exc:
            if several:
                raise
            why = exc.reason
        else:
            report_line(f"{name}: the header is here; each device downloads its own layers")
            return found
        report_line(f"{name}: {why}; the whole file is fetched")
    return model_path(given, lambda: config)


def _check_cut(header: Header, config: Config) -> None:
    """Raise ``NotCutError`` if one device needs the whole model, ``ModelError`` for an incomplete one."""
    from primad.certify.first import certified
    from primad.gguf.architectures.cuts import cuttable
    from primad.gguf.architectures.table import ADVICE, NotCutError

    header, why = certified(header, config.home, report_line)
    if why:
        raise NotCutError(why, ADVICE)
    cuttable(header)


def report_line(line: str) -> None:
    """Print a line for the owner."""
    err.print(line, markup=False, highlight=False)


def fetched(name: HubName, config: Config, *, with_projector: bool = False) -> KeptModel:
    """Download ``name`` from the hub, with bars on a terminal, and ``with_projector`` the file for its pictures.

    Raises as ``model_path``.
    """
    quieten()
    from primad.gguf.hub_fetch import fetch

    with bars() as advance:
        return fetch(name, models_folder(config.home), advance, with_projector=with_projector)


@contextmanager
def bars() -> Iterator[OnBytes]:
    """Progress bars of downloads, on a terminal."""
    from rich.progress import Progress

    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        tasks = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done)

        yield advance


def quieten() -> None:
    """Silence the hub's library, which reads this when it is imported."""
    if not err.is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
