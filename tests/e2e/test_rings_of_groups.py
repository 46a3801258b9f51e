"""Rings of groups and single devices, in real processes, give tokens the probabilities of the whole model."""

from __future__ import annotations

import secrets
import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest

from halda import Streaming, assignments
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.planning.by_hand import plan_by_hand
from tests.e2e.cluster import all_joined, heading
from tests.e2e.streams import ask
from tools.lab.local_ring import LocalRing
from tools.synth import FEW_TOKENS, write_model

pytestmark = pytest.mark.slow

PROMPT = [*range(5, 75)]
TOKENS = 5
ROWS = 32
"""Chunk size; prompts are longer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("shared") / "shared.gguf"
    write_model(path, layers=6, heads=4, heads_kv=4, quantisation="f32")
    return path


async def computed(model, windows, plan=None):
    """Return the tokens with their log-probabilities; check that a second request gives the same bits."""
    async with LocalRing(model, windows, plan=plan, context=256, rows=ROWS, threads=1) as ring:
        first, again = [
            [(each.token, each.logprob) for each in (await ring.generate(PROMPT, TOKENS, logprobs=1))[0]]
            for _ in range(2)
        ]
    assert again == first
    return [token for token, _ in first], [logprob for _, logprob in first]


@pytest.fixture(scope="module")
async def whole(model):
    return await computed(model, None)


@pytest.mark.parametrize(
    ("windows", "ranks"),
    [((1, 4), (1, 2)), ((2, 4), (2, 1)), ((2, 2, 2), (1, 2, 1)), ((2, 4), (2, 2))],
    ids=["behind a device", "before a device", "between devices", "two groups"],
)
async def test_a_group_is_a_place_of_a_ring(model, whole, windows, ranks):
    names = [f"d{i}" for i in range(sum(ranks))]
    plan = plan_by_hand(names, windows, 1, model_profile(open_model(model)), ranks)
    tokens, logprobs = await computed(model, windows, plan)
    assert tokens == whole[0]
    assert logprobs == pytest.approx(whole[1], abs=5e-3)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing that streams is ever given back")
@pytest.mark.parametrize(("windows", "ranks"), [((6,), (3,)), ((1, 4), (1, 2))], ids=["alone", "behind a device"])
async def test_shares_that_stream_give_the_same_tokens_as_in_memory(model, windows, ranks):
    plan = plan_by_hand([f"d{i}" for i in range(sum(ranks))], windows, 1, model_profile(open_model(model)), ranks)
    kept = assignments(plan, model_profile(open_model(model)))
    streaming = tuple(
        Streaming(device=rank.device, streamed_bytes=kept[rank.device].layer_bytes * 3 // 4, read_ahead_bytes=100_000)
        for rank in plan.groups[0]
    )
    in_memory = await computed(model, windows, plan)
    assert await computed(model, windows, replace(plan, streaming=streaming)) == in_memory


@pytest.mark.parametrize("architecture", ["gemma4-per-layer", pytest.param("granitehybrid", marks=pytest.mark.matrix)])
async def test_every_rank_gets_the_inputs_of_its_layers_besides_hidden_states(architecture, tmp_path):
    path = tmp_path / "model.gguf"
    write_model(path, architecture=architecture, quantisation="f32")
    profile = model_profile(open_model(path))
    windows = (len(profile.layers),)
    tokens, logprobs = await computed(path, windows, plan_by_hand(["d0", "d1"], windows, 1, profile, (2,)))
    expected = await computed(path, None)
    assert tokens == expected[0]
    assert logprobs == pytest.approx(expected[1], abs=5e-3)


def test_devices_join_a_ring_with_a_group(smollm2, tmp_path, module_home):
    path, cluster = tmp_path / "shared.gguf", f"ring-{secrets.token_hex(6)}"
    write_model(
        path, layers=6, heads=4, heads_kv=4, vocabulary=f"from:{smollm2}", tokens=FEW_TOKENS, quantisation="f32"
    )
    arguments = ("--wait", 2, "--parallel", "tensor", "--windows", "1,4x2", "--context", 512)
    with ExitStack() as stack:
        stack.enter_context(all_joined([module_home(name) for name in ("g1", "g2")], cluster))
        head = stack.enter_context(heading(path, module_home("head"), cluster, *arguments, config=""))
        head.wait_serving()
        windows = [device["windows"] for device in head.status()["devices"]]
        assert windows == [[[0, 1], [5, 6]], [[1, 5]], [[1, 5]]]
        answer = ask(head, tokens=20)
        assert (answer.finish, answer.error) == ("length", None)
        assert ask(head, tokens=20).text == answer.text
