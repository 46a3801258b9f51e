"""A device's memory in the status: figures, means per token, and the plan's figures next to them."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from halda import DevicePrediction, LinkProfile, Plan, Prediction, Streaming, Window, assignments
from halda.assignment import in_memory
from halda.evaluate import GpuPrediction
from primad.api.answering.backend import Health
from primad.api.http.status import MemoryFigures, PlannedFigures, RingForecast, status_body
from primad.engine.streaming.streams import StreamedWindow, Streams
from primad.head.rings.status import (
    WINDOW_S,
    Costs,
    chains_line,
    device_status,
    left_out_line,
    link_status,
    no_drafts_line,
    plan_lines,
    predicted_status,
)
from primad.planning.draft_gain import why_none
from primad.planning.drafting import SpeculateMode
from primad.planning.forecast import Forecast
from primad.ring.messages import DecodeStatus, MemoryStatus, PromptStatus, Status
from primad.ring.meter import TOKENS_KEPT, Meter
from primad.ring.speculation.drafter import Drafting
from tests.core.test_planned_drafts import ALONE, asked
from tests.fakes.planning import device, model

PLAN = Plan(
    rounds=2,
    route=tuple(
        Window(device=name, first=first, last=first + 5, gpu_layers=0)
        for name, first in (("desk", 0), ("lap", 5), ("desk", 10), ("lap", 15), ("desk", 20))
    ),
    output_on_gpu=False,
    streaming=(
        Streaming(device="desk", streamed_bytes=300, read_ahead_bytes=200),
        Streaming(device="lap", streamed_bytes=300, read_ahead_bytes=200),
    ),
    left_out=(),
)


MODEL = dataclasses.replace(model(layers=25, layer_bytes=100), output_bytes_by_type={"Q4_K": 100})
KEPT = assignments(PLAN, MODEL)


def predicted(device: str, **figures: float) -> DevicePrediction:
    """A prediction with 0 for all figures not given."""
    fields = dict.fromkeys((field.name for field in dataclasses.fields(DevicePrediction)), 0) | figures
    return DevicePrediction(**fields | {"device": device, "each_gpu": figures.get("each_gpu", ())})


LAPTOP = predicted(
    "lap",
    layers=10,
    read_ahead_bytes=200,
    ram_bytes=900,
    disk_bytes_per_token=300,
    stall_s=0.02,
    compute_s=0.1,
    hop_s=0.001,
)
DESK = predicted("desk", layers=15, read_ahead_bytes=250, ram_bytes=800, disk_bytes_per_token=50, stall_s=0.01)
PREDICTION = Prediction(
    tpot_s=0.25,
    ttft_s=2.0,
    period_s=0.25,
    compute_s=0.2,
    stall_s=0.02,
    hop_s=0.002,
    disk_s=0.1,
    prefill_chunk_s=1.0,
    chunk_rows=512,
    step_rows=512,
    devices=(DESK, LAPTOP),
    short=(),
)


def memory(read_bytes: int = 0, stall_s: float = 0.0, pressure: str = "calm") -> MemoryStatus:
    return MemoryStatus(
        resident=7,
        streamed=3,
        streams_output=False,
        read_ahead_bytes=150,
        resident_bytes=700,
        streamed_bytes=300,
        read_bytes=read_bytes,
        stall_s=stall_s,
        pressure=pressure,
    )


def status(steps: int, figures: MemoryStatus | None) -> Status:
    return Status(
        steps=steps,
        rows=steps,
        compute_s=1.5,
        hop_s=[0.003, 0.001, 0.002],
        rss_bytes=5000,
        private_bytes=400,
        refused=1,
        memory=figures,
    )


def means(costs: Costs) -> tuple[float | None, float | None]:
    return costs.bytes_read_per_token, costs.stall_ms_per_token


def test_the_first_means_are_those_since_the_process_was_opened():
    assert means(Costs()) == (None, None)
    costs = Costs().after(status(20, memory(6000, 0.5)), windows=1, now_s=0)
    assert means(costs) == (300, 25)


def test_further_means_are_of_the_passes_since_the_status_before():
    costs = Costs().after(status(20, memory(6000, 0.5)), windows=1, now_s=0)
    assert means(costs.after(status(30, memory(8000, 0.6)), windows=1, now_s=WINDOW_S)) == (200, pytest.approx(10))


def test_the_means_are_the_same_however_often_somebody_asks_meanwhile():
    seldom = often = Costs().after(status(20, memory(6000, 0.5)), windows=1, now_s=0)
    for n in range(1, 1001):
        often = often.after(status(20 + n, memory(6000 + 7 * n, 0.5)), windows=1, now_s=n * WINDOW_S / 1000)
    last = status(1030, memory(6000 + 7 * 1000 + 300, 0.5))
    assert means(often.after(last, windows=1, now_s=WINDOW_S)) == means(seldom.after(last, windows=1, now_s=WINDOW_S))
    assert len(often.marks) < 2 * WINDOW_S


def test_figures_older_than_ten_seconds_do_not_count():
    costs = Costs()
    for second in range(30):
        read = 1000 * min(second, 15)
        costs = costs.after(status(second + 1, memory(read, 0.0)), windows=1, now_s=second)
    assert means(costs) == (0, 0)


def test_a_token_visits_every_window_of_a_device():
    costs = Costs().after(status(20, memory(6000, 0.5)), windows=2, now_s=0)
    assert means(costs) == (600, 50)


def test_the_means_stay_while_nothing_is_computed():
    costs = Costs().after(status(20, memory(6000, 0.5)), windows=1, now_s=0)
    idle = costs.after(status(20, memory(6100, 0.5)), windows=1, now_s=WINDOW_S)
    assert idle == costs
    assert means(idle.after(status(21, memory(6100, 0.5)), windows=1, now_s=2 * WINDOW_S)) == (100, 0)


def test_a_process_that_was_opened_again_counts_from_nothing():
    costs = Costs().after(status(20, memory(6000, 0.5)), windows=1, now_s=0)
    assert means(costs.after(status(0, memory()), windows=1, now_s=WINDOW_S)) == (None, None)
    assert means(costs.after(status(4, memory(400, 0.1)), windows=1, now_s=WINDOW_S)) == (100, 25)


def test_a_process_that_does_not_report_its_memory_has_no_means():
    assert means(Costs().after(status(20, None), windows=1, now_s=0)) == (None, None)


def test_the_memory_of_a_device_is_shown_next_to_the_planned_one():
    printed = status(20, memory(6000, 0.5, "some"))
    found = device_status(
        PLAN, PREDICTION, KEPT["lap"], "lap", printed, Costs().after(printed, 2, 0.0), daemon_rss_bytes=77
    )
    assert (found.role, found.windows, found.layers, found.daemon_rss_bytes) == ("worker", [(5, 10), (15, 20)], 10, 77)
    assert found.memory == MemoryFigures(
        resident=7,
        streamed=3,
        streams_output=False,
        read_ahead_bytes=150,
        resident_bytes=700,
        streamed_bytes=300,
        read_bytes=6000,
        stall_s=0.5,
        bytes_read_per_token=600,
        stall_ms_per_token=50,
        pressure="some",
        experts_picked=0,
        experts_found=0,
    )
    assert found.predicted == PlannedFigures(
        resident=7,
        streamed=3,
        read_ahead_bytes=200,
        ram_bytes=900,
        bytes_read_per_token=300,
        stall_ms_per_token=20,
        compute_ms_per_token=100,
        hop_ms=1,
    )
    assert found.ring is not None
    assert (found.ring.hops, found.ring.hop_median_s, found.ring.hop_p99_s) == (3, 0.002, 0.003)
    assert (found.ring.rss_bytes, found.ring.private_bytes, found.ring.refused_messages) == (5000, 400, 1)


def test_the_output_matrix_is_no_layer():
    """It streams only under memory pressure; a ring process reports it separately, and plans do not count it."""
    units = Streaming(device="desk", streamed_bytes=1500, read_ahead_bytes=200)
    kept = assignments(dataclasses.replace(PLAN, streaming=(units,)), MODEL)["desk"]
    printed = status(3, msgspec.structs.replace(memory(), streams_output=True))
    found = device_status(PLAN, PREDICTION, kept, "desk", printed, Costs(), daemon_rss_bytes=0)
    assert (found.predicted.resident, found.predicted.streamed) == (0, 15)
    assert (found.memory.resident, found.memory.streamed, found.memory.streams_output) == (7, 3, True)
    kept = assignments(dataclasses.replace(PLAN, streaming=()), MODEL)["desk"]
    found = device_status(PLAN, PREDICTION, kept, "desk", None, Costs(), daemon_rss_bytes=0)
    assert (found.predicted.resident, found.predicted.streamed) == (15, 0)


def test_unknown_figures_are_null():
    found = device_status(PLAN, None, KEPT["desk"], "desk", None, Costs(), daemon_rss_bytes=0)
    plain = msgspec.json.decode(msgspec.json.encode(found))
    assert found.role == "head"
    assert plain["ring"] is None
    assert set(plain["memory"]) == set(MemoryFigures.__struct_fields__)
    assert set(plain["predicted"]) == set(PlannedFigures.__struct_fields__)
    assert {*plain["memory"].values(), *plain["predicted"].values()} == {None}


def test_a_device_with_copies_of_all_its_weights_streams_and_reads_nothing():
    window = dataclasses.replace(in_memory(3, 7), layer_bytes=400, resident_bytes=400)
    streams = Streams(
        [StreamedWindow(index=1, assignment=window, units=None)], read_ahead_bytes=0, lock=False, usage=None
    )
    printed = Meter().status(0, streams)
    figures = device_status(PLAN, None, KEPT["desk"], "desk", printed, Costs(), daemon_rss_bytes=0).memory
    assert (figures.resident, figures.streamed, figures.read_ahead_bytes, figures.streams_output) == (4, 0, 0, False)
    assert (figures.resident_bytes, figures.streamed_bytes, figures.read_bytes, figures.stall_s) == (400, 0, 0, 0)


def test_the_body_has_the_serving_phase_and_the_status_of_the_ring():
    link = LinkProfile(
        source="desk", target="lap", address="10.0.0.2", round_trip_s=0.002, bytes_per_s=1e6, late_s=0.003
    )
    found = device_status(PLAN, PREDICTION, KEPT["lap"], "lap", None, Costs(), daemon_rss_bytes=0)
    ring = {
        "epoch": 4,
        "rounds": 2,
        "predicted": msgspec.to_builtins(predicted_status(PREDICTION)),
        "devices": [msgspec.to_builtins(found)],
        "links": [msgspec.to_builtins(link_status(link))],
        "cluster": [{"device": "lap", "phase": "serving", "reason": ""}],
    }
    body = status_body(Health(serving=True, taken=True, detail="serving with 2 devices"), None, ring)
    assert (body.serving, body.detail, body.model, body.epoch, body.rounds) == (
        True,
        "serving with 2 devices",
        None,
        4,
        2,
    )
    assert body.devices == [found]
    assert body.predicted == RingForecast(tokens_per_s=4, tpot_ms=250, ttft_ms=2000)
    assert (body.links[0].round_trip_ms, body.links[0].late_ms, body.links[0].mbit_per_s) == (2, 3, 8)
    assert body.cluster[0].phase == "serving"


def test_the_body_without_a_ring():
    body = status_body(Health(serving=False, taken=False, detail="planning"), None, {})
    plain = msgspec.json.decode(msgspec.json.encode(body))
    assert plain == {
        "serving": False,
        "detail": "planning",
        "model": None,
        "pictures": None,
        "epoch": None,
        "rounds": None,
        "sequences": None,
        "predicted": None,
        "measured": None,
        "devices": [],
        "links": [],
        "kv": None,
        "cluster": [],
        "left_out": [],
        "events": [],
        "tokens": None,
        "checked": None,
        "drafts": None,
        "embedding": None,
        "models": [],
    }


def streams(stall_s: float = 0.0, read_bytes: int = 0) -> SimpleNamespace:
    residency = SimpleNamespace(streams=read_bytes > 0)
    return SimpleNamespace(
        streamer=SimpleNamespace(stall_s=stall_s, read_bytes=read_bytes, residency=residency, experts=None)
    )


def test_a_token_costs_the_sum_of_its_windows():
    meter = Meter()
    meter.computed(1, 16, 9.0, streams(5.0, 1000))  # a prompt chunk
    for seconds in (0.01, 0.5, 0.02):
        meter.computed(1, 1, seconds, streams(5.0, 1000))
        meter.computed(3, 1, 0.1, streams(5.0, 1000))
    assert meter.decode() == DecodeStatus(
        tokens=3, token_s=None, compute_s=pytest.approx(0.12), stall_s=0.0, read_bytes=0.0
    )
    assert (meter.steps, meter.rows) == (7, 22)
    assert meter.compute_s == pytest.approx(9.83)


def test_a_row_of_a_prompt_costs_what_its_quickest_large_chunks_do_in_all_windows():
    meter = Meter()
    meter.computed(1, 512, 99.0, streams())  # earlier reads belong to loading
    assert meter.prompt() is None
    for rows, seconds in ((512, 2.56), (128, 0.512), (63, 0.001), (1, 0.001)):
        meter.computed(1, rows, seconds, streams())
    meter.computed(3, 256, 0.5 + 0.256, streams(stall_s=0.5))
    assert meter.prompt() == PromptStatus(rows=(128 + 256) / 2, row_s=pytest.approx(0.004 + 0.001))


def test_waiting_for_the_disk_is_no_computing():
    meter = Meter()
    for token in (40, 41, 42):
        meter.computed(1, 1, 0.5, streams(0.25 * token, 600 * token))
    decode = meter.decode()
    assert (decode.compute_s, decode.stall_s, decode.read_bytes) == (0.25, 0.25, 600)


def test_only_the_latest_tokens_count():
    meter = Meter()
    for token in range(3 * TOKENS_KEPT):
        meter.computed(1, 1, 1.0 if token < 2 * TOKENS_KEPT else 0.5, SimpleNamespace(streamer=None))
    assert (meter.decode().tokens, meter.decode().compute_s) == (TOKENS_KEPT, 0.5)


def test_the_time_of_a_token_is_that_between_two_of_one_answer():
    meter = Meter()
    for request, now in ((1, 10.0), (1, 10.5), (2, 20.0), (2, 20.5), (2, 21.5), (2, 22.0)):
        meter.drew(request, now, alone=True)
    assert meter.decode().token_s == 0.5
    assert Meter().decode().token_s is None


def test_the_time_of_a_token_batched_with_others_does_not_count():
    meter = Meter()
    for now, alone in ((1.0, True), (1.5, True), (3.5, False), (9.0, True), (9.5, True)):
        meter.drew(1, now, alone=alone)
    assert meter.decode().token_s == 0.5


def test_the_plan_lines_name_the_devices_that_stream():
    units = Streaming(device="desk", streamed_bytes=1500, read_ahead_bytes=200)
    plan = dataclasses.replace(PLAN, streaming=(units,))
    assert plan_lines(plan, assignments(plan, MODEL)) == [
        "desk: 15 layers (0-4, 10-14, 20-24), 15 of them streamed",
        "lap: 10 layers (5-9, 15-19)",
    ]
    assert plan_lines(PLAN, KEPT) == [
        "desk: 15 layers (0-4, 10-14, 20-24), 3 of them streamed",
        "lap: 10 layers (5-9, 15-19), 3 of them streamed",
    ]


def test_each_of_several_gpus_is_named_with_its_layers():
    route = (Window(device="desk", first=0, last=25, gpu_layers=22, other_gpus=(10,)),)
    plan = dataclasses.replace(PLAN, rounds=1, route=route, output_on_gpu=True, streaming=())
    gpus = tuple(
        GpuPrediction(name="RTX 3090", id=name, layers=layers, vram_bytes=7, vram_limit_bytes=9)
        for name, layers in (("CUDA0", 12), ("CUDA1", 10))
    )
    kept, desk = assignments(plan, MODEL), predicted("desk", each_gpu=gpus)
    prediction = dataclasses.replace(PREDICTION, devices=(desk,))
    assert plan_lines(plan, kept, prediction) == [
        "desk: 25 layers (0-24), 22 of them on RTX 3090 (CUDA0): 12 and RTX 3090 (CUDA1): 10"
    ]
    one = dataclasses.replace(PREDICTION, devices=(predicted("desk", each_gpu=gpus[:1]),))
    assert plan_lines(plan, kept, one) == plan_lines(plan, kept) == ["desk: 25 layers (0-24), 22 of them on the GPU"]
    found = device_status(plan, prediction, kept["desk"], "desk", None, Costs(), daemon_rss_bytes=0)
    assert [(gpu.id, gpu.layers, gpu.planned_bytes) for gpu in found.gpus] == [("CUDA0", 12, 7), ("CUDA1", 10, 7)]
    assert device_status(plan, one, kept["desk"], "desk", None, Costs(), daemon_rss_bytes=0).gpus == []


def test_one_layer_is_not_one_layers():
    route = tuple(
        Window(device=name, first=first, last=last, gpu_layers=0)
        for name, first, last in (("desk", 0, 23), ("lap", 23, 24), ("desk", 24, 25))
    )
    plan = dataclasses.replace(PLAN, rounds=1, route=route)
    assert plan_lines(plan, assignments(plan, MODEL))[1].startswith("lap: 1 layer (23)")


@pytest.mark.parametrize(
    ("slowdown", "line"),
    [
        (None, "mini is left out: the others are faster without it"),
        (0.08, "mini is left out: the ring would be 8% slower with it; --use-all takes it anyway"),
        (0.0, "mini is left out: the ring would be no faster with it; --use-all takes it anyway"),
        (-0.01, "mini is left out: the ring would be no faster with it; --use-all takes it anyway"),
    ],
)
def test_a_left_out_device_is_logged_with_the_cost_of_using_it(slowdown, line):
    assert left_out_line("mini", "the others are faster without it", slowdown) == line


def test_why_a_model_with_states_has_no_drafts_is_named():
    def line(architecture: str, mode: SpeculateMode = "auto", drafting: Drafting | None = None, state: int = 9) -> str:
        layer = replace(model().layers[0], state_bytes=state)
        hybrid = replace(model(), layers=(layer,) * 20, architecture=architecture)
        forecast = Forecast(plan=PLAN, prediction=None, assignments={}, context_tokens=64, drafting=drafting)
        return no_drafts_line(forecast, hybrid, mode)

    assert line("qwen3next").startswith("no drafts: layers of")
    assert "'qwen3next'" in line("qwen3next")
    assert not line("qwen3next", drafting=Drafting(room=2))
    assert not line("qwen3next", "off")
    assert not line("qwen35")
    assert not line("llama", state=0)


def test_requested_drafts_that_gain_nothing_are_refused_with_the_reason():
    question = asked(device("a"))
    alone = Forecast(plan=ALONE, prediction=None, assignments={}, context_tokens=64, question=question)
    assert no_drafts_line(alone, question.model, "lookup") == f"no drafts: {why_none(ALONE, question)}"
    assert not no_drafts_line(alone, question.model, "auto")
    assert not no_drafts_line(replace(alone, drafting=Drafting(room=2)), question.model, "lookup")


def test_the_only_obstacle_to_a_draft_tree_is_named():
    def line(sequences: int, keep_rows: int | None, branches: int = 4) -> str:
        drafting = Drafting(rows=8, costs=(1.0,) * 8, branches=branches)
        forecast = Forecast(
            plan=PLAN, prediction=None, assignments={}, context_tokens=64, sequences=sequences, drafting=drafting
        )
        return chains_line(forecast, keep_rows)

    assert not line(1, None)
    assert not line(2, 16, branches=0), "the plan has none"
    assert line(2, None).endswith("need --sequences 1")
    assert line(1, 16).endswith("need --kv-backup off without --kv-cache")
    assert line(2, 16).endswith("need --sequences 1 and --kv-backup off without --kv-cache")
