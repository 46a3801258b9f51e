"""Encoders of pictures and sound on the command line: next to the model, in the library, or in the hub's repository."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from primad.cli.hub import bars, library_model, quieten, report_line
from primad.errors import PrimadError
from primad.settings.config import Config, models_folder
from primad.settings.quantities import show_bytes

if TYPE_CHECKING:
    from primad.gguf.hub import HubFile, HubName, OnBytes
    from primad.library.library import LibraryModel
    from primad.planning.question import PlannedEncoder


def encoder_of(wish: Path, given: Path, model: Path, load: Callable[[], Config]) -> PlannedEncoder | None:
    """Return the encoder that ``serve`` would use for the ``model`` file and ``wish``; the model was ``given`` by that
    name.

    If ``serve`` would download it, only its beginning is read from the hub. Raises ``ConfigError`` if the wish is no
    encoder.
    """
    from primad.gguf.hub import hub_name, projector_beginning
    from primad.gguf.hub_fetch import is_due
    from primad.head.model.encoder import AUTO, BEGINNING_BYTES, encoder_file

    known = known_projector(given, model, library_model(given, load))
    name = hub_name(given.as_posix())
    if name is None or known is not None or wish != AUTO or not is_due(name, models_folder(load().home)):
        return encoder_file(wish, model, known)[0].planned
    quieten()
    with TemporaryDirectory() as folder:
        try:
            known = projector_beginning(_exactly(name, model), Path(folder), BEGINNING_BYTES)
        except (PrimadError, OSError) as exc:
            report_line(f"{name}: planned without the encoder of its repository, which cannot be read: {exc}")
        return encoder_file(wish, model, known)[0].planned


def encoder_of_model_shape(name: str) -> PlannedEncoder | None:
    """The encoder in the published files of the built-in shape ``name``."""
    from primad.gguf.projectors import encoded_bytes
    from primad.gguf.shapes import sizes_of
    from primad.planning.question import PlannedEncoder

    found = sizes_of(name)
    if found is None or found.encoder is None:
        return None
    return PlannedEncoder(
        sees=found.encoder.sees,
        hears=found.encoder.hears,
        memory_bytes=found.encoder.memory_bytes,
        picture_flop=found.encoder.picture_flop,
        encoded_bytes=encoded_bytes(found.encoder.patches, found.width),
    )


def known_projector(given: Path, model: Path, found: LibraryModel | None) -> Path | None:
    """The encoder of the ``model`` file outside its folder, where the model was ``given`` by name.

    It is that of the library's model ``found``, or in the hub's repository.
    """
    from primad.gguf.hub import hub_name
    from primad.head.model.encoder import projector_beside

    if found is not None:
        return found.projector
    return None if hub_name(given.as_posix()) is None else projector_beside(model, is_repository=True)


def is_new(given: Path, config: Config) -> bool:
    """Whether ``given`` is a model of the hub of which nothing is here yet, so that its encoder is downloaded too."""
    from primad.gguf.hub import hub_name, kept, kept_header

    name, folder = hub_name(given.as_posix()), models_folder(config.home)
    return name is not None and kept(name, folder) is None and kept_header(name, folder) is None


def served_projector(
    wish: Path, given: Path, model: Path, found: LibraryModel | None, config: Config, *, new: bool
) -> Path | None:
    """The encoder that ``serve`` uses for ``wish``: from ``known_projector``, or downloaded together with a ``new``
    model."""
    from primad.gguf.hub import hub_name
    from primad.gguf.hub_fetch import is_due

    known, name, folder = known_projector(given, model, found), hub_name(given.as_posix()), models_folder(config.home)
    if name is None or known is not None or not model.is_relative_to(folder) or not (new or is_due(name, folder)):
        return known
    quieten()
    with bars() as advance:
        return _fetched(wish, _exactly(name, model), folder, advance, report_line)


def bring_projector(wish: Path, model: Path, config: Config, report: Callable[[str], None]) -> None:
    """Download the encoder of the ``model`` file if it is from the hub and lacks one, as ``serve`` with ``--model``
    would."""
    from primad.gguf.hub import HubName
    from primad.gguf.hub_fetch import is_due

    folder = models_folder(config.home)
    parts = model.relative_to(folder).parts if model.is_relative_to(folder) else ()
    if len(parts) > 2 and is_due(name := HubName(parts[0], parts[1]), folder):
        quieten()
        _fetched(wish, _exactly(name, model), folder, lambda *_: None, report)


def _fetched(wish: Path, name: HubName, folder: Path, advance: OnBytes, report: Callable[[str], None]) -> Path | None:
    """Download the encoder of ``name``. If that fails, report it in one line; the next start tries again."""
    from primad.gguf.hub_fetch import fetch_projector, make_due
    from primad.head.model.encoder import AUTO

    def begins(file: HubFile) -> None:
        report(
            f"{name}: also downloads its encoder {file.name} ({show_bytes(file.size_bytes)}; --mmproj none skips it)"
        )

    try:
        if wish == AUTO:
            return fetch_projector(name, folder, begins, advance)
        make_due(name, folder)
    except PrimadError as exc:
        report(f"no images: the encoder is missing: {exc}; 'primad pull {name}' fetches it, or the next start does")
    return None


def _exactly(name: HubName, model: Path) -> HubName:
    """Return ``name`` with the quantisation of its file ``model``."""
    from primad.gguf.hub import HubName, by_quantisation

    return HubName(name.owner, name.repo, next(iter(by_quantisation([model.name])), name.quantisation))
