"""Models by name: ``hf:owner/repo:Q4_K_M`` is read from a local folder, or fetched into it from Hugging Face's hub.

A repository holds a model in several quantisations, some of them split into parts. An interrupted download is resumed,
and compared with the hash that the hub states. Files in the folder are used without asking the hub.

    <folder>/<owner>/<repo>/<file>.gguf
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import quote

from primad.errors import ConfigError, printable
from primad.gguf.hub_download import PARTS
from primad.gguf.hub_library import asked, endpoint, library, token
from primad.gguf.hub_ranges import DEFAULT_HUB, HubError, HubRanges, own_hubs
from primad.gguf.model import PART_NAME, quantisation_in
from primad.gguf.origins import RemoteFile
from primad.gguf.projectors import MARK, is_projector, projector_of
from primad.gguf.ranged import HEADERS, RangedModel, keep_header, open_ranged

PREFIX: Final = "hf:"
PREFERRED: Final = ("Q4_K_M", "Q4_K_XL", "Q4_K_S", "Q4_0", "MXFP4", "IQ4_XS", "IQ4_NL", "Q5_K_M", "Q8_0")
"""Quantisations in order of preference, for names without one."""
_NAME: Final = re.compile(r"hf:(?P<owner>[\w.-]+)/(?P<repo>[\w.-]+)(?::(?P<quantisation>[\w.-]+))?")
_ELSEWHERE: Final = re.compile(
    r"(?P<site>(?:https?:/+)?(?:www\.)?(?:huggingface|hf)\.co/)?(?P<name>[\w.-]+/[\w.-]+(?::[\w.-]+)?)(?:/.*)?"
)
_PART: Final = re.compile(PART_NAME.pattern, re.IGNORECASE)
_BESIDE: Final = (MARK, "imatrix")
"""Files next to a model that are not models."""
ANSWER_TIMEOUT_S: Final = 30.0
"""A hub that takes longer to list a repository counts as unreachable."""
UNKNOWN: Final = "unknown"
"""The folder of a header whose name has no quantisation."""

OnBytes = Callable[[str, int, int], None]
"""Called with a file's name (after a verb, if it is not downloaded), its bytes done and its total bytes."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub; ``quantisation`` is empty where none is asked for."""

    owner: str
    repo: str
    quantisation: str = ""

    @property
    def repository(self) -> str:
        """The hub's name for it."""
        return f"{self.owner}/{self.repo}"

    def place(self, folder: Path) -> Path:
        """Where files of the repository are in ``folder``."""
        return folder / self.owner / self.repo

    def __str__(self) -> str:
        behind = f":{self.quantisation}" if self.quantisation else ""
        return f"{PREFIX}{self.repository}{behind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a repository; ``sha256`` is empty if the hub does not state it."""

    name: str
    size_bytes: int
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """A model in the folder: its parts in order, their size, and its name; if not ``whole``, only its header."""

    name: HubName
    files: tuple[Path, ...]
    size_bytes: int
    whole: bool = True


def hub_name(text: str) -> HubName | None:
    """Parse ``text`` as a name on the hub; None if it is not one. Raises ``ConfigError`` for a malformed one."""
    if not text.startswith(PREFIX):
        return None
    match = _NAME.fullmatch(text)
    if match is None or {match["owner"], match["repo"]} & {".", ".."}:
        raise ConfigError(
            f"{printable(text, 100)}: is not a model of the hub; give one as in hf:owner/repo or hf:owner/repo:Q4_K_M"
        )
    return HubName(match["owner"], match["repo"], match["quantisation"] or "")


def repository_in(text: str) -> str | None:
    """The repository and quantisation that ``text`` names in the form of the hub's site or of another program."""
    match = _ELSEWHERE.fullmatch(text)
    is_named = match is not None and (match["site"] or "gguf" in match["name"].lower())
    return match["name"] if match is not None and is_named else None


def kept_models(folder: Path) -> list[KeptModel]:
    """The models in ``folder``, by name: complete ones and those with only their header."""
    places = [place for place in sorted(folder.glob("*/*")) if place.is_dir()]
    return [model for place in places for model in (*kept_in(place), *headers_in(place))]


