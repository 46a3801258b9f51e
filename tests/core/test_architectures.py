"""The table of architectures: the metadata of a window, and which models are refused for which reason."""

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType

from primad.errors import ModelError
from primad.gguf.architecture import Embedding, Recurrent, Sliding
from primad.gguf.architectures.cuts import cut_multiple, cut_points, cuttable, tail_layers
from primad.gguf.architectures.layers import (
    attending_layers,
    drafting_layers,
    indexed_layers,
    layer_count,
    recurrent_layers,
    sliding_layers,
)
from primad.gguf.architectures.table import SUPPORTED
from primad.gguf.architectures.tensors import TensorRole, embedding_scale, is_shared_tensor, layer_of, tensor_role
from primad.gguf.architectures.values import window_values
from primad.gguf.header import Header, TensorInfo, Value, array_value, scalar_value
from primad.gguf.profile import model_profile
from primad.gguf.windows import beside_values

PATH = Path("model.gguf")
INDEXER = {"attention.indexer.key_length": 128}
GLOBAL = ("token_embd.weight", "output_norm.weight", "output.weight")
SIZES = {"embedding_length": 96, "attention.head_count": 4, "feed_forward_length": 128, "rope.freq_base": 10_000.0}


def value(content):
    match content:
        case Value():
            return content
        case bool():
            return scalar_value(GGUFValueType.BOOL, content)
        case int():
            return scalar_value(GGUFValueType.UINT32, content)
        case float():
            return scalar_value(GGUFValueType.FLOAT32, content)
        case str():
            return scalar_value(GGUFValueType.STRING, content)
        case [bool(), *_]:
            return array_value(GGUFValueType.BOOL, content)
        case [float(), *_]:
            return array_value(GGUFValueType.FLOAT32, content)
        case _:
            return array_value(GGUFValueType.UINT32, content)


