"""Architectures outside the table, tried by llama.cpp itself: which are certified, which are refused and why."""

from __future__ import annotations

import msgspec
import pytest

from primad.certify.verdict import CheckVerdict
from primad.gguf.architectures.table import SUPPORTED
from tools import synth
from tools.lab import zoo


@pytest.fixture
def check(command, tmp_path, monkeypatch):
    """The verdict on a synthetic model of an ``architecture`` removed from the table."""

    def run(architecture, layers=zoo.LAYERS, **options):
        monkeypatch.delitem(SUPPORTED, zoo.VARIANTS.get(architecture, architecture), raising=False)
        path = tmp_path / "model.gguf"
        synth.write_model(path, architecture=architecture, layers=layers, **options)
        code, out, _ = command("check", path, "--json", "--home", tmp_path / "home", "--time-limit", 600)
        verdict = msgspec.json.decode(out, type=CheckVerdict)
        assert code == (verdict.result != "certified")
        return verdict

    return run


@pytest.mark.parametrize(
    ("architecture", "multiple", "entry"),
    [
        ("phi3", 1, "embd"),
        ("gemma2", 2, "inp_scaled"),
        ("glm4moe", 1, "embd"),
        ("qwen35", 4, "model.input_embed"),
        ("step35", 2, "attn_norm_in-0"),
        ("mpt", 1, "inpL"),
        ("bloom", 1, "inp_norm-0"),
    ],
)
def test_windows_are_found_exact_without_a_table(check, architecture, multiple, entry):
    verdict = check(architecture)
    assert (verdict.result, verdict.cut_multiple) == ("certified", multiple)
    assert verdict.entry is not None
    assert verdict.entry.entries[-1] == entry
    cut_points = range(multiple, verdict.layers, multiple)
    assert {route.cuts for route in verdict.routes} >= {(0, cut, verdict.layers) for cut in cut_points}, "every length"
    assert {route.outcome for route in verdict.routes if route.kv_type == "f16"} == {"equal"}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "architecture", sorted({*SUPPORTED, *zoo.MODELS} - {"apertus", "gemma3", "mamba", "minicpm", "rwkv6"})
)
def test_nearly_every_architecture_of_the_table_could_do_without_it(check, architecture):
    verdict = check(architecture)
    ignored = f"{verdict.architecture}.leading_dense_block_count not exercised"
    assert verdict.result == "certified" or (architecture in ("bailingmoe", "hy_v3") and verdict.why == ignored)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("minicpm", "not exact, wherever they begin"),  # its residual scale is computed from the number of layers
        ("dream", "depend on later ones"),
        ("bailingmoe", "leading_dense_block_count not exercised"),
    ],
)
def test_a_model_that_cannot_be_cut_or_was_not_exercised_is_not_certified(check, architecture, why):
    verdict = check(architecture)
    assert verdict.result == "not certified"
    assert why in verdict.why


@pytest.mark.slow
@pytest.mark.matrix
def test_a_graph_that_goes_by_the_number_of_layers_is_cut_where_it_does_not(check):
    """llama.cpp takes 32 of the 48 layers for Baichuan 7B and 40 for 13B, with different positions than for other
    numbers.
    """
    verdict = check("baichuan", layers=48)
    assert (verdict.result, verdict.cut_multiple) == ("certified", 3)
