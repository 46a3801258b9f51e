"""Decides which tokens may come next: by a grammar, and by when a completion may end.

A grammar's matcher (llguidance) follows the completion. A thread computes the mask of the next token as soon as a token
is sampled, so that the mask is ready when the ring has computed the logits. The matcher's state is a function of the
tokens so far: a process that takes over a completion gets these tokens and replays them.

Greedy sampling first checks whether the mask allows the most likely token, as it mostly does: listing the allowed
tokens costs more, and is done only where needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from primad.engine.protocol import Sampling
from primad.errors import GrammarError, printable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MASK_TIMEOUT_S: Final = 10.0
"""Time limit for a mask; llguidance has its own limits, which it reaches in a fraction of this."""
MAX_LEXER_STATES: Final = 50_000
"""About 2 kB each."""
MAX_ITEMS: Final = 20_000
"""Items of Earley's algorithm in one mask, about 3 us each: schemas with hundreds of properties need 2,000, ambiguous
rules more."""
WORK_AT_ONCE_S: Final = 3.0
WORK_A_TOKEN_S: Final = 0.01
"""Masks usually take a hundredth to a tenth of it, on a slow device."""
MAX_TEXT_CHARS: Final = 256
"""Characters that are tokenised together where a grammar leaves no choice. llama.cpp's pre-tokenizers recurse once a
character, and a schema may have a constant of 100,000, which would crash the ring process."""

Candidates = NDArray[np.int64]
"""Token ids, ascending."""


class TokenSet:
    """A set of tokens, one bit for each of the vocabulary."""

    def __init__(self, bits: bytes) -> None:
        self._bits = bits
        self._ids: Candidates | None = None

    @classmethod
    def of(cls, tokens: Collection[int], vocabulary: int) -> TokenSet:
        """Return the set of ``tokens`` for a ``vocabulary`` of that size."""
        bits = np.zeros(vocabulary, np.bool_)
        bits[list(tokens)] = True
        return cls(np.packbits(bits, bitorder="little").tobytes())

    @classmethod
    def all_of(cls, vocabulary: int) -> TokenSet:
        """Return the set of all tokens of a ``vocabulary`` of that size."""
        return cls(np.packbits(np.ones(vocabulary, np.bool_), bitorder="little").tobytes())

    def __bool__(self) -> bool:
        return bool(self._bits.strip(b"\0"))

    def __contains__(self, token: int) -> bool:
        return bool(self._bits[token >> 3] >> (token & 7) & 1)

    def without(self, others: TokenSet) -> TokenSet:
        """Return the tokens that are not among ``others``."""
        count = len(self._bits)
        rest = int.from_bytes(self._bits, "little") & ~int.from_bytes(others._bits, "little")
        return TokenSet(rest.to_bytes(count, "little"))

    @property
    def ids(self) -> Candidates:
        """Token ids of the set, ascending."""
        if self._ids is None:
            # numpy searches booleans several times faster than bytes (7 to 32 us, not 65 to 210)
            bits = np.unpackbits(np.frombuffer(self._bits, np.uint8), bitorder="little").view(np.bool_)
            self._ids = np.flatnonzero(bits)
        return self._ids


def likeliest(logits: NDArray[np.float32], allowed: TokenSet | None) -> int:
    """Return the token with the highest of ``logits`` among ``allowed`` (None: all); the first of equals.

    The most likely token of all is tried first: it is mostly allowed, and gathering the logits of many costs more.
    """
    token = int(logits.argmax())
    if allowed is None or token in allowed:
        return token
    candidates = allowed.ids
    return int(candidates[logits[candidates].argmax()])


class ModelTokens(Protocol):
    """A model's vocabulary, as grammars and llama.cpp's samplers need it."""

    size: int

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a completion."""

    @property
    def handle(self) -> Any:
        """llama.cpp's handle of the vocabulary."""

    def piece(self, token: int) -> bytes:
        """Return the bytes that ``token`` adds to a text; none for control tokens."""

    def name(self, token: int) -> str:
        """Return a printable name of any token."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the token ids of ``text``."""

    def release(self) -> None:
        """Free its memory."""