def model(architecture, layers=6, *, drop=(), tensors=(), general=None, **keys):
    """A header in memory; ``attention__sliding_window=4`` sets the key ``{architecture}.attention.sliding_window``."""
    keys = {"block_count": layers, **SIZES, **{key.replace("__", "."): content for key, content in keys.items()}}
    if SUPPORTED.get(architecture) and SUPPORTED[architecture].sliding in (Sliding.ALWAYS, Sliding.NEEDED):
        keys.setdefault("attention.sliding_window", 4096)
    if SUPPORTED.get(architecture) and SUPPORTED[architecture].recurrent is Recurrent.HEADS:
        keys.setdefault("attention.head_count_kv", [layer % 4 // 3 * 2 for layer in range(layers)])
    if SUPPORTED.get(architecture) and SUPPORTED[architecture].output_norm not in GLOBAL[1]:
        tensors = [*tensors, f"{SUPPORTED[architecture].output_norm}.weight"]
    values = {"general.architecture": value(architecture), **{k: value(v) for k, v in (general or {}).items()}}
    values |= {f"{architecture}.{key}": value(content) for key, content in keys.items()}
    names = [*GLOBAL, *(f"blk.{layer}.attn_q.weight" for layer in range(layers)), *tensors]
    infos = {
        name: TensorInfo(name=name, type=GGMLQuantizationType.F32, shape=(4, 1), offset=0, bytes=16, path=PATH)
        for name in names
        if name not in drop
    }
    return Header(path=PATH, values=values, tensors=infos, data_offset=0)


def window(header, first, last, vocabulary=1):
    """The window's metadata, decoded, without the architecture's prefix."""
    cuttable(header)
    prefix = header.text("general.architecture") + "."
    decoded = window_values(header, first, last, vocabulary=vocabulary).items()
    return {key.removeprefix(prefix): item.items() if item.is_array else item.scalar() for key, item in decoded}


def refuses(header, *words):
    with pytest.raises(ModelError) as caught:
        cuttable(header)
    for word in (str(PATH), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_every_entry_cuts_a_plain_model(architecture):
    header = model(architecture, 8)
    assert cuttable(header).name == architecture
    values = window(header, 4, 8, vocabulary=77)
    assert values["block_count"] == 4
    assert values["vocab_size"] == 77
    assert values["tokenizer.ggml.model"] == "none"
    assert values["general.architecture"] == architecture
    assert {key: values[key] for key in SIZES} == SIZES


def test_tokenizer_templates_splits_and_unknown_general_keys_are_dropped():
    general = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [1, 2, 3],
        "tokenizer.chat_template": "{{ messages }}",
        "split.count": 3,
        "general.alignment": 64,
        "general.tags": [1, 2],
        "general.file_type": 15,
        "imatrix.file": "x",
    }
    values = window(model("llama", general=general), 0, 6)
    assert values["general.file_type"] == 15
    assert values["tokenizer.ggml.model"] == "none"
    left = {key for key in values if key.startswith(("tokenizer.", "split.", "general.", "imatrix"))}
    assert left == {"tokenizer.ggml.model", "general.architecture", "general.file_type"}


def test_equal_per_layer_arrays_are_sliced():
    header = model("llama", attention__head_count_kv=[2] * 6, feed_forward_length=[128] * 6)
    values = window(header, 1, 4)
    assert values["attention.head_count_kv"] == [2, 2, 2]
    assert values["feed_forward_length"] == [128] * 3


def test_per_layer_arrays_that_differ_are_refused():
    refuses(model("llama", attention__head_count_kv=[2, 2, 2, 2, 4, 4]), "llama.attention.head_count_kv")
    refuses(model("llama", feed_forward_length=[128] * 5), "llama.feed_forward_length")


def test_unknown_arrays_are_copied_unless_they_have_one_item_a_layer():
    assert window(model("llama", something=[1, 2, 3]), 0, 2)["something"] == [1, 2, 3]
    refuses(model("llama", something=[1, 2, 3, 4, 5, 6]), "llama.something")


def test_the_default_sliding_pattern_is_written_out_and_cut():
    header = model("gemma3", 8, attention__sliding_window=512)
    assert sliding_layers(header) == (True, True, True, True, True, False, True, True)
    values = window(header, 4, 8)
    assert values["attention.sliding_window"] == 512
    assert values["attention.sliding_window_pattern"] == [True, False, True, True]


def test_a_period_in_the_file_overrides_the_default():
    header = model("olmo2", attention__sliding_window=512, attention__sliding_window_pattern=2)
    assert sliding_layers(header) == (True, False) * 3


def test_an_explicit_pattern_is_cut():
    pattern = [True, False, False, True, True, False]
    header = model("gemma3", attention__sliding_window=512, attention__sliding_window_pattern=pattern)
    assert window(header, 2, 5)["attention.sliding_window_pattern"] == [False, True, True]
    numbers = model("gemma3", attention__sliding_window=512, attention__sliding_window_pattern=[1, 0, 0, 1, 1, 0])
    assert sliding_layers(numbers) == tuple(pattern)


def test_a_window_without_a_sliding_layer_drops_the_sliding_window():
    values = window(model("gemma3", attention__sliding_window=512), 5, 6)
    assert not [key for key in values if "sliding" in key]


def test_an_architecture_that_always_slides_gets_an_endless_window():
    values = window(model("gpt-oss", attention__sliding_window=128, rope__freq_base=150_000.0), 1, 2)
    assert values["attention.sliding_window"] == 1 << 22
    assert values["attention.sliding_window_pattern"] == [True]
    assert values["rope.freq_base_swa"] == 150_000.0


def test_a_cohere2_window_without_a_sliding_layer_does_not_rotate():
    header = model("cohere2", attention__sliding_window=128, rope__scaling__type="none")
    values = window(header, 3, 4)
    assert values["rope.scaling.type"] == "linear"
    assert values["rope.scaling.factor"] == float("inf")
    assert "rope.scaling.factor" not in window(header, 2, 4)


def test_a_model_without_a_sliding_window_has_no_pattern():
    for keys in ({}, {"attention__sliding_window": 0}):
        assert not [key for key in window(model("gemma3", **keys), 0, 6) if "sliding" in key]


def test_a_sliding_window_that_llama_cpp_ignores_is_dropped():
    header = model("phi3", attention__sliding_window=2047)
    assert not any(sliding_layers(header))
    assert not [key for key in window(header, 0, 6) if "sliding" in key]


def test_patterns_that_do_not_fit_are_refused():
    refuses(model("gemma3", attention__sliding_window=8, attention__sliding_window_pattern=[True]), "one flag for each")
    refuses(model("gemma3", attention__sliding_window=8, attention__sliding_window_pattern=[0] * 6), "no layer slides")
    refuses(model("gpt-oss", attention__sliding_window=0), "gpt-oss.attention.sliding_window")


@pytest.mark.parametrize(("first", "last", "dense"), [(0, 6, 3), (0, 2, 2), (1, 5, 2), (2, 3, 1), (3, 6, 0), (5, 6, 0)])
def test_leading_dense_layers_move_with_the_cut(first, last, dense):
    assert window(model("dots1", leading_dense_block_count=3), first, last)["leading_dense_block_count"] == dense


def test_embedding_scales():
    assert embedding_scale(model("llama")) == 1.0
    root = embedding_scale(model("gemma3"))
    assert root == float(np.sqrt(np.float32(96)))
    assert root == float(np.float32(root))
    assert embedding_scale(model("granite", embedding_scale=12.3)) == float(np.float32(12.3))
    assert embedding_scale(model("granite")) == 1.0
    assert embedding_scale(model("minicpm")) == 12.0


@pytest.mark.parametrize("number", [1e300, -3.5e38, float("inf"), float("nan")])
def test_numbers_beyond_single_precision_are_refused(number):
    header = model("granite", embedding_scale=scalar_value(GGUFValueType.FLOAT64, number))
    with pytest.raises(ModelError, match=r"granite\.embedding_scale.*not a finite number"):
        embedding_scale(header)


def test_windows_do_not_scale_what_the_head_has_scaled():
    scaling = [entry for entry in SUPPORTED.values() if entry.embedding is Embedding.KEY and not entry.is_fed]
    for architecture in (entry.name for entry in scaling):
        multiple = cut_multiple(model(architecture, 12))
        assert window(model(architecture, 12, embedding_scale=12.0), 0, multiple)["embedding_scale"] == 0.0
        assert window(model(architecture, 12), multiple, 12)["embedding_scale"] == 0.0


@pytest.mark.parametrize(
    ("architecture", "keys", "tail"),
    [
        ("qwen35", {}, 2),
        ("qwen35", {"full_attention_interval": 3}, 2),
        ("qwen35", {"attention.recurrent_layers": [True, False] * 6}, 2),
        ("qwen35", {"attention.recurrent_layers": [False] * 5 + [True] * 7}, 8),
        ("jamba", {"attention.head_count_kv": [0, 0, 2] * 4}, 2),
        ("nemotron_h", {"attention.head_count_kv": [0, 2, 0] * 4, "feed_forward_length": [0, 0, 96] * 4}, 3),
        ("falcon-h1", {}, 1),
    ],
)
def test_a_window_of_a_hybrid_has_the_missing_kind_of_layer_after_its_own_and_the_tail_has_both_kinds(
    architecture, keys, tail
):
    header = model(architecture, 12, **{key.replace(".", "__"): content for key, content in keys.items()})
    assert cuttable(header).name == architecture
    assert (cut_multiple(header), tail_layers(header)) == (1, tail)
    kinds = recurrent_layers(header), attending_layers(header)
    assert all(any(kind[-tail:]) for kind in kinds)
    assert window(header, 12 - tail, 12)["block_count"] == tail
    for first, last in combinations(range(12 - tail + 1), 2):
        missing = [kind for kind in kinds if not any(kind[first:last])]
        values, added = window(header, first, last), [kind.index(True) for kind in missing]
        assert values["block_count"] == last - first + len(missing)
        for key, content in keys.items():
            if isinstance(content, list):
                assert values[key] == [*content[first:last], *(content[layer] for layer in added)]


def test_a_window_without_attention_has_keys_and_values_of_one_head_after_its_layers():
    tensors = [f"blk.{layer}.attn_{name}.weight" for layer in (3, 7) for name in "kv"]
    for architecture, heads in (("jamba", [0, 0, 1]), ("qwen35", 1)):
        header = model(architecture, 8, tensors=tensors)
        assert window(header, 0, 2)["attention.head_count_kv"] == heads
        assert window(header, 2, 4).get("attention.head_count_kv") == (None if heads == 1 else [0, 2])


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("qwen35", {"attention__recurrent_layers": [True, False]}),
        ("jamba", {"attention__head_count_kv": [0, 2]}),
        ("nemotron_h", {"attention__head_count_kv": [0, 2, 0] * 2, "feed_forward_length": [0, 0]}),
    ],
)
def test_a_hybrid_that_does_not_say_what_its_layers_are_is_refused(architecture, keys):
    with pytest.raises(ModelError, match="for each of 6 layers is expected"):
        cut_multiple(model(architecture, **keys))


