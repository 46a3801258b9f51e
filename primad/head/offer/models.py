"""The models that a head offers, loaded when a request names them: the shell around ``loader.py``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final, Protocol

from halda import Infeasible
from primad.api.answering.backend import Backend
from primad.api.answering.models import ModelForecast, ModelState, OfferedModel, PullProgress, Waiting
from primad.api.http.offered import find_offered, state_line
from primad.errors import PlanError, PrimadError, RequestError, RingError
from primad.head.offer.held import HeldModel
from primad.head.offer.loader import (
    NOBODY,
    Grant,
    LoaderEvent,
    LoaderState,
    LoadFailed,
    LoadModel,
    ModelAsked,
    ModelLoaded,
    ModelUnloaded,
    NeedsRoom,
    RefuseRequest,
    TimePassed,
    UnloadAsked,
    UnloadModel,
    UseEnded,
    may_go,
    step,
    wake_at,
)
from primad.head.offer.offered_library import OfferedLibrary
from primad.library.library import LibraryModel
from primad.settings.quantities import show_count
from primad.system.allocator import give_back_freed
from primad.system.shares import Shares
from primad.system.tasks import Tasks, mistake, to_its_end

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 256
"""Number of requests of one caller that may wait for their model; fewer under contention."""
MAX_UNHEARD: Final = 1000


class Opens(Protocol):
    """Makes models."""

    async def who_goes(self, model: LibraryModel, idle: Sequence[str], busy: Sequence[str]) -> frozenset[str]:
        """Return the ``idle`` or ``busy`` models that have to go before ``model`` is loaded. Raises ``PrimadError``,
        also for a model that cannot be loaded at all."""

    async def forecast(self, model: LibraryModel, idle: Sequence[str], busy: Sequence[str]) -> ModelForecast:
        """Return the forecast of ``model`` alongside loaded models. Raises ``PrimadError`` or ``Infeasible``."""

    def begin(self, model: LibraryModel, changed: Callable[[], None], lost: Callable[[], None]) -> HeldModel:
        """Create ``model``, to be loaded; call it after ``who_goes``. ``changed`` is called when loading progresses,
        ``lost`` if the model cannot serve requests any more."""


class Downloads(Protocol):
    """Fetches models, and deletes fetched ones."""

    def free_bytes(self) -> int | None: ...

    def pull(self, name: str) -> AsyncGenerator[PullProgress, None]: ...

    async def delete(self, model: LibraryModel) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferSettings:
    """A model that no request uses is unloaded after ``keep_s`` (negative: never), except ``pinned`` ones. Requests
    wait for their model at most ``max_wait_s`` (None: no limit)."""

    keep_s: float
    pinned: frozenset[str] = frozenset()
    max_wait_s: float | None = None


class HeadModels:
    """Implements ``Models`` for the models of ``library`` on a head."""

    switches = True

    def __init__(
        self,
        library: OfferedLibrary,
        opens: Opens,
        downloads: Downloads,
        settings: OfferSettings,
        report_line: Callable[[str], None],
    ) -> None:
        self._library, self._opens, self._downloads, self._settings = library, opens, downloads, settings
        self._report_line = report_line
        self._state = LoaderState(keep_s=settings.keep_s, pinned=settings.pinned)
        self._held: dict[str, HeldModel] = {}
        self._known: dict[str, LibraryModel] = {}
        """Models that are loaded or were asked for, as the library listed them then."""
        self._began_s: dict[str, float] = {}
        self._took_s: dict[str, float] = {}
        """By model: when its running load began, and how long its last load took that moved no layers."""
        self._numbers = count(NOBODY + 1)
        self._waits: dict[int, tuple[str, asyncio.Future[None]]] = {}
        """The model of each request that waits or is served, and the future that it waits for."""
        self._places = Shares(2 * MAX_WAITING, minimum=1)
        self._loading: asyncio.Task[None] | None = None
        self._forecasting = False
        self._tasks = Tasks()
        self._wake: asyncio.TimerHandle | None = None
        self._last = ""
        self._shown: dict[str, OfferedModel] = {}
        """Each model as listeners last saw it, or as it was when the first listener came."""
        self._listeners: set[asyncio.Queue[OfferedModel]] = set()
        self._waiting: defaultdict[str, set[Waiting]] = defaultdict(set)

    # ---- for the API ------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        await self._library.look()

    def offered(self) -> list[OfferedModel]:
        models = {each.name: each for each in self._library.found.models}
        models |= {name: each for name, each in self._known.items() if self._is_in_use(name)}
        found = [self._offered(each) for each in models.values()]
        return sorted(found, key=lambda each: (each.state is not ModelState.LOADED, each.id.casefold()))

    def loaded(self) -> Mapping[str, Backend]:
        is_loaded = {name for name, each in self._state.models.items() if each.phase is ModelState.LOADED}
        return {name: held.backend for name, held in self._held.items() if name in is_loaded}

    @asynccontextmanager
    async def use(
        self,
        name: str | None,
        *,
        owner: str = "",
        keep_alive_s: float | None = None,
        waiting: Waiting = lambda _: None,
    ) -> AsyncGenerator[Backend, None]:
        model = await self._last_used() if name is None else await self._find(name)
        number, granted = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waits[number] = model, granted
        try:
            self._post(ModelAsked(number, model, keep_alive_s))
            try:
                if not granted.done():
                    await self._wait(model, granted, owner, waiting)
                await granted
            except RingError:
                await self._library.look(again=True)
                find_offered(model, self.offered())  # a 404 if its file vanished
                raise
            if not self._known[model].embeds:
                self._last = model
            yield self._held[model].backend
        finally:
            self._waits.pop(number, None)
            self._post(UseEnded(number))

    async def load(self, name: str) -> None:
        model = await self._find(name)
        self._post(ModelAsked(NOBODY, model))

    async def unload(self, name: str) -> None:
        model = await self._find(name)
        self._post(UnloadAsked(model))
        with self._listening() as changes:
            while self._state.of(model).phase in (ModelState.LOADED, ModelState.LOADING, ModelState.UNLOADING):
                await changes.get()
                if not self._state.of(model).leaving and self._state.of(model).phase is ModelState.LOADED:
                    return  # it was unloaded, and loaded again for a request that waited

    async def forecast(self, name: str) -> ModelForecast:
        model = await self._find(name)
        held = self._held.get(model)
        if held is not None and (found := held.forecast()) is not None:
            return found
        if self._forecasting:
            raise RequestError("another model is being planned; try again in a moment", status=429, code="busy")
        self._forecasting = True
        try:
            return await self._opens.forecast(self._known[model], *self._may_go(may_go(self._state)))
        except Infeasible as exc:
            raise PlanError(f"{exc}{self._beside_pinned(model)}") from exc
        finally:
            self._forecasting = False

    def _may_go(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split ``names`` into idle models and busy ones."""
        idle = [each for each in names if not self._state.of(each).users]
        return idle, [each for each in names if each not in idle]

    async def changes(self) -> AsyncGenerator[OfferedModel, None]:
        with self._listening() as changes:
            while True:
                yield await changes.get()

    def free_bytes(self) -> int | None:
        return self._downloads.free_bytes()

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        async with aclosing(self._downloads.pull(name)) as progress:
            async for each in progress:
                yield each
        await self._library.look(again=True)

    async def delete(self, name: str) -> None:
        found = await self._find(name, is_usable=False)
        model = self._known.get(found) or next(each for each in self._library.found.models if each.name == found)
        await self.unload(found)
        await self._downloads.delete(model)
        await self._library.look(again=True)

    @property
    def summary(self) -> str:
        """For the health check: the number of models, and which are loaded."""
        loaded = list(self.loaded())
        offered = f"{show_count(len(self._library.found.models), 'model')} offered"
        return f"{offered}, loaded: {', '.join(loaded)}" if loaded else f"{offered}, none is loaded"

    def about(self) -> dict[str, Any]:
        """Return the models that are loaded, loading or unloading, for the owner's commands."""
        idle = (ModelState.UNLOADED, ModelState.FAILED)
        return {"models": {each.id: state_line(each) for each in self.offered() if each.state not in idle}}

    def stop(self, reason: str) -> None:
        """End all requests with an error, both waiting and running ones."""
        if self._wake is not None:
            self._wake.cancel()
        for number in self._waits:
            self._settle(number, f"is not loaded any more: {reason}")
        for held in self._held.values():
            held.stop(reason)

    async def close(self) -> None:
        """End everything. Call it after ``stop``."""
        await self._tasks.close()
        await asyncio.gather(*(held.end() for held in self._held.values()))

    async def begin(self) -> None:
        """List the models, and load the pinned ones."""
        await self._library.look()
        for name in sorted(self._settings.pinned):
            try:
                await self.load(name)
            except PrimadError as exc:
                self._report_line(f"{name} stays loaded by models.toml, but {exc}")

    # ---- finding ------------------------------------------------------------------------------------------------------

    async def _find(self, name: str, *, is_usable: bool = True) -> str:
        """Return the name of the model that ``name`` means. Raises ``RequestError``."""
        if self._is_in_use(name):
            return name
        try:
            found = find_offered(name, self.offered())
            is_known = found.state is not ModelState.FAILED
        except RequestError:
            is_known = False
        if not is_known:  # it may be new, or repaired
            await self._library.look(again=True)
            found = find_offered(name, self.offered())
        model = next((each for each in self._library.found.models if each.name == found.id), None)
        if model is None:
            return found.id  # its file vanished, but it is loaded
        if model.problem and is_usable and not self._is_in_use(found.id):
            raise RequestError(f"{found.id} cannot be used: {model.problem}", param="model")
        if not self._is_in_use(found.id):
            self._known[found.id] = model
        return found.id

    def _is_in_use(self, name: str) -> bool:
        return self._state.of(name).phase in (ModelState.LOADED, ModelState.LOADING, ModelState.UNLOADING)

    async def _last_used(self) -> str:
        """Return the model for a request that names none."""
        if self._last and self._is_in_use(self._last):
            return self._last
        await self._library.look()
        if self._last in (each.name for each in self._library.found.models if not each.problem):
            return await self._find(self._last)
        writing = [name for name in self.loaded() if not self._known[name].embeds]
        if writing:
            return writing[0]
        usable = [each for each in self._library.found.models if not each.problem and not each.embeds]
        if len(usable) == 1:
            self._known.setdefault(usable[0].name, usable[0])
            return usable[0].name
        raise RequestError("no model is loaded; name one in 'model'", param="model")

    def _offered(self, model: LibraryModel) -> OfferedModel:
        own, name = self._state.of(model.name), model.name
        phase, held = own.phase, self._held.get(name)
        detail = {ModelState.UNLOADED: model.problem, ModelState.FAILED: own.detail}.get(phase, "")
        if held is not None and phase in (ModelState.LOADED, ModelState.LOADING):
            detail = held.detail
        elif phase is ModelState.LOADING:
            detail = self._waits_for()
        taken = {} if held is None else held.taken()
        served = held.backend.model() if held is not None and phase is ModelState.LOADED else None
        takes = model if served is None else served
        is_idle = phase is ModelState.LOADED and not own.users and own.expires_at_s < float("inf")
        return OfferedModel(
            id=name,
            aliases=model.names[1:],
            created=self._library.created(model),
            path=str(model.files[0]),
            size_bytes=model.size_bytes,
            architecture=model.architecture,
            parameters=model.parameters,
            quantisation=model.quantisation,
            trained_context_tokens=model.context_tokens,
            state=ModelState.FAILED if phase is ModelState.UNLOADED and model.problem else phase,
            detail=detail,
            progress=held.progress if held is not None and phase is ModelState.LOADING else None,
            expected_s=self._expected_s(name) if phase is ModelState.LOADING else None,
            expires_at_s=time.time() + own.expires_at_s - self._now() if is_idle else None,
            pinned=name in self._settings.pinned,
            embeds=model.embeds,
            sees=takes.sees,
            hears=takes.hears,
            memory_bytes={device: each.total_bytes for device, each in taken.items()},
            vram_bytes=sum(sum(each.vram_bytes.values()) for each in taken.values()),
        )

    def _waits_for(self) -> str:
        turn = self._state.turn
        if turn is None or not turn.claims:
            return "loading"
        return f"waits until {' and '.join(sorted(turn.claims))} made room"

    def _expected_s(self, name: str) -> float | None:
        """Return how long it will still load: from its last load, if no layers are moved, otherwise from its devices
        and links."""
        began_s, held = self._began_s.get(name), self._held.get(name)
        if name in self._took_s and (held is None or not held.moves):
            spent_s = 0.0 if began_s is None else self._now() - began_s
            return max(0.0, self._took_s[name] - spent_s)
        return None if held is None else held.expected_s

    # ---- waiting ------------------------------------------------------------------------------------------------------

    async def _wait(self, model: str, granted: asyncio.Future[None], owner: str, waiting: Waiting) -> None:
        if not self._places.has_room(owner):
            raise RequestError(
                "too many of your requests wait for a model already; try again later", status=429, code="queue_full"
            )
        with self._places.held(owner):
            self._begin_to_listen()
            self._waiting[model].add(waiting)
            try:
                waiting(self._offered(self._known[model]))
                async with asyncio.timeout(self._settings.max_wait_s):
                    await granted
            except TimeoutError:
                raise RequestError(
                    f"{model} was not loaded in {self._settings.max_wait_s:g} s, the limit of this server; try again "
                    "later",
                    status=429,
                    code="waited_too_long",
                    retry_s=self._expected_s(model),
                ) from None
            finally:
                self._waiting[model].discard(waiting)

    def _listening(self) -> _Listening:
        self._begin_to_listen()
        return _Listening(self._listeners)

    def _is_heard(self) -> bool:
        return bool(self._listeners) or any(self._waiting.values())

    def _begin_to_listen(self) -> None:
        """Take a snapshot when the first listener comes: earlier changes are no news, and must not hide a change
        back."""
        if not self._is_heard():
            self._shown = {name: self._offered(model) for name, model in self._known.items()}

    def _notify(self) -> None:
        """Notify waiting requests and listeners of changes."""
        if not self._is_heard():
            return
        for name, model in self._known.items():
            now = self._offered(model)
            if _shown(now) == _shown(self._shown.get(name)):
                continue
            self._shown[name] = now
            for waiting in list(self._waiting.get(name, ())):
                waiting(now)
            for listener in list(self._listeners):
                if listener.full():
                    listener.get_nowait()
                listener.put_nowait(now)

    # ---- the loader ---------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _post(self, event: LoaderEvent) -> None:
        now = self._now()
        self._state, effects = step(self._state, event, now)
        for effect in effects:
            match effect:
                case LoadModel(name, others):
                    self._loading = self._tasks.start(self._load(name, others))
                case UnloadModel(name):
                    self._tasks.start(self._unload(name))
                case Grant(number):
                    self._settle(number, None)
                case RefuseRequest(number, reason):
                    self._settle(number, f"cannot be loaded: {reason}")
        if self._wake is not None:
            self._wake.cancel()
        wake = wake_at(self._state, now)
        loop = asyncio.get_running_loop()
        self._wake = None if wake is None else loop.call_at(wake, self._post, TimePassed())
        self._notify()

    def _settle(self, number: int, error: str | None) -> None:
        model, granted = self._waits.get(number, ("", None))
        if granted is None or granted.done():
            return
        if error is None:
            granted.set_result(None)
        else:
            granted.set_exception(RingError(f"{model} {error}"))

    async def _load(self, name: str, others: Sequence[str]) -> None:
        model = self._known[name]
        began_s = self._began_s[name] = self._now()
        try:
            claims = await self._opens.who_goes(model, *self._may_go(others))
            if claims:
                self._report_line(f"{name} needs the memory of {', '.join(sorted(claims))}")
                self._later(NeedsRoom(name, claims))
                return
            held = self._held[name] = self._opens.begin(model, self._notify, partial(self._later, UnloadAsked(name)))
            await held.load()
        except (PlanError, Infeasible) as exc:
            await self._failed(name, f"{exc}{self._beside_pinned(name)}")
        except PrimadError as exc:
            await self._failed(name, str(exc))
        except Exception as exc:  # a bug; requests wait for an outcome
            logger.exception("%s cannot be loaded", name)
            await self._failed(name, mistake(exc))
        else:
            if not held.moves:
                self._took_s[name] = self._now() - began_s
            self._later(ModelLoaded(name))
        finally:
            self._began_s.pop(name, None)

    def _beside_pinned(self, name: str) -> str:
        """Name the pinned models that keep the memory that ``name`` lacks."""
        stay = sorted(self._settings.pinned & self._held.keys() - {name})
        return f"; {' and '.join(stay)} {'stays' if len(stay) == 1 else 'stay'} loaded by models.toml" if stay else ""

    async def _failed(self, name: str, reason: str) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            await to_its_end(held.end())
        self._report_line(f"{name} cannot be loaded: {reason}")
        self._later(LoadFailed(name, reason))

    async def _unload(self, name: str) -> None:
        if self._loading is not None and not self._loading.done() and self._state.turn is None:
            self._loading.cancel()  # the running load is this model's: others wait for their turn
            await asyncio.wait([self._loading])
        held = self._held.pop(name, None)
        if held is not None:
            await to_its_end(held.end())
            del held
            await asyncio.to_thread(give_back_freed)
            self._report_line(f"{name} is unloaded")
        self._later(ModelUnloaded(name))

    def _later(self, event: LoaderEvent) -> None:
        """Post the event once this task has ended, as another task may wait for its end."""
        asyncio.get_running_loop().call_soon(self._post, event)


class _Listening:
    """A queue of every change from now on."""

    def __init__(self, listeners: set[asyncio.Queue[OfferedModel]]) -> None:
        self._listeners = listeners
        self._queue: asyncio.Queue[OfferedModel] = asyncio.Queue(MAX_UNHEARD)

    def __enter__(self) -> asyncio.Queue[OfferedModel]:
        self._listeners.add(self._queue)
        return self._queue

    def __exit__(self, *_: object) -> None:
        self._listeners.discard(self._queue)


def _shown(model: OfferedModel | None) -> object:
    """Return the part of ``model`` whose changes are reported."""
    if model is None:
        return None
    return (
        model.state,
        model.detail,
        model.expected_s is None,
        None if model.progress is None else round(model.progress, 2),
    )
