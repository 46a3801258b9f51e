"""The child process that tries cuts: ``python -m primad.certify.child`` with tasks as lines of JSON on standard input.

It replies to each line with one line. llama.cpp may abort or hang, which its parent (``check.py``) judges. It ends by
itself when its parent is gone, and in any case when a task takes too long or too much processor time.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from functools import lru_cache
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from primad.certify.derive import GraphNode
from primad.engine.protocol import KvType
from primad.errors import PrimadError
from primad.gguf.architecture import Architecture
from primad.gguf.model import open_model
from primad.system.children.reply_stream import answer_lines

if TYPE_CHECKING:
    from primad.certify.route import Logits
    from primad.gguf.windows import ModelCutter

LATEST_S: Final = 600
"""Seconds after which a task has no parent any more."""
HANGS_S = 60.0
"""Processor seconds after which a task counts as hanging; a busy machine only makes it late."""


class MakeTiny(msgspec.Struct, frozen=True, kw_only=True, tag="make"):
    """Write a tiny model like ``model`` to ``tiny``, in one of ``tiny.WAYS``, and compute it."""

    model: str
    tiny: str
    way: str


class TryWhole(msgspec.Struct, frozen=True, kw_only=True, tag="whole"):
    """Compute the ``tiny`` model whole, with a KV cache of ``kv_type``."""

    tiny: str
    kv_type: KvType
    derived: Architecture | None = None


class ListNodes(msgspec.Struct, frozen=True, kw_only=True, tag="nodes"):
    """List the names of the nodes of the ``tiny`` model's graph."""

    tiny: str


class TryCuts(msgspec.Struct, frozen=True, kw_only=True, tag="cuts"):
    """Compute the ``tiny`` model in windows between ``cuts`` and whole, with the key ``wrong`` corrupted, if any."""

    tiny: str
    cuts: tuple[int, ...]
    kv_type: KvType
    wrong: str = ""
    derived: Architecture | None = None


class TryShares(msgspec.Struct, frozen=True, kw_only=True, tag="shares"):
    """Compute the ``tiny`` model in two shares of its layers and whole: ``equal`` if they hardly differ."""

    tiny: str
    derived: Architecture | None = None


class Listed(msgspec.Struct, frozen=True, tag="listed"):
    """The nodes of a graph, in order."""

    nodes: tuple[GraphNode, ...]


class Tried(msgspec.Struct, frozen=True, tag="tried"):
    """Outcome of a task: ``equal`` bit for bit, ``different``, or ``refused``, and ``why`` it is not equal.

    A task without a comparison is ``equal`` if it computed numbers. ``broken``: this machine could not do it, for
    instance because the disk is full.
    """

    outcome: Literal["equal", "different", "refused", "broken"]
    why: str = ""


CheckTask = MakeTiny | TryWhole | ListNodes | TryCuts | TryShares
CheckReply = Tried | Listed


def main() -> None:
    """Reply to tasks until standard input ends."""
    answer_lines(msgspec.json.Decoder(CheckTask), _bounded)


def _bounded(task: CheckTask) -> CheckReply:
    if sys.platform != "win32":
        signal.alarm(LATEST_S)
        signal.setitimer(signal.ITIMER_PROF, HANGS_S)
    try:
        return _answer(task)
    except PrimadError as exc:
        return Tried("refused", str(exc))
    except (OSError, MemoryError) as exc:
        return Tried("broken", str(getattr(exc, "strerror", None) or exc or "out of memory"))


def _answer(task: CheckTask) -> CheckReply:
    match task:
        case MakeTiny():
            from primad.certify.made import write_tiny

            write_tiny(open_model(Path(task.model), header_only=True), Path(task.tiny), task.way)
            return _whole(task.tiny, "f16", None)
        case TryWhole():
            return _whole(task.tiny, task.kv_type, task.derived)
        case ListNodes():
            from primad.certify.route import looks_ahead
            from primad.engine.nodes import graph_nodes

            if looks_ahead(open_model(Path(task.tiny))):
                return Tried("refused", "a token's logits depend on later ones, so it cannot generate token by token")
            return Listed(tuple(starmap(GraphNode, graph_nodes(Path(task.tiny)))))
        case TryCuts():
            return _cuts(task)
        case TryShares():
            from primad.certify.shares import shares_difference

            header = replace(open_model(Path(task.tiny)), derived=task.derived)
            why = shares_difference(header, Path(task.tiny).parent, "f16")
            return Tried("different", why) if why else Tried("equal")


def _whole(tiny: str, kv_type: KvType, derived: Architecture | None) -> Tried:
    from primad.certify.route import is_finite

    if is_finite(_logits(tiny, kv_type, derived)):
        return Tried("equal")
    return Tried("refused", "the whole model's logits are not finite, or all equal")


def _cuts(task: TryCuts) -> Tried:
    from primad.certify.keys import made_wrong, nothing
    from primad.certify.route import TinyRoute, difference

    cutter, folder = _cutter(task.tiny, task.derived), Path(task.tiny).parent
    expected = _logits(task.tiny, task.kv_type, task.derived)
    change = made_wrong(cutter.header, task.wrong) if task.wrong else nothing
    route = TinyRoute(cutter, task.cuts, folder, task.kv_type, change)
    try:
        why = difference(route.logits(), expected)
    finally:
        route.release()
    return Tried("different", why) if why else Tried("equal")


@lru_cache(1)
def _cutter(tiny: str, derived: Architecture | None) -> ModelCutter:
    from primad.gguf.windows import ModelCutter

    return ModelCutter(replace(open_model(Path(tiny)), derived=derived), stand_in=float("nan"))


def _logits(tiny: str, kv_type: KvType, derived: Architecture | None) -> Logits:
    """Return the whole model's logits. Of several entries for a model only whether it keeps states matters here."""
    return _computed(tiny, kv_type, None if derived is None else _whole_entry(derived))


@lru_cache(3)
def _computed(tiny: str, kv_type: KvType, derived: Architecture | None) -> Logits:
    from primad.certify.route import whole_logits

    return whole_logits(replace(open_model(Path(tiny)), derived=derived), kv_type)


def _whole_entry(derived: Architecture) -> Architecture:
    return Architecture(name=derived.name, recurrent=derived.recurrent)


if __name__ == "__main__":
    main()