def test_a_known_array_of_as_many_values_as_there_are_layers_is_not_by_layer():
    assert cuttable(model("qwen35", 4, rope__dimension_sections=[11, 11, 10, 0])).name == "qwen35"


def test_an_interval_of_no_layers_is_no_interval():
    assert cut_multiple(model("qwen35", full_attention_interval=0)) == 6, "llama.cpp takes no model without attention"


def test_the_output_norm_of_lfm2_has_another_name():
    assert tensor_role(model("lfm2"), "token_embd_norm.weight") is TensorRole.OUTPUT_NORM
    refuses(model("llama", tensors=["token_embd_norm.weight"]), "token_embd_norm.weight")


def test_minicpms_residual_scale_is_that_of_the_whole_model():
    expected = float(np.float32(1.4) / np.sqrt(np.float32(40)))
    assert window(model("minicpm", 40), 0, 3)["residual_scale"] == expected
    assert window(model("minicpm", 40, residual_scale=0.5), 0, 3)["residual_scale"] == 0.5


def test_deepseek2_lite_stays_lite():
    lite = window(model("deepseek2", 27), 0, 3)
    assert lite["attention.q_lora_rank"] == 0
    assert lite["expert_gating_func"] == 1
    full = window(model("deepseek2", 61, attention__q_lora_rank=1536, expert_gating_func=2), 0, 3)
    assert full["attention.q_lora_rank"] == 1536
    assert full["expert_gating_func"] == 2
    sigmoid = window(model("deepseek2", 47, attention__q_lora_rank=768, vocab_size=154_880), 0, 3)
    assert sigmoid["expert_gating_func"] == 2


