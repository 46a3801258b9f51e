"""Verdicts on a model's windows, kept in the home folder from run to run: one small file per model and cuts.

A verdict is for one build of llama.cpp, one architecture, the metadata and tensors of which its windows are made, and
the cuts. The weights do not matter, so all quantisations of a model share one. A file that is damaged or of another
kind is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Final, Literal

import msgspec

from halda import ModelProfile
from primad.certify.keys import is_own
from primad.engine.build import build_id
from primad.engine.protocol import KvType
from primad.errors import printable
from primad.gguf.architecture import Architecture
from primad.gguf.architectures.cuts import cut_points, why_whole
from primad.gguf.architectures.table import SUPPORTED, is_unknown
from primad.gguf.header import Header
from primad.gguf.windows import vocabulary_size
from primad.settings.config import checks_folder
from primad.system.files import write_whole

VERSION: Final = 3
"""Incremented when the comparison changes."""
MAX_KEPT: Final = 256
RouteOutcome = Literal["equal", "different", "refused", "ended", "not opened"]


class TriedRoute(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of windows between ``cuts`` with the whole: ``equal`` bit for bit, ``different``, ``refused`` by
    llama.cpp, or the child ``ended`` over it, and ``why``. ``not opened``: the whole model does not support this type
    of KV cache."""

    cuts: tuple[int, ...]
    kv_type: KvType
    outcome: RouteOutcome
    why: str = ""