class Words:
    """The vocabulary of a model file, read when a completion first needs it."""

    def __init__(self, load: Callable[[], ModelTokens]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._tokens: ModelTokens | None = None
        self._tokenizer: LLTokenizer | None = None

    def tokens(self) -> ModelTokens:
        """Return the vocabulary. Raises ``EngineError`` when its file cannot be read."""
        with self._lock:
            if self._tokens is None:
                self._tokens = self._load()
            return self._tokens

    def tokenizer(self) -> LLTokenizer:
        """Return the vocabulary as llguidance takes it. Raises ``EngineError`` when its file cannot be read."""
        tokens = self.tokens()
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(tokens)
            return self._tokenizer

    def release(self) -> None:
        """Free its memory; no sampler may be in use."""
        with self._lock:
            tokens, self._tokens, self._tokenizer = self._tokens, None, None
        if tokens is not None:
            tokens.release()


class _Wrapped:
    """A vocabulary in llguidance's interface. A token without text is special; no grammar refers to it."""

    def __init__(self, tokens: ModelTokens) -> None:
        pieces = [tokens.piece(token) for token in range(tokens.size)]
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]
        self.tokens = [piece or tokens.name(token).encode() for token, piece in enumerate(pieces)]
        self.eos_token_id = min(tokens.ends)
        self.bos_token_id = None
        self._vocabulary = tokens

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokens of ``text``. Where the tokenizer changes it, say by a leading space, take the longest
        tokens."""
        data = text.encode() if isinstance(text, str) else text
        text = data.decode("utf-8", errors="replace")
        pieces = [text[at : at + MAX_TEXT_CHARS] for at in range(0, len(text), MAX_TEXT_CHARS)]
        found = [self._vocabulary.tokenize(each, add_special=False, parse_special=False) for each in pieces]
        tokens = [token for each in found for token in each]
        return tokens if b"".join(map(self._vocabulary.piece, tokens)) == data else self._longest(data) or tokens

    def _longest(self, data: bytes) -> list[int]:
        """Split ``data`` greedily into the longest tokens; empty where no token fits."""
        found, at = list[int](), 0
        while at < len(data):
            ends = range(min(at + self._max_bytes, len(data)), at, -1)
            end = next((end for end in ends if data[at:end] in self._by_bytes), None)
            if end is None:
                return []
            found.append(self._by_bytes[data[at:end]])
            at = end
        return found

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {piece: token for token, piece in enumerate(self.tokens) if token not in special}

    @cached_property
    def _max_bytes(self) -> int:
        return max(map(len, self._by_bytes))


def _tokenizer(tokens: ModelTokens) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    if not tokens.ends:
        raise GrammarError("the model has no end-of-generation token, so it cannot follow a grammar")
    return LLTokenizer(TokenizerWrapper(_Wrapped(tokens)), eos_token=sorted(tokens.ends))


class WorkBudget:
    """Processor time for the masks of one completion: an initial amount, for parsing the grammar, and more per token.

    A late mask delays only its own completion. Processor time is shared, so a grammar that costs too much ends its
    completion.
    """

    def __init__(self) -> None:
        self._left_s = WORK_AT_ONCE_S

    def spend(self, work_s: float, tokens: int) -> None:
        """Subtract ``work_s``, spent on ``tokens`` tokens. Raises ``GrammarError`` when the budget is exceeded."""
        self._left_s = min(WORK_AT_ONCE_S, self._left_s + tokens * WORK_A_TOKEN_S - work_s)
        if self._left_s < 0:
            raise GrammarError(
                f"the grammar is too much work: its tokens take more than {WORK_A_TOKEN_S * 1e3:g} ms of CPU time "
                "each; make it simpler, above all where it can read a text in several ways"
            )


class GrammarMask:
    """The position of one completion in its grammar. ``sampled`` are its tokens so far; ``clock`` gives processor time.

    With ``lists``, the allowed ids are listed in the thread, for samplers that go through all of them.
    """

    def __init__(
        self,
        words: Words,
        grammar: str,
        sampled: Sequence[int],
        clock: Callable[[], float] = time.thread_time,
        *,
        lists: bool = False,
    ) -> None:
        self._words, self._clock, self._lists = words, clock, lists
        self._budget = WorkBudget()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._matcher: LLMatcher | None = None
        self._mask = b""
        """The last mask, and the tokens that it allows: inside a text the next mask is often the same."""
        self._allowed = TokenSet(b"")
        self._due_s = time.monotonic() + MASK_TIMEOUT_S
        self._next: Future[TokenSet] = self._thread.submit(self._begin, grammar, list(sampled))

    def is_ready(self, wait_s: float) -> bool:
        """Whether ``allowed`` would not wait, now or within ``wait_s``."""
        if not self._next.done() and wait_s > 0:
            wait([self._next], wait_s)
        return self._next.done() or time.monotonic() >= self._due_s

    def allowed(self) -> TokenSet:
        """Return the tokens that may come next, with those that end the completion where it may end.

        Raises ``GrammarError`` when the grammar is wrong, or too much work.
        """
        try:
            return self._next.result(timeout=max(0.0, self._due_s - time.monotonic()))
        except FutureTimeoutError as exc:
            raise GrammarError(f"the grammar gave no token within {MASK_TIMEOUT_S:g} s; make it simpler") from exc

    def took(self, token: int) -> None:
        """Advance by ``token``, which was allowed."""
        self._due_s = time.monotonic() + MASK_TIMEOUT_S
        self._next = self._thread.submit(self._follow, token)

    def release(self) -> None:
        """End its thread, which may still finish a mask."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, grammar: str, sampled: list[int]) -> TokenSet:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, step_max_items=MAX_ITEMS, verbose_errors=False)
        tokenizer, began_s = self._words.tokenizer(), self._clock()
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        self._check()
        for token in sampled:  # one by one: each call holds the interpreter lock
            if not self._matcher.consume_token(token):
                break
        return self._compute(began_s, 1 + len(sampled))

    def _follow(self, token: int) -> TokenSet:
        assert self._matcher is not None
        began_s = self._clock()
        self._matcher.consume_token(token)
        return self._compute(began_s, 1)

    def _compute(self, began_s: float, tokens: int) -> TokenSet:
        assert self._matcher is not None
        self._check()
        mask = self._matcher.compute_bitmask()
        self._check()
        self._budget.spend(self._clock() - began_s, tokens)
        if mask != self._mask:
            self._mask, self._allowed = mask, TokenSet(mask)
            if not self._allowed:
                raise GrammarError("the grammar allows no token here, and does not end either")
            if self._lists:
                _ = self._allowed.ids
        return self._allowed

    def _check(self) -> None:
        assert self._matcher is not None
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed: {printable(self._matcher.get_error())}")


