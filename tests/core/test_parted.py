"""What a plan is said to read is what the engine reads of it: never more than plans count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halda import Instance, LinkProfile, Plan, Prediction, Workload, as_run, instance, parted, solve
from halda.cost import RUNTIME_BYTES
from primad.engine.streaming.residency import Spread, two_slots
from primad.engine.streaming.streams import LEAST_AHEAD_BYTES, RESERVE_BYTES
from tests.fakes import planning

MB = 10**6
LAYER = 50 * MB
CUT = 2 << 20
WORK = Workload(context_tokens=1024, kv_type="f16", sequences=1, prompt_tokens=512, answer_tokens=256, chunk_rows=512)


def question(*rams: int, output: int = 60 * MB, disk: float = 0.2e9) -> Instance:
    toy = planning.model(layers=20, layer_bytes=LAYER)
    toy = replace(toy, output_bytes_by_type={"Q4_K": output}, width=2048)
    devices = [planning.device(f"d{i}", ram=ram, rate=2e9, disk=disk) for i, ram in enumerate(rams)]
    links = [
        LinkProfile(source=a.device, target=b.device, round_trip_s=2e-4, bytes_per_s=1e8, address="")
        for a in devices
        for b in devices
        if a is not b
    ]
    return instance(devices, links, toy, WORK, {})


def solved(asked: Instance) -> tuple[Plan, Prediction]:
    names = frozenset(device.device for device in asked.devices)
    found = solve(asked.devices, list(asked.links.values()), asked.model, asked.workload, require=names)
    return found.plan, found.prediction


def engine_reads(plan: Plan, prediction: Prediction, asked: Instance) -> int:
    """Bytes that the engine of a device alone reads for a token, by its own rule, parted every 2 MiB."""
    sizes = (*(layer.size_bytes for layer in asked.model.layers), asked.model.output_bytes)
    (device,) = prediction.devices
    planned = device.disk_bytes_per_token
    held = sum(sizes) - planned + asked.ahead_bytes(device.slots, output=plan.streams_output)
    cuts = tuple(tuple(range(0, size, CUT)) for size in sizes)
    spread = Spread(sizes, cuts, min(LEAST_AHEAD_BYTES, two_slots(sizes, range(len(sizes)))))
    return spread.within(held + max(0, device.room_bytes - RESERVE_BYTES) + asked.buffer_bytes).read_bytes


def test_solver_and_engine_count_with_the_same_figures():
    assert (parted.RESERVE_BYTES, parted.LEAST_AHEAD_BYTES) == (RESERVE_BYTES, LEAST_AHEAD_BYTES)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.75, 0.9, 0.97])
def test_a_device_alone_reads_what_is_said(share):
    whole = 20 * LAYER + 60 * MB + RUNTIME_BYTES + 120 * MB
    asked = question(int(share * whole))
    plan, counted = solved(asked)
    told = as_run(plan, counted, asked)
    reads = engine_reads(plan, counted, asked)
    assert told.devices[0].disk_bytes_per_token == pytest.approx(reads, rel=0.05, abs=2 * CUT)
    assert reads < counted.devices[0].disk_bytes_per_token
    assert told.tpot_s <= counted.tpot_s
    assert told.disk_s == pytest.approx(told.devices[0].disk_bytes_per_token / 0.2e9)
    assert told.period_s >= told.disk_s


def test_in_a_ring_what_is_left_over_is_read_no_more():
    asked = question(500 * MB, 700 * MB)
    plan, counted = solved(asked)
    told = as_run(plan, counted, asked)
    assert any(device.disk_bytes_per_token for device in counted.devices)
    for before, after in zip(counted.devices, told.devices, strict=True):
        less = before.disk_bytes_per_token - after.disk_bytes_per_token
        more = max(0, before.room_bytes - RESERVE_BYTES) + asked.buffer_bytes
        assert less in (0, before.disk_bytes_per_token, more)
    assert told.tpot_s < counted.tpot_s
    assert told.tpot_s >= told.compute_s + told.hop_s


def test_what_does_not_stream_is_told_as_it_is_counted():
    asked = question(4000 * MB)
    plan, counted = solved(asked)
    assert as_run(plan, counted, asked) is counted