@pytest.mark.parametrize(("layers", "count"), [(61, 26), (61, 27)])
def test_a_window_that_llama_cpp_would_take_for_deepseek2_lite_is_refused(layers, count):
    header = model("deepseek2", layers, attention__q_lora_rank=1536)
    cuttable(header)
    with pytest.raises(ModelError, match=f"takes {count} layers of 'deepseek2' for the lite model"):
        window_values(header, 1, 1 + count, vocabulary=1)


def test_counts_that_change_llama_cpps_graph_are_refused():
    refuses(model("gemma3", 62, attention__key_length=128), "gemma3 with 62 layers")
    refuses(model("exaone4", 64), "exaone4 with 64 layers")
    refuses(model("command-r", 64), "command-r with 64 layers")
    assert cuttable(model("gemma3", 62)).name == "gemma3"
    with pytest.raises(ModelError, match="62 layers"):
        window_values(model("gemma3", 70, attention__key_length=128), 0, 62, vocabulary=1)


def test_laguna_slides_but_for_every_fourth_layer_from_the_first_on():
    """llama.cpp rotates all full-attention layers as it does a window's first layer, so that layer must not slide."""
    slides = [False, True, True, True] * 2
    default, reported = model("laguna", 8, attention__sliding_window=24), {"attention.sliding_window_pattern": slides}
    assert list(sliding_layers(default)) == slides
    assert cut_multiple(model("laguna", 8, attention__sliding_window=24, **reported)) == 4
    assert not any(sliding_layers(model("laguna", 8)))
    other = {"attention.sliding_window_pattern": slides[::-1]}
    refuses(model("laguna", 8, attention__sliding_window=24, **other), "sliding_window_pattern")


