"""The number of concurrent requests that a head plans for, and its change when devices are lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from halda import DeviceProfile, ModelProfile, evaluate
from halda.chunk_rows import RING_CHUNKS, RING_GAIN
from primad.head.model.encoder import NO_ENCODER
from primad.head.model.learning import Learning
from primad.head.model.limits import DeviceLimits
from primad.head.rings import planner as planner_module
from primad.head.rings.planner import DevicePool, Planner, PlanResult
from primad.head.rings.status import attention_line
from primad.planning.forecast import Forecast
from primad.planning.plan import search
from primad.planning.question import PlannedDraft, workload_of
from primad.planning.request import FoundPlan, PlanRequest
from primad.planning.run_config import RunConfig
from primad.system.tasks import Tasks
from tests.fakes.planning import GB, device, link, model, offloading

LAPTOP = frozenset({"lap"})


async def solve_here(asked: PlanRequest, *, background: bool = False) -> FoundPlan:
    return search(msgspec.structs.replace(asked, time_limit_s=60))


class Served:
    """The model; nothing is known of its experts."""

    header = share_bytes = None

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile

    async def planned(self) -> ModelProfile:
        return self.profile


class PlannedHome:
    """A head with ``ram`` bytes, and a laptop of the same speed."""

    def __init__(
        self,
        monkeypatch,
        tmp_path,
        *,
        ram: float,
        laptop: float = 8 * GB,
        vram: int = 0,
        trained: int = 4096,
        profiles: Sequence[DeviceProfile] = (),
        toy: ModelProfile | None = None,
        draft: PlannedDraft | None = None,
        **wishes: Any,
    ) -> None:
        monkeypatch.setattr(planner_module, "solve_in_process", solve_here)
        desk = device("desk", ram=int(ram), vram=vram)
        self._profiles = list(profiles) or [offloading(desk) if vram else desk, device("lap", ram=int(laptop))]
        run = RunConfig(**wishes)
        toy = model(context_tokens=trained) if toy is None else toy
        self.service = SimpleNamespace(
            model=Served(toy),
            workload=workload_of(run, toy),
            options=SimpleNamespace(run=run),
            planned_draft=draft,
            encoder=NO_ENCODER,
            reserved_bytes=0,
        )
        book = SimpleNamespace(
            all_between=lambda names: [] if profiles else [link("desk", "lap"), link("lap", "desk")],
            why_cut=lambda *_: None,
        )
        monkeypatch.setattr(planner_module, "cuttable", lambda header: None)
        monkeypatch.setattr(planner_module, "why_whole", lambda header: "")
        monkeypatch.setattr(planner_module, "turns_by_context", lambda header: False)
        own, devices = SimpleNamespace(profile=self._own), SimpleNamespace(present=self._present, book=book)
        self.pool = DevicePool(own=own, others=devices, learning=Learning(tmp_path), limits=DeviceLimits(tmp_path))
        self.planner = Planner(self.service, self.pool)

    async def plan(
        self, candidates: frozenset[str] = frozenset(), served: Forecast | None = None, *, keeps_attention: bool = False
    ) -> PlanResult:
        return await self.planner.plan(candidates, served, keeps_attention=keeps_attention)

    async def _own(self) -> DeviceProfile:
        return self._profiles[0]

    def _present(self, names: Collection[str]) -> list[SimpleNamespace]:
        return [SimpleNamespace(profile=each) for each in self._profiles[1:] if each.device in names]


@pytest.fixture
def planned_home(monkeypatch, tmp_path):
    return lambda **wishes: PlannedHome(monkeypatch, tmp_path, **wishes)


@pytest.mark.parametrize(
    ("ram", "sequences", "why"),
    [
        (64 * GB, 4, "--sequences sets it"),
        (7 * GB, 2, "4 would take over half of the RAM that is left on desk; --sequences sets it"),
        (5 * GB, 1, "2 would read more from the disk of desk for every token; --sequences sets it"),
    ],
)
async def test_a_first_plan_has_as_many_as_its_memory_gives_at_little_cost(planned_home, ram, sequences, why):
    forecast, value = await planned_home(ram=ram).plan()
    assert (forecast.sequences, forecast.why_sequences) == (sequences, why)
    assert value == forecast.prediction.objective_s("balanced", 256)
    one, of_one = await planned_home(ram=ram, sequences=1).plan()
    assert one.plan == forecast.plan
    assert value == pytest.approx(of_one, rel=0.01), "chunks of a prompt are smaller"
    assert forecast.flash == one.flash == (ram < 6 * GB), "where nothing streams, scores have room"
    assert attention_line(one) == f"output equals llama.cpp's with --flash-attn {'on' if one.flash else 'off'}"


async def test_a_model_that_is_not_known_to_be_exact_serves_one_request_at_a_time(planned_home, monkeypatch):
    at_home = planned_home(ram=64 * GB)

    monkeypatch.setattr(planner_module, "why_whole", lambda header: "its layers mix in values of the first one")
    forecast, _ = await at_home.plan()
    assert (forecast.sequences, forecast.context_tokens) == (1, 4096)
    assert forecast.why_sequences == "more are not known to be exact with such a model; --sequences sets it"


async def test_a_requested_number_is_used_without_a_reason(planned_home):
    forecast, _ = await planned_home(ram=64 * GB, sequences=7).plan()
    assert (forecast.sequences, forecast.why_sequences) == (7, "")


@pytest.mark.parametrize(("asked", "planned"), [(None, 1), (3, 3)])
async def test_a_plan_by_hand_is_for_one_request_unless_set_otherwise(planned_home, asked, planned):
    forecast, _ = await planned_home(ram=64 * GB, windows=(19,), rounds=1, sequences=asked).plan()
    assert forecast.sequences == planned


async def test_a_plan_by_hand_is_forecast_and_computes_prompts_in_the_chunks_of_its_ring(planned_home):
    at_home = planned_home(ram=64 * GB, laptop=64 * GB, windows=(10, 9), rounds=1)
    forecast, _ = await at_home.plan(LAPTOP)
    assert forecast.prediction is not None
    assert forecast.prediction.chunk_rows < RunConfig().chunk_rows, "one has a chunk while the other has the next"
    assert [each.ram_bytes > 0 for each in forecast.prediction.devices] == [True, True], (
        "other models are planned next to it"
    )
    assert await at_home.planner.value(forecast) is None, "no other plan is better"


@pytest.mark.parametrize("windows", [None, (10, 9)])
@pytest.mark.parametrize(("flash_s", "plain_s"), [(2e-9, 1e-9), (5e-8, 1e-8)])
async def test_chunks_suit_the_attention_that_a_plan_is_run_with(planned_home, windows, flash_s, plain_s):
    """Flash attention computes chunks of fewer than 64 rows row by row, so a plan with it has none of them."""
    profiles = [
        replace(each, cpu=replace(each.cpu, attention_s=flash_s, plain_attention_s=plain_s, rows_attention_s=1e-11))
        for each in (device("desk", ram=64 * GB), device("lap", ram=64 * GB))
    ]
    wishes = {"use_all": True} if windows is None else {"windows": windows, "rounds": 1}
    forecast, _ = await planned_home(ram=64 * GB, profiles=profiles, **wishes).plan(LAPTOP)
    assert (forecast.question, forecast.prediction, forecast.flash) != (None, None, True)
    work = forecast.question.workload
    others = [evaluate(forecast.plan, forecast.question.with_rows(rows, work.step_rows)) for rows in RING_CHUNKS]
    assert forecast.prediction.ttft_s <= min(each.ttft_s for each in others) * (1 + 2 * RING_GAIN)


@pytest.mark.parametrize(
    ("host", "cores", "chunks"),
    [("lap", (), 2), ("desk", (), 1), ("desk", (1,), 2)],
    ids=["two", "one", "its own core"],
)
async def test_processes_that_share_cores_compute_one_chunk_at_a_time(planned_home, host, cores, chunks):
    desk, laptop = device("desk", ram=64 * GB), device("lap", ram=64 * GB)
    profiles = [replace(desk, cores=(0,) if cores else ()), replace(laptop, host=host, cores=cores)]
    forecast, _ = await planned_home(ram=64 * GB, profiles=profiles, windows=(10, 9), rounds=1).plan(LAPTOP)
    assert forecast.chunks_at_once == chunks


@pytest.mark.parametrize(("ram", "left"), [(7, 4), (6.5, 2), (5, 1)])
async def test_without_a_device_as_many_requests_continue_as_still_fit(planned_home, ram, left):
    at_home = planned_home(ram=ram * GB, laptop=64 * GB, use_all=True)
    both, _ = await at_home.plan(LAPTOP)
    assert (both.sequences, both.plan.devices) == (4, ("desk", "lap"))
    rest, _ = await at_home.plan(served=both)
    assert (rest.sequences, rest.plan.devices) == (left, ("desk",))
    again, _ = await at_home.plan(LAPTOP, rest)
    assert again.sequences == 4


async def test_a_serving_plan_is_valued_for_its_number_of_requests(planned_home):
    at_home = planned_home(ram=64 * GB, objective="throughput")
    forecast, value = await at_home.plan()
    assert forecast.sequences == 4
    assert await at_home.planner.value(forecast) == pytest.approx(value)


@pytest.mark.parametrize(
    ("wishes", "prefill_offload"),
    [({}, ("desk",)), ({"batching": "exact"}, ()), ({"batching": "fast"}, ("desk",)), ({"extra_buffers": "on"}, ())],
)
async def test_no_prefill_is_offloaded_if_exact_bits_or_extra_buffers_are_requested(
    planned_home, wishes, prefill_offload
):
    forecast, _ = await planned_home(ram=12 * GB, vram=GB, **wishes).plan()
    assert forecast.plan.prefill_offload == prefill_offload
    assert not forecast.prediction.short
    assert forecast.flash or not prefill_offload
    assert forecast.is_exact or wishes.get("batching") != "exact"


@pytest.mark.parametrize("before", [GB * 64, 5 * GB])
async def test_running_answers_keep_their_attention_whether_the_next_plan_streams_or_not(planned_home, before):
    """Only a streaming plan has flash attention by default; any plan keeps the attention of running requests."""
    roomy, tight = planned_home(ram=64 * GB), planned_home(ram=5 * GB)
    first, second = (roomy, tight) if before == 64 * GB else (tight, roomy)
    served, _ = await first.plan()
    anew, _ = await second.plan(served=served)
    assert anew.flash != served.flash
    kept, _ = await second.plan(served=served, keeps_attention=True)
    assert bool(kept.plan.streaming) != bool(served.plan.streaming)
    assert kept.flash == served.flash
    assert not kept.prediction.short


async def test_a_precomputed_plan_and_a_plan_by_hand_keep_the_attention(planned_home):
    at_home = planned_home(ram=5 * GB, laptop=64 * GB, use_all=True)
    both, _ = await at_home.plan(LAPTOP)
    assert not both.flash
    tasks = Tasks()
    at_home.planner.precompute(LAPTOP, LAPTOP, tasks, both)
    await at_home.planner.foreseeing
    rest = (await at_home.planner.plan(frozenset(), both))[0]
    assert rest.plan.streaming
    assert not rest.flash
    by_hand = planned_home(ram=64 * GB, windows=(19,), rounds=1)
    assert not (await by_hand.plan())[0].flash
    assert (await by_hand.plan(served=replace(both, flash=True), keeps_attention=True))[0].flash


async def test_an_attention_that_no_plan_has_memory_for_is_given_up_before_the_context_is(planned_home):
    served, _ = await planned_home(ram=64 * GB, trained=1 << 18).plan()
    assert not served.flash
    small = planned_home(ram=2.4 * GB, trained=1 << 18)
    kept, _ = await small.plan(served=replace(served, sequences=1, context_tokens=16384), keeps_attention=True)
    assert kept.flash
    assert kept.context_tokens == 16384


async def test_memory_of_encoders_on_the_head_is_not_planned_with_until_their_models_go(planned_home):
    at_home = planned_home(ram=9 * GB)
    at_home.service.reserved_bytes = GB
    at_home.pool.reserved.update({"": GB, "other": GB})
    forecast, _ = await at_home.planner.beside(frozenset(), frozenset())
    assert forecast.question.devices[0].ram_available_bytes == 7 * GB
    forecast, _ = await at_home.planner.beside(frozenset(), {"other"})
    assert forecast.question.devices[0].ram_available_bytes == 8 * GB