class Allowed:
    """Which tokens of a completion may come next, by its grammar and by when it may end.

    Where the grammar allows only end tokens, the completion ends, whatever its minimum length.
    """

    def __init__(
        self, sampling: Sampling, ends: frozenset[int], sampled: int, mask: GrammarMask | None, *, vocabulary: int
    ) -> None:
        self._min_tokens = sampling.min_tokens
        self._ignores_ends = sampling.ignore_eos
        self._ends, self._has_ends = TokenSet.of(ends, vocabulary), bool(ends)
        self._sampled = sampled
        self._mask = mask
        self.vocabulary = vocabulary
        self._all_but_ends = TokenSet.all_of(vocabulary).without(self._ends) if self._must_go_on else None

    @property
    def has_grammar(self) -> bool:
        """Whether the tokens allowed next depend on the tokens before."""
        return self._mask is not None

    @property
    def leaves_out(self) -> bool:
        """Whether some tokens may be forbidden."""
        return self._mask is not None or self._must_go_on

    @property
    def _must_go_on(self) -> bool:
        return self._has_ends and (self._ignores_ends or self._sampled < self._min_tokens)

    def is_ready(self, wait_s: float) -> bool:
        """Whether ``next`` would not wait, now or within ``wait_s``."""
        return self._mask is None or self._mask.is_ready(wait_s)

    def next(self) -> TokenSet | None:
        """Return the tokens that may come next, None for all. Raises ``GrammarError``."""
        if self._mask is None:
            return self._all_but_ends if self._must_go_on else None
        allowed = self._mask.allowed()
        return allowed if not self._must_go_on else allowed.without(self._ends) or allowed

    def took(self, token: int) -> None:
        """Count the sampled ``token``."""
        self._sampled += 1
        if self._mask is not None and token not in self._ends:
            self._mask.took(token)

    def release(self) -> None:
        """Release the grammar."""
        if self._mask is not None:
            self._mask.release()
