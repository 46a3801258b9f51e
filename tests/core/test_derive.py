"""Unknown architectures: the derived entry, and its certification."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from primad.certify import first
from primad.certify.derive import GraphNode, derived, multiples, named, provisional
from primad.certify.first import FIRST_LOAD_S, certified, warning
from primad.certify.verdict import load_verdict, save_verdict, windows_line, with_verdict
from primad.errors import EngineError, ModelError
from primad.gguf.architecture import Architecture, Recurrent, Sliding
from primad.gguf.architectures.cuts import cut_multiple, cuttable
from primad.gguf.architectures.layers import attending_layers, recurrent_layers
from primad.gguf.architectures.table import ENTRY_KEY, EXIT_KEY, NotCutError
from primad.gguf.architectures.tensors import embedding_scale
from primad.gguf.profile import model_profile
from tests.core.test_architectures import model, window
from tests.core.test_certify import VERDICT

NAMES = Architecture(name="new", entries=("embd", "inp_scaled"), exit="l_out-{layer}")


def graph(*names):
    """Nodes with the shape of hidden states; names with a leading dot have another shape."""
    return [GraphNode(name.removeprefix("."), not name.startswith(".")) for name in names]


def blocks(*names, layers=6):
    return [f"{name}-{number}" for number in range(layers) for name in names]


def nodes_named(*names):
    return [(each.entries, each.exit, each.last_exit) for each in named(model("new"), graph(*names))]


def test_the_entry_node_is_the_token_lookup_and_the_exit_node_a_layers_last_one():
    found = nodes_named("embd", *blocks("attn_norm", ".Qcur", "ffn_out", "l_out"), "norm", "result_norm")
    assert found[0] == (("embd",), "l_out-{layer}", "")


def test_only_the_first_window_computes_the_scale_of_tokens():
    found = nodes_named("embd", "inp_scaled", "node_2", *blocks("attn_norm", ".Qcur", "l_out"), "result_norm")
    assert found[0][0] == ("embd", "inp_scaled")
    assert nodes_named("node_0", "embd", *blocks("attn_norm", ".Qcur", "l_out"))[0][0] == ("node_0", "embd")


def test_a_norm_of_tokens_may_have_the_first_layers_number():
    found = nodes_named("embd", "norm-0", "inp_norm-0", "norm-0", *blocks("attn_norm", ".Qcur", "l_out"))
    assert {each[0] for each in found} == {("embd",), ("embd", "inp_norm-0")}


def test_a_layers_output_may_be_called_by_the_next_one():
    found = nodes_named(*blocks("attn_norm_in", ".Qcur", "ffn_out"), "h_nextn", "norm", "result_norm")
    assert (("attn_norm_in-0",), "attn_norm_in-{after}", "h_nextn") in found
    assert NAMES.exit_of(3, is_last=True) == "l_out-3"
    assert replace(NAMES, exit="x-{after}", last_exit="h").exit_of(3, is_last=False) == "x-4"


def test_repeated_names_and_nodes_without_a_name_are_no_route():
    found = nodes_named("embd", *blocks("norm", "norm", "l_out", "l_out", "x"))
    assert [each[1] for each in found] == ["x-{layer}"]
    for names in ((), ("embd",), (".embd", *blocks(".x")), ("embd", *blocks("x", "x"))):
        with pytest.raises(ModelError, match="no node of its graph"):
            nodes_named(*names)


def test_everything_with_a_value_a_layer_is_sliced():
    header = provisional(model("new", attention__head_count_kv=[1, 2, 3, 4, 5, 6], some__list=[1, 2, 3]))
    values = window(derived(header, NAMES, 2), 2, 4)
    assert values["attention.head_count_kv"] == [3, 4]
    assert values["some.list"] == [1, 2, 3]
    assert values["block_count"] == 2


def test_the_metadata_of_a_window_names_its_entry_and_exit_nodes():
    header = derived(provisional(model("new")), NAMES, 1)
    assert [window(header, first, first + 1)[ENTRY_KEY] for first in (0, 1)] == ["embd", "inp_scaled"]
    assert window(header, 0, 1)[EXIT_KEY] == "l_out-{layer}"
    assert embedding_scale(header) == 1.0, "the graph of the first window scales"
    assert ENTRY_KEY not in window(model("llama"), 0, 1)


def test_cuts_are_tried_at_multiples_of_layers():
    header = provisional(model("new", 8))
    assert multiples(header) == [1, 2, 3, 4, 5, 6, 7]
    assert cut_multiple(derived(header, NAMES, 4)) == 4
    with pytest.raises(ModelError, match="multiple of 4 layers"):
        window(derived(header, NAMES, 4), 2, 4)
    assert multiples(provisional(model("new", 1))) == []


def test_layers_that_slide_without_a_list_do_so_by_their_number():
    plain = provisional(model("new", attention__sliding_window=512, attention__sliding_window_pattern=3))
    assert plain.derived.sliding is Sliding.FIXED
    values = window(derived(plain, NAMES, 3), 3, 6)
    assert (values["attention.sliding_window"], values["attention.sliding_window_pattern"]) == (512, 3)
    slides = [True, True, False] * 2
    listed = provisional(model("new", attention__sliding_window=512, attention__sliding_window_pattern=slides))
    assert listed.derived.sliding is Sliding.NEEDED
    assert multiples(listed)[0] == 2, "no window without a layer that slides"


def test_layers_with_a_state_are_known_by_their_tensors():
    names = [f"blk.{each}.ssm_conv1d.weight" for each in (0, 1, 3, 4)]
    names += [f"blk.{each}.attn_k.weight" for each in (2, 5)]
    header = provisional(model("new", tensors=names))
    assert header.derived.recurrent is Recurrent.TENSORS
    assert recurrent_layers(header) == (True, True, False, True, True, False)
    assert attending_layers(header) == (False, False, True, False, False, True)
    assert multiples(header) == [3, 4], "each window has both kinds"
    assert provisional(model("new")).derived.recurrent is Recurrent.NEVER


def test_a_model_that_cannot_be_cut_is_refused_before_any_check():
    for header, words in (
        (model("rwkv7"), "values of the first one"),
        (model("bert"), "not a causal text decoder"),
        (model("new", attention__causal=False), "not causal"),
        (model("new", pooling_type=1), "embedding model"),
        (model("llama", attention__key_length_swa=8), "another size"),
    ):
        with pytest.raises(NotCutError, match=words):
            provisional(header)
    with pytest.raises(ModelError, match="not a complete model"):
        provisional(model("new", drop=["token_embd.weight"]))


@pytest.fixture
def checks(monkeypatch):
    """Records checks; ``result`` is the verdict to return or the exception to raise."""

    class Checks(list):
        result = msgspec.structs.replace(VERDICT, architecture="new", entry=NAMES)

    found = Checks()

    def check(header, wanted, advance):
        found.append(wanted)
        advance("windows")
        if isinstance(found.result, Exception):
            raise found.result
        return found.result

    monkeypatch.setattr(first, "check", check)
    return found


def test_an_unknown_architecture_is_certified_once_when_it_is_first_loaded(checks, tmp_path):
    printed = []
    found, why = certified(model("new"), tmp_path, printed.append)
    assert (cuttable(found).entries, why) == (NAMES.entries, "")
    assert checks[0].time_limit_s == FIRST_LOAD_S
    assert "'new' is not known" in printed[0]
    assert printed[-1].startswith("architecture 'new': certified")
    again = []
    assert certified(model("new"), tmp_path, again.append) == (found, "")
    assert (again, len(checks)) == ([], 1)


@pytest.mark.parametrize("result", ["not certified", "not finished"])
def test_an_uncertified_architecture_is_refused_with_a_reason_and_not_checked_again(checks, tmp_path, result):
    checks.result = msgspec.structs.replace(checks.result, result=result, why="windows of it are not exact")
    for _ in range(2):
        found, why = certified(model("new"), tmp_path, lambda _: None)
        assert found.derived is None
        assert why.startswith("architecture 'new' is ")
        assert ("not exact" if result == "not certified" else "--time-limit") in why
    assert len(checks) == 1


def test_a_check_that_could_not_be_made_is_made_again(checks, tmp_path):
    checks.result = EngineError("memory is short")
    for _ in range(2):
        assert "memory is short" in certified(model("new"), tmp_path, lambda _: None)[1]
    assert len(checks) == 2


def test_the_table_and_what_it_refuses_need_no_check(checks, tmp_path):
    for name in ("llama", "bert"):
        header = model(name)
        assert certified(header, tmp_path, pytest.fail) == (header, "")
    assert "not causal" in certified(model("new", attention__causal=False), tmp_path, pytest.fail)[1]
    assert checks == []


def test_a_model_of_the_table_that_is_not_certified_is_served_with_a_warning(tmp_path):
    header = model("llama", 12, context_length=4096)
    assert warning(header, load_verdict(tmp_path, header)) == ""
    save_verdict(tmp_path, header, VERDICT)
    assert warning(header, load_verdict(tmp_path, header)) == ""
    failed = msgspec.structs.replace(VERDICT, result="not certified", why="llama.x not exercised")
    save_verdict(tmp_path, header, failed)
    assert "llama.x not exercised; output of several devices may differ" in warning(
        header, load_verdict(tmp_path, header)
    )
    assert "llama.x not exercised" in windows_line(tmp_path, header, [0, 3])
    assert with_verdict(model_profile(header), header, load_verdict(tmp_path, header)).cut_multiple == 1


def test_a_plan_uses_the_certified_cuts(tmp_path):
    header = model("new", 12, context_length=4096)
    profile = model_profile(header)
    assert with_verdict(profile, header, load_verdict(tmp_path, header)).cut_multiple == 1
    assert "serve does first" in windows_line(tmp_path, header, [0])
    entry = replace(provisional(header).derived, cut_multiple=4)
    save_verdict(tmp_path, header, msgspec.structs.replace(VERDICT, entry=entry))
    assert with_verdict(profile, header, load_verdict(tmp_path, header)).cut_multiple == 4
    assert "checked bit for bit" in windows_line(tmp_path, header, [0, 4])
    failed = msgspec.structs.replace(VERDICT, entry=entry, result="not certified", why="no exact cut")
    save_verdict(tmp_path, header, failed)
    assert with_verdict(profile, header, load_verdict(tmp_path, header)).cut_multiple == 12, "one device has it all"
    assert windows_line(tmp_path, header, [0]).endswith("no exact cut")


def test_a_plan_gives_a_model_that_cannot_be_cut_to_one_device(tmp_path):
    header = model("bert", 12, context_length=4096)
    assert with_verdict(model_profile(header), header, load_verdict(tmp_path, header)).cut_multiple == 12
    assert "one device serves this model" in windows_line(tmp_path, header, [0])


def test_a_verdict_on_a_derived_entry_is_none_of_one_in_the_table(tmp_path):
    for name, entry in (("llama", NAMES), ("new", None)):
        header = model(name)
        save_verdict(tmp_path, header, msgspec.structs.replace(VERDICT, entry=entry))
        assert load_verdict(tmp_path, header) is None
