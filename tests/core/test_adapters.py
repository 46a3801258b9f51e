"""LoRA adapters: what is judged before anything is loaded, what a window takes of them, what they take of memory."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from halda import cost
from primad.errors import ConfigError, ModelError, ProtocolError
from primad.gguf.adapter import check_adapter, open_adapter
from primad.gguf.header import read_header
from primad.gguf.profile import model_profile
from primad.gguf.windows import ModelCutter
from primad.head.loads import adapted
from primad.head.service import ModelSource
from primad.planning.adapters import check_adapters, open_adapters, parse_lora, with_adapters
from primad.planning.question import default_workload
from tests.fakes.gguf import write_adapter
from tools import synth

QUERY = "blk.{}.attn_q.weight"


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path)
    return read_header(path)


def of(model, *names):
    return {name: model.tensors[name].shape for name in names}


def queries(model, *layers):
    return of(model, *(QUERY.format(layer) for layer in layers))


def test_a_window_takes_its_own_layers_of_an_adapter(model, tmp_path):
    adapter = open_adapter(write_adapter(tmp_path / "lora.gguf", queries(model, 1, 2, 4)), 0.5, model)
    spec = adapter.spec(1, 4)
    assert (spec.numbers, spec.scale, spec.alpha) == ((0, 1), 0.5, 8.0)
    assert [tensor.name for tensor in spec.layers[0].tensors] == [f"blk.*.attn_q.weight.lora_{part}" for part in "ab"]
    assert adapter.source(spec.layers[0].digest) is not None
    assert adapter.spec(5, 6) is None
    window = adapted(ModelCutter(model).spec(0, 1, 4), [adapter])
    assert window.files == (*window.layers, *spec.layers)
    check_adapter(spec, 3)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"numbers": (1, 0)}, "not in order"),
        ({"numbers": (0,)}, "not in order"),
        ({"numbers": (0, 7)}, "beyond the 3"),
        ({"numbers": (-1, 1)}, "beyond the 3"),
        ({"alpha": float("inf")}, "impossible weight"),
    ],
    ids=["order", "count", "beyond", "negative", "infinite"],
)
def test_an_impossible_spec_from_a_peer_is_refused(changed, said, model, tmp_path):
    adapter = open_adapter(write_adapter(tmp_path / "lora.gguf", queries(model, 1, 2)), 1.0, model)
    with pytest.raises(ProtocolError, match=said):
        check_adapter(msgspec.structs.replace(adapter.spec(1, 4), **changed), 3)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"architecture": "qwen3"}, "is for 'qwen3', and model.gguf is 'llama'"),
        ({"kind": "model"}, "is no adapter but a model"),
        ({"tensors": {"blk.0.attn_x.weight": (64, 64)}}, "which is not in model.gguf"),
        ({"tensors": {"blk.0.attn_q.weight": (64, 63)}}, "do not change one of"),
        ({"tensors": {}}, "has no matrices"),
    ],
    ids=["architecture", "kind", "name", "shape", "empty"],
)
def test_what_is_no_adapter_of_the_model_is_refused_by_name(written, said, model, tmp_path):
    arguments = {"tensors": queries(model, 0), **written}
    file = write_adapter(tmp_path / "lora.gguf", **arguments)
    with pytest.raises(ModelError, match=said):
        open_adapter(file, 1.0, model)


def test_a_model_is_no_adapter(model):
    with pytest.raises(ModelError, match="is no adapter but a model"):
        open_adapter(model.path, 1.0, model)


def test_files_and_scales_are_read(tmp_path):
    strange = tmp_path / "a=b.gguf"
    strange.touch()
    assert parse_lora(["x.gguf", "y.gguf=0.5", str(strange)]) == (
        (Path("x.gguf"), 1.0),
        (Path("y.gguf"), 0.5),
        (strange, 1.0),
    )


@pytest.mark.parametrize("text", ["x.gguf=much", "x.gguf=", "x.gguf=nan", "x.gguf=1e9"])
def test_a_scale_that_is_no_number_is_refused(text):
    with pytest.raises(ConfigError, match=f"--lora {text}"):
        parse_lora([text])


def test_the_plan_counts_what_adapters_take(model, tmp_path):
    profile, work = model_profile(model), default_workload(256, 64, "f16")
    file = write_adapter(tmp_path / "lora.gguf", queries(model, 0, 1))
    adapters = open_adapters([(file, 1.0), (file, 2.0)], model)
    with_them = with_adapters(profile, adapters)
    more = [
        cost.kv_bytes(b, work) - cost.kv_bytes(a, work) for a, b in zip(profile.layers, with_them.layers, strict=True)
    ]
    inner, outer = model.tensors[QUERY.format(0)].shape
    assert more == [2 * 4 * 4 * (inner + outer)] * 2 + [0] * (len(profile.layers) - 2)
    assert replace(with_them, layers=profile.layers) == profile


def test_an_adapter_of_the_embedding_keeps_the_model_whole(model, tmp_path):
    file = write_adapter(tmp_path / "lora.gguf", {**queries(model, 0), **of(model, "output.weight")})
    adapters = open_adapters([(file, 1.0)], model)
    profile = with_adapters(model_profile(model), adapters)
    assert profile.cut_multiple == len(profile.layers)
    check_adapters(adapters, several=False)
    with pytest.raises(ConfigError, match="serve with --alone"):
        check_adapters(adapters, several=True)


def test_kept_cells_are_those_of_the_same_adapters_and_scales(model, tmp_path):
    """Their keys are made from the model's stamp."""
    file = write_adapter(tmp_path / "lora.gguf", queries(model, 0))

    def stamp(*given):
        adapters = open_adapters(given, model)
        return ModelSource(model, model_profile(model), tmp_path, None, adapters, again_s=1.0).stamp

    stamps = [stamp(), stamp((file, 1.0)), stamp((file, 0.5)), stamp((file, 1.0), (file, 1.0))]
    assert len({*stamps}) == len(stamps)
    assert stamp((file, 1.0)) == stamps[1]
    write_adapter(file, queries(model, 1))
    assert stamp((file, 1.0)) != stamps[1], "another content"