class TriedKey(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the comparison notices a corrupted ``key`` that the cutter rewrites, and ``how``.

    ``ignored``: windows omit the key, and putting it back changes nothing.
    """

    key: str
    outcome: Literal["exercised", "ignored", "not exercised"]
    how: str = ""


class ForbiddenCut(msgspec.Struct, frozen=True, kw_only=True):
    """Windows may not begin at all of these ``layers`` (usually one), and ``why``."""

    layers: tuple[int, ...]
    why: str


class CheckVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared, and the result; ``checked`` is in UTC.

    Windows of the model may begin at multiples of ``cut_multiple`` plus ``cut_offset``. ``cuts`` are the requested
    ones; empty: everywhere. ``left`` says what was not tried before the time limit. ``entry`` was derived for an
    architecture that is not in the table. ``shares`` says why devices cannot share its layers; None: not tried.
    """

    version: int
    checked: str
    library: str
    model: str
    architecture: str
    layers: int
    cut_multiple: int
    cuts: tuple[int, ...]
    result: Literal["certified", "not certified", "not finished"]
    why: str
    routes: tuple[TriedRoute, ...]
    keys: tuple[TriedKey, ...]
    forbidden: tuple[ForbiddenCut, ...]
    left: tuple[str, ...]
    seconds: float
    entry: Architecture | None = None
    cut_offset: int = 0
    shares: str | None = None

    @property
    def day(self) -> str:
        """Date of the check, in UTC."""
        return self.checked[:10]


def verdict_key(header: Header, cuts: Sequence[int] = ()) -> str:
    """Return the key of a verdict; see the module's docstring for what it covers."""
    own = sorted((key, value.type, value.raw) for key, value in header.values.items() if is_own(header, key))
    facts = (VERSION, build_id(), header.text("general.architecture"), own, sorted(header.tensors))
    return blake2b(repr((*facts, vocabulary_size(header), tuple(cuts))).encode(), digest_size=16).hexdigest()


def load_verdict(home: Path, header: Header, cuts: Sequence[int] = ()) -> CheckVerdict | None:
    """Return the verdict for windows between these ``cuts``, or else for all; None if they were not checked."""
    is_derived = header.text("general.architecture") not in SUPPORTED
    for asked in dict.fromkeys((tuple(cuts), ())):
        try:
            data = (checks_folder(home) / f"{verdict_key(header, asked)}.json").read_bytes()
            verdict = msgspec.json.decode(data, type=CheckVerdict)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if verdict.version == VERSION and (verdict.entry is not None) is is_derived:
            return verdict
    return None


def save_verdict(home: Path, header: Header, verdict: CheckVerdict) -> None:
    """Keep ``verdict``, and the latest ``MAX_KEPT`` of all. Raises ``OSError``."""
    folder = checks_folder(home)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{verdict_key(header, verdict.cuts)}.json", msgspec.json.encode(verdict))
    kept = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in kept[:-MAX_KEPT]:
        path.unlink(missing_ok=True)


def windows_line(home: Path, header: Header, firsts: Iterable[int]) -> str | None:
    """Return in one line what is known about windows that begin at ``firsts``; None for the whole model on one
    device."""
    cuts = sorted({*firsts} - {0})
    verdict = load_verdict(home, header, cuts)
    if verdict is None and is_unknown(header):
        how = f"not checked, which serve does first; primad check {printable(header.path)} does it now"
        return f"windows of this model: {how}"
    why = _why_whole(header, verdict)
    if why:
        return f"one device serves this model: {why}"
    return f"windows of this model: {verdict_line(verdict, header.path)}" if cuts else None


def _why_whole(header: Header, verdict: CheckVerdict | None) -> str:
    """Return why the model is not cut; empty if it is."""
    if not is_unknown(header):
        return why_whole(header)
    return "" if verdict is None or verdict.result == "certified" else verdict_line(verdict, header.path)


def why_not_shared(home: Path, header: Header) -> str:
    """Return why devices cannot share layers of the model; empty if nothing is known against it. For an architecture
    that is not in the table a check must have found that shares add up."""
    verdict = load_verdict(home, header)
    if verdict is not None and verdict.shares:
        return verdict.shares
    if not is_unknown(header) or (verdict is not None and verdict.shares is not None):
        return ""
    return f"whether shares of its layers add up was not checked: primad check {printable(header.path)}"


def verdict_line(verdict: CheckVerdict | None, model: Path) -> str:
    """Return in one line the result of checking ``model``."""
    if verdict is None:
        return f"not checked: primad check {printable(model)}"
    if verdict.result == "certified":
        where = f", at layers {', '.join(map(str, verdict.cuts))}" if verdict.cuts else ""
        return f"checked bit for bit on {verdict.day}{where}"
    if verdict.result == "not finished":
        return f"checked in part on {verdict.day}; primad check {printable(model)} continues with a longer --time-limit"
    return f"not certified on {verdict.day}: {printable(verdict.why)}"


def with_verdict(profile: ModelProfile, header: Header, verdict: CheckVerdict | None) -> ModelProfile:
    """Return the ``profile`` of ``header`` without cuts that are inexact or that the ``verdict`` forbids.

    An architecture that is not in the table has no forbidden cuts until there is a verdict.
    """
    if _why_whole(header, verdict):
        return profile.uncut
    if is_unknown(header):
        entry = None if verdict is None else verdict.entry
        return profile if entry is None else _with_cut_points(profile, cut_points(replace(header, derived=entry)))
    if verdict is None or not verdict.forbidden:
        return profile
    return _with_cut_points(profile, allowed(verdict, cut_points(header)))


def _with_cut_points(profile: ModelProfile, places: range) -> ModelProfile:
    """Return ``profile`` with windows that begin at these ``places``."""
    if not places:
        return profile.uncut
    return replace(profile, cut_multiple=places.step, cut_offset=places.start % places.step)


def allowed(verdict: CheckVerdict | None, places: range) -> range:
    """Return as many evenly spaced ``places`` as possible without a cut that ``verdict`` forbids."""
    forbidden = verdict.forbidden if verdict is not None and not verdict.cuts else ()
    every = (places[step - 1 :: step] for step in range(1, len(places) + 1))
    return next((some for some in every if not any(set(each.layers) <= set(some) for each in forbidden)), places[:0])
