"""Models by name: ``hf:owner/repo:Q4_K_M`` out of a folder of ours, or fetched into it from Hugging Face's hub.

A repository holds a model in several quantisations, some of them split into parts. What is fetched goes on where it was
interrupted, and is compared with the hash that the hub states. What is in the folder is used without asking anybody.

    <folder>/<owner>/<repo>/<file>.gguf
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from primad.errors import ConfigError, DiskError, ModelError, printable
from primad.gguf.model import PART_NAME
from primad.system.disk import lacking_room

PREFIX: Final = "hf:"
PREFERRED: Final = ("Q4_K_M", "Q4_K_XL", "Q4_K_S", "Q4_0", "MXFP4", "IQ4_XS", "IQ4_NL", "Q5_K_M", "Q8_0")
"""Quantisations that are taken where none is asked for, the first that there is."""
_NAME: Final = re.compile(r"hf:(?P<owner>[\w.-]+)/(?P<repo>[\w.-]+)(?::(?P<quantisation>[\w.-]+))?")
_PART: Final = re.compile(PART_NAME.pattern, re.IGNORECASE)
_QUANTISATION: Final = re.compile(
    r"(?<![A-Za-z0-9])(I?Q\d\w*|MXFP4\w*|BF16|F16|F32|TQ\d\w*)(?![A-Za-z0-9])", re.IGNORECASE
)
_BESIDE: Final = ("mmproj", "imatrix")
"""Files beside a model that are none."""
ANSWER_TIMEOUT_S: Final = 30.0
"""A hub that takes longer to say what a repository has cannot be reached."""
_CHUNK_BYTES: Final = 8 << 20

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
    """A model in the folder: its parts in order, what they take, and what it is called."""

    name: HubName
    files: tuple[Path, ...]
    size_bytes: int


def hub_name(text: str) -> HubName | None:
    """What ``text`` names on the hub; None for one that is no such name. Raises ``ConfigError`` for a broken one."""
    if not text.startswith(PREFIX):
        return None
    match = _NAME.fullmatch(text)
    if match is None or {match["owner"], match["repo"]} & {".", ".."}:
        raise ConfigError(
            f"{printable(text, 100)}: is no model of the hub; give one as in hf:owner/repo or hf:owner/repo:Q4_K_M"
        )
    return HubName(match["owner"], match["repo"], match["quantisation"] or "")


def kept_models(folder: Path) -> list[KeptModel]:
    """The whole models in ``folder``, by name."""
    return [model for place in sorted(folder.glob("*/*")) for model in _kept_in(place)]


def _kept_in(place: Path) -> list[KeptModel]:
    """Those of the repository at ``place``."""
    found = []
    files = {path.relative_to(place).as_posix(): path for path in place.rglob("*.gguf") if ".cache" not in path.parts}
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
    if own and not any(place.rglob("*.gguf")):
        shutil.rmtree(place, ignore_errors=True)
    return own


def by_quantisation(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF files among ``names`` by what they are quantised to, parts in order; of two alike the shorter name."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in sorted(names):
        file = PurePosixPath(name).name
        if not file.lower().endswith(".gguf") or any(word in file.lower() for word in _BESIDE):
            continue
        part = _PART.fullmatch(name)
        stem = part["stem"] if part is not None else name[: -len(".gguf")]
        kinds = _QUANTISATION.findall(PurePosixPath(stem).name)
        found.setdefault(kinds[-1].upper() if kinds else "", {}).setdefault(stem, []).append(name)
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
    known = {file.name: file for file in repository(name)}
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
    place = name.place(folder)
    missing = [file for file in wanted if not _is_here(place, file)]
    _check_room(place, missing, name)
    for file in missing:
        _download(name, file, place)
        _verify(place / file.name, file, advance)
    paths = tuple(place / file.name for file in wanted)
    named = HubName(name.owner, name.repo, chosen)
    return KeptModel(name=named, files=paths, size_bytes=sum(file.size_bytes for file in wanted))


def repository(name: HubName) -> list[HubFile]:
    """The files of a repository, as the hub says. Raises ``ConfigError``."""
    hub = _library()
    api = hub.HfApi(endpoint=_endpoint())
    info = _asked(name, lambda: api.model_info(name.repository, files_metadata=True, timeout=ANSWER_TIMEOUT_S))
    return [
        HubFile(name=each.rfilename, size_bytes=each.size or 0, sha256=each.lfs.sha256 if each.lfs is not None else "")
        for each in info.siblings or ()
        if not PurePosixPath(each.rfilename).is_absolute() and ".." not in PurePosixPath(each.rfilename).parts
    ]


def _download(name: HubName, file: HubFile, place: Path) -> None:
    hub = _library()
    _asked(
        name,
        lambda: hub.hf_hub_download(
            name.repository, file.name, local_dir=place, endpoint=_endpoint(), library_name="primad"
        ),
    )


def _asked(name: HubName, ask: Callable[[], Any]) -> Any:
    """What the hub's library answers; whatever it raises is one line of ours."""
    from huggingface_hub import errors

    try:
        return ask()
    except errors.GatedRepoError as exc:
        raise ConfigError(
            f"{name}: its makers ask for your consent; give it on the model's page, and a token in HF_TOKEN"
        ) from exc
    except errors.RepositoryNotFoundError as exc:
        raise ConfigError(
            f"{name}: the hub has no such repository, or not for everybody; look at the name, or set HF_TOKEN"
        ) from exc
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled) as exc:
        raise ConfigError(f"{name}: the hub does not give it: {_first_line(exc)}; try again later") from exc
    except OSError as exc:
        if exc.errno is not None and exc.filename is not None:
            raise DiskError(
                f"{exc.filename}: cannot be written: {exc.strerror}; make room or the folder writable"
            ) from exc
        raise ConfigError(f"{name}: {_unreachable(exc)}") from exc
    except Exception as exc:  # what the library's own HTTP client raises has no common root with it
        raise ConfigError(f"{name}: {_unreachable(exc)}") from exc


def _unreachable(exc: BaseException) -> str:
    return f"the hub cannot be reached ({_first_line(exc)}); go online, or name a GGUF file that is here"


def _first_line(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return printable(lines[0] if lines else type(exc).__name__, 160).rstrip(".")


def _library() -> Any:
    try:
        import huggingface_hub
    except ModuleNotFoundError as exc:
        raise ConfigError("models by name need primad's extra 'hub': install primad[hub], or name a GGUF file") from exc
    return huggingface_hub


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


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