def test_smallthinker_has_no_window_of_four_layers():
    """llama.cpp takes such a window for a variant all of whose layers rotate."""
    for layers, multiple in ((32, 8), (52, 20), (16, 8), (9, 9)):
        header = model("smallthinker", layers, attention__sliding_window=24)
        assert min(cut_multiple(header), layers) == multiple
    assert cut_multiple(model("smallthinker", 32)) == 4, "of one that does not slide all rotate"


def test_every_window_of_minimax_m3_has_sparse_attention_and_of_granite_swa_one_that_rotates():
    assert cut_multiple(model("minimax-m3", 60, leading_dense_block_count=3, **INDEXER)) == 4
    rotates = {"attention.rope_pattern": [True, False, False, False] * 2}
    assert cut_multiple(model("granite_swa", 8, attention__sliding_window=24, **rotates)) == 4


def test_every_window_of_deci_has_attention_and_heads_of_the_models_width():
    """Nemotron 51B and 49B have layers without attention or without KV heads."""
    heads = {"attention.head_count": [4, 0, 4, 4], "attention.head_count_kv": [2, 0, 0, 1]}
    header = model("deci", 4, embedding_length=64, **heads)
    assert attending_layers(header) == (True, False, False, True)
    assert cut_multiple(header) == 2
    values = window(header, 2, 4)
    assert (values["attention.key_length"], values["rope.dimension_count"]) == (16, 16)
    assert values["attention.head_count_kv"] == [0, 1]
    first = {"attention.head_count": [4, 4, 0, 4] * 2, "attention.head_count_kv": [1, 0, 0, 1] * 2}
    assert cut_multiple(model("deci", 8, **first)) == 4, "no window begins with a layer without heads"
    reported = window(model("deci", 4, embedding_length=64, attention__key_length=8, **heads), 2, 4)
    assert (reported["attention.key_length"], reported["rope.dimension_count"]) == (8, 8)
    none = {"feed_forward_length": [8, 8, 0, 8]}
    refuses(model("deci", 4, **heads, **none), "feed_forward_length", "left out of the graph")


def test_windows_of_glm_5_2_begin_where_a_layer_chooses_what_attention_sees():
    assert cut_multiple(model("glm-dsa", 78, context_length=202_752, **INDEXER)) == 1
    new = model("glm-dsa", 78, context_length=1 << 20, **INDEXER)
    assert [layer for layer, chooses in enumerate(indexed_layers(new)) if chooses][:6] == [0, 1, 2, 6, 10, 14]
    assert cut_points(new) == range(2, 78, 4)
    profile = model_profile(new)
    assert (profile.cut_multiple, profile.cut_offset, profile.cut_points) == (4, 2, cut_points(new))
    assert window(new, 2, 6)["attention.indexer.types"] == [1, 0, 0, 0]
    with pytest.raises(ModelError, match="multiple of 4 layers and 2 more, not at layer 4"):
        window(new, 4, 78)
    types = {"attention.indexer.types": [1, 0, 0, 1, 0, 0]}
    header = model("glm-dsa", 6, context_length=1 << 20, **INDEXER, **types)
    assert cut_multiple(header) == 3
    assert window(header, 3, 6)["attention.indexer.types"] == [1, 0, 0]
    assert window(new, 42, 78)["attention.indexer.types"][:5] == [1, 0, 0, 0, 1]


def test_positions_are_added_by_the_head_and_windows_have_one_row_of_them():
    header = model("gpt2", 4)
    assert window(header, 2, 4)["context_length"] == 1
    assert tensor_role(header, "position_embd.weight") is TensorRole.POSITIONS
    with pytest.raises(ModelError, match="position_embd"):
        tensor_role(model("llama", 4), "position_embd.weight")


