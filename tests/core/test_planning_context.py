"""The default context and number of concurrent requests, from the room in a plan."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from halda import DeviceProfile, ModelProfile, Plan, evaluate, instance, residency
from halda.instance import Instance
from primad.planning.context import LITTLE_OF_FREE, MAX_AT_ONCE, MAX_OF_FREE, answers_at_once, widened_context
from primad.planning.question import default_workload
from tests.fakes.planning import GB, device, model
from tests.solver.test_simulate import ring
from tools.research.random_fleets import random_instance, random_plan

MODEL = model(context_tokens=1 << 20)
"""5 GB of layers; 82 kB of KV cache per token."""


LARGE = "would take a KV cache larger than the model's layers and over 5%"


def question(*devices: DeviceProfile, asked: ModelProfile = MODEL) -> Instance:
    return instance(devices, [], asked, default_workload(4096, 512, "f16"), {})


def alone(ram: int, asked: ModelProfile = MODEL) -> tuple[Plan, Instance]:
    found = question(device("desk", ram=ram), asked=asked)
    return residency(ring(("desk", 20)), found), found


@pytest.mark.parametrize(
    ("ram", "trained", "tokens", "why"),
    [
        (64 * GB, 2048, 4096, "all that the model was trained with"),
        (64 * GB, 6000, 6000, "all that the model was trained with"),
        (64 * GB, 1 << 20, 32768, f"65536 {LARGE} of the RAM that is left on desk; --context sets it"),
        (256 * GB, 1 << 20, 131072, f"262144 {LARGE} of the RAM that is left on desk; --context sets it"),
        (256 * GB, 100_000, 100_000, "all that the model was trained with"),
        (8 * GB, 1 << 20, 16384, "32768 would not fit into the RAM of desk; --context sets it"),
        (10 * GB, 1 << 20, 16384, "32768 would take over half of the RAM that is left on desk; --context sets it"),
        (5 * GB, 1 << 20, 4096, "8192 would read more from the disk of desk for every token; --context sets it"),
    ],
)
def test_a_context_is_as_wide_as_costs_next_to_nothing(ram, trained, tokens, why):
    found = widened_context(*alone(ram, model(context_tokens=trained)))
    assert (found.tokens, found.why) == (tokens, why)


@pytest.mark.parametrize(
    ("ram", "served", "sequences", "why"),
    [
        (64 * GB, 1, 4, "--sequences sets it"),
        (8 * GB, 1, 4, "--sequences sets it"),
        (7 * GB, 1, 2, "4 would take over half of the RAM that is left on desk; --sequences sets it"),
        (7 * GB, 2, 2, "4 would take over half of the RAM that is left on desk; --sequences sets it"),
        (7 * GB, 4, 4, "--sequences sets it"),
        (6.5 * GB, 1, 1, "2 would take over half of the RAM that is left on desk; --sequences sets it"),
        (6.5 * GB, 4, 2, "4 would not fit into the RAM of desk; --sequences sets it"),
        (6 * GB, 4, 1, "2 would not fit into the RAM of desk; --sequences sets it"),
        (5 * GB, 4, 1, "2 would read more from the disk of desk for every token; --sequences sets it"),
    ],
)
def test_as_many_answers_are_written_at_once_as_cost_next_to_nothing_or_were_served_and_fit(
    ram, served, sequences, why
):
    found = answers_at_once(*alone(int(ram)), served=served)
    assert (found.sequences, found.why) == (sequences, why)


def test_small_layers_and_large_caches_give_few_sequences():
    small = model(layer_bytes=GB // 100, context_tokens=1 << 20)
    found = answers_at_once(*alone(4 * GB, small))
    assert found.sequences == 1
    assert f"larger than the model's layers and over {LITTLE_OF_FREE:.0%}" in found.why


def test_a_context_is_for_each_of_the_answers_at_once():
    plan, asked = alone(10 * GB)
    assert (
        widened_context(plan, asked).tokens,
        widened_context(plan, asked, replace(asked.workload, sequences=4)).tokens,
    ) == (16384, 4096)
    plan, asked = alone(64 * GB)
    assert (
        widened_context(plan, asked).tokens,
        widened_context(plan, asked, replace(asked.workload, sequences=4)).tokens,
    ) == (32768, 8192)


def test_devices_of_one_machine_share_the_free_memory():
    both = question(device("a", ram=8 * GB, host="box"), device("b", ram=8 * GB, host="box"))
    plan = ring(("a", 9), ("b", 10), ("a", 1))
    separate = replace(both, devices=tuple(replace(each, host=each.device) for each in both.devices))
    assert widened_context(plan, both).tokens < widened_context(plan, separate).tokens
    assert "on a and b" in widened_context(plan, both).why


def test_answers_at_once_and_a_wider_context_cost_no_time_and_break_no_limit():
    widened, several = 0, 0
    for seed in range(80):
        rng = random.Random(seed)
        asked = random_instance(rng)
        work = replace(asked.workload, context_tokens=256, prompt_tokens=64, answer_tokens=32)
        asked = replace(asked, workload=work)
        plan = random_plan(rng, asked, streams=0)
        now = evaluate(plan, asked)
        if now.short:
            continue
        asked = replace(asked, workload=replace(work, sequences=1))
        now, count = evaluate(plan, asked), answers_at_once(plan, asked).sequences
        found = widened_context(plan, asked, replace(asked.workload, sequences=count))
        assert found.tokens >= work.context_tokens
        assert count in (1, 2, MAX_AT_ONCE)
        widened += found.tokens > work.context_tokens
        several += count > 1
        then = evaluate(plan, replace(asked, workload=replace(work, context_tokens=found.tokens, sequences=count)))
        assert not then.short
        assert then.tpot_s == pytest.approx(now.tpot_s)
        assert then.ttft_s == pytest.approx(now.ttft_s)
        limits = {member.name: member.ram_limit for member in asked.members}
        for before, after in zip(now.devices, then.devices, strict=True):
            assert after.ram_bytes - before.ram_bytes <= MAX_OF_FREE * (limits[before.device] - before.ram_bytes)
    assert widened >= 10
    assert several >= 10
