"""LoRA adapters: checks before loading, what a window takes of them, and their memory."""

import random
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
from primad.head.model.service import ModelSource
from primad.head.rings.loads import adapted
from primad.planning.adapters import check_adapters, open_adapters, parse_lora, whole_line, with_adapters
from primad.planning.question import default_workload
from tests.fakes.gguf import write_adapter
from tools import synth
from tools.research.random_fleets import random_instance

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
    ("changed", "printed"),
    [
        ({"numbers": (1, 0)}, "not in order"),
        ({"numbers": (0,)}, "not in order"),
        ({"numbers": (0, 7)}, "beyond the 3"),
        ({"numbers": (-1, 1)}, "beyond the 3"),
        ({"alpha": float("inf")}, "impossible weight"),
    ],
    ids=["order", "count", "beyond", "negative", "infinite"],
)
def test_an_impossible_spec_from_a_peer_is_refused(changed, printed, model, tmp_path):
    adapter = open_adapter(write_adapter(tmp_path / "lora.gguf", queries(model, 1, 2)), 1.0, model)
    with pytest.raises(ProtocolError, match=printed):
        check_adapter(msgspec.structs.replace(adapter.spec(1, 4), **changed), 3)


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ({"architecture": "qwen3"}, "is for 'qwen3', and model.gguf is 'llama'"),
        ({"kind": "model"}, "is no adapter but a model"),
        ({"tensors": {"blk.0.attn_x.weight": (64, 64)}}, "which is not in model.gguf"),
        ({"tensors": {"blk.0.attn_q.weight": (64, 63)}}, "do not change one of"),
        ({"tensors": {}}, "has no matrices"),
    ],
    ids=["architecture", "kind", "name", "shape", "empty"],
)
def test_a_file_that_is_no_adapter_of_the_model_is_refused_by_name(written, printed, model, tmp_path):
    arguments = {"tensors": queries(model, 0), **written}
    file = write_adapter(tmp_path / "lora.gguf", **arguments)
    with pytest.raises(ModelError, match=printed):
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


def test_an_adapter_for_a_tensor_that_no_window_has_keeps_the_model_whole(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="llama4")
    model = read_header(path)
    changed = {"rope_freqs.weight": (*model.tensors["rope_freqs.weight"].shape, 1)}
    file = write_adapter(tmp_path / "lora.gguf", changed, architecture="llama4")
    adapters = open_adapters([(file, 1.0)], model)
    profile = with_adapters(model_profile(model), adapters)
    assert profile.cut_multiple == len(profile.layers)
    check_adapters(adapters, several=False)
    assert f"--lora {file}: changes 'rope_freqs.weight'" in whole_line(adapters)
    with pytest.raises(ConfigError, match="one device serves the model whole: give --single-device"):
        check_adapters(adapters, several=True)


def test_adapter_tensors_for_the_output_go_with_the_tail(model, tmp_path):
    file = write_adapter(tmp_path / "lora.gguf", {**queries(model, 0), **of(model, "output.weight")})
    adapter = open_adapter(file, 1.0, model)
    assert (adapter.spec(0, 3).numbers, adapter.spec(1, 3), adapter.spec(2, 6).numbers) == ((0,), None, (4,))
    cutter = ModelCutter(model, keeps_name=True)
    assert [tensor.name for tensor in cutter.ref(6).tensors][:2] == ["token_embd.weight", "output.weight"]
    profile = model_profile(model)
    changed = with_adapters(profile, [adapter])
    assert changed.cut_multiple == 1
    assert changed.layers[5].adapter_bytes == adapter.bytes_of(6) == 4 * 4 * (64 + 320)


def test_adapter_tensors_for_the_token_embedding_go_with_the_first_layer(model, tmp_path):
    file = write_adapter(tmp_path / "lora.gguf", of(model, "token_embd.weight"))
    profile = with_adapters(model_profile(model), open_adapters([(file, 1.0)], model))
    assert profile.cut_multiple == 1
    assert [layer.adapter_bytes for layer in profile.layers] == [4 * 4 * (64 + 320), 0, 0, 0, 0, 0]
    assert profile.layers[0].adapter_reads == {"F32": 4 * 4 * 64}


def test_an_adapter_of_an_embedding_that_is_the_output_too_is_refused(tmp_path):
    """Without the refusal llama.cpp would abort."""
    path = tmp_path / "model.gguf"
    synth.write_model(path, tied=True)
    model = read_header(path)
    file = write_adapter(tmp_path / "lora.gguf", of(model, "token_embd.weight"))
    with pytest.raises(
        ModelError, match=r"which is the output matrix of model.gguf too; llama.cpp computes no such model"
    ):
        open_adapter(file, 1.0, model)


def test_the_plan_counts_the_time_that_adapters_take(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="qwen3moe")
    model = read_header(path)
    tensors = queries(model, 0) | of(model, "blk.1.ffn_up_exps.weight")
    file = write_adapter(tmp_path / "lora.gguf", tensors, architecture="qwen3moe")
    profile = with_adapters(model_profile(model), open_adapters([(file, 1.0)], model))
    first, second, third = profile.layers[:3]
    assert first.adapter_reads == {"F32": first.adapter_bytes}
    assert second.adapter_reads == {"F32": second.adapter_bytes * profile.experts_used // profile.experts}
    assert third.adapter_reads == {}
    cpu = random_instance(random.Random(3)).devices[0].cpu
    without = replace(first, adapter_reads={})
    taken = [cost.layer_s(cpu, 1e10, each, profile, 1, 64, "f16") for each in (first, without)]
    read = cost.weights_s(cpu.speeds, first.adapter_reads, 1)
    assert taken[0] - taken[1] == pytest.approx(read)
    assert read > 0


def test_kept_cells_are_those_of_the_same_adapters_and_scales(model, tmp_path):
    """KV keys derive from the model's stamp."""
    file = write_adapter(tmp_path / "lora.gguf", queries(model, 0))

    def stamp(*given):
        adapters = open_adapters(given, model)
        return ModelSource(model, model_profile(model), tmp_path, None, adapters, again_s=1.0).stamp

    stamps = [stamp(), stamp((file, 1.0)), stamp((file, 0.5)), stamp((file, 1.0), (file, 1.0))]
    assert len({*stamps}) == len(stamps)
    assert stamp((file, 1.0)) == stamps[1]
    write_adapter(file, queries(model, 1))
    assert stamp((file, 1.0)) != stamps[1], "another content"