def test_smollm3_is_cut_at_every_fourth_layer():
    header = model("smollm3", 12)
    assert window(header, 4, 11)["block_count"] == 7
    with pytest.raises(ModelError, match="multiple of 4 layers, not at layer 3"):
        window_values(header, 3, 6, vocabulary=1)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("rwkv7", "values of the first one"),
        ("deepseek4", "several hidden states"),
        ("gemma3n", "layers apart by number"),
        ("minicpm3", "number of layers"),
        ("plm", "aborts"),
        ("talkie", "inputs in addition"),
        ("llada", "causal"),
        ("bert", "causal"),
        ("nosuch", "not known"),
        ("evil\nname", "not known"),
    ],
)
def test_architectures_are_refused_by_name(architecture, reason):
    refuses(model(architecture), repr(architecture), reason, "serve it with --single-device")


@pytest.mark.parametrize(
    ("key", "content"),
    [
        ("nextn_predict_layers", 1),
        ("attention.causal", False),
        ("attention.key_length_swa", 128),
        ("rope.dimension_sections", [16, 24, 24, 0]),
        ("deepstack_mapping", [1, 2]),
        ("pooling_type", 1),
    ],
)
def test_keys_are_refused_by_name(key, content):
    refuses(model("llama", **{key.replace(".", "__"): content}), f"llama.{key}", "serve it with --single-device")


def test_harmless_values_of_those_keys_are_not_refused():
    cuttable(model("llama", nextn_predict_layers=0, attention__causal=True, pooling_type=0))
    cuttable(model("llama", rope__dimension_sections=[0, 0, 0, 0]))


def test_activation_precision_by_tensor_name_is_refused():
    refuses(model("llama", general={"general.tensor_extra.name": [1]}), "general.tensor_extra.name")


def test_a_tail_that_predicts_has_the_prediction_layer_after_its_own():
    header = model("glm4moe", 7, nextn_predict_layers=1, leading_dense_block_count=1, feed_forward_length=[*range(7)])
    for first, last, lengths in ((4, 6, [4, 5, 6]), (2, 4, [2, 3])):
        made = window_values(header, first, last, vocabulary=1, predicts=True)
        assert made["glm4moe.block_count"].scalar() == len(lengths)
        assert made["glm4moe.feed_forward_length"].items() == lengths
        assert ("glm4moe.nextn_predict_layers" in made) == (last == 6)


NEEDED = [f"blk.6.{name}.weight" for name in ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "ffn_gate_inp")]
LATENT = [*NEEDED, "blk.6.attn_q_a.weight", "blk.6.attn_k_b.weight"]


@pytest.mark.parametrize(
    ("header", "count"),
    [
        (model("glm4moe", 7, nextn_predict_layers=1, tensors=NEEDED), 1),
        (model("glm4moe", 7, nextn_predict_layers=1, tensors=NEEDED[1:]), 0),
        (model("glm4moe", 8, nextn_predict_layers=2, tensors=NEEDED), 0),
        (model("glm4moe", 7, tensors=NEEDED), 0),
        (model("deepseek2", 7, nextn_predict_layers=1, tensors=LATENT), 1),
        (model("deepseek2", 7, nextn_predict_layers=1, tensors=NEEDED), 0),
        (model("deepseek2", 7, nextn_predict_layers=1, tensors=LATENT, attention__temperature_scale=0.5), 0),
        (model("mistral4", 7, nextn_predict_layers=1, tensors=NEEDED), 0),
        (model("qwen35moe", 7, nextn_predict_layers=1, tensors=NEEDED), 1),
        (model("qwen35", 7, nextn_predict_layers=1, tensors=NEEDED), 0),
        (model("qwen35", 7, nextn_predict_layers=1, tensors=[*NEEDED[:3], "blk.6.ffn_gate.weight"]), 1),
    ],
    ids=[
        *("one", "without its matrix", "two", "none", "latent", "with heads", "scaled", "another graph"),
        *("after states", "without experts", "dense"),
    ],
)
def test_one_whole_layer_drafts_where_llama_cpps_graph_for_it_is_known(header, count):
    assert drafting_layers(header) == count


