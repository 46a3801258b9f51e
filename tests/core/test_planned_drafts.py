"""How many draft rows of a request a plan has room for, and the cost of several in one step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halda import DeviceProfile, LayerProfile, Rank, evaluate, instance, residency
from halda.ahead import tokens_ahead
from halda.instance import Instance
from primad.planning.batching import BatchingMode, batches_of
from primad.planning.drafting import MAX_ROWS, SpeculateMode, drafting_of
from primad.planning.question import default_workload, workload_of
from primad.planning.run_config import RunConfig
from primad.ring.speculation.drafter import MAX_ROOM, Drafting
from tests.core.test_batches import exactly
from tests.fakes.planning import GB, device, link, model
from tests.solver.test_simulate import ring

ALONE = ring(("a", 20))
TWO = ring(("a", 9), ("b", 10), ("a", 1))
FOUR = ring(("a", 4), ("b", 5), ("c", 5), ("d", 5), ("a", 1))


def asked(*devices: DeviceProfile, round_trip_s: float = 0.0002, flash: bool = False) -> Instance:
    names = [each.device for each in devices]
    links = [link(one, two, round_trip_s=round_trip_s) for one in names for two in names if one != two]
    return instance(devices, links, model(), replace(default_workload(4096, 512, "f16"), flash=flash), {})


def drafting(
    plan, question: Instance, mode: SpeculateMode = "auto", batching: BatchingMode = "auto"
) -> Drafting | None:
    return drafting_of(mode, batching, plan, question, batches_of(batching, plan, question, 1))


def test_a_ring_has_room_for_a_row_on_each_of_its_machines():
    found = drafting(FOUR, asked(*map(device, "abcd")))
    assert found is not None
    assert found.room in (4, 5)


@pytest.mark.parametrize(("round_trip_s", "room"), [(0.0002, 3), (0.02, 4)])
def test_a_row_waits_only_where_the_head_is_done_with_it_before_the_token_that_decides(round_trip_s, room):
    three = ring(("a", 5), ("b", 7), ("c", 7), ("a", 1))
    found = drafting(three, asked(*map(device, "abc"), round_trip_s=round_trip_s))
    assert found is not None
    assert found.room == room


def test_rows_ahead_give_what_they_do_where_windows_take_equally_long():
    plan, question = ring(("a", 5), ("b", 10), ("a", 5)), asked(device("a"), device("b"), round_trip_s=1e-6)
    token_s = evaluate(plan, question).tpot_s
    assert tokens_ahead(plan, question, 1, 0.7) * token_s == pytest.approx(1.0)
    assert tokens_ahead(plan, question, 2, 0.0) * token_s == pytest.approx(1.0)
    assert tokens_ahead(plan, question, 2, 1.0) * token_s == pytest.approx(2.0, rel=0.05)
    assert tokens_ahead(plan, question, 2, 0.7) * token_s == pytest.approx(2 / 1.3, rel=0.05)


def test_the_longer_the_links_the_more_rows_are_in_flight():
    near, far = (
        drafting(TWO, asked(device("a"), device("b"), round_trip_s=round_trip_s)) for round_trip_s in (1e-4, 0.4)
    )
    assert near is not None
    assert far is not None
    assert near.room < far.room <= MAX_ROOM


def slower_rows(name: str, times: float) -> DeviceProfile:
    """A device on which a byte takes ``times`` as long with the rows of a batch as with one row."""
    found = device(name)
    speeds = (replace(each, batch_bytes_per_s=each.decode_bytes_per_s / times, rows=()) for each in found.cpu.speeds)
    return replace(found, cpu=replace(found.cpu, speeds=tuple(speeds)))


EVEN = ring(("a", 5), ("b", 10), ("a", 5))
EVEN_FOUR = ring(("a", 2), ("b", 5), ("c", 5), ("d", 5), ("a", 3))


@pytest.mark.parametrize(
    ("plan", "times", "block"), [(TWO, 1.5, 1), (EVEN, 1.5, 1), (EVEN, 2, 1), (EVEN_FOUR, 1.5, 2), (EVEN_FOUR, 8, 1)]
)
def test_steps_of_several_rows_follow_each_other_where_many_devices_compute_cheap_rows(plan, times, block):
    """With two devices, one step with all draft rows gains nearly as much, but keeps only one device busy at a time."""
    question = asked(*(slower_rows(name, times) for name in plan.devices), round_trip_s=1e-4)
    found = drafting(plan, question, "auto", "fast")
    assert found is not None
    assert found.block == block


def test_blocks_give_more_than_rows_by_themselves_as_far_as_those_are_cheap():
    plan = ring(("a", 5), ("b", 10), ("a", 5))
    cheap, dear = (asked(slower_rows("a", each), slower_rows("b", each), round_trip_s=1e-6) for each in (1.0, 8.0))
    one, two = (tokens_ahead(plan, cheap, 2, 0.7, block=block) for block in (1, 2))
    until_wrong = [1 + (1 / (1 - 0.7**block) - 1) / 2 for block in (1, 2)]  # each further step takes half a pass
    assert two / one == pytest.approx(until_wrong[0] / until_wrong[1], rel=0.05)
    one, two = (tokens_ahead(plan, dear, 2, 0.7, block=block) for block in (1, 2))
    assert two < one
    drafted = tokens_ahead(plan, cheap, 2, 0.7, block=2, draft_s=0.1 * evaluate(plan, cheap).tpot_s)
    assert drafted < tokens_ahead(plan, cheap, 2, 0.7, block=2)


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_ring_pass_without_room_has_no_drafts(mode):
    assert drafting(ALONE, asked(device("a")), mode) is None
    assert drafting(TWO, asked(device("a", host="one"), device("b", host="one")), mode) is None


def test_lookup_on_request_has_a_row_on_each_device_whatever_it_gains():
    found = drafting(TWO, asked(device("a", host="one"), device("b", host="one")), "lookup")
    assert found is not None
    assert found.room == 2


def test_off_is_off():
    assert drafting(FOUR, asked(*map(device, "abcd")), "off") is None


def test_a_group_is_one_place_whose_drafts_are_rows_of_one_step():
    group = replace(ALONE, groups=((Rank(device="a", weight=1), Rank(device="b", weight=1)),))
    question = asked(exactly(8, device("a", ram=8 * GB)), exactly(8, device("b", ram=8 * GB)))
    found = drafting(group, question, "lookup", "fast")
    assert found is not None
    assert (found.room, found.branches, found.ring_passes) == (1, 0, 1.0)
    assert 1 < found.rows <= MAX_ROWS
    assert found.costs[-1] < found.rows


def test_where_weights_stream_several_rows_cost_little_more_than_one():
    question = asked(exactly(8, device("a", ram=3 * GB, disk=0.3e9)))
    plan = residency(ALONE, question)
    assert plan.streaming
    fast = drafting(plan, question, batching="fast")
    assert fast is not None
    assert (fast.room, fast.rows) == (1, MAX_ROWS)
    assert fast.costs[0] == 1.0
    assert fast.costs[-1] < 2
    assert fast.branches > 0


def test_trees_are_for_one_device_that_streams_and_need_not_be_exact():
    question = asked(exactly(8, device("a", ram=3 * GB, disk=0.3e9)))
    plan = residency(ALONE, question)
    exact = drafting(plan, question, batching="exact")
    assert exact is None or not exact.branches
    two = drafting(TWO, asked(device("a"), device("b"), round_trip_s=0.4), batching="fast")
    assert two is not None
    assert not two.branches


def test_no_more_rows_are_computed_at_once_than_are_exact():
    question = asked(device("a", ram=3 * GB, disk=0.3e9))
    plan = residency(ALONE, question)
    assert drafting(plan, question) is None, "of its rows it is known that single ones are exact"


def test_a_state_has_drafts_with_the_next_token_where_memory_is_planned_for_them_and_ahead_where_some_is_left():
    question = asked(*map(device, "abcd"))
    layer = LayerProfile(
        bytes_by_type={"Q4_K": GB // 4}, expert_bytes_by_type={}, kv_bytes_per_token=0, state_bytes=1000
    )
    recurrent = replace(question, model=replace(question.model, layers=(layer,) * 20))
    assert recurrent.model.is_recurrent
    assert evaluate(FOUR, recurrent).tpot_s > 0
    ahead = drafting(FOUR, recurrent, "lookup", "fast")
    assert ahead is not None
    assert (ahead.room, ahead.rows, ahead.states) == (4, 1, 4)
    planned = replace(recurrent, workload=replace(recurrent.workload, rollback=3))
    both = drafting(FOUR, planned, "lookup", "fast")
    assert both is not None
    assert (both.room, both.rows, both.branches) == (4, 4, 0)
    large = replace(layer, state_bytes=3 * GB)
    full = replace(planned, model=replace(question.model, layers=(large,) * 20))
    together = drafting(FOUR, full, "lookup", "fast")
    assert together is not None
    assert (together.room, together.rows) == (1, 4)
    assert drafting(FOUR, full, "lookup") is None, "of its rows it is known that single ones are exact"
    bytes_of = [sum(each.ram_bytes for each in evaluate(FOUR, each).devices) for each in (recurrent, planned)]
    assert bytes_of[1] > bytes_of[0] + 3 * 20 * 1000


@pytest.mark.parametrize(
    ("mode", "batching", "architecture", "rows"),
    [
        ("lookup", "exact", "qwen35", 3),
        ("auto", "fast", "qwen35", 3),
        ("auto", "auto", "qwen35", 0),
        ("off", "fast", "qwen35", 0),
        ("lookup", "fast", "qwen3next", 0),
    ],
)
def test_memory_for_drafts_of_states_is_planned_where_there_will_be_some(mode, batching, architecture, rows):
    layer = LayerProfile(bytes_by_type={"Q4_K": 9}, expert_bytes_by_type={}, kv_bytes_per_token=0, state_bytes=9)
    found = replace(model(), layers=(layer,) * 20, architecture=architecture)
    run = RunConfig(speculate=mode, batching=batching)
    assert workload_of(run, found).rollback == rows
    assert not workload_of(run, replace(model(), architecture=architecture)).rollback
