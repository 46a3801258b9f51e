"""Plans of a tensor-parallel group: shares by speed and memory, the forecast, refusals, and network traffic."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import permutations

import pytest
from msgspec.structs import replace as with_fields

from halda import Infeasible, Plan, Rank, Window, assignments, evaluate, instance, residency
from halda.assignment import in_memory
from halda.shared import HALVING_S, places_of
from primad.cli.run_options import DraftOptions, RunOptions, run_config
from primad.errors import ConfigError, PlanError, ProtocolError, RankError
from primad.gguf.splits import MAX_RANKS, ShareUnits
from primad.head.members.core import RankLostError, StageError, attributed
from primad.head.members.wanted import WantedState
from primad.head.rings import kv_backup
from primad.kv.cells import LAYER_NUMBERS, MAX_LAYERS
from primad.network.messages import LinkGroup, decode_from_head
from primad.planning.by_hand import senders_by_hand
from primad.planning.groups import GroupWishes, all_in_one, group_sets, ring_of, streaming_group
from primad.planning.plan import plan
from primad.planning.question import Wishes, ask, default_workload
from primad.planning.replicas import cell_bytes
from primad.planning.request import PlanRequest
from primad.planning.run_config import RunConfig
from primad.ring.messages import GroupRank, RankAddress, broken_by, cause_of
from primad.system.wire import encode
from tests.fakes.load import a_load
from tests.fakes.planning import GB, device, link, model

WORK = default_workload(4096, 512, "f16")
KEY = bytes(32)
GROUP = GroupRank(rank=1, devices=["desk", "mini"], key=KEY)


def question(*devices, links=()):
    return instance(devices, links, model(), WORK, {})


def weights(plan: Plan) -> dict[str, int]:
    return {rank.device: rank.weight for rank in plan.groups[0]}


def group(*ranks: tuple[str, int]) -> Plan:
    whole = Window(device=ranks[0][0], first=0, last=20, gpu_layers=0)
    members = tuple(Rank(device=name, weight=weight) for name, weight in ranks)
    return Plan(rounds=1, route=(whole,), output_on_gpu=False, streaming=(), left_out=(), groups=(members,))


def test_like_devices_have_like_shares_and_a_slower_one_less():
    desk, mini, slow = device("desk"), device("mini"), device("mini", rate=5e9)
    assert weights(all_in_one(question(desk, mini), 2, None)) == {"desk": 16, "mini": 16}
    assert weights(all_in_one(question(desk, slow), 2, None))["mini"] in range(3, 6)


def test_a_device_that_is_short_of_memory_has_less():
    found = all_in_one(question(device("desk", ram=8 * GB), device("mini", ram=2 * GB)), 2, None)
    assert weights(found)["mini"] < weights(found)["desk"]
    assert not evaluate(found, question(device("desk", ram=8 * GB), device("mini", ram=2 * GB))).short


def test_a_device_without_memory_for_any_share_is_named():
    with pytest.raises(Infeasible, match=r"mini is short of .* of RAM for a share of each layer"):
        all_in_one(question(device("desk", ram=8 * GB), device("mini", ram=GB // 4)), 2, None)


def short_of_memory(disk=1e8):
    """Two devices, each with memory for a third of the model, on a fast link; the second one has another ``disk``."""
    devices = [device("desk", ram=2 * GB, disk=1e8), device("mini", ram=2 * GB, disk=disk)]
    return question(*devices, links=[link(*pair, round_trip_s=0.0002) for pair in permutations(("desk", "mini"))])


def test_shares_without_memory_stream_from_all_disks_at_once():
    asked = short_of_memory()
    plan = streaming_group(asked, ["desk", "mini"], None)
    found = evaluate(plan, asked)
    assert {each.device for each in plan.streaming} == {"desk", "mini"}
    assert not found.short
    assert found.disk_s == pytest.approx(max(each.disk_s for each in found.devices), rel=1e-6)
    assert max(found.compute_s, found.disk_s) <= found.tpot_s <= found.compute_s + found.disk_s + found.hop_s
    for each in found.devices:
        assert each.disk_s == pytest.approx(each.disk_bytes_per_token / 1e8, rel=1e-6)
        assert 0 < each.disk_bytes_per_token <= plan.streaming_of(each.device).streamed_bytes
        assert each.ram_bytes <= 2 * GB
        assert each.stall_s > 0
    for name, assignment in assignments(plan, model()).items():
        assert assignment.streamed_bytes == plan.streaming_of(name).streamed_bytes
        assert 0 < assignment.streamed_bytes < assignment.layer_bytes
    whole = Plan(rounds=1, route=plan.route, output_on_gpu=False, streaming=(), left_out=())
    alone = question(device("desk", ram=2 * GB, disk=1e8))
    assert found.tpot_s < 0.5 * evaluate(residency(whole, alone), alone).tpot_s, "half is read, and more of that stays"


def test_a_slower_disk_reads_less():
    even, slow = (streaming_group(short_of_memory(disk), ["desk", "mini"], None) for disk in (1e8, 4e7))
    assert weights(even)["desk"] == weights(even)["mini"]
    assert weights(slow)["desk"] > weights(slow)["mini"]


def test_ranks_on_one_disk_take_turns():
    asked = short_of_memory()
    plan = streaming_group(asked, ["desk", "mini"], None)
    one = replace(asked, devices=tuple(replace(each, host="one", disk=asked.devices[0].disk) for each in asked.devices))
    assert evaluate(plan, one).disk_s == pytest.approx(2 * evaluate(plan, asked).disk_s, rel=1e-6)


def test_auto_has_a_group_stream_where_nothing_else_is_as_fast():
    names = ("desk", "mini")
    devices = [device(name, rate=2e10, ram=2 * GB, disk=1e8) for name in names]
    links = [link(*pair, bytes_per_s=1.2e8, round_trip_s=0.0003) for pair in permutations(names)]
    found = chosen(0.0003, whole=True, devices=devices, links=links)
    assert [rank.device for rank in found.plan.groups[0]] == [*names]
    assert {each.device for each in found.plan.streaming} == {*names}
    tensor = RunConfig(parallel="tensor", context_tokens=4096)
    assert chosen(0.0003, devices=devices, links=links, run=tensor).groups


def test_devices_beyond_what_the_heads_allow_are_left_out_by_name():
    found = all_in_one(question(*(device(f"d{i}", ram=8 * GB) for i in range(3))), 2, None)
    assert [*weights(found)] == ["d0", "d1"]
    assert [left.device for left in found.left_out] == ["d2"]


def test_devices_of_a_group_all_reach_each_other():
    names = ("desk", "mini", "nas")
    devices = [device("desk", ram=8 * GB), device("mini", ram=8 * GB), device("nas", ram=8 * GB, rate=1e10)]
    for cut in (("mini", "nas"), ("nas", "mini")):
        links = [replace(link(*pair), works=pair != cut) for pair in permutations(names, 2)]
        asked = question(*devices, links=links)
        found = all_in_one(asked, 3, None)
        assert [*weights(found)] == ["desk", "mini"]
        assert [each.device for each in found.left_out] == ["nas"]
        assert "does not reach mini" in found.left_out[0].reason
        wishes = GroupWishes(max_ranks=3)
        assert not [each for each in group_sets(asked, wishes) if {*each} >= {*cut}]
    cut_off = [replace(link(*pair), works="desk" not in pair) for pair in permutations(names, 2)]
    with pytest.raises(Infeasible, match="no other device reaches desk"):
        all_in_one(question(*devices, links=cut_off), 3, None)


def test_by_hand_places_send_along_the_ring_and_ranks_to_each_other():
    names = ("desk", "mini", "nas", "old", "spare")
    assert senders_by_hand(names, (1, 3)) == [
        *[("desk", "mini"), ("mini", "desk")],
        *[("mini", "nas"), ("mini", "old"), ("nas", "old")],
    ]
    assert senders_by_hand(names, (2,)) == [("desk", "mini")]
    assert senders_by_hand(names, (1, 1)) == [("desk", "mini"), ("mini", "desk")]


def with_gpus(*vram: int, step_s: float = 0.0002):
    """Devices with GPUs of these sizes; 0 means no GPU."""
    found = [device(name, ram=8 * GB, vram=size, rate=2e10) for name, size in zip(("desk", "mini"), vram, strict=True)]
    return [each.with_gpus([replace(gpu, step_s=step_s) for gpu in each.gpus]) for each in found]


def test_a_device_has_its_share_on_a_gpu_that_is_quicker():
    asked = question(*with_gpus(0, 8 * GB))
    plan = all_in_one(asked, 2, None)
    assert [(rank.device, rank.on_gpu) for rank in plan.groups[0]] == [("desk", False), ("mini", True)]
    share = weights(plan)["mini"] / sum(weights(plan).values())
    assert share == pytest.approx(10 / 11, abs=0.03)
    desk, mini = evaluate(plan, asked).devices
    assert (desk.gpu_layers, mini.gpu_layers, desk.vram_bytes) == (0, 20, 0)
    assert mini.ram_bytes < GB // 2
    assert share * 5 * GB < mini.vram_bytes == sum(gpu.vram_bytes for gpu in mini.each_gpu) < 8 * GB
    kept = assignments(plan, model())
    (on_cpu,), (on_gpu,) = kept["desk"].windows, kept["mini"].windows
    assert (on_gpu.gpu_layers, on_gpu.output, on_gpu.layer_bytes, on_gpu.output_bytes) == (20, "gpu", 0, 0)
    assert (on_cpu.gpu_layers, on_cpu.output) == (0, "cpu")
    assert kept["mini"].share == pytest.approx(share, rel=1e-6)
    slow = [replace(each, gpu=each.gpu and replace(each.gpu, layer_s=0.1)) for each in asked.devices]
    assert not any(rank.on_gpu for rank in all_in_one(question(*slow), 2, None).groups[0])


def test_a_gpu_with_less_memory_has_a_smaller_share_and_with_too_little_none():
    small, smallest = (all_in_one(question(*with_gpus(8 * GB, size)), 2, None) for size in (2 * GB, GB // 2))
    assert 1 <= weights(small)["mini"] < weights(small)["desk"]
    assert [rank.on_gpu for rank in small.groups[0]] == [True, True]
    assert [rank.on_gpu for rank in smallest.groups[0]] == [True, False]
    assert weights(smallest)["mini"] == 1
    too_large = replace(small, groups=(tuple(replace(rank, weight=1) for rank in small.groups[0]),))
    assert [(each.what, each.where) for each in evaluate(too_large, question(*with_gpus(8 * GB, 2 * GB))).short] == [
        ("VRAM", "mini")
    ]


def test_shares_on_gpus_cost_what_those_take_and_a_stop_with_copies_for_each_sum():
    quick, slow = (question(*with_gpus(8 * GB, 8 * GB, step_s=step_s)) for step_s in (0.0002, 0.0012))
    plan = all_in_one(quick, 2, None)
    found, with_stops = evaluate(plan, quick), evaluate(plan, slow)
    place, slow_place = (places_of(asked, plan.groups)[1]["desk"] for asked in (quick, slow))
    assert slow_place.sum_s - place.sum_s == pytest.approx(0.001)
    assert with_stops.tpot_s - found.tpot_s == pytest.approx((2 * 20 + 1) * 0.001), "a window is a stop as well"
    on_cpu = replace(plan, groups=(tuple(replace(rank, on_gpu=False) for rank in plan.groups[0]),))
    assert found.compute_s < 0.2 * evaluate(on_cpu, quick).compute_s
    assert places_of(quick, on_cpu.groups)[1]["desk"].sum_s < place.sum_s - 0.0002


def test_ranks_on_gpus_of_one_machine_compute_at_once_unless_it_is_the_same_gpu():
    devices = with_gpus(8 * GB, 8 * GB)
    plan, separate = (
        all_in_one(question(*devices), 2, None),
        evaluate(all_in_one(question(*devices), 2, None), question(*devices)),
    )

    def on_one_machine(*ids: str) -> float:
        here = [replace(each, host="desk", gpu=replace(each.gpu, id=id)) for each, id in zip(devices, ids, strict=True)]
        return evaluate(plan, question(*here)).compute_s

    assert on_one_machine("CUDA0", "CUDA1") == pytest.approx(separate.compute_s)
    assert on_one_machine("CUDA0", "CUDA0") > 1.8 * separate.compute_s


def test_auto_shares_layers_on_gpus_where_these_take_longer_than_sums():
    names = ("desk", "mini")
    for rate, shares in ((4e9, True), (1e11, False)):
        devices = [device(name, rate=rate, ram=8 * GB, vram=8 * GB) for name in names]
        links = [link(*pair, bytes_per_s=1.2e9, round_trip_s=0.0002) for pair in permutations(names)]
        found = chosen(0.0002, devices=devices, links=links)
        assert bool(found.groups) == shares
        assert found.uses_gpu


def test_a_token_costs_the_slowest_share_two_sums_a_layer_its_row_and_logits():
    desk, mini = (device(name, ram=8 * GB) for name in ("desk", "mini"))
    both = [link(*pair, round_trip_s=0.002) for pair in (("desk", "mini"), ("mini", "desk"))]
    asked, alone = question(desk, mini, links=both), question(desk)
    found = evaluate(group(("desk", 1), ("mini", 1)), asked)
    place = places_of(asked, group(("desk", 1), ("mini", 1)).groups)[1]["desk"]
    assert found.hop_s == pytest.approx(2 * 20 * place.sum_s + place.spread_s + place.gather_s)
    assert 0.001 < place.sum_s < asked.hops_s[0][1], "an echo passes programs that a sum does without"
    assert place.gather_s > place.spread_s
    assert found.tpot_s == pytest.approx(found.compute_s + found.hop_s)
    whole = evaluate(replace(group(("desk", 1), ("mini", 1)), groups=()), alone)
    assert whole.compute_s / 2 < found.compute_s < whole.compute_s
    uneven = evaluate(group(("desk", 3), ("mini", 1)), asked)
    assert found.compute_s < uneven.compute_s < whole.compute_s


def test_a_sum_costs_what_the_network_alone_was_measured_to_take_and_little_more():
    desk, mini = device("desk", ram=8 * GB), device("mini", ram=8 * GB)
    groups, pairs = group(("desk", 1), ("mini", 1)).groups, (("desk", "mini"), ("mini", "desk"))

    def sum_s(network_s: float) -> float:
        links = [replace(link(*pair, round_trip_s=0.002), late_s=0.01, network_s=network_s) for pair in pairs]
        return places_of(question(desk, mini, links=links), groups)[1]["desk"].sum_s

    assert sum_s(0.0008) - sum_s(0.0002) == pytest.approx(0.0003)
    assert 0.0001 < sum_s(0.0002) < 0.0002 + desk.cpu.token_s


def test_prompts_over_a_slow_link_come_sooner_where_sums_are_sent_in_16_bits():
    asked, groups = (
        question(device("desk", ram=8 * GB), device("mini", ram=8 * GB)),
        group(("desk", 1), ("mini", 1)).groups,
    )
    halved = asked.changed(workload=replace(asked.workload, wire="f16"))
    both = [place.chunk_sum_s for each in (asked, halved) for place in places_of(each, groups)[1].values()]
    link, sent_bytes = asked.link(0, 1), 4 * asked.members[0].prefill.rows * asked.model.hop_values
    assert both[0] - both[1] == pytest.approx(sent_bytes / 2 / link.bytes_per_s - HALVING_S * sent_bytes / 4)


def test_ranks_on_one_machine_share_its_cores_and_memory():
    desk = device("desk", ram=8 * GB)
    two = question(desk, replace(device("mini", ram=8 * GB), host=desk.host))
    separate = question(desk, device("mini", ram=8 * GB))
    plan = group(("desk", 1), ("mini", 1))
    assert evaluate(plan, two).compute_s == pytest.approx(2 * evaluate(plan, separate).compute_s)
    small = question(device("desk", ram=2 * GB), replace(device("mini", ram=2 * GB), host=desk.host))
    assert any("desk and mini" in short.where for short in evaluate(plan, small).short)


def test_each_rank_keeps_its_share_of_layers_and_output():
    found = assignments(group(("desk", 3), ("mini", 1)), model())
    whole = assignments(replace(group(("desk", 3), ("mini", 1)), groups=()), model())["desk"].windows[0]
    for name, share in (("desk", 0.75), ("mini", 0.25)):
        (window,) = found[name].windows
        assert (window.first, window.last, window.output) == (0, 20, "cpu")
        assert window.layer_bytes == int(share * whole.layer_bytes)
        assert window.streamed_bytes == 0


def test_each_rank_keeps_cells_of_its_share_under_numbers_of_its_own():
    plan = group(("desk", 3), ("mini", 1))
    assert kv_backup._layers(plan, "mini") == [(MAX_LAYERS, MAX_LAYERS + 20)]
    assert MAX_RANKS * MAX_LAYERS == LAYER_NUMBERS
    layers = model().layers
    sizes = cell_bytes(plan, layers, "f16")
    assert sizes["desk"] == 3 * sizes["mini"] == 3 * cell_bytes(replace(plan, groups=()), layers, "f16")["desk"] // 4


def test_the_planner_makes_one_group_of_all_devices():
    devices = [device(name, ram=8 * GB) for name in ("desk", "mini")]
    run = RunConfig(parallel="tensor", context_tokens=4096)
    request = PlanRequest(devices=devices, links=[], model=model(), run=run, max_ranks=2)
    found = plan(request)
    assert found.plan.devices == ("desk", "mini")
    alone = PlanRequest(devices=devices[:1], links=[], model=model(), run=run)
    assert plan(alone).plan.groups == ()


@pytest.mark.parametrize(
    ("run", "draft", "option"),
    [
        ({"batching": "exact"}, {}, "--batching exact"),
        ({"windows": "4,4"}, {}, "--windows"),
        ({"extra_buffers": "on"}, {}, "--extra-buffers on"),
        ({}, {"speculate": "mtp"}, "--speculate mtp"),
    ],
)
def test_an_option_that_a_group_does_not_support_is_refused_by_name(run, draft, option):
    with pytest.raises(ConfigError, match=f"--parallel tensor: cannot be combined with {option}"):
        run_config(RunOptions(parallel="tensor", **run), DraftOptions(**draft))


@pytest.mark.parametrize(
    ("windows", "parallel", "why"),
    [("2,4x2", "pipeline", "share layers with --parallel tensor"), ("2,4x0", "tensor", "at least one layer")],
)
def test_windows_that_are_shared_by_hand_are_checked(windows, parallel, why):
    with pytest.raises(ConfigError, match=why):
        run_config(RunOptions(parallel=parallel, windows=windows), DraftOptions())
    found = run_config(RunOptions(parallel="tensor", windows="2,4x2"), DraftOptions())
    assert (found.windows, found.ranks, found.may_share) == ((2, 4), (1, 2), True)


def test_a_16_bit_exchange_needs_shared_layers():
    assert run_config(RunOptions(parallel="tensor", wire="f16"), DraftOptions()).wire == "f16"
    with pytest.raises(ConfigError, match="--wire f16: needs devices that share layers"):
        run_config(RunOptions(wire="f16"), DraftOptions())


def test_windows_for_devices_that_are_gone_say_so_and_nothing_of_heads():
    run = run_config(RunOptions(parallel="tensor", windows="2,6x2", context=4096), DraftOptions())
    request = PlanRequest(devices=[device("desk", ram=8 * GB)], links=[], model=model(), run=run, max_ranks=1)
    with pytest.raises(PlanError, match="2,6x2 is for 3 devices; found 1"):
        plan(request)
    request = with_fields(request, devices=[device(name, ram=8 * GB) for name in ("desk", "mini", "nas")])
    with pytest.raises(PlanError, match="heads of this model allow at most 1"):
        plan(request)


def a_group_load(**changes):
    assignment = replace(in_memory(0, 2, output="cpu"), layer_bytes=90, output_bytes=10, resident_bytes=100)
    fields = {"window": 0, "first": 0, "last": 2, "route": 1, "assignment": assignment, "group": GROUP}
    return a_load(**fields | changes)


def test_a_share_of_all_layers_is_a_load():
    assert decode_from_head(encode(a_group_load())) == a_group_load()


def test_the_first_rank_of_a_group_has_windows_of_a_ring_and_others_may_have_shares_of_the_heads():
    leads, follows = with_fields(GROUP, rank=0), GROUP
    middle = {"window": 1, "route": 3, "assignment": in_memory(0, 2)}
    for load in (a_group_load(**middle, group=leads), a_group_load(**middle, group=follows)):
        assert decode_from_head(encode(load)) == load
    tail = a_group_load(window=2, route=3, group=follows)
    assert decode_from_head(encode(tail)) == tail
    for changes in ({"window": 0, "assignment": in_memory(0, 2)}, {"window": 2}):
        with pytest.raises(ProtocolError, match="the head's first or last window"):
            decode_from_head(encode(a_group_load(route=3, group=leads, **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"group": None},
        {"route": 3},
        {"window": 1},
        {"group": with_fields(GROUP, rank=0)},
        {"group": with_fields(GROUP, rank=2)},
        {"group": with_fields(GROUP, key=bytes(31))},
        {"group": with_fields(GROUP, devices=["desk"])},
        {"assignment": in_memory(0, 2)},
        {"assignment": replace(in_memory(0, 2, output="cpu"), output_bytes=-1)},
    ],
)
def test_an_impossible_group_is_no_load(changes):
    with pytest.raises(ProtocolError):
        decode_from_head(encode(a_group_load(**changes)))


def test_a_share_of_all_layers_may_be_on_a_gpu_of_a_group_alone():
    on_gpu = in_memory(0, 2, gpu_layers=2, output="gpu")
    assert decode_from_head(encode(a_group_load(assignment=on_gpu))).windows[0].assignment == on_gpu
    with pytest.raises(ProtocolError, match="the assignment of another one"):
        decode_from_head(encode(a_group_load(window=1, route=3, assignment=on_gpu)))


def test_a_link_of_a_group_is_wanted_like_that_of_a_route():
    table, joins = WantedState(), LinkGroup(epoch=3, addresses=[RankAddress("192.0.2.1", 7000)])
    table.ask(a_load(3), 1)
    table.ask(joins, 1)
    assert table.ask_again(2) == [joins]


def test_the_device_of_a_group_that_failed_is_named_across_processes():
    found = cause_of(broken_by(RankError("mini of this group closed its connection", "mini")))
    assert isinstance(found, RankError)
    assert (str(found), found.device) == ("mini of this group closed its connection", "mini")


def test_a_rank_that_fails_is_at_fault_and_nobody_before_it():
    plan, error = group(("desk", 1), ("mini", 1), ("nas", 1)), StageError("nas: llama.cpp failed", "nas", "ring")
    failed = attributed(error, plan, 3)
    assert (failed.device, failed.parties) == ("nas", ())
    assert RankLostError(error, "mini").rank == "mini"


def chosen(round_trip_s: float, *, whole: bool = False, **changes):
    """The plan of ``auto`` for three equal devices on links with this round trip."""
    names = ("desk", "mini", "nas")
    links = [link(a, b, bytes_per_s=1.2e8, round_trip_s=round_trip_s) for a in names for b in names if a != b]
    fields = {
        "devices": [device(name, rate=4e9) for name in names],
        "links": links,
        "model": model(),
        "run": RunConfig(parallel="auto", context_tokens=4096),
        "max_ranks": 4,
    }
    found = plan(PlanRequest(**fields | changes))
    return found if whole else found.plan


def test_heads_are_counted_as_they_are_cut():
    units = ShareUnits(heads=9, keys=(3,), head_unit=1, values=1536, value_unit=32)
    assert units.shares([1, 1]) == [(6 / 9, 0.5), (3 / 9, 0.5)]
    asked = question(device("desk", ram=8 * GB), device("mini", ram=8 * GB))
    (ranks,) = all_in_one(asked, 2, units).groups
    assert {(rank.heads, rank.values) for rank in ranks} <= {*units.shares([rank.weight for rank in ranks])}
    by_weight = evaluate(group(("desk", 1), ("mini", 1)), asked).compute_s
    assert evaluate(all_in_one(asked, 2, units), asked).compute_s > by_weight


def test_shapes_share_layers_as_far_as_their_architecture_and_heads_are_known_to_allow():
    asked = ask(Wishes(head=None), [device("desk")], [], model())
    assert asked.max_ranks == MAX_RANKS
    few = ask(Wishes(head=None), [device("desk")], [], replace(model(), heads=3))
    other = ask(Wishes(head=None), [device("desk")], [], replace(model(), architecture="mamba"))
    assert (few.max_ranks, other.max_ranks) == (3, 1)
    whole = ask(Wishes(head=None), [device("desk")], [], replace(model(), heads=3, architecture="gpt2"))
    assert (whole.max_ranks, whole.units.shares([3, 1])) == (MAX_RANKS, [(1.0, 0.75), (1.0, 0.25)])


def test_whole_attention_counts_with_its_share_of_the_bytes_that_a_token_reads():
    layer = replace(model().layers[0], bytes_by_type={"Q4_K": 10_000_000}, expert_bytes_by_type={"Q4_K": 80_000_000})
    mixture = replace(model(), layers=(layer,) * 20, experts=8, experts_used=2, attention_share=1 / 9)
    asked = instance([device("desk", ram=8 * GB), device("mini", ram=8 * GB)], (), mixture, WORK, {})
    ranks = tuple(Rank(device=name, weight=1, heads=1.0, values=0.5) for name in ("desk", "mini"))
    places, shared = places_of(asked, (ranks,))
    own = shared["desk"].own[0].model.layers[0]
    assert (own.bytes_by_type, own.expert_bytes) == (layer.bytes_by_type, 40_000_000)
    halves = places_of(asked, (tuple(replace(rank, heads=0.5) for rank in ranks),))[0]
    whole_s, half_s = (each.members[0].decode.cpu[0] for each in (places, halves))
    alone_s = asked.members[0].decode.cpu[0]
    assert whole_s - half_s > 0.1 * alone_s, "10 MB of the 30 MB that a token reads"


def test_attention_that_is_whole_takes_the_time_and_the_cells_of_all_of_it():
    asked = question(device("desk", ram=8 * GB), device("mini", ram=8 * GB))
    whole = ShareUnits(heads=0, keys=(), head_unit=1, values=1024, value_unit=1)
    (by_head,), (of_all,) = group(("desk", 1), ("mini", 1)).groups, all_in_one(asked, 2, whole).groups
    places = [places_of(asked, (ranks,))[1]["desk"] for ranks in (by_head, of_all)]
    cells = [place.own[0].model.layers[0].kv_bytes_per_token for place in places]
    assert cells == [model().layers[0].kv_bytes_per_token // 2, model().layers[0].kv_bytes_per_token]
    halves, alone = (evaluate(plan, asked) for plan in (group(("desk", 1), ("mini", 1)), all_in_one(asked, 2, whole)))
    assert halves.compute_s < alone.compute_s
    assert cell_bytes(all_in_one(asked, 2, whole), model().layers, "f16")["mini"] == sum(
        layer.kv_bytes_per_token for layer in model().layers
    )


def test_a_plan_gives_the_reason_for_sharing_layers_or_not():
    for round_trip_s, why in (
        (0.0003, "tensor over desk, mini and nas: "),
        (0.05, "tensor over .* would take .* instead"),
    ):
        assert re.match(why, chosen(round_trip_s, whole=True).why_parallel)
    assert chosen(0.3, whole=True).why_parallel == "", "no link is quick enough"


def test_a_context_that_nobody_set_and_costs_too_much_is_no_reason_against_a_group():
    devices = [device(name, rate=4e9, ram=11 * GB // 5) for name in ("desk", "mini", "nas")]
    wide = replace(model(), context_tokens=65536)
    found = chosen(0.0003, whole=True, devices=devices, model=wide, run=RunConfig(parallel="auto"))
    assert (len(found.plan.groups), found.solved.workload.context_tokens) == (1, 4096)
    assert found.why_context == "16384 would have layers read from a disk for every token; --context sets it"
    set_to = RunConfig(parallel="auto", context_tokens=16384)
    assert {each.device for each in chosen(0.0003, devices=devices, model=wide, run=set_to).streaming} >= {"desk"}


def test_devices_with_a_gpu_are_places_of_a_ring_with_a_group():
    names = ("desk", "mini", "nas")
    devices = [device(name, rate=4e9, ram=3 * GB, vram=3 * GB * (name == "desk")) for name in names]
    found = chosen(0.0003, devices=devices)
    assert [rank.device for rank in found.groups[0]] == ["mini", "nas"]
    assert [window.device for window in found.route] == ["desk", "mini", "desk"]
    assert found.route[0].gpu_layers > 0


def test_a_ring_with_a_group_on_gpus_is_one_that_their_windows_can_be_on():
    names = ("desk", "mini", "nas")
    asked = question(device("desk", rate=4e9), *(device(name, rate=4e9, vram=4 * GB) for name in names[1:]))
    with_inputs = asked.changed(model=replace(asked.model, beside_values=256))  # inputs on the CPU
    groups = (tuple(Rank(device=name, weight=1, on_gpu=True) for name in names[1:]),)
    found, none = (ring_of(each, groups, "latency", 3.0) for each in (asked, with_inputs))
    assert [each.gpu_layers for each in found.prediction.devices if each.device != "desk"] == [
        found.plan.route[1].last - 1
    ] * 2
    assert none is None


def test_auto_takes_a_group_where_it_is_faster_and_possible():
    assert len(chosen(0.0003).groups[0]) == 3
    assert chosen(0.05).groups == ()
    assert chosen(0.0003, max_ranks=1).groups == ()
    assert chosen(0.0003, run=RunConfig(context_tokens=4096)).groups == ()
    with_gpu = [device(name, rate=4e9, vram=GB // 8 * (name == "nas")) for name in ("desk", "mini", "nas")]
    assert [rank.device for rank in chosen(0.0003, devices=with_gpu).groups[0]] == ["desk", "mini"]


def test_devices_on_wifi_have_layers_of_their_own():
    in_air = [replace(device(name, rate=4e9), wireless=True) for name in ("desk", "mini", "nas")]
    assert chosen(0.0003, devices=in_air).groups == ()


@pytest.mark.parametrize("asked", [{"batching": "exact"}, {"windows": (4, 4)}, {"speculate": "mtp"}])
def test_auto_shares_no_layers_with_options_that_a_group_does_not_support(asked):
    assert RunConfig(parallel="auto").may_share
    assert not RunConfig(parallel="auto", **asked).may_share