def kept_in(place: Path) -> list[KeptModel]:
    """The complete models of the repository at ``place``."""
    found = []
    files = {
        path.relative_to(place).as_posix(): path
        for path in place.rglob("*.gguf")
        if not {PARTS, HEADERS} & set(path.relative_to(place).parts)
    }
    for quantisation, names in by_quantisation(files).items():
        if not _lacking(names):
            paths = tuple(files[name] for name in names)
            size = sum(path.stat().st_size for path in paths)
            name = HubName(place.parent.name, place.name, quantisation)
            found.append(KeptModel(name=name, files=paths, size_bytes=size))
    return found


def kept(name: HubName, folder: Path) -> KeptModel | None:
    """The complete model ``name`` in ``folder``, if it is there."""
    own = {each.name.quantisation: each for each in kept_in(name.place(folder))}
    chosen = choose(list(own), name.quantisation)
    return None if chosen is None else own[chosen]


def headers_in(place: Path) -> list[KeptModel]:
    """The models of the repository at ``place`` with only their header, for devices that fetch their layers."""
    found = []
    for folder in sorted(place.glob(f"{HEADERS}/*")):
        name = HubName(place.parent.name, place.name, "" if folder.name == UNKNOWN else folder.name)
        files = tuple(sorted(folder.glob("*.gguf")))
        if files:
            size = sum(path.stat().st_size for path in files)
            found.append(KeptModel(name=name, files=files, size_bytes=size, whole=False))
    return found


