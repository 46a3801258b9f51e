"""The grammar state of a completion follows from its tokens alone, and it ends only where the grammar allows."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.engine.masks import (
    MAX_TEXT_CHARS,
    WORK_A_TOKEN_S,
    WORK_AT_ONCE_S,
    Allowed,
    GrammarMask,
    TokenSet,
    Words,
    likeliest,
)
from primad.errors import GrammarError
from tests.fakes.backend import BOS, EOS, SIZE, ByteVocabulary
from tests.fakes.ring import GREEDY

ENDS = frozenset({EOS})


class ByteTokens(ByteVocabulary):
    """One token per byte; counts loads against releases."""

    ends = ENDS
    handle = None
    loaded = 0

    def release(self) -> None:
        type(self).loaded -= 1


def load() -> ByteTokens:
    ByteTokens.loaded += 1
    return ByteTokens()


@pytest.fixture
def words() -> Iterator[Words]:
    words = Words(load)
    yield words
    words.release()
    assert ByteTokens.loaded == 0


def text_of(tokens: TokenSet) -> str:
    return "".join("$" if token == EOS else chr(token) for token in tokens.ids.tolist())


def test_a_mask_follows_the_answer_to_its_end(words):
    mask = GrammarMask(words, 'start: ("ab" | "ac") "d"?', [])
    seen = []
    for token in b"abd":
        seen.append(text_of(mask.allowed()))
        mask.took(token)
    assert [*seen, text_of(mask.allowed())] == ["a", "bc", "d$", "$"]
    mask.release()


def test_a_mask_that_comes_again_is_the_same(words):
    mask = GrammarMask(words, "start: /[ab]+/ /[cd]/", [])
    seen = []
    for token in b"abac":
        seen.append(text_of(mask.allowed()))
        mask.took(token)
    assert [*seen, text_of(mask.allowed())] == ["ab", "abcd", "abcd", "abcd", "$"]
    mask.release()


@given(logits=st.lists(st.sampled_from([-1.0, 0.0, 2.0]), min_size=1, max_size=9), data=st.data())
def test_the_likeliest_token_is_the_first_of_the_best_that_may_come(logits, data):
    tokens = data.draw(st.sets(st.integers(0, len(logits) - 1), min_size=1))
    best = max(logits[token] for token in tokens)
    first = min(token for token in tokens if logits[token] == best)
    assert likeliest(np.array(logits, np.float32), TokenSet.of(tokens, len(logits))) == first
    assert likeliest(np.array(logits, np.float32), None) == logits.index(max(logits))


@given(size=st.integers(1, 70), data=st.data())
def test_a_set_of_tokens_is_one(size, data):
    tokens, others = (data.draw(st.sets(st.integers(0, size - 1))) for _ in range(2))
    one, other = TokenSet.of(tokens, size), TokenSet.of(others, size)
    assert (one.ids.tolist(), bool(one)) == (sorted(tokens), bool(tokens))
    assert [token for token in range(size) if token in one] == sorted(tokens)
    assert one.without(other).ids.tolist() == sorted(tokens - others)
    assert TokenSet.all_of(size).ids.tolist() == list(range(size))


def test_which_tokens_may_come_is_looked_up_only_where_the_likeliest_may_not():
    may = TokenSet.of({1, 3}, 4)
    assert likeliest(np.array([0, 1, 0, 9], np.float32), may) == 3
    assert may._ids is None
    assert likeliest(np.array([9, 1, 0, 0], np.float32), may) == 1
    assert may._ids is not None


@pytest.mark.parametrize("cut", range(4))
def test_a_mask_that_takes_over_a_completion_is_in_the_same_state(words, cut):
    grammar, answer = 'start: ("ab" | "ac") "d"?', b"abd"
    mask = GrammarMask(words, grammar, answer[:cut])
    assert text_of(mask.allowed()) == ["a", "bc", "d$", "$"][cut]
    mask.release()


@pytest.mark.parametrize(("grammar", "sampled"), [("start: )", b""), ('start: "ab"', b"x")])
def test_a_grammar_that_cannot_be_followed_is_an_error_of_its_request(words, grammar, sampled):
    mask = GrammarMask(words, grammar, sampled)
    with pytest.raises(GrammarError, match="grammar") as caught:
        mask.allowed()
    assert "\n" not in str(caught.value)
    mask.release()


def test_a_tokenizer_that_begins_texts_with_a_space_puts_none_into_an_answer():
    class SpacedTexts(ByteTokens):
        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            return super().tokenize(f" {text}", add_special=add_special, parse_special=parse_special)

    mask = GrammarMask(Words(SpacedTexts), 'start: "abc" /[d-f]/', [])
    seen = []
    for token in b"abce":
        seen.append(text_of(mask.allowed()))
        mask.took(token)
    assert [*seen, text_of(mask.allowed())] == ["a", "b", "c", "def", "$"]
    mask.release()


def test_text_that_a_grammar_forces_is_tokenised_in_parts():
    sizes: list[int] = []

    class ShortTexts(ByteTokens):
        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            sizes.append(len(text))
            return super().tokenize(text, add_special=add_special, parse_special=parse_special)

    mask = GrammarMask(Words(ShortTexts), f'start: "{"a" * 5000}b"', b"a" * 4998)
    for char in "aab":
        assert text_of(mask.allowed()) == char
        mask.took(ord(char))
    mask.release()
    assert len(sizes) > 1
    assert max(sizes) <= MAX_TEXT_CHARS


class Clock:
    """Each reading is ``tick_s`` later."""

    def __init__(self) -> None:
        self.now_s = self.tick_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def test_a_grammar_that_is_much_work_ends_its_answer(words):
    clock = Clock()
    mask = GrammarMask(words, "start: /a*/", [], clock)
    for _ in range(1000):
        mask.allowed()
        clock.tick_s = WORK_A_TOKEN_S  # the maximum per token
        mask.took(ord("a"))
    mask.allowed()
    clock.tick_s = WORK_A_TOKEN_S + WORK_AT_ONCE_S * 0.45
    for _ in range(2):
        mask.took(ord("a"))
        mask.allowed()
    mask.took(ord("a"))
    with pytest.raises(GrammarError, match="too much work"):
        mask.allowed()
    mask.release()


def test_a_mask_that_takes_over_a_completion_has_the_work_budget_of_all_its_tokens(words):
    clock = Clock()
    clock.tick_s = WORK_AT_ONCE_S
    mask = GrammarMask(words, "start: /a*/", b"a" * 100, clock)
    assert ord("a") in mask.allowed()
    clock.tick_s = 2 * WORK_AT_ONCE_S
    mask = GrammarMask(words, "start: /a*/", b"a" * 100, clock)
    with pytest.raises(GrammarError, match="too much work"):
        mask.allowed()


class LongTokens(ByteTokens):
    """One more token, which a grammar must read to its end to decide."""

    @property
    def size(self) -> int:
        return SIZE + 1

    def piece(self, token: int) -> bytes:
        return b"a" * 220 if token == SIZE else super().piece(token)


@pytest.mark.parametrize("rule", ['e: e e | "a"', 'e: e e e | e e | "a" | "aa"', 'e: "a" e "a" | "a" e | e "a" | "a"'])
def test_a_grammar_that_parses_a_token_ambiguously_without_bound_ends_its_request(rule):
    """Each mask has a bound, so no other request waits longer for it."""
    mask = GrammarMask(Words(LongTokens), f"start: e\n{rule}", [], lambda: 0.0)
    with pytest.raises(GrammarError, match="Too many items"):
        mask.allowed()
    mask.release()


def test_a_special_token_is_not_its_text(words):
    mask = GrammarMask(words, 'start: "<s>" | "x"', [])
    assert text_of(mask.allowed()) == "<x"
    assert BOS not in mask.allowed()
    mask.release()


def allowed(words: Words, grammar: str | None, **changes) -> Allowed:
    sampling = msgspec.structs.replace(GREEDY, grammar=grammar, **changes)
    mask = GrammarMask(words, grammar, []) if grammar is not None else None
    return Allowed(sampling, ENDS, 0, mask, vocabulary=SIZE)


def test_without_bounds_every_token_may_come(words):
    assert allowed(words, None).next() is None


def test_a_completion_does_not_end_before_its_minimum_length(words):
    bounds = allowed(words, None, min_tokens=2)
    for _ in range(2):
        assert set(range(SIZE)) - set(bounds.next().ids.tolist()) == ENDS
        bounds.took(65)
    assert bounds.next() is None
    assert EOS not in allowed(words, None, ignore_eos=True).next()


def test_a_grammar_that_has_ended_ends_the_answer_all_the_same(words):
    bounds = allowed(words, 'start: "a" "b"?', min_tokens=9)
    assert text_of(bounds.next()) == "a"
    bounds.took(ord("a"))
    assert text_of(bounds.next()) == "b", "it might end here, and is too short"
    bounds.took(ord("b"))
    assert text_of(bounds.next()) == "$"
    bounds.took(EOS)
    bounds.release()
