"""All models of this device by name: lists what the stores have, with what the files say.

A file that is found twice (a link, or one blob under two names) is one model with several names. An encoder of pictures
and sound (llama.cpp: a projector) belongs to the model next to it and is not a model itself, nor is an adapter. Files
that cannot be used are listed with the reason.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final

from primad.errors import ConfigError, ModelError, printable
from primad.gguf.hub import PREFIX
from primad.gguf.model import quantisation_in
from primad.gguf.projectors import folder_of, projector_of
from primad.library.headers import MAX_LABEL_CHARS, HeaderCache, HeaderFacts, parameters_in
from primad.library.names import meant, nearest
from primad.library.ollama import models_of_ollama
from primad.library.places import ModelPlace
from primad.library.stores import MAX_LINE_CHARS, NOT_LISTED, FolderWalk, LibraryProblem, StoredModel, models_in

MAX_FILES: Final = 5_000
"""Maximum of GGUF files in one place; a home has some hundred."""
_SHOWN: Final = 6
_BESIDE: Final = ("mmproj", "imatrix")


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryModel:
    """A model with its ``names``, the first of which is shown, as kept by ``sources``. Texts are empty if unknown.

    ``files`` are its parts in order. ``problem`` is the line why it cannot be used; empty if it can.
    """

    names: tuple[str, ...]
    sources: tuple[str, ...]
    files: tuple[Path, ...]
    size_bytes: int
    architecture: str = ""
    parameters: str = ""
    quantisation: str = ""
    context_tokens: int | None = None
    projector: Path | None = None
    sees: bool = False
    hears: bool = False
    """``sees``, ``hears``: whether it takes pictures, or sound, with its ``projector``."""
    refused: str = ""
    """Why its ``projector`` cannot be used; empty if it can."""
    encoder_bytes: int = 0
    """Memory of the process that has the ``projector`` loaded."""
    wants_encoder: bool = False
    """Whether it could see or hear with a projector."""
    problem: str = ""
    embeds: bool = False
    """Whether it makes one vector of a text, and generates none."""

    @property
    def name(self) -> str:
        """The name that is shown."""
        return self.names[0]

    @property
    def lacks_encoder(self) -> bool:
        """Whether it could see or hear, and there is no ``projector`` for it."""
        return self.wants_encoder and self.projector is None


@dataclass(frozen=True, slots=True)
class Library:
    """The models of this device, by their shown names, and what cannot be read."""

    models: tuple[LibraryModel, ...]
    problems: tuple[LibraryProblem, ...]

    def find(self, typed: str) -> LibraryModel | None:
        """Return the model that ``typed`` means, or None.

        Raises ``ConfigError`` with the choices if it may mean several, ``ModelError`` if that model cannot be used.
        """
        found = [self.models[place] for place in meant(typed, [each.names for each in self.models])]
        usable = [each for each in found if not each.problem] or found
        if len(usable) > 1:
            shown = ", ".join(f"{each.name} ({each.files[0]})" for each in usable[:_SHOWN])
            more = f" and {len(usable) - _SHOWN} more" if len(usable) > _SHOWN else ""
            raise ConfigError(f"{printable(typed)}: may be {shown}{more}; give one of these names, or the file")
        if usable and usable[0].problem:
            raise ModelError(f"{usable[0].name} cannot be used: {usable[0].problem}")
        return usable[0] if usable else None

    def nearest(self, typed: str) -> list[str]:
        """Return names similar to ``typed``."""
        return nearest(typed, [each.names for each in self.models])

    def with_aliases(self, aliases: Mapping[str, Sequence[str]]) -> Library:
        """Return the library with additional names for the models that the keys mean; a key that means no model is
        skipped."""
        added: dict[tuple[Path, ...], tuple[str, ...]] = {}
        for key, names in aliases.items():
            try:
                model = self.find(key)
            except (ConfigError, ModelError):
                continue
            if model is not None:
                added[model.files] = (*added.get(model.files, ()), *names)
        changed = (replace(each, names=_once((*each.names, *added.get(each.files, ())))) for each in self.models)
        return replace(self, models=tuple(changed))


def read_library(places: Iterable[ModelPlace], cache: HeaderCache) -> Library:
    """Read the models in ``places``, with facts from ``cache`` for unchanged files. Writes nothing but the cache."""
    cache.load()
    problems: list[LibraryProblem] = []
    found: list[_Read] = []
    for place in places:
        walk = FolderWalk()
        if place.named and _is_missing(place.folder):
            walk.report(place.folder, "no such folder; check --models, or models in config.toml")
        stored = models_of_ollama(place, walk) if place.layout == "ollama" else models_in(place, walk)
        found += (_read(each, cache) for each in islice(stored, MAX_FILES))
        if next(stored, None) is not None:
            walk.report(place.folder, f"has more than {MAX_FILES:,} GGUF files; {NOT_LISTED}")
        problems += walk.problems
    beside = [each for each in found if not each.is_model]
    problems += (LibraryProblem(each.stored.files[0], each.problem) for each in beside if each.problem)
    models = [each for each in found if each.is_model]
    names = _names(models)
    merged: dict[object, LibraryModel] = {}
    chosen = _projectors(models, beside)
    for each, own in zip(models, names, strict=True):
        projector = chosen(each)
        encoder = _projector_facts(projector, cache)
        if projector is not None and encoder.refused:
            line = printable(f"{projector}: is of no use for {own[0]}: {encoder.refused}", MAX_LINE_CHARS)
            problems.append(LibraryProblem(projector, line))
        model = _model(each, own, projector, encoder)
        earlier = merged.get(each.identity)
        merged[each.identity] = model if earlier is None else _both(earlier, model)
    cache.save()
    ordered = sorted(merged.values(), key=lambda each: (each.name.casefold(), each.files))
    return Library(tuple(ordered), tuple(dict.fromkeys(problems)))


def _is_missing(folder: Path) -> bool:
    try:
        folder.stat()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False  # the walk reports it
    return False


@dataclass(frozen=True, slots=True)
class _Read:
    """A stored model with the facts of its first file, None if that cannot be read."""

    stored: StoredModel
    facts: HeaderFacts | None
    identity: object
    size_bytes: int
    problem: str

    @property
    def is_model(self) -> bool:
        if self.facts is not None:
            return self.facts.is_model
        return not any(word in self.stored.stem.lower() for word in _BESIDE)

    @property
    def place(self) -> tuple[Path, str]:
        """The folder and the repository in which files belong together."""
        return folder_of(self.stored.files[0]), self.stored.repository

    @property
    def quantisation(self) -> str:
        """The quantisation in the file name, which distinguishes more kinds than the header; else its program's or its
        header's."""
        of_header = "" if self.facts is None else self.facts.quantisation
        return quantisation_in(self.stored.stem) or self.stored.quantisation or of_header


