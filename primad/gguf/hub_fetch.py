"""Fetch whole models from the hub into a local folder, and remove them from it.

Only one primad process at a time does either with a repository, so that no file is downloaded twice concurrently.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Final

from primad.errors import DiskError, ModelError, NotNowError
from primad.gguf.header import MAGIC
from primad.gguf.hub import (
    HubFile,
    HubName,
    KeptModel,
    OnBytes,
    headers_in,
    is_beside,
    kept_in,
    own_reader,
    remote_file,
    wanted_files,
)
from primad.gguf.hub_download import PARTS, StopDownload, download, part_of
from primad.gguf.hub_library import asked, bar_class, endpoint, library
from primad.gguf.hub_ranges import HubError
from primad.gguf.projectors import MARK
from primad.gguf.ranged import HEADERS
from primad.system.files import lacking_room, locked

_CHUNK_BYTES: Final = 8 << 20


def fetch(
    name: HubName,
    folder: Path,
    advance: OnBytes,
    stop: StopDownload | None = None,
    *,
    with_projector: bool = True,
) -> KeptModel:
    """Fetch all of ``name`` into ``folder``, as the hub has it. Files of an earlier call are not fetched again.

    ``with_projector`` also fetches its picture encoder, if the repository has one.

    Raises ``ConfigError`` if the hub does not have it, or refuses it; ``NotNowError`` while another process fetches it;
    ``DiskError`` if it does not fit; ``ModelError`` if a file is not what the hub says; ``DownloadStopped``.
    """
    stop = stop or StopDownload()
    named, commit, wanted, projector = wanted_files(name)
    needed = wanted if projector is None or not with_projector else [*wanted, projector]
    stop.check()
    place = name.place(folder)
    _bring(name, commit, needed, place, advance, stop)
    paths = tuple(place / file.name for file in wanted)
    return KeptModel(name=named, files=paths, size_bytes=sum(file.size_bytes for file in wanted))


def fetch_projector(name: HubName, folder: Path, begins: Callable[[HubFile], None], advance: OnBytes) -> Path | None:
    """Fetch the encoder of the model ``name`` into ``folder``; ``begins`` is called if it is missing. Returns None if the
    repository has no encoder. Until it is complete, ``is_due`` is true, across restarts. Raises as ``fetch``."""
    place = name.place(folder)
    make_due(name, folder)
    _, commit, _, projector = wanted_files(name)
    if projector is not None:
        if not _is_here(place, projector):
            begins(projector)
        _bring(name, commit, [projector], place, advance, StopDownload())
    _due(place).unlink(missing_ok=True)
    return None if projector is None else place / projector.name


def make_due(name: HubName, folder: Path) -> None:
    """Note that the encoder of ``name``, if the repository has one, is still to be fetched. Raises ``DiskError``."""
    note = _due(name.place(folder))
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
    except OSError as exc:
        raise DiskError(f"{note}: cannot be written: {exc.strerror}; make room or the folder writable") from exc


def is_due(name: HubName, folder: Path) -> bool:
    """Whether the encoder of ``name`` is still to be fetched (see ``make_due``)."""
    return _due(name.place(folder)).exists()


def _due(place: Path) -> Path:
    return place / PARTS / MARK


def _bring(
    name: HubName, commit: str, files: Sequence[HubFile], place: Path, advance: OnBytes, stop: StopDownload
) -> None:
    """Fetch those ``files`` of the repository ``name`` that are missing at ``place``."""
    if all(_is_here(place, file) for file in files):
        return
    with _alone(name, place):
        missing = [file for file in files if not _is_here(place, file)]
        _check_room(place, missing, name)
        for file in missing:
            _download(name, commit, file, place, advance, stop)
            _check_gguf(place / file.name)


@contextmanager
def _alone(name: HubName, place: Path) -> Iterator[None]:
    """Lock ``place`` against other downloads and removals. Raises ``NotNowError``."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise DiskError(f"{place}: cannot be made: {exc.strerror}; make its folder writable") from exc
    taken = NotNowError(f"{name.repository}: is being downloaded or removed by another primad; wait until that ends")
    with locked(place.parent / f".{place.name}.lock", place, taken):
        yield


