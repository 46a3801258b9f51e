"""Decides which models are loaded, as one pure function: ``step(state, event, now) -> state, effects``.

- Requests are granted their model if it is loaded, and otherwise wait in one queue. One model is loaded at a time: that
  of the first request in the queue whose model is not loaded. When it is loaded, all requests that wait for it are
  granted.
- The shell judges memory. If a model needs the memory of others, the shell names them (``NeedsRoom``). It chooses among
  models that are not pinned: unused ones first, the least recently used first. From then on they are *claimed*:
  requests that run there finish, and new requests for them wait in the queue, after the one that needs the memory. So
  no request starves, and two models that compete for memory alternate.
- An unused model is unloaded when its time is over, or when its owner asks. A model in use never is.
- A request that leaves the queue leaves no trace. A load that no request waits for continues, unless another model is
  waited for.

Nothing here waits, sends or looks at a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from primad.api.answering.models import ModelState

NOBODY: Final = 0
"""The number of a "request" without a client: the owner has a model loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loadable:
    """A model. ``users`` are the requests that use it; the latest one keeps it for ``keep_s`` afterwards. It was last
    used at ``used_s``, and is unloaded at ``expires_at_s`` if no request uses it then. ``leaving``: its owner wants it
    unloaded. ``detail`` is the reason why it failed."""

    phase: ModelState = ModelState.UNLOADED
    users: frozenset[int] = frozenset()
    keep_s: float = 0.0
    used_s: float = 0.0
    expires_at_s: float = math.inf
    leaving: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """Request ``number`` waits for the model ``name``, and will keep it for ``keep_s`` (negative: for ever)."""

    number: int
    name: str
    keep_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTurn:
    """The model ``name`` is to be loaded: it is ``loading``, or waits until the models that it ``claims`` are gone."""

    name: str
    claims: frozenset[str] = frozenset()
    loading: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """All models that are or were loaded, by name, and the queue. ``pinned`` models stay loaded. A model is kept for
    ``keep_s`` (negative: for ever) unless the request says otherwise."""

    keep_s: float
    pinned: frozenset[str] = frozenset()
    models: Mapping[str, Loadable] = field(default_factory=dict)
    queue: tuple[WaitingRequest, ...] = ()
    turn: LoadTurn | None = None

    def of(self, name: str) -> Loadable:
        """Return the model ``name``."""
        return self.models.get(name, Loadable())


# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelAsked:
    """Request ``number`` wants the model ``name``; ``keep_s`` as in ``WaitingRequest``, None for the owner's
    setting."""

    number: int
    name: str
    keep_s: float | None = None


@dataclass(frozen=True, slots=True)
class UseEnded:
    """Request ``number`` no longer waits, or no longer uses its model."""

    number: int


@dataclass(frozen=True, slots=True)
class UnloadAsked:
    """The owner wants ``name`` unloaded."""

    name: str


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """``name`` can serve requests."""

    name: str


@dataclass(frozen=True, slots=True)
class NeedsRoom:
    """``name`` can be loaded once the models ``claims`` are gone."""

    name: str
    claims: frozenset[str]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """``name`` cannot be loaded, and nothing is left of the attempt."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelUnloaded:
    """No device holds anything of ``name``."""

    name: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed."""


LoaderEvent = ModelAsked | UseEnded | UnloadAsked | ModelLoaded | NeedsRoom | LoadFailed | ModelUnloaded | TimePassed


