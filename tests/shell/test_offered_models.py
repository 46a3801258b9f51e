"""The models that a head offers: found, loaded for requests in order, unloaded; on devices that a test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from primad.api.answering.models import ModelForecast, ModelState, OfferedModel, PullProgress
from primad.api.dialects.openai.offered_models import offered_entry
from primad.errors import ClusterError, PlanError, RequestError, RingError
from primad.head.offer.models import HeadModels, OfferSettings
from primad.head.offer.offered_library import OfferedLibrary
from primad.head.offer.room import who_goes
from primad.head.rings.taken import Taken
from primad.library.library import Library, LibraryModel
from primad.library.stores import LibraryProblem
from tests.fakes.models import backend_of

MAX_LOADED = 2
FORECAST = ModelForecast(tokens_per_s=10.0, ttft_ms=500.0, prompt_tokens=512, context_tokens=4096, devices=("desk",))


def model(name: str, **facts: object) -> LibraryModel:
    return LibraryModel(
        names=(name, f"{name}-too"),
        sources=("folder",),
        files=(Path(f"/models/{name}.gguf"),),
        size_bytes=1000,
        **facts,  # type: ignore[arg-type]
    )


@dataclass
class HeldModel:
    """A model that is loaded when its gate opens."""

    loader: FakeLoader
    name: str
    lost: Callable[[], None]
    detail: str = "planning"
    progress: float | None = None
    expected_s: float | None = None
    moves: bool = False

    def __post_init__(self) -> None:
        self.backend = backend_of(self.name)
        self.gate = asyncio.Event()
        if self.name not in self.loader.slow:
            self.gate.set()

    def taken(self) -> dict[str, Taken]:
        return {"desk": Taken(ram_bytes=600, vram_bytes={"Vulkan0": 400})}

    def forecast(self) -> ModelForecast | None:
        return FORECAST if self.gate.is_set() else None

    async def load(self) -> None:
        await self.gate.wait()
        if self.name in self.loader.failing:
            raise ClusterError("a device is short of memory")
        self.detail = "serving with 1 device"

    def stop(self, reason: str) -> None:
        self.loader.stopped.append(self.name)

    async def end(self) -> None:
        self.loader.held.pop(self.name)
        self.loader.ended.append(self.name)
        self.loader.news.set()


@dataclass
class FakeLoader:
    """Devices with room for ``MAX_LOADED`` models, and a library."""

    found: list[LibraryModel] = field(default_factory=lambda: [model("one"), model("two"), model("three")])
    problems: tuple[LibraryProblem, ...] = ()
    slow: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    held: dict[str, HeldModel] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    may_plan: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a model begins or ends to be held."""

    def read(self) -> Library:
        return Library(tuple(self.found), self.problems)

    async def who_goes(self, model: LibraryModel, idle: Sequence[str], busy: Sequence[str]) -> frozenset[str]:
        too_many = max(0, len(self.held) + 1 - MAX_LOADED)
        if too_many > len(idle) + len(busy):
            raise PlanError(f"{model.name} has no room")
        return frozenset([*idle, *busy][:too_many])

    async def forecast(self, model: LibraryModel, idle: Sequence[str], busy: Sequence[str]) -> ModelForecast:
        await self.may_plan.wait()
        return replace(FORECAST, goes=tuple(await self.who_goes(model, idle, busy)))

    def begin(self, model: LibraryModel, changed: Callable[[], None], lost: Callable[[], None]) -> HeldModel:
        del changed
        made = self.held[model.name] = HeldModel(self, model.name, lost)
        self.news.set()
        return made

    def free_bytes(self) -> int | None:
        return 1 << 30

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        yield PullProgress(file=name)
        self.found.append(model(name))

    async def delete(self, model: LibraryModel) -> None:
        self.deleted.append(model.name)
        self.found.remove(model)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` is true."""
        while not condition():
            self.news.clear()
            await self.news.wait()

    async def load_of(self, name: str) -> HeldModel:
        """``name``, once its load begins."""
        await self.until(lambda: name in self.held)
        return self.held[name]


@asynccontextmanager
async def offered(
    loader: FakeLoader,
    *,
    keep_s: float = -1.0,
    pinned: Collection[str] = (),
    max_wait_s: float | None = None,
    fresh_s: float = 0.0,
) -> AsyncIterator[HeadModels]:
    settings = OfferSettings(keep_s=keep_s, pinned=frozenset(pinned), max_wait_s=max_wait_s)
    library = OfferedLibrary(loader.read, loader.lines.append, fresh_s=fresh_s)
    models = HeadModels(library, loader, loader, settings, loader.lines.append)
    await models.begin()
    try:
        yield models
    finally:
        models.stop("primad is stopping")
        await models.close()
        assert not loader.held, "nothing is left"


def state(models: HeadModels, name: str) -> OfferedModel:
    return next(each for each in models.offered() if each.id == name)


async def test_a_request_loads_the_model_that_it_names_by_any_of_its_names():
    async with offered(FakeLoader()) as models:
        assert {each.state for each in models.offered()} == {ModelState.UNLOADED}
        async with models.use("ONE-too") as backend:
            served = backend.model()
            assert served is not None
            assert served.id == "one"
            assert list(models.loaded()) == ["one"]
        assert models.offered()[0].id == "one"
        assert (models.offered()[0].memory_bytes, models.offered()[0].vram_bytes) == ({"desk": 1000}, 400)


async def test_supported_inputs_follow_the_encoder_until_loading_and_then_the_loaded_model():
    loader = FakeLoader(found=[model("one", projector=Path("mmproj.gguf"), hears=True)])
    async with offered(loader) as models:
        assert (state(models, "one").sees, state(models, "one").hears) == (False, True)
        entry = offered_entry(state(models, "one"), None)
        assert (entry.capabilities, entry.architecture["input_modalities"]) == (
            ["completion", "audio", "multimodal"],
            ["text", "audio"],
        )
        async with models.use("one"):
            assert not state(models, "one").hears, "it was loaded without its encoder"


async def test_a_request_without_a_name_gets_the_last_used_model():
    loader = FakeLoader()
    async with offered(loader) as models:
        with pytest.raises(RequestError, match="name one in 'model'"):
            async with models.use(None):
                pass
        for name in ("one", "two"):
            async with models.use(name):
                pass
        async with models.use(None):
            assert [each.name for each in loader.held.values()] == ["one", "two"]
        await models.unload("two")
        async with models.use(None) as backend:  # even after it was unloaded
            assert backend is loader.held["two"].backend


async def test_without_a_name_a_model_that_vanished_since_is_passed_over():
    loader = FakeLoader()
    async with offered(loader) as models:
        for name in ("two", "one"):
            async with models.use(name):
                pass
        await models.unload("one")
        del loader.found[0]
        async with models.use(None) as backend:
            assert backend is loader.held["two"].backend


async def test_a_new_or_repaired_file_is_found_even_with_a_fresh_list():
    loader = FakeLoader(found=[model("one", problem="is cut short")])
    async with offered(loader, fresh_s=1e9) as models:
        loader.found = [model("one"), model("new")]
        for name in ("one", "new"):
            async with models.use(name):
                pass


async def test_a_load_that_fails_as_its_file_vanished_is_a_404():
    loader = FakeLoader(failing={"two"})
    async with offered(loader, fresh_s=3600.0) as models:
        with pytest.raises(RingError, match="short of memory"):
            async with models.use("two"):
                pass
        loader.found = [each for each in loader.found if each.name != "three"]
        loader.failing = {"three"}
        with pytest.raises(RequestError, match="not offered here") as refused:
            async with models.use("three"):
                pass
        assert refused.value.status == 404


async def test_concurrent_searches_for_models_share_one_search():
    looks = []

    def read() -> Library:
        looks.append(1)
        return Library((), ())

    library = OfferedLibrary(read, lambda _: None)
    await asyncio.gather(*(library.look(again=True) for _ in range(20)))
    assert len(looks) <= 2


async def test_waiting_reports_progress_and_leaving_does_not_affect_others():
    loader = FakeLoader(slow={"one"})
    async with offered(loader) as models:
        states: list[OfferedModel] = []

        async def use(name: str, heard: Callable[[OfferedModel], None]) -> str:
            async with models.use(name, waiting=heard) as backend:
                served = backend.model()
                assert served is not None
                return served.id

        first = asyncio.create_task(use("one", states.append))
        leaving = asyncio.create_task(use("one", lambda _: None))
        other = asyncio.create_task(use("two", lambda _: None))
        held = await loader.load_of("one")
        assert [each.state for each in states][-1] is ModelState.LOADING
        assert states[-1].detail in ("loading", "planning")
        leaving.cancel()
        await asyncio.wait([leaving])
        held.gate.set()
        assert await first == "one"
        assert await other == "two"


async def test_the_expected_time_of_a_load_is_that_of_the_last_one(monkeypatch):
    loop, later_s = asyncio.get_running_loop(), 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + later_s)
    loader = FakeLoader(slow={"one"})
    async with offered(loader) as models:
        states: list[OfferedModel] = []

        async def use() -> None:
            async with models.use("one", waiting=states.append):
                pass

        using = asyncio.create_task(use())
        held = await loader.load_of("one")
        later_s += 100
        held.gate.set()
        await using
        await models.unload("one")
        later_s += 1000
        states.clear()
        using = asyncio.create_task(use())
        held = await loader.load_of("one")
        assert states[0].expected_s is not None
        assert 100 <= states[0].expected_s < 200
        held.moves, held.expected_s = True, 7.0
        assert state(models, "one").expected_s == 7, "layers that are moved take other times"
        held.gate.set()
        await using


async def test_an_abandoned_load_is_cancelled_for_the_next_one():
    loader = FakeLoader(slow={"one"})
    async with offered(loader) as models:
        first = asyncio.create_task(models.use("one").__aenter__())
        await loader.load_of("one")
        first.cancel()
        async with models.use("two"):
            assert loader.ended == ["one"]


async def test_an_evicted_model_is_unloaded_once_its_requests_have_ended():
    loader = FakeLoader()
    async with offered(loader) as models:
        async with models.use("one"):
            pass
        async with models.use("two"):
            async with models.use("three"):  # in place of the unused one
                assert loader.ended == ["one"]
            async with models.use("three"):
                waiting = asyncio.create_task(models.use("one").__aenter__())
                for _ in range(20):
                    await asyncio.sleep(0)
                assert not waiting.done()
                assert "waits until" in state(models, "one").detail
        await waiting
        assert len(loader.held) == MAX_LOADED
        assert any("needs the memory of" in line for line in loader.lines)


async def test_a_model_that_cannot_be_loaded_is_an_error_and_is_tried_again_by_the_next_request():
    loader = FakeLoader(failing={"one"})
    async with offered(loader) as models:
        with pytest.raises(RingError, match=r"one cannot be loaded: a device is short of memory"):
            async with models.use("one"):
                pass
        assert state(models, "one").state is ModelState.FAILED
        assert "short of memory" in state(models, "one").detail
        loader.failing.clear()
        async with models.use("one"):
            assert state(models, "one").state is ModelState.LOADED


async def test_a_lost_model_is_unloaded_and_loaded_again_by_the_next_request():
    loader = FakeLoader()
    async with offered(loader) as models:
        async with models.use("one"):
            pass
        loader.held["one"].lost()
        await loader.until(lambda: loader.ended == ["one"])
        async with models.use("one"):
            pass


async def test_a_wait_that_is_too_long_is_a_429():
    loader = FakeLoader(slow={"one"})
    async with offered(loader, max_wait_s=0.01) as models:
        with pytest.raises(RequestError, match=r"was not loaded in 0.01 s") as refused:
            async with models.use("one"):
                pass
        assert refused.value.status == 429


async def test_keep_alive_0_unloads_and_pinned_models_stay():
    loader = FakeLoader()
    async with offered(loader, keep_s=0.0, pinned={"three"}) as models:
        async with models.use("three"):
            pass
        async with models.use("one", keep_alive_s=-1):
            pass
        assert set(models.loaded()) == {"one", "three"}
        assert state(models, "three").pinned
        async with models.use("one"):
            pass
        await loader.until(lambda: "one" not in loader.held)
        assert set(models.loaded()) == {"three"}


async def test_a_model_without_room_next_to_pinned_ones_is_refused_with_their_names():
    loader = FakeLoader()
    async with offered(loader, pinned={"one", "two"}) as models:
        for name in ("one", "two"):
            async with models.use(name):
                pass
        with pytest.raises(RingError, match=r"has no room; one and two stay loaded by models\.toml"):
            async with models.use("three"):
                pass


async def test_unloading_returns_once_no_memory_is_held():
    loader = FakeLoader()
    async with offered(loader) as models:
        await models.unload("one")
        async with models.use("one"):
            unloading = asyncio.create_task(models.unload("one"))
            await asyncio.sleep(0)
            assert not unloading.done()
        await unloading
        assert loader.ended == ["one"]


async def test_unloading_returns_also_for_a_model_whose_load_nobody_awaited():
    loader = FakeLoader()
    async with offered(loader) as models:
        async with models.use("one"):
            pass
        await models.unload("one")  # listeners last saw it unloaded
        loader.slow.add("one")
        await models.load("one")
        await loader.load_of("one")
        async with asyncio.timeout(10):
            await models.unload("one")
        assert state(models, "one").state is ModelState.UNLOADED


async def test_new_files_are_offered_vanished_ones_are_not_and_broken_ones_harm_no_other():
    loader = FakeLoader()
    async with offered(loader) as models:
        loader.found.append(model("new"))
        async with models.use("new"):
            loader.found.pop()
            await models.look()
            assert state(models, "new").state is ModelState.LOADED, "it is loaded"
        await models.unload("new")
        assert "new" not in [each.id for each in models.offered()]
        loader.found.append(model("broken", problem="/models/broken.gguf: is cut short"))
        await models.look()
        assert state(models, "broken").state is ModelState.FAILED
        with pytest.raises(RequestError, match=r"broken cannot be used: /models/broken.gguf: is cut short"):
            async with models.use("broken"):
                pass
        async with models.use("one"):
            pass
        await models.look()
        assert sum("cut short" in line for line in loader.lines) == 1, "the owner is notified once"


async def test_an_unknown_name_is_a_404_with_the_names_that_there_are():
    async with offered(FakeLoader()) as models:
        with pytest.raises(RequestError, match="there are: one, three, two") as refused:
            await models.load("gpt-5")
        assert refused.value.status == 404


async def test_speed_and_evictions_of_a_model_are_forecast_without_loading_it():
    loader = FakeLoader()
    async with offered(loader) as models:
        for name in ("one", "two"):
            async with models.use(name):
                pass
        assert await models.forecast("one") == FORECAST, "it is served"
        planning = asyncio.create_task(models.forecast("three"))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="another model is being planned"):
            await models.forecast("three")
        loader.may_plan.set()
        assert (await planning).goes == ("one",)
        assert list(loader.held) == ["one", "two"]
        with pytest.raises(RequestError, match="not offered here"):
            await models.forecast("four")


async def test_changes_are_delivered_until_the_end():
    loader = FakeLoader()
    async with offered(loader) as models:
        changes = models.changes()
        next_change = asyncio.create_task(anext(changes))
        await asyncio.sleep(0)
        await models.load("one")
        heard = [await next_change]
        while heard[-1].state is not ModelState.LOADED:
            heard.append(await anext(changes))
        assert heard[0].state is ModelState.LOADING
        await changes.aclose()


async def test_pulled_models_are_offered_and_deleted_ones_are_not():
    loader = FakeLoader()
    async with offered(loader) as models:
        assert [each.file async for each in models.pull("hf:new")] == ["hf:new"]
        async with models.use("hf:new"):
            pass
        await models.delete("hf:new")
        assert loader.ended == loader.deleted == ["hf:new"]
        assert "hf:new" not in [each.id for each in models.offered()]


async def test_requests_at_shutdown_get_an_error():
    loader = FakeLoader(slow={"one"})
    async with offered(loader) as models:
        waiting = asyncio.create_task(models.use("one").__aenter__())
        await loader.load_of("one")
    with pytest.raises(RingError, match="primad is stopping"):
        await waiting


@pytest.mark.parametrize(
    ("objective", "idle", "busy", "evicted"),
    [
        (1.2, ("a", "b"), (), ()),  # a plan next to others is nearly as good
        (2.0, ("a", "b"), (), ("a",)),  # one makes enough room
        (None, ("b", "a"), (), ("b", "a")),  # both are needed
        (2.0, (), ("a",), ()),  # a slow plan is better than a wait
        (None, (), ("c", "a"), ("c", "a")),
    ],
)
async def test_as_few_models_as_possible_are_evicted_and_busy_ones_only_if_necessary(objective, idle, busy, evicted):
    async def objective_s(without: Collection[str]) -> float:
        if "a" in without:
            return 1.0
        if objective is None:
            raise PlanError("short of memory")
        return objective

    assert await who_goes(objective_s, idle, busy) == frozenset(evicted)


async def test_without_a_plan_on_free_devices_its_error_is_raised():
    async def objective_s(without: Collection[str]) -> float:
        raise PlanError(f"short of memory without {sorted(without)}")

    with pytest.raises(PlanError, match=r"without \['a', 'b'\]"):
        await who_goes(objective_s, ("a",), ("b",))
