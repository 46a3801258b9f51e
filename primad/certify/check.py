"""Certify that a model can be cut: compute a tiny model with the same layers in windows and whole, compare bit for bit.

Child processes compute. Any outcome in llama.cpp is a result: a difference, a refusal, an abort, or a hang. The model's
weights are not used, so its header is enough.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Final, cast

import msgspec

from primad.certify.child import (
    HANGS_S,
    LATEST_S,
    CheckReply,
    CheckTask,
    Listed,
    ListNodes,
    MakeTiny,
    Tried,
    TryCuts,
    TryShares,
    TryWhole,
)
from primad.certify.cuts import SAMPLED, CutRoute, asked_route, failing_cuts, in_two, is_allowed, route
from primad.certify.derive import derived, multiples, named, provisional
from primad.certify.keys import rewritten
from primad.certify.tiny import WAYS
from primad.certify.verdict import VERSION, CheckVerdict, ForbiddenCut, RouteOutcome, TriedKey, TriedRoute
from primad.engine.build import build_id
from primad.engine.protocol import KvType
from primad.errors import DiskError, EngineError, ModelError, printable
from primad.gguf.architectures.cuts import cut_points, cuttable
from primad.gguf.architectures.layers import layer_count
from primad.gguf.architectures.table import known
from primad.gguf.header import Header
from primad.gguf.model import open_model
from primad.system.children.spawn import environment
from primad.system.children.task_child import TaskChild

TIME_LIMIT_S: Final = 120.0
KV_TYPES: Final[tuple[KvType, ...]] = ("f16", "q8_0", "q4_0")
_FROM_OUTSIDE: Final = re.compile(r"ended by SIG(KILL|TERM|HUP|INT)\b")
_HUNG: Final = re.compile(r"ended by SIGPROF\b")
_BUILD_PATH: Final = re.compile(r"\S*/(?=[\w.-]+\.\w+:\d+: )")
_ANSWER: Final = cast("type[CheckReply]", CheckReply)
NotifyNext = Callable[[str], None]
"""Called with a description of what is tried next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to try: windows that begin at ``cuts`` (empty: at every possible layer), and two windows, cut in ``every``
    place or in some, for ``time_limit_s``."""

    cuts: tuple[int, ...] = ()
    every: bool = False
    time_limit_s: float = TIME_LIMIT_S


def check(header: Header, wanted: Wanted, advance: NotifyNext) -> CheckVerdict:
    """Try windows of the model. Raises ``ModelError`` if it cannot be cut, ``DiskError``, ``EngineError``.

    For an architecture that is not in the table an entry is derived and tried.
    """
    if known(header) is None:
        header = provisional(header)
    cuttable(header)
    if wanted.cuts:
        asked_route(header, wanted.cuts)
    try:
        with tempfile.TemporaryDirectory(prefix="primad-check-") as folder:
            child = TaskChild(
                "primad.certify.child", "the child", environment(os.environ, 1, 0), timeout_s=wanted.time_limit_s
            )
            try:
                found = _Check(header, wanted, advance, child, Path(folder) / "tiny.gguf", time.monotonic())
                found.run()
                return found.verdict()
            finally:
                child.close()
    except OSError as exc:
        raise DiskError(f"{tempfile.gettempdir()}: a tiny model cannot be tried there: {exc.strerror or exc}") from exc


class _TimeOverError(Exception):
    """The time limit has passed."""


@dataclass(slots=True)
class _Check:
    """One running check."""

    header: Header
    wanted: Wanted
    advance: NotifyNext
    child: TaskChild
    tiny: Path
    began: float
    routes: list[TriedRoute] = field(default_factory=list)
    keys: list[TriedKey] = field(default_factory=list)
    forbidden: list[ForbiddenCut] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    why: str = ""
    shares: str | None = None

    def run(self) -> None:
        """Try everything until the time limit."""
        first = self._windows if self.header.derived is None else self._derive
        parts = (("a tiny model", self._make), ("windows", first), ("keys", self._keys), ("KV types", self._kv))
        later = (("the model cut in two", self._in_two),) if not self.wanted.cuts else ()
        for what, part in (*parts, *later):
            if self.why:
                return
            try:
                part()
            except _TimeOverError:
                self.left.append(what)
        if not self.wanted.cuts and not self.left:
            with suppress(_TimeOverError):
                self._share()

    def _share(self) -> None:
        """Try shares of layers, only if windows are certified. A model that cannot be shared is certified all the
        same."""
        if self.why or self.forbidden:
            return
        self.advance("shares of layers")
        outcome, why = self._ask(TryShares(tiny=str(self.tiny), derived=self.header.derived))
        self.shares = "" if outcome == "equal" else why or outcome

    def verdict(self) -> CheckVerdict:
        """Return the verdict."""
        unused = [each.key for each in self.keys if each.outcome == "not exercised"]
        why = self.why
        if self.forbidden:
            layers = "; ".join("layer " + " and ".join(map(str, each.layers[:8])) for each in self.forbidden[:8])
            why = f"windows that begin at {layers} are not exact"
        elif unused:
            why = f"{', '.join(unused)} not exercised"
        return CheckVerdict(
            version=VERSION,
            checked=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            library=build_id(),
            model=self.header.name,
            architecture=self.header.text("general.architecture"),
            layers=layer_count(self.header),
            cut_multiple=(places := cut_points(self.header)).step,
            cut_offset=places.start % places.step,
            cuts=self.wanted.cuts,
            entry=self.header.derived,
            result="not certified" if why else "not finished" if self.left else "certified",
            why=why,
            routes=tuple(self.routes),
            keys=tuple(self.keys),
            forbidden=tuple(self.forbidden),
            left=tuple(self.left),
            shares=self.shares,
            seconds=round(time.monotonic() - self.began, 1),
        )

    def _make(self) -> None:
        reasons = []
        for way in WAYS:
            self.advance("a tiny model")
            outcome, why = self._ask(MakeTiny(model=str(self.header.path), tiny=str(self.tiny), way=way))
            if outcome == "equal":
                return
            reasons.append(why)
        self.why = f"no tiny model of it can be computed: {reasons[-1]}"

    def _derive(self) -> None:
        """Find an entry with which windows are exact at every place where they may begin."""
        self.advance("where its graph is cut")
        listed = self._answer(ListNodes(tiny=str(self.tiny)))
        if not isinstance(listed, Listed):
            self.why = listed[1]
            return
        try:
            ways, places = named(self.header, listed.nodes), multiples(self.header)
        except ModelError as exc:
            self.why = str(exc)
            return
        unset, why = self.header, ""
        for multiple in places:
            for names in ways:
                self.header = derived(unset, names, multiple)
                self.routes.clear()
                why_not = self._differs(
                    f"windows at multiples of {multiple} layers, fed at {names.entries[-1]}, taken at {names.exit}"
                )
                if not why_not:
                    if self.wanted.cuts:
                        asked_route(self.header, self.wanted.cuts)
                        self._windows()
                    return
                why = why or why_not
        self.routes.clear()
        self.why = f"windows of it are not exact, wherever they begin: {why}" if why else "it has one layer"

    def _differs(self, how: str) -> str:
        """Return why windows between all possible places, or two windows, do not equal the whole; empty if they do."""
        routes = (route(self.header, cut_points(self.header)), *in_two(self.header, None))
        for number, windows in enumerate(routes, 1):
            self.advance(f"{how}: {number} of {len(routes)} routes")
            tried = self._try(windows, "f16")
            if tried.outcome != "equal":
                return f"at layers {', '.join(map(str, windows[1:-1][:8]))}: {tried.why}"
        return ""

    def _windows(self) -> None:
        windows = self._finest()
        cuts = windows[1:-1]
        if not cuts:
            return
        self.advance(
            "windows at every layer where one may begin" if not self.wanted.cuts else "windows at these layers"
        )
        if self._try(windows, "f16").outcome == "equal":
            return

        @cache
        def fails(some: tuple[int, ...]) -> str:
            tried = self._try(route(self.header, some), "f16")
            return "" if tried.outcome == "equal" else tried.why or tried.outcome

        found = failing_cuts(
            cuts, lambda some: fails(tuple(some)) if is_allowed(self.header, route(self.header, some)) else ""
        )
        self.forbidden += [ForbiddenCut(layers=layers, why=why) for layers, why in found]

    def _finest(self) -> CutRoute:
        """Return as many windows as were requested or are possible."""
        cuts = [*self.wanted.cuts] or cut_points(self.header)
        while cuts and not is_allowed(self.header, route(self.header, cuts)):
            cuts = cuts[1::2]
        return route(self.header, cuts)

    def _keys(self) -> None:
        if self.forbidden:
            return
        tiny = replace(open_model(self.tiny), derived=self.header.derived)
        halves = [] if self.wanted.cuts else in_two(self.header)
        windows = [*halves[len(halves) // 2 :][:1], self._finest()]  # most keys show in two windows, which cost less
        found: dict[str, bool] = {}
        for each in windows:
            found |= {key: kept or found.get(key, False) for key, kept in rewritten(tiny, each).items()}
        for key, is_kept in found.items():
            self.advance(f"{key} made wrong")
            self.keys.append(self._try_key(key, windows, is_kept=is_kept))

    def _try_key(self, key: str, windows: Sequence[CutRoute], *, is_kept: bool) -> TriedKey:
        """Try ``key`` made wrong. Different logits are stronger evidence than a model that cannot be loaded."""
        how = ""
        for each in windows:
            outcome, why = self._ask(self._cuts(each, "f16", wrong=key))
            how = why if outcome == "different" else how or why
            if outcome == "different":
                break
        if how:
            return TriedKey(key=key, outcome="exercised", how=how)
        return TriedKey(key=key, outcome="not exercised" if is_kept else "ignored")

    def _kv(self) -> None:
        if self.forbidden:
            return
        windows = self._finest()
        for kv_type in KV_TYPES[1:]:
            self.advance(f"a KV cache of {kv_type}")
            outcome, why = self._ask(TryWhole(tiny=str(self.tiny), kv_type=kv_type, derived=self.header.derived))
            if outcome != "equal":
                self.routes.append(TriedRoute(cuts=windows, kv_type=kv_type, outcome="not opened", why=why))
                continue
            self._try(windows, kv_type, forbids=True)

    def _in_two(self) -> None:
        every = self.wanted.every or self.header.derived is not None
        routes = in_two(self.header, None if every else SAMPLED)
        for number, windows in enumerate(routes, 1):
            self.advance(f"two windows, cut at layer {windows[1]}: {number} of {len(routes)}")
            if not any(windows == each.cuts for each in self.routes):
                self._try(windows, "f16", forbids=True)

    def _try(self, windows: CutRoute, kv_type: KvType, *, forbids: bool = False) -> TriedRoute:
        outcome, why = self._ask(self._cuts(windows, kv_type))
        tried = TriedRoute(cuts=windows, kv_type=kv_type, outcome=outcome, why=why)
        self.routes.append(tried)
        if forbids and outcome != "equal":
            self.forbidden.append(ForbiddenCut(layers=windows[1:-1], why=f"{why} ({kv_type})"))
        return tried

    def _cuts(self, windows: CutRoute, kv_type: KvType, wrong: str = "") -> TryCuts:
        return TryCuts(tiny=str(self.tiny), cuts=windows, kv_type=kv_type, wrong=wrong, derived=self.header.derived)

    def _ask(self, task: CheckTask) -> tuple[RouteOutcome, str]:
        """Return the outcome of a task. Raises ``_TimeOverError``."""
        answer = self._answer(task)
        return ("ended", "the child replied something else") if isinstance(answer, Listed) else answer

    def _answer(self, task: CheckTask) -> Listed | tuple[RouteOutcome, str]:
        """Return the child's list of nodes, or the outcome of the task. Raises ``_TimeOverError``."""
        left_s = self.began + self.wanted.time_limit_s - time.monotonic()
        if left_s <= 0:
            raise _TimeOverError
        self.child.timeout_s = min(LATEST_S, left_s)
        try:
            answer: CheckReply | str = self.child.ask(task, _ANSWER)
        except msgspec.DecodeError as exc:
            answer = f"the child's reply is invalid: {exc}"
        if isinstance(answer, Listed):
            return answer
        if isinstance(answer, Tried):
            if answer.outcome == "broken":
                raise DiskError(f"{self.tiny.parent}: {answer.why}; make room, or name another folder in TMPDIR")
            return answer.outcome, self._shown(answer.why)
        if self.child.timeout_s < LATEST_S and time.monotonic() >= self.began + self.wanted.time_limit_s:
            raise _TimeOverError
        if _HUNG.search(answer):
            answer = f"the child did not end within {HANGS_S:g} s of CPU time"
        if _FROM_OUTSIDE.search(answer):
            raise EngineError(f"{printable(answer)}, as where memory is short; check again when there is more")
        return "ended", self._shown(answer)

    def _shown(self, why: str) -> str:
        """Return ``why`` without the folder of the tiny model and the build folder of llama.cpp."""
        return printable(_BUILD_PATH.sub("", why.replace(f"{self.tiny.parent}/", "")))
