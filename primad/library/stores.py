"""Lists and names GGUF files in a folder, in LM Studio's folder, in Hugging Face's cache and in llama.cpp's.

LM Studio and primad keep ``owner/repo/file.gguf`` (LM Studio's documentation, "Import Models"). Hugging Face's cache
keeps ``models--owner--repo/snapshots/COMMIT/file.gguf``, a link into ``blobs`` or a copy; ``refs/main`` has the commit
(huggingface_hub, "Understand caching"). llama.cpp's flat cache keeps ``owner_repo_file.gguf`` next to
``manifest=owner=repo=tag.json`` (``common/download.cpp`` before the shared cache).

A folder may be hostile, or a mistake: links to folders are followed once, and depth, files and models are limited.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from primad.errors import printable
from primad.gguf.model import PART_NAME
from primad.gguf.ranged import HEADERS
from primad.library.places import ModelPlace, small_text

MAX_DEPTH: Final = 8
MAX_ENTRIES: Final = 100_000
"""Maximum of files and folders that are visited in one place."""
MAX_LINE_CHARS: Final = 1000
NOT_LISTED: Final = "the others are not listed: name a folder in it with --models"
_LEFT_OUT: Final = frozenset((".cache", ".git", HEADERS))
"""Folders with parts of downloads, or only headers."""
_REPOSITORY: Final = re.compile(r"models--(?P<name>[\w.-]+)")
_COMMIT: Final = re.compile(r"[0-9a-f]{7,64}")
_MANIFEST: Final = re.compile(r"manifest=(?P<owner>[\w.-]+)=(?P<repo>[\w.-]+)=.*\.json")


@dataclass(frozen=True, slots=True)
class LibraryProblem:
    """What is wrong with a file or folder, in one line that names it."""

    path: Path
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """The ``files`` of a possible model, the parts of a split one in order, as a store keeps them; none was read.

    ``names`` are its names in its program. Without them its name is derived from its ``repository``, if any, and from
    its file, which is at ``relative`` in the store. ``problem`` says what is already known to be wrong. ``projector``
    encodes its pictures. ``size_bytes``, ``parameters`` and ``quantisation`` are recorded by its program, if at all.
    """

    source: str
    files: tuple[Path, ...]
    names: tuple[str, ...] = ()
    repository: str = ""
    relative: str = ""
    problem: str = ""
    projector: Path | None = None
    size_bytes: int | None = None
    parameters: str = ""
    quantisation: str = ""

    @property
    def stem(self) -> str:
        """Its file's name, without part number and extension."""
        return self.relative.rpartition("/")[2]


@dataclass(slots=True)
class FolderWalk:
    """A visit to a place: the problems found in it, and the number of entries visited so far."""

    problems: list[LibraryProblem] = field(default_factory=list)
    entries: int = 0
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def report(self, path: Path, what: str) -> None:
        """Record a problem with ``path``."""
        self.problems.append(LibraryProblem(path, printable(f"{path}: {what}", MAX_LINE_CHARS)))

    def listed(self, folder: Path) -> list[os.DirEntry[str]]:
        """Return the entries of ``folder``, by name; empty if it is missing or cannot be read, which is reported."""
        try:
            with os.scandir(folder) as found:
                entries = []
                for entry in found:
                    self.entries += 1
                    if self.entries == MAX_ENTRIES:
                        self.report(folder, f"has, with others, more than {MAX_ENTRIES:,} files; {NOT_LISTED}")
                    if self.entries >= MAX_ENTRIES:
                        break
                    entries.append(entry)
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as exc:
            self.report(folder, f"cannot be read: {getattr(exc, 'strerror', None) or exc}; its models are not listed")
            return []
        return sorted(entries, key=lambda each: each.name)

    def files(self, root: Path) -> list[Path]:
        """Return the GGUF files below ``root``."""
        found: list[Path] = []
        waiting = [(root, 0)] if self._is_new(root) else []
        while waiting:
            folder, depth = waiting.pop()
            for entry in self.listed(folder):
                path = Path(entry.path)
                if is_folder(entry):
                    if depth < MAX_DEPTH and entry.name not in _LEFT_OUT and self._is_new(path):
                        waiting.append((path, depth + 1))
                elif entry.name.lower().endswith(".gguf"):
                    found.append(path)
        return sorted(found)

    def _is_new(self, folder: Path) -> bool:
        """Return whether ``folder`` was not visited under another name: a link may lead back to a parent."""
        try:
            status = folder.stat()
        except (OSError, ValueError):  # an error is reported when it is read
            return True
        key = status.st_dev, status.st_ino
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether this is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def models_in(place: ModelPlace, walk: FolderWalk) -> Iterator[StoredModel]:
    """Yield the models of ``place``, in every layout but Ollama's."""
    match place.layout:
        case "hub":
            yield from _of_hub(place, walk)
        case "llama.cpp":
            yield from _of_flat_cache(place, walk)
        case _:
            for model in grouped_parts(place.source, place.folder, walk.files(place.folder)):
                owner, _, rest = model.relative.partition("/")
                repo, _, file = rest.partition("/")
                named = f"{owner}/{repo}" if place.layout == "repositories" and file else ""
                yield replace(model, repository=named)