def test_layers_for_multi_token_prediction_are_in_no_window():
    header = model("glm4moe", 7, nextn_predict_layers=1, leading_dense_block_count=1, feed_forward_length=[96] * 7)
    assert cuttable(header).name == "glm4moe"
    assert layer_count(header) == 6
    assert tensor_role(header, "blk.6.nextn.eh_proj.weight") is TensorRole.UNUSED
    values = window(header, 4, 6)
    assert values["feed_forward_length"] == [96, 96]
    assert "nextn_predict_layers" not in values
    refuses(model("glm4moe", tensors=["blk.7.attn_q.weight"], nextn_predict_layers=1), "blk.7.attn_q.weight")
    with pytest.raises(ModelError, match="leaves none of 6 layers"):
        layer_count(model("glm4moe", nextn_predict_layers=6))


@pytest.mark.parametrize(
    ("slides", "multiple"),
    [
        ([1, 1, 1, 1], 1),
        ([1, 1, 0, 1, 1, 0], 2),
        ([0, 1, 1, 1, 0, 1, 1, 1], 2),
        ([1, 1, 0, 0, 1, 0], 3),
        ([1, 0, 0, 0, 0, 0], 6),
        ([1, 1, 1, 0, 0], 5),
    ],
)
def test_windows_begin_where_each_has_a_layer_that_slides(slides, multiple):
    """Gemma 4's sliding layers have other head sizes."""
    pattern = [bool(each) for each in slides]
    sizes = {"attention__key_length": 32, "attention__key_length_swa": 16}
    header = model(
        "gemma4", len(slides), attention__sliding_window=8, attention__sliding_window_pattern=pattern, **sizes
    )
    assert cuttable(header).name == "gemma4"
    assert cut_multiple(header) == multiple
    for first in range(0, len(slides), multiple):
        values = window(header, first, min(first + multiple, len(slides)))
        assert any(values["attention.sliding_window_pattern"])


def per_layer(layers, period, sharing):
    """Gemma 4 with 256 input values per layer; every ``period``-th layer does not slide."""
    pattern = [layer % period != period - 1 for layer in range(layers)]
    header = model(
        "gemma4",
        layers,
        attention__sliding_window=8,
        attention__sliding_window_pattern=pattern,
        embedding_length_per_layer_input=256,
        attention__shared_kv_layers=sharing,
        feed_forward_length=[128 + layer for layer in range(layers)],
        embedding_length=4,
    )
    shapes = {"per_layer_token_embd.weight": (256 * layers, 1), "per_layer_model_proj.weight": (4, 256 * layers)}
    shapes["per_layer_proj_norm.weight"] = (256,)
    tables = {
        name: TensorInfo(name=name, type=GGMLQuantizationType.F32, shape=shape, offset=0, bytes=4096, path=PATH)
        for name, shape in shapes.items()
    }
    return replace(header, tensors={**header.tensors, **tables})