def _read(stored: StoredModel, cache: HeaderCache) -> _Read:
    first, problem, size = stored.files[0], stored.problem, 0
    facts: HeaderFacts | None = None
    identity: object = first
    try:
        statuses = [path.stat() for path in stored.files]
        size = sum(each.st_size for each in statuses)
        identity = (statuses[0].st_dev, statuses[0].st_ino) if statuses[0].st_ino else os.path.realpath(first)
        facts = cache.facts(first, statuses[0])
    except OSError as exc:
        problem = problem or f"{first}: cannot be read: {exc.strerror or exc}"
    except ModelError as exc:
        problem = problem or str(exc)
    if not problem and stored.size_bytes is not None and size != stored.size_bytes:
        problem = f"{first}: has {size} of {stored.size_bytes} bytes; fetch it again with {stored.source}"
    return _Read(stored, facts, identity, size, printable(problem, MAX_LINE_CHARS))


def _names(models: Sequence[_Read]) -> list[tuple[str, ...]]:
    """Return the names of each of ``models``, as users of its program know it."""
    of_repository = Counter((each.stored.source, each.stored.repository) for each in models)
    of_kind = Counter((each.stored.source, each.stored.repository, each.quantisation) for each in models)
    of_stem = Counter(each.stored.stem for each in models if not each.stored.repository)
    found: list[tuple[str, ...]] = []
    for each in models:
        stored, kind = each.stored, each.quantisation
        if stored.names:
            found.append(stored.names)
        elif not stored.repository:
            plain = (stored.stem, stored.relative)
            found.append(_once(plain if of_stem[stored.stem] == 1 else plain[::-1]))
        else:
            source, repository = stored.source, stored.repository
            is_named = kind and of_kind[source, repository, kind] == 1
            exact = f"{repository}:{kind}" if is_named else f"{repository}/{stored.stem}"
            names = (repository, exact) if of_repository[source, repository] == 1 else (exact,)
            own = (f"{PREFIX}{exact}",) if source == "primad" else ()
            found.append(_once((*own, *names, stored.stem)))
    return found


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _projectors(models: Sequence[_Read], beside: Sequence[_Read]) -> Callable[[_Read], Path | None]:
    """Return a function that finds a model's encoder of pictures and sound: the one that its store names, or one next
    to it."""
    neighbours: dict[tuple[Path, str], list[str]] = {}
    for each in models:
        neighbours.setdefault(each.place, []).append(each.stored.stem)
    there: dict[tuple[Path, str], dict[str, Path]] = {}
    for each in beside:
        if each.facts is not None and each.facts.is_projector and not each.problem:
            there.setdefault(each.place, {})[each.stored.stem] = each.stored.files[0]

    def projector(model: _Read) -> Path | None:
        stored, found = model.stored, there.get(model.place, {})
        if stored.projector is not None or stored.names:
            return stored.projector
        name = projector_of(stored.stem, neighbours[model.place], found, is_repository=bool(stored.repository))
        return None if name is None else found[name]

    return projector


