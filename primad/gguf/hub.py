"""Models by name: ``hf:owner/repo:Q4_K_M`` out of a folder of ours, or fetched into it from Hugging Face's hub.

A repository holds a model in several quantisations, some of them split into parts. What is fetched goes on where it was
interrupted, and is compared with the hash that the hub states. What is in the folder is used without asking anybody.

    <folder>/<owner>/<repo>/<file>.gguf
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import quote

from primad.errors import ConfigError, DiskError, ModelError, printable
from primad.gguf.hub_library import asked, endpoint, library, token
from primad.gguf.hub_ranges import DEFAULT_HUB, HubError, HubRanges, own_hubs
from primad.gguf.model import PART_NAME
from primad.gguf.origins import RemoteFile
from primad.gguf.ranged import HEADERS, RangedModel, keep_header, open_ranged
from primad.system.files import lacking_room

PREFIX: Final = "hf:"
PREFERRED: Final = ("Q4_K_M", "Q4_K_XL", "Q4_K_S", "Q4_0", "MXFP4", "IQ4_XS", "IQ4_NL", "Q5_K_M", "Q8_0")
"""Quantisations that are taken where none is asked for, the first that there is."""
_NAME: Final = re.compile(r"hf:(?P<owner>[\w.-]+)/(?P<repo>[\w.-]+)(?::(?P<quantisation>[\w.-]+))?")
_ELSEWHERE: Final = re.compile(
    r"(?P<site>(?:https?:/+)?(?:www\.)?(?:huggingface|hf)\.co/)?(?P<name>[\w.-]+/[\w.-]+(?::[\w.-]+)?)(?:/.*)?"
)
_PART: Final = re.compile(PART_NAME.pattern, re.IGNORECASE)
_QUANTISATION: Final = re.compile(
    r"(?<![A-Za-z0-9])(I?Q\d\w*|MXFP4\w*|BF16|F16|F32|TQ\d\w*)(?![A-Za-z0-9])", re.IGNORECASE
)
_BESIDE: Final = ("mmproj", "imatrix")
"""Files beside a model that are none."""
ANSWER_TIMEOUT_S: Final = 30.0
"""A hub that takes longer to say what a repository has cannot be reached."""
_CHUNK_BYTES: Final = 8 << 20
UNKNOWN: Final = "unknown"
"""The folder of a header whose quantisation its name does not say."""

OnBytes = Callable[[str, int, int], None]
"""Told what is done (a verb and a file's name), and bytes of how many."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub; ``quantisation`` is empty where none is asked for."""

    owner: str
    repo: str
    quantisation: str = ""

    @property
    def repository(self) -> str:
        """What the hub calls it."""
        return f"{self.owner}/{self.repo}"

    def place(self, folder: Path) -> Path:
        """Where files of the repository are in ``folder``."""
        return folder / self.owner / self.repo

    def __str__(self) -> str:
        behind = f":{self.quantisation}" if self.quantisation else ""
        return f"{PREFIX}{self.repository}{behind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a repository; ``sha256`` is empty where the hub does not say it."""

    name: str
    size_bytes: int
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """A model in the folder: its parts in order, what they take, and what it is called; not ``whole``: its header alone."""

    name: HubName
    files: tuple[Path, ...]
    size_bytes: int
    whole: bool = True


def hub_name(text: str) -> HubName | None:
    """What ``text`` names on the hub; None for one that is no such name. Raises ``ConfigError`` for a broken one."""
    if not text.startswith(PREFIX):
        return None
    match = _NAME.fullmatch(text)
    if match is None or {match["owner"], match["repo"]} & {".", ".."}:
        raise ConfigError(
            f"{printable(text, 100)}: is not a model of the hub; give one as in hf:owner/repo or hf:owner/repo:Q4_K_M"
        )
    return HubName(match["owner"], match["repo"], match["quantisation"] or "")


def repository_in(text: str) -> str | None:
    """The repository, and what it is quantised to, that ``text`` names as the hub's site or another program does."""
    match = _ELSEWHERE.fullmatch(text)
    is_named = match is not None and (match["site"] or "gguf" in match["name"].lower())
    return match["name"] if match is not None and is_named else None


def kept_models(folder: Path) -> list[KeptModel]:
    """The models in ``folder``, by name: the whole ones, and those of which the header is there."""
    return [model for place in sorted(folder.glob("*/*")) for model in (*_kept_in(place), *headers_in(place))]


def _kept_in(place: Path) -> list[KeptModel]:
    """Those of the repository at ``place``."""
    found = []
    files = {
        path.relative_to(place).as_posix(): path
        for path in place.rglob("*.gguf")
        if not {".cache", HEADERS} & set(path.relative_to(place).parts)
    }
    for quantisation, names in by_quantisation(files).items():
        if not _lacking(names):
            paths = tuple(files[name] for name in names)
            size = sum(path.stat().st_size for path in paths)
            name = HubName(place.parent.name, place.name, quantisation)
            found.append(KeptModel(name=name, files=paths, size_bytes=size))
    return found


def kept(name: HubName, folder: Path) -> KeptModel | None:
    """The model that is called so in ``folder``, whole."""
    own = {each.name.quantisation: each for each in _kept_in(name.place(folder))}
    chosen = choose(list(own), name.quantisation)
    return None if chosen is None else own[chosen]


def remove(name: HubName, folder: Path) -> list[KeptModel]:
    """Remove the models that are called so, of any quantisation where ``name`` has none; those that were there."""
    place = name.place(folder)
    own = [each for each in _kept_in(place) if name.quantisation.lower() in ("", each.name.quantisation.lower())]
    for each in own:
        for path in each.files:
            path.unlink()
    headers = headers_in(place)
    for each in [each for each in headers if name.quantisation.lower() in ("", each.name.quantisation.lower())]:
        shutil.rmtree(each.files[0].parent, ignore_errors=True)
        own.append(each)
    if own and not any(place.rglob("*.gguf")):
        shutil.rmtree(place, ignore_errors=True)
    return own


def headers_in(place: Path) -> list[KeptModel]:
    """The models of the repository at ``place`` of which the header is there, for devices that fetch their layers."""
    found = []
    for folder in sorted(place.glob(f"{HEADERS}/*")):
        name = HubName(place.parent.name, place.name, "" if folder.name == UNKNOWN else folder.name)
        files = tuple(sorted(folder.glob("*.gguf")))
        if files:
            size = sum(path.stat().st_size for path in files)
            found.append(KeptModel(name=name, files=files, size_bytes=size, whole=False))
    return found


def quantisation_in(stem: str) -> str:
    """What a file of this name is quantised to, in capitals; empty if its name does not say it."""
    kinds = _QUANTISATION.findall(stem)
    return str(kinds[-1]).upper() if kinds else ""


def by_quantisation(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF files among ``names`` by what they are quantised to, parts in order; of two alike the shorter name."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in sorted(names):
        file = PurePosixPath(name).name
        if not file.lower().endswith(".gguf") or any(word in file.lower() for word in _BESIDE):
            continue
        part = _PART.fullmatch(name)
        stem = part["stem"] if part is not None else name[: -len(".gguf")]
        found.setdefault(quantisation_in(PurePosixPath(stem).name), {}).setdefault(stem, []).append(name)
    return {kind: min(stems.items(), key=lambda each: (len(each[0]), each[0]))[1] for kind, stems in found.items()}


def choose(kinds: Sequence[str], asked: str) -> str | None:
    """The quantisation that is meant: the one that was ``asked`` for, or the first that is preferred, or the only one."""
    by_name = {kind.lower(): kind for kind in kinds}
    if asked:
        return by_name.get(asked.lower())
    return next((by_name[kind.lower()] for kind in PREFERRED if kind.lower() in by_name), next(iter(kinds), None))


def fetch(name: HubName, folder: Path, advance: OnBytes) -> KeptModel:
    """Have ``name`` in ``folder``, whole and as the hub has it.

    Raises ``ConfigError`` where the hub does not have it, or does not give it; ``DiskError`` where it does not fit;
    ``ModelError`` for a file that is not what the hub says.
    """
    named, _, wanted = _wanted(name)
    place = name.place(folder)
    missing = [file for file in wanted if not _is_here(place, file)]
    _check_room(place, missing, name)
    for file in missing:
        _download(name, file, place)
        _verify(place / file.name, file, advance)
    paths = tuple(place / file.name for file in wanted)
    return KeptModel(name=named, files=paths, size_bytes=sum(file.size_bytes for file in wanted))


def header_of(name: HubName, folder: Path) -> RangedModel:
    """The header of ``name`` alone, out of ``folder`` or fetched into it.

    A header that is there is used without asking anybody. Raises ``HubError`` where the hub gives no ranges of the model,
    ``ConfigError`` and ``ModelError`` as ``fetch``, and ``DiskError``.
    """
    place = name.place(folder) / HEADERS
    hub = (endpoint() or DEFAULT_HUB).rstrip("/")
    found = kept_header(name, folder)
    if found is not None and all(file.url.startswith(f"{hub}/") for file in found.files):
        return found
    named, commit, wanted = _wanted(name)
    files = {
        PurePosixPath(file.name).name: RemoteFile(
            f"{hub}/{name.repository}/resolve/{commit}/{quote(file.name)}", file.size_bytes, file.sha256
        )
        for file in wanted
    }
    if not commit or not all(file.sha256 for file in wanted):
        raise HubError(f"{hub} does not state the hashes of its files", again=False)
    reader = HubRanges(own_hubs(), token(), silence_timeout_s=ANSWER_TIMEOUT_S)
    try:
        keep_header(files, place / (named.quantisation or UNKNOWN), reader)
    finally:
        reader.close()
    found = open_ranged(place / (named.quantisation or UNKNOWN))
    assert found is not None
    return found


def kept_header(name: HubName, folder: Path) -> RangedModel | None:
    """The header of the model that is called so in ``folder``. Raises ``ModelError`` for a damaged one."""
    place = name.place(folder) / HEADERS
    chosen = choose(sorted(each.name for each in place.glob("*")), name.quantisation)
    return None if chosen is None else open_ranged(place / chosen)


def _wanted(name: HubName) -> tuple[HubName, str, list[HubFile]]:
    """Which model is meant, the commit, and its files in order. Raises ``ConfigError``."""
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
    return HubName(name.owner, name.repo, chosen), commit, [known[file] for file in kinds[chosen]]


def repository(name: HubName) -> tuple[str, list[HubFile]]:
    """The latest commit of a repository and its files, as the hub says. Raises ``ConfigError``."""
    hub = library()
    api = hub.HfApi(endpoint=endpoint())
    info = asked(name, lambda: api.model_info(name.repository, files_metadata=True, timeout=ANSWER_TIMEOUT_S))
    return info.sha or "", [
        HubFile(name=each.rfilename, size_bytes=each.size or 0, sha256=each.lfs.sha256 if each.lfs is not None else "")
        for each in info.siblings or ()
        if not PurePosixPath(each.rfilename).is_absolute() and ".." not in PurePosixPath(each.rfilename).parts
    ]


def _download(name: HubName, file: HubFile, place: Path) -> None:
    hub = library()
    asked(
        name,
        lambda: hub.hf_hub_download(
            name.repository, file.name, local_dir=place, endpoint=endpoint(), library_name="primad"
        ),
    )


def _lacking(names: Sequence[str]) -> list[int]:
    """The numbers of the parts that are not among ``names``."""
    first = _PART.fullmatch(names[0])
    if first is None:
        return []
    there = {int(match["number"]) for match in map(_PART.fullmatch, names) if match is not None}
    return sorted(set(range(1, int(first["count"]) + 1)) - there)


def _is_here(place: Path, file: HubFile) -> bool:
    path = place / file.name
    return path.is_file() and path.stat().st_size == file.size_bytes


def _check_room(place: Path, files: Sequence[HubFile], name: HubName) -> None:
    needed = sum(file.size_bytes for file in files)
    if not needed:
        return
    try:
        place.mkdir(parents=True, exist_ok=True)
        lacking = lacking_room(place, needed)
    except OSError as exc:
        raise DiskError(f"{place}: cannot be made: {exc.strerror}; make its folder writable") from exc
    if lacking:
        raise DiskError(
            f"{name}: {needed} bytes do not fit {place}: {lacking}; make room, or take a smaller quantisation"
        )


def _verify(path: Path, file: HubFile, advance: OnBytes) -> None:
    """Compare what came with what the hub says; what differs is removed."""
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
            f"{path}: is not what the hub says ({size} of {file.size_bytes} bytes came); it is removed, fetch it again"
        )