def _of_hub(place: ModelPlace, walk: FolderWalk) -> Iterator[StoredModel]:
    """Yield the models of each repository: files of its current commit, and those of earlier commits that it lacks."""
    for entry in walk.listed(place.folder):
        match = _REPOSITORY.fullmatch(entry.name)
        if match is None:
            continue
        there: dict[str, Path] = {}
        for snapshot in _snapshots(Path(entry.path), walk):
            for path in walk.files(snapshot):
                there.setdefault(path.relative_to(snapshot).as_posix(), path)
        by_snapshot: dict[Path, list[Path]] = {}
        for relative, path in there.items():
            by_snapshot.setdefault(path.parents[relative.count("/")], []).append(path)
        for snapshot, paths in by_snapshot.items():
            for model in grouped_parts(place.source, snapshot, paths):
                yield replace(model, repository=match["name"].replace("--", "/", 1))


def _snapshots(repository: Path, walk: FolderWalk) -> list[Path]:
    """Return the folders of its commits, the current one first, then the latest."""
    current = small_text(repository / "refs" / "main").strip()
    found = [Path(each.path) for each in walk.listed(repository / "snapshots") if _COMMIT.fullmatch(each.name)]

    def order(path: Path) -> tuple[bool, float]:
        try:
            return path.name != current, -path.stat().st_mtime
        except OSError:
            return True, 0.0

    return sorted(found, key=order)


def _of_flat_cache(place: ModelPlace, walk: FolderWalk) -> Iterator[StoredModel]:
    entries = walk.listed(place.folder)
    manifests = [match for each in entries if (match := _MANIFEST.fullmatch(each.name)) is not None]
    prefixes = {f"{match['owner']}_{match['repo']}_": f"{match['owner']}/{match['repo']}" for match in manifests}
    paths = [Path(each.path) for each in entries if each.name.lower().endswith(".gguf")]
    for model in grouped_parts(place.source, place.folder, paths):
        prefix = max((each for each in prefixes if model.relative.startswith(each)), key=len, default="")
        yield replace(model, repository=prefixes.get(prefix, ""), relative=model.relative.removeprefix(prefix))


def grouped_parts(source: str, root: Path, paths: Sequence[Path]) -> Iterator[StoredModel]:
    """Yield the files ``paths`` in ``root`` as models: the parts of a split model are one model, which reports missing
    parts."""
    groups: dict[tuple[Path, str, int], dict[int, Path]] = {}
    for path in paths:
        match = PART_NAME.fullmatch(path.name)
        stem, count, number = (path.name[: -len(".gguf")], 0, 0) if match is None else _part(match)
        groups.setdefault((path.parent, stem, count), {})[number] = path
    for (folder, stem, count), parts in groups.items():
        lacking = next((number for number in range(1, count + 1) if number not in parts), None) if count else None
        files = tuple(parts[number] for number in sorted(parts))
        problem = "" if lacking is None else f"{files[0]}: part {lacking} of {count} of this split model is missing"
        relative = (folder / stem).relative_to(root).as_posix()
        yield StoredModel(source=source, files=files, relative=relative, problem=problem)


def _part(match: re.Match[str]) -> tuple[str, int, int]:
    return match["stem"], int(match["count"]), int(match["number"])