def by_quantisation(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF files among ``names`` by quantisation, parts in order; of two alike, the one with the shorter name."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in sorted(names):
        file = PurePosixPath(name).name
        if not file.lower().endswith(".gguf") or is_beside(file):
            continue
        part = _PART.fullmatch(name)
        stem = part["stem"] if part is not None else name[: -len(".gguf")]
        found.setdefault(quantisation_in(PurePosixPath(stem).name), {}).setdefault(stem, []).append(name)
    return {kind: min(stems.items(), key=lambda each: (len(each[0]), each[0]))[1] for kind, stems in found.items()}


def is_beside(name: str) -> bool:
    """Whether the file ``name`` of a repository belongs to a model without being one."""
    return any(word in PurePosixPath(name).name.lower() for word in _BESIDE)


def choose(kinds: Sequence[str], asked: str) -> str | None:
    """The quantisation to use: the one that was ``asked`` for, else the first preferred one, else the only one."""
    by_name = {kind.lower(): kind for kind in kinds}
    if asked:
        return by_name.get(asked.lower())
    return next((by_name[kind.lower()] for kind in PREFERRED if kind.lower() in by_name), next(iter(kinds), None))


def header_of(name: HubName, folder: Path) -> RangedModel:
    """Only the header of ``name``, from ``folder`` or fetched into it.

    A header in the folder is used without asking the hub. Raises ``HubError`` if the hub does not serve byte ranges of
    the model, ``ConfigError`` and ``ModelError`` as ``fetch``, and ``DiskError``.
    """
    place = name.place(folder) / HEADERS
    hub = _hub()
    found = kept_header(name, folder)
    if found is not None and all(file.url.startswith(f"{hub}/") for file in found.files):
        return found
    named, commit, wanted, _ = wanted_files(name)
    files = {PurePosixPath(file.name).name: remote_file(name, commit, file) for file in wanted}
    if not commit or not all(file.sha256 for file in wanted):
        raise HubError(f"{hub} does not state the hashes of its files", again=False)
    reader = own_reader()
    try:
        keep_header(files, place / (named.quantisation or UNKNOWN), reader)
    finally:
        reader.close()
    found = open_ranged(place / (named.quantisation or UNKNOWN))
    assert found is not None
    return found


def kept_header(name: HubName, folder: Path) -> RangedModel | None:
    """The header of the model ``name`` in ``folder``, if it is there. Raises ``ModelError`` if it is damaged."""
    place = name.place(folder) / HEADERS
    chosen = choose(sorted(each.name for each in place.glob("*")), name.quantisation)
    return None if chosen is None else open_ranged(place / chosen)


def projector_beginning(name: HubName, folder: Path, max_bytes: int) -> Path | None:
    """The first ``max_bytes`` of the encoder of ``name``, in a sparse file of its full size in ``folder``; None if the
    repository has none. Raises ``ConfigError``, ``HubError``."""
    _, commit, _, projector = wanted_files(name)
    if projector is None:
        return None
    reader = own_reader()
    try:
        data = reader.read(remote_file(name, commit, projector), 0, min(max_bytes, projector.size_bytes))
    finally:
        reader.close()
    path = folder / PurePosixPath(projector.name).name
    with path.open("wb") as file:
        file.write(data)
        file.truncate(projector.size_bytes)
    return path


def wanted_files(name: HubName) -> tuple[HubName, str, list[HubFile], HubFile | None]:
    """The full name of the model, the commit, its files in order, and the encoder, if any. Raises ``ConfigError``."""
    commit, files = repository(name)
    known = {file.name: file for file in files}
    kinds = by_quantisation(known)
    chosen = choose([kind for kind, files in kinds.items() if not _lacking(files)], name.quantisation)
    chosen = choose(list(kinds), name.quantisation) if chosen is None else chosen
    if chosen is None:
        there = ", ".join(kind or "one of unknown quantisation" for kind in kinds) or "no GGUF file"
        raise ConfigError(
            f"{name}: the repository has {there}; name one of those, as in {PREFIX}{name.repository}:KIND"
        )
    if lacking := _lacking(kinds[chosen]):
        raise ConfigError(
            f"{name}: the repository lacks part {lacking[0]} of {kinds[chosen][0]}; take another quantisation"
        )
    wanted = [known[file] for file in kinds[chosen]]
    return HubName(name.owner, name.repo, chosen), commit, wanted, _projector(files, wanted[0], kinds)


def _projector(files: Iterable[HubFile], model: HubFile, kinds: Mapping[str, Sequence[str]]) -> HubFile | None:
    """The file of ``files`` that encodes pictures or sound for ``model``; ``kinds`` are the repository's files."""
    named = {PurePosixPath(file.name).name: file for file in files if is_projector(file.name)}
    models = [PurePosixPath(parts[0]).name for parts in kinds.values()]
    found = projector_of(PurePosixPath(model.name).name, models, named, is_repository=True)
    return None if found is None else named[found]


def repository(name: HubName) -> tuple[str, list[HubFile]]:
    """The latest commit of a repository and its files, from the hub. Raises ``ConfigError``."""
    hub = library()
    api = hub.HfApi(endpoint=endpoint())
    info = asked(name, lambda: api.model_info(name.repository, files_metadata=True, timeout=ANSWER_TIMEOUT_S))
    return info.sha or "", [
        HubFile(name=each.rfilename, size_bytes=each.size or 0, sha256=each.lfs.sha256 if each.lfs is not None else "")
        for each in info.siblings or ()
        if not PurePosixPath(each.rfilename).is_absolute() and ".." not in PurePosixPath(each.rfilename).parts
    ]


def _hub() -> str:
    return (endpoint() or DEFAULT_HUB).rstrip("/")


def remote_file(name: HubName, commit: str, file: HubFile) -> RemoteFile:
    """``file`` of the repository ``name`` in ``commit``, for reading by ranges."""
    url = f"{_hub()}/{name.repository}/resolve/{commit}/{quote(file.name)}"
    return RemoteFile(url, file.size_bytes, file.sha256)


def own_reader() -> HubRanges:
    """A connection to the hubs that this device's owner chose."""
    return HubRanges(own_hubs(), token(), silence_timeout_s=ANSWER_TIMEOUT_S)


def _lacking(names: Sequence[str]) -> list[int]:
    """The numbers of the parts that are not among ``names``."""
    first = _PART.fullmatch(names[0])
    if first is None:
        return []
    there = {int(match["number"]) for match in map(_PART.fullmatch, names) if match is not None}
    return sorted(set(range(1, int(first["count"]) + 1)) - there)