def remove(name: HubName, folder: Path) -> list[KeptModel]:
    """Remove the models with this name, of any quantisation if ``name`` has none; return the removed ones.

    Raises ``NotNowError`` while a file of the repository is downloaded, and ``DiskError``.
    """
    place, kind = name.place(folder), name.quantisation.lower()
    own = [each for each in (*kept_in(place), *headers_in(place)) if kind in ("", each.name.quantisation.lower())]
    if own:
        remove_files(name, folder, [path for each in own for path in each.files])
    return own


def remove_files(name: HubName, folder: Path, files: Iterable[Path]) -> None:
    """Remove ``files`` of the repository ``name`` in ``folder``; with its last model, remove everything else of it.
    Raises as ``remove``."""
    place = name.place(folder)
    with _alone(name, place):
        for path in files:
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                raise DiskError(f"{path}: cannot be removed: {exc.strerror}; make its folder writable") from exc
            if path.parent.parent.name == HEADERS:
                shutil.rmtree(path.parent, ignore_errors=True)
        if all(is_beside(path.name) for path in place.rglob("*.gguf")):
            shutil.rmtree(place, ignore_errors=True)


def _download(name: HubName, commit: str, file: HubFile, place: Path, advance: OnBytes, stop: StopDownload) -> None:
    """Download ``file`` by ranges; the hub's own library is used where ranges do not work: an old hub, or one behind a
    proxy."""
    if commit and file.sha256:
        remote = remote_file(name, commit, file)
        part = part_of(place, remote)
        try:
            download(remote, part, own_reader, lambda done: advance(file.name, done, file.size_bytes), stop)
            (place / file.name).parent.mkdir(parents=True, exist_ok=True)
            part.replace(place / file.name)
        except HubError as exc:
            if exc.again and _size(part):
                raise NotNowError(f"{name}: {exc}; what came is kept, and the next try resumes it") from exc
        except OSError as exc:
            raise DiskError(f"{part}: cannot be written: {exc.strerror}; make room or the folder writable") from exc
        else:
            return
    hub, bar = library(), bar_class(lambda done, total: advance(file.name, done, total or file.size_bytes), stop.check)
    more = {"tqdm_class": bar} if "tqdm_class" in signature(hub.hf_hub_download).parameters else {}
    given = {"local_dir": place, "endpoint": endpoint(), "library_name": "primad", **more}
    try:
        asked(name, lambda: hub.hf_hub_download(name.repository, file.name, **given))
    except NotNowError:
        stop.check()
        raise
    _verify(place / file.name, file, advance)
    (place / PARTS / f"{file.sha256}.part").unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _is_here(place: Path, file: HubFile) -> bool:
    path = place / file.name
    return path.is_file() and path.stat().st_size == file.size_bytes


def _check_room(place: Path, files: Sequence[HubFile], name: HubName) -> None:
    needed = sum(file.size_bytes - _size(place / PARTS / f"{file.sha256}.part") for file in files)
    try:
        place.mkdir(parents=True, exist_ok=True)
        lacking = lacking_room(place, needed)
    except OSError as exc:
        raise DiskError(f"{place}: cannot be made: {exc.strerror}; make its folder writable") from exc
    if needed > 0 and lacking:
        raise DiskError(
            f"{name}: {needed} bytes do not fit {place}: {lacking}; make room, or take a smaller quantisation"
        )


def _check_gguf(path: Path) -> None:
    with path.open("rb") as stream:
        begin = stream.read(len(MAGIC))
    if begin != MAGIC:
        path.unlink()
        raise ModelError(f"{path}: is not a GGUF file, whatever the hub calls it; it is removed, take another one")


def _verify(path: Path, file: HubFile, advance: OnBytes) -> None:
    """Compare the file with the hub's hash; one that differs is removed."""
    found, done = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while file.sha256 and (chunk := stream.read(_CHUNK_BYTES)):
            found.update(chunk)
            done += len(chunk)
            advance(f"verifying {path.name}", done, file.size_bytes)
    size = path.stat().st_size
    if size != file.size_bytes or (file.sha256 and found.hexdigest() != file.sha256):
        path.unlink()
        raise ModelError(
            f"{path}: not the hub's file ({size} of {file.size_bytes} bytes, or another checksum); deleted, fetch it again"
        )