# ---- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Load ``name``. The reply is ``ModelLoaded``, ``LoadFailed``, or ``NeedsRoom`` with some of ``may_go``, preferably
    the first ones."""

    name: str
    may_go: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """Unload ``name``, or give up loading it. The reply is ``ModelUnloaded``."""

    name: str


@dataclass(frozen=True, slots=True)
class Grant:
    """Request ``number`` may use its model."""

    number: int


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """Request ``number`` gets no model, for this ``reason``."""

    number: int
    reason: str


LoaderEffect = LoadModel | UnloadModel | Grant | RefuseRequest


# ---- decisions ------------------------------------------------------------------------------------------------------


def step(state: LoaderState, event: LoaderEvent, now: float) -> tuple[LoaderState, tuple[LoaderEffect, ...]]:
    """Return the next ``state`` after ``event`` at ``now`` (seconds on any scale), and the effects, in order."""
    effects: list[LoaderEffect] = []
    state = _take(state, event, now, effects)
    state = _give_up_turn(state, effects)
    state = _grant(state, now, effects)
    state = _end_idle(state, now, effects)
    state = _make_room(state, effects)
    return _begin_turn(state, effects), tuple(effects)


def wake_at(state: LoaderState, now: float) -> float | None:
    """Return when ``TimePassed`` is due if nothing else happens; None: never."""
    times = (each.expires_at_s for name, each in state.models.items() if _is_idle(state, name))
    return min((time for time in times if now < time < math.inf), default=None)


def _take(state: LoaderState, event: LoaderEvent, now: float, effects: list[LoaderEffect]) -> LoaderState:
    match event:
        case ModelAsked(number, name, keep_s):
            asked = WaitingRequest(number=number, name=name, keep_s=state.keep_s if keep_s is None else keep_s)
            return replace(state, queue=(*state.queue, asked))
        case UseEnded(number):
            return _left(state, number, now)
        case UnloadAsked(name):
            queue = tuple(each for each in state.queue if each.name != name or each.number != NOBODY)
            state = replace(state, queue=queue)
            is_there = state.of(name).phase in (ModelState.LOADED, ModelState.LOADING)
            return _put(state, name, leaving=True) if is_there else state
        case ModelLoaded(name) if _is_loading(state, name):
            state = _put(state, name, phase=ModelState.LOADED, used_s=now, keep_s=state.keep_s, detail="")
            return _rested(_granted_all(replace(state, turn=None), name, now, effects), name, now)
        case NeedsRoom(name, claims) if _is_loading(state, name) and state.turn is not None:
            claims = frozenset(each for each in claims if state.of(each).phase is not ModelState.UNLOADED)
            return replace(state, turn=replace(state.turn, claims=claims - state.pinned, loading=False))
        case LoadFailed(name, reason) if _is_loading(state, name):
            refused = [each for each in state.queue if each.name == name]
            effects += [RefuseRequest(each.number, reason) for each in refused if each.number != NOBODY]
            queue = tuple(each for each in state.queue if each.name != name)
            state = replace(state, queue=queue, turn=None)
            return _put(state, name, phase=ModelState.FAILED, leaving=False, detail=reason)
        case ModelUnloaded(name) if state.of(name).phase is ModelState.UNLOADING:
            return _without(state, name)
        case _:
            return state  # time passed, or a late reply to a load that was given up


def _left(state: LoaderState, number: int, now: float) -> LoaderState:
    state = replace(state, queue=tuple(each for each in state.queue if each.number != number))
    for name, model in state.models.items():
        if number in model.users:
            state = _put(state, name, users=model.users - {number}, used_s=now)
            return _rested(state, name, now)
    return state


def _rested(state: LoaderState, name: str, now: float) -> LoaderState:
    """Start the idle time of ``name``, unless a request uses it."""
    model = state.of(name)
    if model.users:
        return state
    is_kept = model.keep_s < 0 or name in state.pinned
    return _put(state, name, expires_at_s=math.inf if is_kept else now + model.keep_s)


def _grant(state: LoaderState, now: float, effects: list[LoaderEffect]) -> LoaderState:
    """Grant requests whose model is loaded and not claimed."""
    claimed = frozenset[str]() if state.turn is None else state.turn.claims
    for name in dict.fromkeys(each.name for each in state.queue):
        model = state.of(name)
        if model.phase is ModelState.LOADED and not model.leaving and name not in claimed:
            state = _granted_all(state, name, now, effects)
    return state


def _granted_all(state: LoaderState, name: str, now: float, effects: list[LoaderEffect]) -> LoaderState:
    """Grant all requests in the queue for ``name``, which is loaded."""
    granted = [each for each in state.queue if each.name == name]
    if not granted:
        return state
    numbers = [each.number for each in granted if each.number != NOBODY]
    effects += [Grant(number) for number in numbers]
    state = replace(state, queue=tuple(each for each in state.queue if each.name != name))
    users = state.of(name).users | frozenset(numbers)
    return _rested(_put(state, name, users=users, used_s=now, keep_s=granted[-1].keep_s), name, now)


def _end_idle(state: LoaderState, now: float, effects: list[LoaderEffect]) -> LoaderState:
    """Unload idle models whose time is over, whose owner wants it, or whose memory is needed."""
    claimed = frozenset[str]() if state.turn is None else state.turn.claims
    for name, model in state.models.items():
        if _is_idle(state, name) and (model.leaving or name in claimed or model.expires_at_s <= now):
            state = _unload(state, name, effects)
    return state


def _give_up_turn(state: LoaderState, effects: list[LoaderEffect]) -> LoaderState:
    """End the turn of a model that no request waits for: drop its claims. A running load is ended only if others wait,
    or its owner wants that."""
    turn = state.turn
    if turn is None or any(each.name == turn.name for each in state.queue):
        return state
    if not turn.loading:
        return _without(replace(state, turn=None), turn.name)
    others = any(state.of(each.name).phase is not ModelState.LOADED for each in state.queue)
    return _unload(state, turn.name, effects) if others or state.of(turn.name).leaving else state


def _make_room(state: LoaderState, effects: list[LoaderEffect]) -> LoaderState:
    """Load the model whose turn it is, once all models that it claimed are gone."""
    turn = state.turn
    if turn is None or turn.loading or _is_unloading(state):
        return state
    if any(state.of(name).phase is ModelState.LOADED for name in turn.claims):
        return state
    effects.append(LoadModel(turn.name, may_go(state)))
    return replace(state, turn=replace(turn, loading=True))


def _begin_turn(state: LoaderState, effects: list[LoaderEffect]) -> LoaderState:
    """Begin the turn of the first model in the queue that is not loaded, once no other model is loading or
    unloading."""
    if state.turn is not None or _is_unloading(state):
        return state
    absent = (ModelState.UNLOADED, ModelState.FAILED)
    name = next((each.name for each in state.queue if state.of(each.name).phase in absent), None)
    if name is None:
        return state
    state = _put(state, name, phase=ModelState.LOADING, leaving=False, detail="")
    effects.append(LoadModel(name, may_go(state)))
    return replace(state, turn=LoadTurn(name=name))


def may_go(state: LoaderState) -> tuple[str, ...]:
    """Return the models that may be unloaded for another one, in the order in which they go."""
    loaded = [name for name, each in state.models.items() if each.phase is ModelState.LOADED]
    free = [name for name in loaded if name not in state.pinned]
    return tuple(sorted(free, key=lambda name: (bool(state.of(name).users), state.of(name).used_s, name)))


def _unload(state: LoaderState, name: str, effects: list[LoaderEffect]) -> LoaderState:
    effects.append(UnloadModel(name))
    if state.turn is not None and state.turn.name == name:
        state = replace(state, turn=None)
    return _put(state, name, phase=ModelState.UNLOADING)


def _is_idle(state: LoaderState, name: str) -> bool:
    model = state.of(name)
    return model.phase is ModelState.LOADED and not model.users


def _is_loading(state: LoaderState, name: str) -> bool:
    return state.turn is not None and state.turn.name == name and state.turn.loading


def _is_unloading(state: LoaderState) -> bool:
    return any(each.phase is ModelState.UNLOADING for each in state.models.values())


def _without(state: LoaderState, name: str) -> LoaderState:
    """Return the state without ``name``, of which no device holds anything."""
    return replace(state, models={other: each for other, each in state.models.items() if other != name})


def _put(state: LoaderState, name: str, **changes: object) -> LoaderState:
    return replace(state, models={**state.models, name: replace(state.of(name), **changes)})  # type: ignore[arg-type]
