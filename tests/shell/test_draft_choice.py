"""Which models may guess for another one, and how those that may not are refused."""

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
from primad.head.options import ServeOptions
from primad.head.serve import check_speculate
from primad.planning.draft_model import MOST_CONTEXT, check_room, draft_model
from tools.synth import write_model


def words(*texts: str) -> Value:
    body = b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in texts)
    return Value(GGUFValueType.ARRAY, struct.pack("<IQ", GGUFValueType.STRING, len(texts)) + body)


@pytest.fixture
def served(tmp_path):
    path = tmp_path / "served.gguf"
    write_model(path)
    return open_model(path)


def test_a_model_with_the_same_tokens_may_guess_in_bounded_memory(tmp_path, served):
    path = tmp_path / "small.gguf"
    write_model(path, layers=2, seed=5)
    model = draft_model(path, served, context=1 << 20, threads=3)
    assert (model.path, model.layers, model.threads, model.context) == (str(path), 2, 3, MOST_CONTEXT)
    assert model.memory_bytes > model.bytes == model_profile(open_model(path)).size_bytes
    check_room(model, model.memory_bytes)
    with pytest.raises(ConfigError, match=rf"^--draft {path}: takes .* of memory, and .* are free here; choose a"):
        check_room(model, model.memory_bytes - 1)


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


def options(**given: Any) -> ServeOptions:
    return cast("ServeOptions", SimpleNamespace(**({"speculate": "auto", "draft": None} | given)))


def test_what_contradicts_itself_is_refused(tmp_path, served):
    profile = model_profile(served)
    path = tmp_path / "small.gguf"
    check_speculate(options(), profile)
    check_speculate(options(draft=path), profile)
    check_speculate(options(draft=path, speculate="draft"), profile)
    with pytest.raises(ConfigError, match=r"^--speculate draft: needs a model that guesses; give it with --draft FILE"):
        check_speculate(options(speculate="draft"), profile)
    for mode in ("off", "lookup"):
        with pytest.raises(ConfigError, match=f"^--draft {path}: contradicts --speculate {mode}; leave one"):
            check_speculate(options(draft=path, speculate=mode), profile)


def test_a_state_that_cannot_be_cut_back_is_refused_by_name(served):
    profile = model_profile(served)
    recurrent = replace(profile, layers=tuple(replace(layer, state_bytes=9) for layer in profile.layers))
    for mode in ("auto", "off"):
        check_speculate(options(speculate=mode), recurrent)
    with pytest.raises(ConfigError, match=f"^--speculate lookup: layers of {profile.name} keep a state that cannot"):
        check_speculate(options(speculate="lookup"), recurrent)
