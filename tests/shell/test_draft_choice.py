"""Which models may draft for another one, and how others are refused."""

from __future__ import annotations

import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from primad.errors import ConfigError
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Value, scalar_value
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.head.model.checked import draft_of
from primad.head.model.options import ServeOptions
from primad.planning.check_run import check_sequences, check_speculate
from primad.planning.draft_model import MAX_CONTEXT, choose_draft, draft_model, models_here
from primad.planning.run_config import RunConfig
from tools.synth import write_model


def words(*texts: str) -> Value:
    body = b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in texts)
    return Value(GGUFValueType.ARRAY, struct.pack("<IQ", GGUFValueType.STRING, len(texts)) + body)


@pytest.fixture
def served(tmp_path):
    path = tmp_path / "served.gguf"
    write_model(path)
    return open_model(path)


def test_a_model_with_the_same_tokens_may_draft_in_bounded_memory(tmp_path, served):
    path = tmp_path / "small.gguf"
    write_model(path, layers=2, seed=5)
    model = draft_model(path, served, context=1 << 20, threads=3)
    assert (model.path, model.layers, model.threads, model.context) == (str(path), 2, 3, MAX_CONTEXT)
    assert model.memory_bytes > model.bytes == model_profile(open_model(path)).size_bytes


def test_other_tokens_are_refused_with_the_difference(tmp_path, served):
    tokens = [str(each) for each in served.values["tokenizer.ggml.tokens"].items()]
    path = tmp_path / "other.gguf"

    def refused(**values: Value) -> str:
        write_model(path, values={f"tokenizer.ggml.{key}": value for key, value in values.items()})
        with pytest.raises(ConfigError, match=r"choose a smaller model of its family$") as caught:
            draft_model(path, served, context=100, threads=1)
        return str(caught.value)

    other = [*tokens[:7], "seven", *tokens[8:]]
    assert f"its token 7 is 'seven', not '{tokens[7]}'" in refused(tokens=words(*other))
    assert f"it has {len(tokens) - 200} tokens, not {len(tokens)}" in refused(tokens=words(*tokens[:-200]))
    kind = served.text("tokenizer.ggml.model")
    assert f"its tokenizer.ggml.model is odd, not {kind}" in refused(model=scalar_value(GGUFValueType.STRING, "odd"))


def test_padding_of_a_vocabulary_is_no_difference(tmp_path, served):
    tokens = [str(each) for each in served.values["tokenizer.ggml.tokens"].items()]
    path = tmp_path / "padded.gguf"
    write_model(path, values={"tokenizer.ggml.tokens": words(*tokens, "<pad0>", "<pad1>")})
    assert draft_model(path, served, context=100, threads=1).context == 100


def options(**fields: Any) -> ServeOptions:
    run = RunConfig(draft_on=fields.pop("draft_on", None))
    return cast("ServeOptions", SimpleNamespace(run=run, **({"draft": None} | fields)))


def test_a_draft_model_without_room_here_runs_elsewhere_unless_it_must_run_here(tmp_path, served):
    path = tmp_path / "small.gguf"
    write_model(path, layers=2, seed=5)
    memory_bytes = draft_model(path, served, context=MAX_CONTEXT, threads=1).memory_bytes
    printed: list[str] = []
    config, reporter = (
        SimpleNamespace(home=tmp_path, name="desk", threads=1),
        SimpleNamespace(report_line=printed.append),
    )

    def found(free_bytes: int, **fields: Any) -> tuple[bool, bool]:
        serve_options = options(**({"draft": path, "single_device": False} | fields))
        model, has_room = draft_of(serve_options, cast("Any", config), served, cast("Any", reporter), free_bytes)
        return model is not None, has_room

    assert found(memory_bytes) == (True, True)
    assert not printed
    assert found(memory_bytes - 1) == (True, False)
    assert printed.pop().endswith("are free here: it runs on a device that has room")
    assert found(memory_bytes - 1, draft_on="lap") == (True, False)
    for must in ({"draft_on": "desk"}, {"single_device": True}):
        with pytest.raises(ConfigError, match=rf"^--draft {path}: takes .* of memory, and .* are free here; choose a"):
            found(memory_bytes - 1, **must)


def test_contradicting_draft_options_are_refused(tmp_path, served):
    profile = model_profile(served)
    path = tmp_path / "small.gguf"
    check_speculate(RunConfig(), profile, None)
    check_speculate(RunConfig(), profile, path)
    check_speculate(RunConfig(speculate="draft"), profile, path)
    with pytest.raises(ConfigError, match=r"^--speculate draft: needs a draft model; give it with --draft FILE"):
        check_speculate(RunConfig(speculate="draft"), profile, None)
    for mode in ("off", "lookup"):
        with pytest.raises(ConfigError, match=f"^--draft {path}: contradicts --speculate {mode}; leave one"):
            check_speculate(RunConfig(speculate=mode), profile, path)


def test_more_concurrent_sequences_than_llama_cpp_supports_are_refused(served):
    profile = replace(model_profile(served), architecture="minimax-m3")
    check_sequences(RunConfig(sequences=None), profile)
    check_sequences(RunConfig(sequences=8), profile)
    check_sequences(RunConfig(sequences=9), model_profile(served))
    with pytest.raises(ConfigError, match=r"^--sequences 9: for 'minimax-m3' llama.cpp computes at most 8"):
        check_sequences(RunConfig(sequences=9), profile)


# ---- auto ------------------------------------------------------------------------------------------------------------


def test_auto_chooses_the_model_of_the_family_whose_size_is_closest_to_a_tenth(tmp_path):
    served = tmp_path / "served.gguf"
    write_model(served, width=256, layers=12)
    header = open_model(served)
    family = {
        "tiny.gguf": {"width": 64, "layers": 1},
        "right.gguf": {"width": 128, "layers": 2},
        "large.gguf": {"width": 256, "layers": 11},
    }
    for name, shape in family.items():
        write_model(tmp_path / name, seed=3, **shape)
    write_model(tmp_path / "other.gguf", width=128, layers=2, values={"tokenizer.ggml.tokens": words(*"ab" * 160)})
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "lost.gguf").symlink_to(tmp_path / "nowhere")
    paths = models_here(header, tmp_path / "models")
    assert served in paths
    found = choose_draft(header, paths, context=100, free_bytes=1 << 40)
    assert found.path == tmp_path / "right.gguf"
    assert "it has the tokens of served.gguf and 0." in found.why
    assert found.why.endswith("; of 2 candidates its size is nearest to a tenth")
    assert str(choose_draft(header, [served], context=100, free_bytes=None)).startswith("no draft model: none of the")
    small = choose_draft(header, paths, context=100, free_bytes=1000)
    assert (small.path, small.why) == (
        None,
        "those that could draft for served.gguf do not fit the 1.00 kB that are free here",
    )


def test_auto_prefers_the_architecture_of_the_served_model(tmp_path):
    served = tmp_path / "served.gguf"
    write_model(served, width=256, layers=12)
    write_model(tmp_path / "qwen.gguf", architecture="qwen3", width=128, layers=2)
    write_model(tmp_path / "llama.gguf", width=64, layers=1)
    header = open_model(served)
    found = choose_draft(header, models_here(header, tmp_path / "models"), context=100, free_bytes=None)
    assert found.path == tmp_path / "llama.gguf"


def test_models_fetched_by_name_are_candidates(tmp_path, served):
    folder = tmp_path / "models"
    kept = folder / "owner" / "repo" / "small-Q4_K_M.gguf"
    kept.parent.mkdir(parents=True)
    write_model(kept, layers=1)
    assert kept in models_here(served, folder)