def _projector_facts(path: Path | None, cache: HeaderCache) -> HeaderFacts:
    """Return the facts of the encoder's file ``path``; empty if it cannot be read, which is reported when it is
    opened."""
    try:
        return HeaderFacts() if path is None else cache.facts(path, path.stat())
    except (OSError, ModelError):
        return HeaderFacts()


def _model(read: _Read, names: tuple[str, ...], projector: Path | None, encoder: HeaderFacts) -> LibraryModel:
    facts, stored = read.facts or HeaderFacts(), read.stored
    is_taken = encoder.is_projector and not encoder.refused
    in_names = (found for name in (stored.stem, *names) if (found := parameters_in(name)))
    parameters = stored.parameters or facts.parameters or next(in_names, "")
    return LibraryModel(
        names=tuple(printable(name) for name in names),
        sources=(stored.source,),
        files=stored.files,
        size_bytes=read.size_bytes,
        architecture=facts.architecture,
        parameters=parameters[:MAX_LABEL_CHARS],
        quantisation=read.quantisation[:MAX_LABEL_CHARS],
        context_tokens=facts.context_tokens,
        projector=projector,
        sees=is_taken and encoder.sees,
        hears=is_taken and encoder.hears,
        refused=encoder.refused,
        encoder_bytes=encoder.encoder_bytes if is_taken else 0,
        wants_encoder=facts.wants_encoder,
        problem=read.problem,
        embeds=facts.embeds,
    )


def _both(first: LibraryModel, other: LibraryModel) -> LibraryModel:
    """Merge two finds of one file into one model, with the files of the first find, unless only the other can be
    used."""
    base, added = (other, first) if first.problem and not other.problem else (first, other)
    encoded = base if base.projector is not None else added
    return replace(
        base,
        names=_once((*base.names, *added.names)),
        sources=_once((*base.sources, *added.sources)),
        parameters=base.parameters or added.parameters,
        quantisation=base.quantisation or added.quantisation,
        projector=encoded.projector,
        sees=encoded.sees,
        hears=encoded.hears,
        refused=encoded.refused,
        encoder_bytes=encoded.encoder_bytes,
    )