@pytest.mark.parametrize(
    ("layers", "period", "sharing", "places"),
    [(35, 5, 20, range(2, 14, 2)), (42, 6, 18, range(2, 24, 2)), (35, 5, 33, []), (42, 6, 0, range(2, 42, 2))],
    ids=["E2B", "E4B", "nearly-all", "none"],
)
def test_layers_that_use_the_cells_of_others_are_in_the_last_window_with_them(layers, period, sharing, places):
    header = per_layer(layers, period, sharing)
    assert [*cut_points(header)] == [*places]
    for first, last in pairwise([0, *places, layers]):
        values = window(header, first, last)
        assert values["attention.shared_kv_layers"] == (sharing if last == layers else 0)
        assert any(values["attention.sliding_window_pattern"])
    if sharing:
        with pytest.raises(ModelError, match=f"the last window has at least {sharing + 2} of {layers} layers, so none"):
            window_values(header, (layers - 1) // 2 * 2, layers, vocabulary=1)


def test_inputs_of_layers_besides_hidden_states_go_as_far_as_windows_need_them():
    assert beside_values(per_layer(35, 5, 20)) == 4 + 12 * 256 + 1
    assert beside_values(model("gemma4", attention__sliding_window=8)) == 0


@pytest.mark.parametrize("name", ["per_layer_token_embd.weight", "per_layer_model_proj.weight"])
def test_tables_of_another_number_of_layers_are_refused(name):
    header = per_layer(35, 5, 20)
    other = replace(header.tensors[name], shape=(256, 256))
    refuses(replace(header, tensors={**header.tensors, name: other}), name, "not 256 values for each of 35 layers")
    refuses(
        replace(header, tensors={n: t for n, t in header.tensors.items() if n != name}), name, "not a complete model"
    )


def test_windows_keep_to_the_step_of_layers_with_experts():
    assert cut_multiple(model("llama4", 12, interleave_moe_layer_step=6)) == 12
    assert cut_multiple(model("llama4", 12)) == 4
    assert cut_multiple(model("ernie4_5-moe", interleave_moe_layer_step=2)) == 2
    refused = model("llama4", 8, attention__sliding_window=0)
    assert window(refused, 4, 8)["attention.sliding_window"] == 0


def test_values_of_one_a_layer_go_with_their_layers():
    header = model("mimo2", attention__head_count_kv=[1, 2, 2, 1, 2, 2], attention__sliding_window=8)
    assert window(header, 2, 5)["attention.head_count_kv"] == [2, 1, 2]
    refuses(
        model("mimo2", attention__head_count_kv=[1, 2], attention__sliding_window=8), "mimo2.attention.head_count_kv"
    )
    activations = {"xielu.alpha_n": value([0.5, 0.6, 0.7, 0.8, 0.9, 1.0])}
    assert window(model("apertus", general=activations), 1, 3)["xielu.alpha_n"] == pytest.approx([0.6, 0.7])


@pytest.mark.parametrize("tensor", ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"])
def test_shared_tensors(tensor):
    assert is_shared_tensor(tensor)
    assert tensor_role(model("llama"), tensor) is TensorRole.SHARED


def test_tensor_roles():
    header = model("llama")
    assert tensor_role(header, "blk.5.ffn_up.weight") is TensorRole.LAYER
    assert tensor_role(header, "token_embd.weight") is TensorRole.EMBEDDING
    assert tensor_role(header, "output_norm.bias") is TensorRole.OUTPUT_NORM
    assert tensor_role(header, "output.weight") is TensorRole.OUTPUT
    assert not is_shared_tensor("output.weight")


@pytest.mark.parametrize(
    "tensor", ["position_embd.weight", "output.scale", "cls.weight", "dense_2.weight", "blk.6.attn_q.weight", "blk.x.y"]
)
def test_other_tensors_are_refused_by_name(tensor):
    refuses(model("llama", tensors=[tensor]), tensor)


@pytest.mark.parametrize("tensor", ["token_embd.weight", "output_norm.weight"])
def test_missing_tensors_are_named(tensor):
    refuses(model("llama", drop=[tensor]), tensor, "not a complete model")


def test_a_missing_output_matrix_matters_only_without_the_fallback():
    cuttable(model("llama", drop=["output.weight"]))
    refuses(model("olmoe", drop=["output.weight"]), "output.weight")


def test_a_layer_without_tensors_is_named():
    refuses(model("llama", drop=["blk.3.attn_q.weight"]), "layer 3 has no tensors")


def test_layer_of():
    assert layer_of("blk.0.attn_q.weight") == 0
    assert layer_of("blk.123.attn_q.weight") == 123
    for name in ("blk.01.x", "blk.-1.x", "blk.x.y", "blk.1", "enc.blk.1.x", "output.weight", "blk.99999.x"):
        assert layer_of(name) is None


@pytest.mark.parametrize("layers", [0, 513, 1 << 31])
def test_absurd_layer_counts(layers):
    header = model("llama", 1, block_count=layers)
    with pytest.raises(ModelError, match=r"llama\.block_count"):
        layer_count(header)
