"""What a head learns from requests: bounded factors, kept with the measurement they correct, and shown."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halda import (
    DevicePrediction,
    DeviceProfile,
    ModelProfile,
    Plan,
    Prediction,
    RowSpeed,
    Streaming,
    Window,
    Workload,
    instance,
    prompt_row_s,
)
from primad.api.http.status import CompletionFigures, wrong_line
from primad.head.model.learning import Learning, correction_line, corrections_file, read_corrections
from primad.head.model.limits import DeviceLimits
from primad.head.rings.planner import DevicePool, Planner
from primad.planning.corrections import (
    MAX,
    MIN,
    MIN_TOKENS,
    NEAR,
    NOTHING_LEARNT,
    Corrections,
    DeviceFactors,
    learnt,
    moved,
    prompts_learnt,
    stamp_of,
    verdict_of,
)
from primad.planning.forecast import Forecast
from primad.planning.question import default_workload
from primad.planning.run_config import RunConfig
from primad.ring.messages import DecodeStatus, MemoryStatus, PromptStatus, Status
from tests.fakes.planning import device, link, model

PLAN = Plan(
    rounds=1,
    route=tuple(
        Window(device=name, first=first, last=last, gpu_layers=0)
        for name, first, last in (("desk", 0, 5), ("lap", 5, 15), ("desk", 15, 20))
    ),
    output_on_gpu=False,
    streaming=(),
    left_out=(),
)
PROFILES = [device("desk"), device("lap", vram=1 << 30)]
USED = NOTHING_LEARNT.noted(PROFILES)
MEMORY = MemoryStatus(
    resident=5,
    streamed=0,
    streams_output=False,
    read_ahead_bytes=0,
    resident_bytes=1,
    streamed_bytes=0,
    read_bytes=0,
    stall_s=0.0,
    pressure="calm",
)


def device_prediction(name: str, **figures: float) -> DevicePrediction:
    fields = dict.fromkeys((field.name for field in dataclasses.fields(DevicePrediction)), 0) | figures
    return DevicePrediction(**fields | {"device": name, "each_gpu": ()})


def prediction(desk: DevicePrediction, laptop: DevicePrediction, *, hop_s: float = 0.004) -> Prediction:
    both = (desk, laptop)
    return Prediction(
        tpot_s=sum(each.compute_s + each.stall_s for each in both) + hop_s,
        ttft_s=1.0,
        period_s=0.1,
        compute_s=0.1,
        stall_s=0.0,
        hop_s=hop_s,
        disk_s=0.0,
        prefill_chunk_s=1.0,
        chunk_rows=512,
        step_rows=512,
        devices=both,
        short=(),
    )


PREDICTED = prediction(device_prediction("desk", compute_s=0.02), device_prediction("lap", compute_s=0.03))
FORECAST = Forecast(plan=PLAN, prediction=PREDICTED, assignments={}, context_tokens=64, corrections=USED)


def status(
    compute_s: float,
    *,
    token_s: float | None = None,
    tokens: int = MIN_TOKENS,
    stall_s: float = 0.0,
    read_bytes: float = 0.0,
    pressure: str = "calm",
) -> Status:
    return Status(
        steps=0,
        rows=0,
        compute_s=0.0,
        hop_s=[],
        rss_bytes=0,
        private_bytes=0,
        refused=0,
        memory=msgspec.structs.replace(MEMORY, pressure=pressure),
        decode=DecodeStatus(
            tokens=tokens, token_s=token_s, compute_s=compute_s, stall_s=stall_s, read_bytes=read_bytes
        ),
    )


AS_PLANNED = {"desk": status(0.02, token_s=0.054), "lap": status(0.03)}
SLOW_LAPTOP = {"desk": status(0.02, token_s=0.084), "lap": status(0.06)}


# ---- factors --------------------------------------------------------------------------------------------------------


@given(st.floats(MIN, MAX), st.floats(0, 1e6))
def test_no_factor_leaves_its_bounds_and_each_step_leads_nearer(factor, wanted):
    target = min(MAX, max(MIN, wanted))
    after = moved(factor, wanted)
    assert MIN <= after <= MAX
    assert abs(target - after) <= abs(target - factor)


@given(st.floats(MIN, MAX))
def test_a_factor_comes_near_in_a_few_answers_and_stays(wanted):
    factor = 1.0
    for _ in range(8):
        factor = moved(factor, wanted)
    assert abs(wanted / factor - 1) <= NEAR
    assert moved(factor, wanted) == factor


def test_a_slow_device_is_planned_with_slower_from_then_on():
    verdict = verdict_of(PLAN, PREDICTED, USED, SLOW_LAPTOP)
    known = learnt(USED, verdict, PLAN, USED)
    assert known.devices["lap"].compute == pytest.approx(1.5)
    assert known.devices["desk"].compute == 1.0
    assert not known.links, "hops are next to nothing of the token"
    before, after = PROFILES[1], known.apply(PROFILES[1])
    assert after.cpu.speeds[0].decode_bytes_per_s == pytest.approx(before.cpu.speeds[0].decode_bytes_per_s / 1.5)
    assert after.gpu.layer_s == pytest.approx(before.gpu.layer_s * 1.5)
    assert after.cpu.speeds[0].prefill_flop_per_s == before.cpu.speeds[0].prefill_flop_per_s
    assert (after.disk, after.ram_available_bytes) == (before.disk, before.ram_available_bytes)
    assert known.apply(PROFILES[0]) == PROFILES[0]


def test_a_few_rows_are_corrected_with_one_and_many_as_prompts_are():
    rows = tuple(RowSpeed(rows=count, bytes_per_s=1e9) for count in (2, 16, 64))
    cpu = PROFILES[0].cpu
    measured = dataclasses.replace(
        PROFILES[0], cpu=dataclasses.replace(cpu, speeds=(dataclasses.replace(cpu.speeds[0], rows=rows),))
    )
    known = Corrections(devices={"desk": DeviceFactors(stamp=stamp_of(measured), compute=2.0, prompts=1.25)})
    after = known.apply(measured).cpu
    assert [each.bytes_per_s for each in after.speeds[0].rows] == [5e8, 5e8, 8e8]
    assert after.speeds[0].prefill_flop_per_s == pytest.approx(cpu.speeds[0].prefill_flop_per_s / 1.25)
    assert after.plain_attention_s == 2 * cpu.plain_attention_s
    assert (after.token_s, after.value_s, after.wake_s) == (2 * cpu.token_s, 2 * cpu.value_s, cpu.wake_s)


QUESTION = instance(PROFILES, [], model(layers=20), default_workload(1024, 512, "f16"), {})


def prompts(plan: Plan = PLAN, *, used: Corrections = USED, **slower: float) -> Corrections:
    """Corrections after prompts of 100-row chunks that took each device ``slower`` times as long as planned."""
    planned = prompt_row_s(plan, QUESTION, 100)
    printed = {
        name: msgspec.structs.replace(status(0.02), prompt=PromptStatus(rows=100, row_s=row_s * slower.get(name, 1)))
        for name, row_s in planned.items()
    }
    return prompts_learnt(used, plan, QUESTION, used, printed)


def test_prompts_that_take_longer_than_planned_are_planned_with_longer():
    assert prompts() == USED
    known = prompts(lap=1.8)
    assert known.devices["lap"] == dataclasses.replace(USED.devices["lap"], prompts=pytest.approx(1.4))
    assert known.devices["desk"] == USED.devices["desk"]
    after = known.apply(PROFILES[1])
    assert after.gpu.speeds[0].prefill_flop_per_s == pytest.approx(PROFILES[1].gpu.speeds[0].prefill_flop_per_s / 1.4)
    assert after.cpu.speeds[0].decode_bytes_per_s == PROFILES[1].cpu.speeds[0].decode_bytes_per_s
    slow = dataclasses.replace(QUESTION, devices=tuple(known.apply(each) for each in QUESTION.devices))
    ratio = prompt_row_s(PLAN, slow, 100)["lap"] / prompt_row_s(PLAN, QUESTION, 100)["lap"]
    assert 1.3 < ratio < 1.4, "what a layer costs besides its weights is as one row takes it"


def test_prompts_correct_no_device_that_streams_or_was_remeasured():
    streams = dataclasses.replace(PLAN, streaming=(Streaming(device="lap", streamed_bytes=1, read_ahead_bytes=1),))
    assert prompts(streams, lap=1.8) == USED
    remeasured = USED.noted([device("lap", rate=19e9)])
    printed = {"lap": msgspec.structs.replace(status(0.02), prompt=PromptStatus(rows=100, row_s=1.0))}
    assert prompts_learnt(remeasured, PLAN, QUESTION, USED, printed) == remeasured


def test_corrections_that_a_plan_already_used_are_not_applied_twice():
    used = dataclasses.replace(
        USED, devices=USED.devices | {"lap": dataclasses.replace(USED.devices["lap"], compute=1.5)}
    )
    assert learnt(used, verdict_of(PLAN, PREDICTED, used, AS_PLANNED), PLAN, used) == dataclasses.replace(
        used, links={("desk", "lap"): 1.0, ("lap", "desk"): 1.0}
    )


def test_the_remaining_time_of_a_token_is_that_of_its_hops():
    statuses = {"desk": status(0.02, token_s=0.056), "lap": status(0.03)}
    known = learnt(USED, verdict_of(PLAN, PREDICTED, USED, statuses), PLAN, USED)
    assert known.links == {pair: pytest.approx(1.25) for pair in (("desk", "lap"), ("lap", "desk"))}
    before, after = link("desk", "lap"), known.apply_link(link("desk", "lap"))
    assert after.round_trip_s == pytest.approx(before.round_trip_s * 1.25)
    assert after.bytes_per_s == pytest.approx(before.bytes_per_s / 1.25)
    assert known.apply_link(link("lap", "nas")) == link("lap", "nas")


def test_a_negligible_share_of_a_token_corrects_nothing():
    statuses = {"desk": status(0.0004, token_s=0.5), "lap": status(0.479)}
    offered_forecast = prediction(
        device_prediction("desk", compute_s=0.0001), device_prediction("lap", compute_s=0.479)
    )
    known = learnt(USED, verdict_of(PLAN, offered_forecast, USED, statuses), PLAN, USED)
    assert known == USED


def test_a_slow_disk_shows_in_the_stall_time():
    laptop = device_prediction("lap", compute_s=0.03, stall_s=0.03, disk_s=0.04, disk_bytes_per_token=1000)
    offered_forecast = prediction(device_prediction("desk", compute_s=0.02), laptop)
    statuses = {
        "desk": status(0.02, token_s=0.124),
        "lap": status(0.03, stall_s=0.07, read_bytes=1000),
    }
    verdict = verdict_of(PLAN, offered_forecast, USED, statuses)
    assert (verdict.worst.kind, verdict.worst.device) == ("disk", "lap")
    known = learnt(USED, verdict, PLAN, USED)
    assert known.devices["lap"].disk == pytest.approx(1.5)
    assert known.devices["lap"].compute == 1.0
    after = known.apply(PROFILES[1]).disk
    assert after.prefetch_bytes_per_s == pytest.approx(PROFILES[1].disk.prefetch_bytes_per_s / 1.5)
    assert after.free_bytes == PROFILES[1].disk.free_bytes


def test_a_disk_that_nobody_waits_for_teaches_nothing():
    laptop = device_prediction("lap", compute_s=0.03, disk_s=0.01, disk_bytes_per_token=1000)
    offered_forecast = prediction(device_prediction("desk", compute_s=0.02), laptop)
    statuses = AS_PLANNED | {"lap": status(0.03, read_bytes=10)}
    assert learnt(USED, verdict_of(PLAN, offered_forecast, USED, statuses), PLAN, USED).devices == USED.devices


@pytest.mark.parametrize(
    "laptop",
    [
        None,
        status(0.06, tokens=MIN_TOKENS - 1),
        status(0.06, pressure="some"),
        status(float("nan")),
        status(float("inf")),
        status(-1.0),
        msgspec.structs.replace(status(0.06), decode=None),
    ],
)
def test_a_disturbed_measurement_corrects_nothing(laptop):
    assert verdict_of(PLAN, PREDICTED, USED, SLOW_LAPTOP | {"lap": laptop}) is None


def test_nothing_is_learnt_without_the_time_of_a_token():
    assert verdict_of(PLAN, PREDICTED, USED, SLOW_LAPTOP | {"desk": status(0.02)}) is None


# ---- measurements ---------------------------------------------------------------------------------------------------


def test_a_remeasured_device_starts_without_corrections():
    known = Corrections(devices={"lap": DeviceFactors(stamp=stamp_of(PROFILES[1]), compute=1.5)})
    free = dataclasses.replace(PROFILES[1], ram_available_bytes=1)
    assert known.of(free).compute == 1.5, "what is free is not measured"
    remeasured = device("lap", vram=1 << 30, rate=19e9)
    assert known.apply(remeasured) == remeasured
    assert known.noted([remeasured]).devices["lap"] == DeviceFactors(stamp=stamp_of(remeasured))


def test_an_answer_of_a_plan_with_older_figures_teaches_nothing_of_that_device():
    remeasured = USED.noted([device("lap", rate=19e9)])
    known = learnt(remeasured, verdict_of(PLAN, PREDICTED, USED, SLOW_LAPTOP), PLAN, USED)
    assert known.devices == remeasured.devices


def test_corrections_are_kept(tmp_path):
    learning = Learning(tmp_path)
    assert learning.planned(PROFILES) == USED
    slow = msgspec.structs.replace(SLOW_LAPTOP["lap"], prompt=PromptStatus(rows=100, row_s=1e9))
    learning.completed(1, dataclasses.replace(FORECAST, question=QUESTION), SLOW_LAPTOP | {"lap": slow})
    assert Learning(tmp_path).corrections == learning.corrections
    assert learning.corrections.devices["lap"].prompts == pytest.approx(1.5)
    assert learning.corrections.devices["lap"].compute == pytest.approx(1.5)
    line = "corrected by measurements: computing takes 1.50 times as long, computing prompts takes 1.50 times as long"
    assert correction_line(tmp_path, PROFILES[1]) == line
    assert correction_line(tmp_path, PROFILES[0]) is None
    assert correction_line(tmp_path, device("lap", rate=19e9)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-9],
        lambda text: b"",
        lambda text: b"[" * 100_000,
        lambda text: b"\xff\xfe",
        lambda text: text.replace(b'"version": 1', b'"version": 2'),
        lambda text: text.replace(b"1.5", b"150"),
        lambda text: text.replace(b"1.5", b'"fast"'),
    ],
)
def test_a_file_that_is_damaged_counts_as_none(tmp_path, change):
    learning = Learning(tmp_path)
    learning.planned(PROFILES)
    learning.completed(1, FORECAST, SLOW_LAPTOP)
    file = corrections_file(tmp_path)
    assert b"1.5" in file.read_bytes()
    file.write_bytes(change(file.read_bytes()))
    assert read_corrections(tmp_path) == NOTHING_LEARNT
    assert Learning(tmp_path).planned(PROFILES) == USED


def test_a_home_that_cannot_be_written_is_no_reason_to_end(tmp_path, caplog):
    learning = Learning(tmp_path / "gone")
    learning.planned(PROFILES)
    assert learning.completed(1, FORECAST, SLOW_LAPTOP) is not None
    assert "cannot save corrections" in caplog.text
    assert learning.corrections.devices["lap"].compute == pytest.approx(1.5)


# ---- what is shown --------------------------------------------------------------------------------------------------


def test_a_plan_whose_forecast_holds_is_not_logged(tmp_path, caplog):
    measured = Learning(tmp_path).completed(1, FORECAST, AS_PLANNED)
    assert measured == CompletionFigures(tpot_ms=pytest.approx(54), predicted_tpot_ms=pytest.approx(54), wrong=None)
    assert not caplog.records


def test_a_plan_whose_forecast_is_off_is_logged_once_with_the_term(tmp_path, caplog):
    learning = Learning(tmp_path)
    learning.planned(PROFILES)
    with caplog.at_level(logging.WARNING):
        measured = learning.completed(1, FORECAST, SLOW_LAPTOP)
        learning.completed(1, FORECAST, SLOW_LAPTOP)
    assert measured.wrong.term == "compute"
    assert measured.wrong.device == "lap"
    assert not measured.wrong.is_beyond
    assert [record.getMessage() for record in caplog.records] == [
        "epoch 1: a token takes 84.0 ms, not 54.0 ms as planned; "
        "the worst term is computing on lap: 60.0 ms, not 30.0 ms"
    ]
    learning.completed(1, FORECAST, SLOW_LAPTOP | {"desk": status(0.05, token_s=0.114)})
    assert len(caplog.records) == 1
    learning.completed(1, FORECAST, SLOW_LAPTOP | {"desk": status(0.12, token_s=0.184)})
    assert len(caplog.records) == 2, "it became much worse"
    learning.completed(2, FORECAST, SLOW_LAPTOP)
    assert len(caplog.records) == 3, "another plan"


def test_a_difference_beyond_any_factor_is_reported_as_such(tmp_path):
    statuses = {"desk": status(0.02, token_s=0.224), "lap": status(0.2)}
    learning = Learning(tmp_path)
    learning.planned(PROFILES)
    for _ in range(9):
        measured = learning.completed(1, FORECAST, statuses)
    assert measured.wrong.is_beyond
    assert wrong_line(measured).endswith("check what else runs there")
    quicker = msgspec.structs.replace(measured, wrong=msgspec.structs.replace(measured.wrong, measured_ms=0.1))
    assert wrong_line(quicker).endswith("measure: primad profile --remeasure")
    assert learning.corrections.devices["lap"].compute <= MAX


def test_a_plan_by_hand_is_not_compared_with_a_forecast(tmp_path):
    by_hand = Forecast.of(PLAN, model(), None, context_tokens=64)
    assert Learning(tmp_path).completed(1, by_hand, SLOW_LAPTOP) is None


def test_another_plan_is_worth_a_look_once_much_was_learnt_for_sure(tmp_path):
    learning = Learning(tmp_path)
    learning.planned(PROFILES)
    assert learning.worth_a_plan(1, FORECAST) == set()
    while learning.completed(1, FORECAST, SLOW_LAPTOP) and not learning.worth_a_plan(1, FORECAST):
        assert learning.corrections.devices["lap"].compute < MAX
    settled = learning.corrections
    assert settled.devices["lap"].compute == pytest.approx(MAX, rel=NEAR)
    learning.completed(1, FORECAST, SLOW_LAPTOP)
    assert learning.corrections == settled
    assert learning.worth_a_plan(1, FORECAST) == set(), "as much was known then"
    assert learning.worth_a_plan(2, FORECAST) == {"lap"}
    assert learning.worth_a_plan(3, dataclasses.replace(FORECAST, corrections=settled)) == set()


# ---- plans ----------------------------------------------------------------------------------------------------------


async def test_the_value_of_a_plan_includes_later_corrections(tmp_path):
    profiles = {each.device: each for each in PROFILES}

    async def own() -> DeviceProfile:
        return profiles["desk"]

    async def planned() -> ModelProfile:
        return model()

    def present(names: Collection[str]) -> list[SimpleNamespace]:
        return [SimpleNamespace(profile=profile) for name, profile in profiles.items() if name in set(names) - {"desk"}]

    work = Workload(context_tokens=512, kv_type="f16", sequences=1, prompt_tokens=16, answer_tokens=100, chunk_rows=16)
    service = SimpleNamespace(
        model=SimpleNamespace(planned=planned),
        workload=work,
        options=SimpleNamespace(run=RunConfig(objective="latency")),
        reserved_bytes=0,
    )
    book = SimpleNamespace(
        all_between=lambda names: [link("desk", "lap"), link("lap", "desk")], why_cut=lambda *_: None
    )
    learning = Learning(tmp_path)
    planner = Planner(
        service,
        DevicePool(
            own=SimpleNamespace(profile=own),
            others=SimpleNamespace(present=present, book=book),
            learning=learning,
            limits=DeviceLimits(tmp_path),
        ),
    )
    forecast = dataclasses.replace(FORECAST, prediction=dataclasses.replace(PREDICTED, chunk_rows=16))
    before = await planner.value(forecast)
    learning.corrections = learnt(learning.corrections, verdict_of(PLAN, PREDICTED, USED, SLOW_LAPTOP), PLAN, USED)
    assert before < await planner.value(forecast) < 1.5 * before
    del profiles["lap"]
    assert await planner.value(forecast) is None
    assert await planner.value(Forecast.of(PLAN, model(), None, context_tokens=64)) is None
