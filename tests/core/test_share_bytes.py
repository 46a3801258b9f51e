"""The bytes that a plan assigns to each device of a group are those of the files cut for it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest

from halda import assignments
from primad.gguf.architectures.layers import layer_count
from primad.gguf.header import read_header
from primad.gguf.profile import model_profile
from primad.gguf.share_rules import ShareRules
from primad.gguf.shares import share_bytes, share_header
from primad.gguf.windows import ModelCutter
from primad.planning.explain import best_plan, explain
from primad.planning.question import Question, Wishes, ask
from primad.planning.run_config import RunConfig
from tests.fakes.planning import device
from tools import synth

BY_HEADS, BY_COPIED_KEYS = ("llama", {"heads": 8, "heads_kv": 4}), ("llama", {"heads": 8, "heads_kv": 1})
WHOLE_ATTENTION, LATENT, EXPERTS = ("olmo2", {}), ("deepseek2-lite", {}), ("hunyuan-moe", {})


def question(tmp_path, architecture, overrides, **rates) -> Question:
    """A question about a model file, for one group of devices with these rates."""
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture, quantisation="q8_0", **overrides)
    header = read_header(path)
    rules, run = ShareRules(header), RunConfig(parallel="tensor", context_tokens=64)
    devices = [device(name, rate=rate) for name, rate in rates.items()]
    asked = ask(Wishes(run=run, head="desk", links=("10Gbit/s,0.01ms",)), devices, (), model_profile(header))
    return replace(asked, max_ranks=2, units=rules.units, share_bytes=cache(partial(share_bytes, rules)))


def cut_bytes(header, weights, rank) -> tuple[int, int]:
    """The bytes of weights in the files of layers and output matrix cut for a rank."""
    cutter = ModelCutter(share_header(ShareRules(header), weights, rank))
    *layers, output = [cutter.ref(layer) for layer in range(layer_count(header) + 1)]
    matrix = next(each for each in output.tensors if each.name in ("output.weight", "token_embd.weight"))
    return sum(tensor.size_bytes for each in layers for tensor in each.tensors), matrix.size_bytes


@pytest.mark.parametrize("mini", [20e9, 7e9])
@pytest.mark.parametrize(
    ("architecture", "overrides"), [BY_HEADS, BY_COPIED_KEYS, WHOLE_ATTENTION, LATENT, EXPERTS], ids=str
)
def test_the_planned_bytes_of_a_rank_are_those_of_its_files(tmp_path, architecture, overrides, mini):
    asked = question(tmp_path, architecture, overrides, desk=20e9, mini=mini)
    header, found = read_header(tmp_path / "model.gguf"), explain(asked).devices
    whole = sum(layer.size_bytes for layer in asked.model.layers)
    for rank, each in enumerate(found):
        layers, output = cut_bytes(header, weights_of(asked), rank)
        assert (each.resident_bytes, each.streamed_bytes, each.shard_bytes) == (layers, 0, layers + output)
        assert each.share == layers / whole
    assert [each.leader for each in found] == ["desk", "desk"]


def weights_of(asked: Question) -> list[int]:
    return [rank.weight for rank in best_plan(asked).plan.groups[0]]


def test_without_a_file_a_rank_counts_by_its_shares_of_attention_and_network(tmp_path):
    asked = question(tmp_path, *WHOLE_ATTENTION, desk=20e9, mini=20e9)
    found, model = assignments(best_plan(asked).plan, asked.model), asked.model
    for each in found.values():
        assert each.share == pytest.approx((1 + model.attention_part) / 2, rel=0.01)
        assert each.layer_bytes == pytest.approx(each.share * sum(layer.size_bytes for layer in model.layers))
