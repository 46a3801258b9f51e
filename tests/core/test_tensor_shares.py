"""The slices of a model's layers on each rank of a tensor-parallel group."""

import re

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from primad.gguf.architectures.table import NotCutError
from primad.gguf.digests import LayerDigests
from primad.gguf.header import read_header
from primad.gguf.layers import cut
from primad.gguf.share_rules import PARTS, Part, ShareRules
from primad.gguf.shares import share_header
from primad.gguf.splits import cut_heads, keys_of, split
from primad.gguf.windows import ModelCutter
from tools import synth

WEIGHTS = st.lists(st.integers(1, 9), min_size=2, max_size=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def model(architecture, quantisation="f32", **overrides):
        key = (architecture, quantisation, *overrides.items())
        if key not in made:
            path = tmp_path_factory.mktemp("models") / "model.gguf"
            synth.write_model(path, architecture=architecture, quantisation=quantisation, **overrides)
            made[key] = read_header(path)
        return made[key]

    return model


def content(tensor):
    return cut({tensor.name: tensor}).read(0, tensor.bytes)


def blocks(header, name):
    """The tensor as quantisation blocks: (outer..., rows, blocks, bytes of a block)."""
    tensor = header.tensors[name]
    block, size = GGML_QUANT_SIZES[tensor.type]
    shape = (*reversed(tensor.shape[1:]), tensor.shape[0] // block, size)
    return np.frombuffer(content(tensor), np.uint8).reshape(shape)


@given(st.integers(2, 64), WEIGHTS)
def test_units_are_split_so_that_the_slowest_rank_is_as_fast_as_can_be(units, weights):
    shares = split(units, weights)
    if units < len(weights):
        assert shares is None
        return
    assert sum(shares) == units
    assert min(shares) >= 1
    slowest = max(range(len(weights)), key=lambda rank: shares[rank] / weights[rank])
    for rank in range(len(weights)):
        if shares[slowest] > 1 and rank != slowest:
            assert (shares[rank] + 1) / weights[rank] >= shares[slowest] / weights[slowest] - 1e-9


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 7]), st.sampled_from([1, 2, 4]), WEIGHTS)
def test_each_head_is_on_one_rank_together_with_its_keys(keys, group, unit, weights):
    found = cut_heads(keys * group, [keys], unit, weights)
    if found is None:
        assert keys * group // unit < len(weights) or group % unit or keys < len(weights)
        return
    assert [head for heads in found for head in heads] == [*range(keys * group)]
    for heads in found:
        assert {head // group for head in heads} == {*keys_of(heads, group)}
        assert heads.start % unit == 0


def test_layers_with_the_same_number_of_heads_are_cut_at_the_same_heads_whatever_keys_they_have():
    assert cut_heads(4, [1, 2], 1, [2, 1]) == [range(2), range(2, 4)]
    assert cut_heads(4, [1], 1, [3, 1]) == [range(3), range(3, 4)]


@settings(max_examples=20)
@given(WEIGHTS, st.sampled_from(["q4_0", "q8_0", "f32"]))
def test_the_shares_of_the_ranks_add_up_to_the_layer(models, weights, quantisation):
    header = models("llama", quantisation, heads=8, heads_kv=4, head_width=32, feed_forward=256)
    ranks = [share_header(ShareRules(header), weights, rank) for rank in range(len(weights))]
    for name, axis in (("attn_q", 0), ("attn_k", 0), ("attn_output", 1), ("ffn_up", 0), ("ffn_down", 1)):
        parts = [blocks(each, f"blk.2.{name}.weight") for each in ranks]
        assert np.array_equal(np.concatenate(parts, axis), blocks(header, f"blk.2.{name}.weight")), name
    parts = [blocks(each, "output.weight") for each in ranks]
    assert np.array_equal(np.concatenate(parts), blocks(header, "output.weight"))


def test_experts_are_shared_by_columns(models):
    header = models("hunyuan-moe", "q8_0")
    ranks = [share_header(ShareRules(header), [1, 1], rank) for rank in range(2)]
    for name, axis in (("up", 1), ("down", 2)):
        parts = [blocks(each, f"blk.1.ffn_{name}_exps.weight") for each in ranks]
        assert np.array_equal(np.concatenate(parts, axis), blocks(header, f"blk.1.ffn_{name}_exps.weight"))


def test_fused_tensors_are_shared_part_by_part(models):
    header = models("qwen")
    rank = share_header(ShareRules(header), [1, 1], 1)
    whole, own = blocks(header, "blk.0.attn_qkv.weight"), blocks(rank, "blk.0.attn_qkv.weight")
    each = len(whole) // 3
    assert np.array_equal(own, np.concatenate([whole[n * each + each // 2 : (n + 1) * each] for n in range(3)]))


@pytest.mark.parametrize(("architecture", "heads"), [("qwen35", [1, 3]), ("qwen3next", [2, 3])])
def test_states_are_shared_with_the_heads_of_keys_that_write_to_them(models, architecture, heads):
    header = models(architecture)
    rank, values = (
        share_header(ShareRules(header), [1, 1], 1),
        [row for head in heads for row in range(16 * head, 16 * head + 16)],
    )
    mixed = [*range(16, 32), *range(48, 64), *(64 + row for row in values)]
    for name, rows in (
        ("ssm_a", heads),
        ("ssm_conv1d.weight", mixed),
        ("attn_qkv.weight", mixed),
        ("attn_gate.weight", values),
    ):
        assert np.array_equal(blocks(rank, f"blk.0.{name}"), blocks(header, f"blk.0.{name}")[rows]), name
    assert np.array_equal(blocks(rank, "blk.0.ssm_out.weight"), blocks(header, "blk.0.ssm_out.weight")[:, values])
    counts = {"group_count": 1, "time_step_rank": 2, "inner_size": 32}
    assert {key: rank.count(f"{architecture}.ssm.{key}") for key in counts} == counts


def test_a_bias_after_a_sum_is_added_once(models):
    header = models("gpt-oss")
    ranks = [share_header(ShareRules(header), [2, 1], rank) for rank in range(2)]
    for name in ("attn_output", "ffn_down_exps"):
        biases = [content(each.tensors[f"blk.0.{name}.bias"]) for each in ranks]
        assert biases[0] == content(header.tensors[f"blk.0.{name}.bias"])
        assert biases[1] == bytes(len(biases[0]))


def test_the_metadata_counts_what_the_rank_has(models):
    header = models("llama", heads=8, heads_kv=4)
    rank = share_header(ShareRules(header), [3, 1], 0)
    assert rank.values["llama.attention.head_count"].scalar() == 6
    assert rank.values["llama.attention.head_count_kv"].scalar() == 3
    assert rank.values["llama.feed_forward_length"].scalar() == 96
    assert rank.values["llama.attention.key_length"].scalar() == 16


def test_a_share_of_a_layer_is_known_by_its_content_in_any_window(models):
    header = models("llama")
    cutters = [ModelCutter(share_header(ShareRules(header), [1, 1], rank)) for rank in (0, 1, 0)]
    assert cutters[0].spec(0, 0, 6).layers[4] == cutters[2].spec(1, 3, 6).layers[1]
    assert cutters[0].ref(4).digest != cutters[1].ref(4).digest


def test_the_digest_of_a_share_is_not_taken_for_the_model_or_another_share(models, tmp_path):
    header = models("llama")
    headers = [
        header,
        *(share_header(ShareRules(header), weights, rank) for weights in ([1, 1], [3, 1]) for rank in range(2)),
    ]
    refs = []
    for each in headers:
        digests = LayerDigests(each, tmp_path / "digests.json")
        refs.append(ModelCutter(each, digests).ref(0))
        digests.save()
    assert len({ref.digest for ref in refs}) == len(headers)
    for each, ref in zip(headers, refs, strict=True):
        assert ModelCutter(each, LayerDigests(each, tmp_path / "digests.json")).ref(0) == ref


def test_a_model_of_few_heads_is_shared_by_as_many_devices_as_it_allows(models):
    assert ShareRules(models("llama", heads=8, heads_kv=2)).max_ranks() == 8
    assert ShareRules(models("llama", "q8_0", heads=8, heads_kv=2, head_width=16)).max_ranks() == 4
    with pytest.raises(NotCutError, match="5 devices are more than its"):
        share_header(ShareRules(models("llama", "q8_0", heads=8, heads_kv=2, head_width=16)), [1] * 5, 0)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("granitehybrid", "its layers keep states"),
        ("olmo2", "as wide as the hidden state together"),
        ("minimax-m2", "norms over all heads"),
        ("gptneox", "as wide as the hidden state together"),
        ("mpt", "goes by the number of a head"),
        ("phi3", "how large the context is"),
        ("arctic", "as wide as the hidden state together"),
    ],
)
def test_attention_that_cannot_be_cut_is_whole_and_its_result_the_first_ranks(models, architecture, why):
    header = models(architecture)
    rules, ranks = ShareRules(header), [share_header(ShareRules(header), [1, 1], rank) for rank in range(2)]
    assert re.search(why, rules.why_whole)
    assert rules.units.shares([3, 1])[0][0] == 1.0
    first, second = ({name: content(tensor) for name, tensor in rank.tensors.items()} for rank in ranks)
    outputs = {"attn_output.weight", "attn_output.bias", "ssm_out.weight", "ffn_down.bias"}
    outputs |= {"ffn_down.weight"} if architecture == "arctic" else set()
    for name, tensor in header.tensors.items():
        short = name.removeprefix("blk.2.")
        if short in outputs:
            assert first[name] == content(tensor)
            assert second[name] == bytes(tensor.bytes)
        elif name.startswith("blk.2.") and (
            not short.startswith("ffn") or short.endswith(("norm.weight", "inp.weight"))
        ):
            assert first[name] == second[name] == content(tensor)
    downs = [
        rank.tensors[name] for rank in ranks for name in rank.tensors if re.search(r"blk.2.ffn_down(_exps)?.w", name)
    ]
    assert any(2 * down.shape[0] == header.tensors[down.name].shape[0] for down in downs)
    assert ranks[1].values["general.architecture"] == header.values["general.architecture"]


@pytest.mark.parametrize(
    ("architecture", "why"),
    [("mamba", "no networks, and its layers keep states"), ("bitnet", "ffn_sub_norm.weight' .* a norm over what is")],
)
def test_a_model_that_cannot_be_shared_is_refused_by_name(models, architecture, why):
    with pytest.raises(NotCutError, match=why):
        share_header(ShareRules(models(architecture)), [1, 1], 0)


def test_heads_that_are_too_few_for_two_are_whole(models):
    header = models("llama", "q8_0", heads=2, heads_kv=1, head_width=16)
    assert "more than its 2 heads allow" in ShareRules(header).why_whole
    assert ShareRules(header).max_ranks(3) == 3


def test_every_part_is_of_some_tensor():
    of_states = {Part.FIRST, Part.STATE, Part.STATE_COLUMNS}
    assert {*PARTS.values()} == {*Part} - of_states
