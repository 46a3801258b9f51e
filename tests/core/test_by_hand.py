"""Windows set by hand stream what does not fit, or the error names the device and the missing bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halda import evaluate, instance, residency
from halda.streaming import RESERVE_BYTES
from primad.errors import PlanError
from primad.planning.by_hand import plan_by_hand, stream_by_hand
from primad.planning.question import default_workload
from tests.fakes.planning import GB, device, model

WORK = default_workload(4096, 512, "f16")


def by_hand(*rams: int, windows: tuple[int, ...], rounds: int = 1):
    devices = [device(f"d{i}", ram=ram) for i, ram in enumerate(rams)]
    plan = plan_by_hand([each.device for each in devices], windows, rounds, model())
    question = instance(devices, [], model(), WORK, {})
    found = stream_by_hand(plan, question)
    assert found.route == plan.route
    return found, evaluate(found, question)


def test_devices_that_share_a_window_are_a_place_of_the_route():
    plan = plan_by_hand([f"d{i}" for i in range(5)], (2, 6, 8), 1, model(), (1, 2, 2))
    assert [window.device for window in plan.route] == ["d0", "d1", "d3", "d0"]
    assert [[rank.device for rank in ranks] for ranks in plan.groups] == [["d1", "d2"], ["d3", "d4"]]
    assert plan.windows_of("d4") == ((2, replace(plan.route[2], device="d4")),)
    assert (plan.after("d2"), plan.after("d4"), plan.places) == ("d3", "d0", ("d0", "d1", "d3"))
    with pytest.raises(PlanError, match=r"--windows 2,6x2 is for 3 devices; found 2"):
        plan_by_hand(["d0", "d1"], (2, 6), 1, model(), (1, 2))


def test_nothing_streams_where_all_fits():
    plan, _ = by_hand(4 * GB, 4 * GB, windows=(10, 9))
    assert plan.streaming == ()


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_device_that_is_short_of_memory_streams_just_enough(rounds):
    plan, prediction = by_hand(4 * GB, 2 * GB, windows=(9 // rounds, 9 // rounds), rounds=rounds)
    assert [streaming.device for streaming in plan.streaming] == ["d1"]
    streaming = plan.streaming_of("d1")
    assert not prediction.short
    # Streaming frees memory for read-ahead, and only a few bytes more.
    assert streaming.streamed_bytes > streaming.read_ahead_bytes
    assert 2 * GB - 4096 <= prediction.devices[1].ram_bytes <= 2 * GB


def test_with_the_minimum_of_memory_all_layers_stream():
    needs = instance([device("d0", ram=GB)], [], model(), WORK, {})
    bare = plan_by_hand(["d0"], (20,), 1, model())
    (short,) = evaluate(residency(bare, needs), needs).short
    minimum = short.needed_bytes
    plan, prediction = by_hand(minimum, windows=(20,))
    assert plan.streaming_of("d0").streamed_bytes == 20 * GB // 4
    assert not prediction.short
    held = plan.streaming_of("d0").read_ahead_bytes + RESERVE_BYTES + model().output_bytes
    assert minimum == needs.runtime_bytes(1) + needs.head_bytes(1) + 20 * needs.kv_bytes[0] + held
    with pytest.raises(PlanError, match="d0 is short of"):
        by_hand(minimum - 1, windows=(20,))


def test_a_device_with_less_than_the_minimum_is_named_with_the_missing_bytes():
    with pytest.raises(
        PlanError, match=r"^--windows: d1 is short of \d+ MB of RAM for its 9 layers, streaming included; give it"
    ):
        by_hand(4 * GB, GB // 2, windows=(10, 9))
