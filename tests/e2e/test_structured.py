"""A completion with a grammar matches it, whichever ring computes it and whichever resumes it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primad.api.answering.grammar import of_schema, of_text
from primad.engine.vocabulary import LlamaVocabulary
from tools.lab.local_ring import GREEDY, LocalRing
from tools.synth import FEW_TOKENS, write_model

pytestmark = pytest.mark.slow

SAMPLED = msgspec.structs.replace(GREEDY, temperature=1.0, top_k=40, top_p=0.95, min_p=0.05)
QUESTION = "<|im_start|>user\nDescribe a ship as JSON.<|im_end|>\n<|im_start|>assistant\n"
MAX = 400
"""Maximum tokens; the schemas below allow no longer text."""


class Rings:
    """The same model on one device and on three; tests call them without ``await``."""

    def __init__(self, runner: asyncio.Runner, rings: list[LocalRing], words: LlamaVocabulary) -> None:
        self._runner, self._rings, self.words = runner, rings, words
        self.prompt = words.tokenize(QUESTION, add_special=False, parse_special=True)

    def answer(
        self, grammar: str, *, on: int = 0, maximum: int = MAX, behind: list[int] | None = None, **changes: Any
    ) -> tuple[list[int], Any]:
        """Return the tokens sampled after those in ``behind``, and the end event."""
        sampling = msgspec.structs.replace(SAMPLED, grammar=grammar, **changes)
        asked = self._rings[on].generate(self.prompt, maximum, sampling=sampling, replayed=behind or [])
        sampled, finished = self._runner.run(asked)
        return [event.token for event in sampled], finished

    def text(self, tokens: list[int]) -> str:
        return b"".join(map(self.words.piece, tokens)).decode()


@pytest.fixture(scope="module")
def rings(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rings]:
    """The weights are random: what a grammar permits depends only on the vocabulary."""
    model = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_model(model, layers=6, vocabulary=f"from:{smollm2}", tokens=FEW_TOKENS)
    words = LlamaVocabulary(model)
    with asyncio.Runner() as runner:
        made = [LocalRing(model, windows, context=1024, threads=1) for windows in (None, (2, 2, 1))]
        opened = []
        try:
            for ring in made:
                runner.run(ring.__aenter__())
                opened.append(ring)
            yield Rings(runner, made, words)
        finally:
            for ring in opened:
                runner.run(ring.__aexit__(None, None, None))
    words.release()


NAMES = st.sampled_from(["name", "size", "a b", "größe", 'q"uote', "x"])
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(1, 6).map(lambda maximum: {"type": "string", "maxLength": maximum}),
    st.tuples(st.integers(-50, 0), st.integers(0, 999)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[1]}
    ),
    st.lists(st.sampled_from(["red", "blue", 3, None, True]), min_size=1, max_size=3, unique_by=repr).map(
        lambda values: {"enum": values}
    ),
    st.just({"type": "string", "pattern": "^[a-c]{2,4}$"}),
    st.just({"type": "string", "format": "date"}),
)


def _objects(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def of(properties: dict[str, Any], required: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:required],
            "additionalProperties": False,
        }

    return st.builds(of, st.dictionaries(NAMES, values, max_size=3), st.integers(0, 3))


def _lists(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda items, maximum: {"type": "array", "items": items, "maxItems": maximum}, values, st.integers(0, 2)
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda values: st.one_of(
        _objects(values),
        _lists(values),
        st.lists(values, min_size=2, max_size=2).map(lambda either: {"anyOf": either}),
    ),
    max_leaves=5,
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(schema=SCHEMAS, seed=st.integers(0, 2**31))
def test_structured_output_matches_its_schema_even_if_another_ring_takes_over(rings, schema, seed):
    grammar = of_schema(schema)
    tokens, finished = rings.answer(grammar, seed=seed)
    if finished.reason == "stop":  # rarely, white space uses up all tokens
        jsonschema.validate(json.loads(rings.text(tokens)), schema)
    cut = random.Random(seed).randint(0, len(tokens))
    rest, ended = rings.answer(grammar, seed=seed, on=1, behind=tokens[:cut])
    assert ended.reason == finished.reason
    assert tokens[:cut] + rest == tokens


def test_output_for_any_json_object_is_one_or_was_truncated(rings):
    tokens, finished = rings.answer(of_schema({"type": "object"}), seed=1, maximum=200)
    text = rings.text(tokens)
    assert text.startswith("{")
    assert finished.reason == "length" or isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "grammar",
    ['root ::= ("yes" | "no") "!"', 'start: ("yes" | "no") "!"', "start: /(yes|no)!/"],
    ids=["gbnf", "lark", "regex"],
)
def test_a_grammar_of_text_is_followed(rings, grammar):
    for on in (0, 1):
        tokens, finished = rings.answer(of_text(grammar), on=on, seed=5)
        assert rings.text(tokens) in ("yes!", "no!")
        assert finished.reason == "stop"


def test_output_ends_if_the_grammar_allows_only_the_end(rings):
    for changes in ({"min_tokens": 50}, {"ignore_eos": True}):
        tokens, finished = rings.answer(of_text('start: "yes"'), **changes)
        assert (rings.text(tokens), finished.reason) == ("yes", "stop")


def test_structured_output_may_be_truncated(rings):
    tokens, finished = rings.answer(of_text('start: "a"{200}'), maximum=5)
    assert (len(tokens), finished.reason) == (5, "length")
    assert set(rings.text(tokens)) == {"a"}


def test_an_invalid_grammar_ends_only_its_own_request(rings):
    tokens, finished = rings.answer("start: )")
    assert (tokens, finished.reason) == ([], "refused")
    assert "grammar" in finished.error
    tokens, _ = rings.answer(of_text('start: "yes"'))
    assert rings.text(tokens) == "yes"
