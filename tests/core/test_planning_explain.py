"""The full explanation of a plan: it adds up, it names the bottleneck, and more resources are never worse."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from rich.console import Console

from halda import CHUNKS, Infeasible, Limits, arrange, evaluate, instance, solve
from primad.errors import PlanError
from primad.planning.describe import DescribedPlan, ring_part
from primad.planning.explain import best_plan, explain
from primad.planning.question import PlannedEncoder, Question, ask
from primad.planning.schema import SCHEMA, Explanation, RingJson, encode
from primad.planning.table import show
from primad.planning.whatif import change
from tests.fakes.planning import GB, device, model, wishes

DESK = device("desk", ram=3 * GB, vram=2 * GB, disk=2e9)
LAPTOP = device("laptop", ram=2 * GB, rate=10e9)
PI = device("pi", ram=GB, rate=1e9, disk=0.1e9)
NOTHING: list = []


def question(*devices, links=("1Gbit/s,1ms",), **changes) -> Question:
    return ask(wishes(links=links, **changes), devices or (DESK, LAPTOP, PI), (), model())


def no_file(path):
    raise AssertionError(path)


def what_if(asked: Question, *changes: str) -> Explanation:
    return explain(change(asked, changes, no_file), changes, asked)


@pytest.fixture(scope="module")
def answer() -> Explanation:
    return explain(question())


def test_every_layer_has_one_place(answer):
    windows = sorted((window.index, window) for part in answer.devices for window in part.windows)
    assert [index for index, _ in windows] == list(range(len(windows)))
    at = 0
    for _, window in windows:
        assert window.first == at
        assert window.layers == window.last - window.first
        at = window.last
    assert at == answer.model.layers


def test_each_device_adds_up(answer):
    asked = question()
    work = replace(asked.workload, context_tokens=answer.workload.context_tokens)
    needs = instance(asked.devices, [], asked.model, work, {}).with_rows(answer.chunk_rows)
    assert sum(part.layers for part in answer.devices) == answer.model.layers
    for part in answer.devices:
        assert part.layers == part.resident_layers + part.streamed_layers == sum(w.layers for w in part.windows)
        assert part.gpu_layers == sum(window.gpu_layers for window in part.windows)
        assert part.streamed_bytes == sum(window.streamed_bytes for window in part.windows)
        assert part.resident_bytes + part.streamed_bytes == part.layers * GB // 4
        # Without a prompt being processed, the buffer holds layers.
        assert part.disk_bytes_per_token == max(0, part.streamed_bytes - needs.buffer_bytes)
        assert part.streamed_layers == (part.streamed_bytes > 0 and max(1, round(4 * part.streamed_bytes / GB)))
        assert part.ram_bytes <= part.ram_limit_bytes
        assert part.vram_bytes <= part.vram_limit_bytes
    assert [part.name for part in answer.devices if part.head] == [answer.head]


def test_a_token_adds_up(answer):
    found = answer.predicted
    assert found.compute_ms + found.hop_ms + found.stall_ms == pytest.approx(found.tpot_ms)
    assert found.tokens_per_s == pytest.approx(1e3 / found.tpot_ms)
    assert found.exchange_ms == pytest.approx(found.ttft_ms + answer.workload.answer_tokens * found.tpot_ms)


def test_every_device_is_in_or_out(answer):
    inside = {part.name for part in answer.devices}
    outside = {part.name for part in answer.left_out}
    assert inside | outside == {"desk", "laptop", "pi"}
    assert not inside & outside


def test_a_left_out_device_has_the_cost_of_using_it(answer):
    left = next(part for part in answer.left_out if part.name == "pi")
    assert left.slower_ms is not None
    assert left.objective_ms is not None
    assert left.objective_ms >= 0
    assert "would" in left.reason


def test_a_device_that_cannot_take_part_is_shown_with_its_limit():
    answer = explain(question(DESK, LAPTOP, device("watch", ram=GB // 10)))
    left = next(part for part in answer.left_out if part.name == "watch")
    assert left.slower_ms is None
    assert left.reason.startswith("cannot take part: ")
    assert "RAM" in left.reason


def test_the_best_alone_comes_first_and_the_ring_is_not_slower(answer):
    assert {part.name for part in answer.single_device} == {"desk", "laptop", "pi"}
    times = [part.predicted.exchange_ms for part in answer.single_device if part.predicted is not None]
    assert times == sorted(times)
    assert answer.predicted.exchange_ms <= times[0] * (1 + 1e-6)


@pytest.mark.parametrize("objective", ["latency", "ttft", "throughput", "balanced"])
def test_every_objective_is_answered(objective):
    answer = explain(question(DESK, LAPTOP, objective=objective, sequences=2))
    assert answer.proof.objective == objective
    assert answer.proof.objective_ms is not None


def test_the_head_that_was_named_is_the_head():
    assert explain(question(head="laptop")).head == "laptop"


@pytest.mark.parametrize(
    ("devices", "links", "words"),
    [
        ((device("desk", ram=12 * GB),), (), "compute of desk (100 % of the time per token: 20 layers on the CPU)"),
        ((device("desk", ram=12 * GB, vram=12 * GB),), (), "100 % of the time per token: 20 layers on the GPU)"),
        ((device("pi", ram=3 * GB, disk=0.2e9),), (), "the disk of pi: "),
        (
            (device("a", ram=4 * GB, disk=0.01e9), device("b", ram=4 * GB, disk=0.01e9)),
            ("1Mbit/s,1s",),
            "hops between devices (",
        ),
        (
            (device("a", ram=4 * GB, disk=0.01e9), device("b", ram=4 * GB, disk=0.01e9)),
            ("1Gbit/s,2ms,20s",),
            "at 2.00 ms round trip, p95 delay +20.0 s)",
        ),
    ],
)
def test_the_bottleneck_is_one_sentence(devices, links, words):
    sentence = explain(question(*devices, links=links)).predicted.bottleneck
    assert words in sentence
    assert "\n" not in sentence


def test_the_error_without_a_plan_names_the_short_limit():
    with pytest.raises(PlanError, match=r"short of [0-9,.]+ MB") as caught:
        explain(question(device("watch", ram=GB // 10)))
    assert "\n" not in str(caught.value)


def test_a_change_shows_the_plan_before_it():
    answer = what_if(question(), "ram:desk=8GB")
    assert answer.what_if is not None
    assert answer.what_if.changes == ["ram:desk=8GB"]
    assert answer.what_if.before is not None
    assert answer.predicted.exchange_ms <= answer.what_if.before.predicted.exchange_ms * (1 + 1e-6)


def test_a_change_that_leaves_no_plan_is_refused_with_the_plan_before_it():
    with pytest.raises(PlanError, match=r"no plan with --what-if drop=desk: .*; without, a token takes "):
        what_if(question(DESK, device("watch", ram=GB // 10)), "drop=desk")


def test_a_change_that_makes_a_plan_possible():
    answer = what_if(question(device("watch", ram=GB // 10)), "ram:watch=8GB")
    assert answer.what_if is not None
    assert answer.what_if.before is None
    assert "short" in (answer.what_if.reason or "")


@pytest.mark.parametrize("what", ["ram:laptop", "ram:pi", "vram:desk"])
@pytest.mark.parametrize(
    "sizes",
    [("1GB", "3GB", "9GB"), pytest.param(("1GB", "2GB", "3GB", "5GB", "9GB"), marks=pytest.mark.matrix)],
    ids=" ".join,
)
def test_more_memory_is_never_slower(what, sizes):
    times = []
    for size in sizes:
        solution = best_plan(
            change(question(objective="latency", context_tokens=4096), [f"{what}={size}"], no_file)
        ).solved.solution
        assert solution.proven
        times.append(solution.objective_s)
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(times))


def test_another_device_is_never_slower():
    asked = question(DESK, LAPTOP, context_tokens=4096)
    with_pi = replace(asked, devices=(*asked.devices, PI))
    tokens = asked.workload.answer_tokens
    more, fewer = (best_plan(each).prediction.exchange_s(tokens) for each in (with_pi, asked))
    assert more <= fewer * (1 + 1e-6)


def test_json_is_the_answer(answer):
    data = encode(answer)
    assert msgspec.json.decode(data, type=Explanation, strict=True) == answer
    content = msgspec.json.decode(data)
    assert next(iter(content)) == "schema"
    assert content["schema"] == SCHEMA


def test_streamed_bytes_are_counted_for_each_device_and_in_all():
    found = explain(question(device("desk", ram=3 * GB, disk=1e9), device("laptop", ram=2 * GB, disk=1e9)))
    assert any(part.streamed_layers for part in found.devices)
    assert found.predicted.disk_bytes_per_token == sum(part.disk_bytes_per_token for part in found.devices) > 0
    assert sum(part.stall_ms for part in found.devices) == pytest.approx(found.predicted.stall_ms)
    assert all(part.read_ahead_bytes > 0 for part in found.devices if part.streamed_layers)


def test_devices_that_share_a_disk_are_named(answer):
    def ring(*devices) -> RingJson:
        asked = question(*devices)
        plan = arrange([each.device for each in devices], (12, 8), rounds=1, model=asked.model)
        here = instance(devices, asked.all_links, asked.model, asked.workload, {})
        return ring_part(DescribedPlan(plan, evaluate(plan, here), here))

    one = [replace(each, host="desk", disk=replace(each.disk, disk_id="1f2e3d4c")) for each in (DESK, LAPTOP)]
    own = [replace(each, disk=replace(each.disk, disk_id=each.device)) for each in one]
    assert ring(*one).one_disk == [["desk", "laptop"]]
    assert ring(*own).one_disk == ring(DESK, LAPTOP).one_disk == answer.one_disk == []
    console = Console(file=io.StringIO(), width=200)
    show(msgspec.structs.replace(answer, one_disk=[["desk", "laptop"]]), console)
    assert re.search("one disk +of desk and laptop: reads of one delay the others", console.file.getvalue())


def test_a_last_window_that_must_be_long_is_reported_where_it_costs_something(answer):
    """A slow head must have half of the layers, or more than fit in its memory."""
    asked = question(device("slow", ram=4 * GB, rate=5e9), device("fast", ram=7 * GB), head="slow")
    assert explain(asked).tail is answer.tail is None
    found = explain(replace(asked, model=replace(asked.model, tail_layers=9)))
    assert found.devices[0].windows[-1].layers >= 9
    assert re.match("the head's last window has at least 9 layers, .* costs .* of a request", found.tail or "")
    console = Console(file=io.StringIO(), width=200)
    show(found, console)
    assert re.search("tail +the head's last window", console.file.getvalue())
    none = replace(asked, model=replace(asked.model, tail_layers=19), limits={"slow": Limits(ram_bytes=9 * GB // 10)})
    with pytest.raises(PlanError, match=r"short of .* has at least 19 layers, .* take a head with more memory"):
        explain(none)


def test_with_the_minimum_memory_all_layers_are_read():
    asked = question(device("desk"))
    fewest = replace(asked.workload, chunk_rows=min(CHUNKS))
    needs = instance(asked.devices, [], asked.model, fewest, {})
    with pytest.raises(Infeasible) as caught:
        solve([device("desk", ram=GB // 2)], [], asked.model, fewest)
    minimum = GB // 2 + caught.value.short_bytes
    found = explain(question(device("desk", ram=minimum)))
    assert found.chunk_rows == fewest.chunk_rows
    (part,) = found.devices
    assert part.streamed_bytes == 20 * GB // 4
    assert part.resident_bytes == 0
    assert part.disk_bytes_per_token == 20 * GB // 4 - needs.buffer_bytes, "while no prompt is read its room is used"
    assert part.ram_bytes == minimum
    with pytest.raises(PlanError, match=r"RAM of desk is short of .*: a smaller context or a KV cache in q8_0 or q4_0"):
        explain(question(device("desk", ram=minimum - GB // 100)))
    smaller = explain(question(device("desk", ram=minimum - GB // 100), kv_type="q8_0"))
    assert smaller.workload.kv_type == "q8_0"


def test_an_encoder_takes_memory_of_the_head_and_the_plan_shows_what_the_model_can_read(answer):
    encoder = PlannedEncoder(sees=True, hears=False, memory_bytes=GB)
    asked = replace(question(), encoder=encoder)
    left = question(
        *(replace(each, ram_available_bytes=2 * GB) if each is DESK else each for each in (DESK, LAPTOP, PI))
    )
    found, known = explain(replace(asked, head="desk")), explain(replace(left, head="desk"))
    assert found.devices == known.devices
    assert (found.model.sees, found.model.hears, found.model.encoder_bytes) == (True, False, GB)
    console = Console(file=io.StringIO(), width=200)
    show(found, console)
    assert re.search(r"vision +with its encoder, which takes .* of desk", console.file.getvalue())
    assert best_plan(asked).solved.solution.plan.head == answer.head
