"""A strict fake of llama.cpp's windows: hidden states record every layer and every token that they stand for.

A row's hidden state has the layer it reached, its position, its token, a digest of the layers it passed and a digest of
all tokens up to it. Every window compares that with its own KV cache, so a layer out of order, a missing or repeated
position, a KV operation that one window did not see or a hidden state of another row fails where it happens. The next
token is a function of all tokens before it and of nothing else, so any ring must give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primad.engine.protocol import EngineOptions, Hidden, LogitsRow, Rows, Sampling, biases_in, sampling_seed
from primad.errors import EngineError, GrammarError
from primad.kv.cells import CellShape, LayerCells

WIDTH = 8
VOCABULARY = 64
_PART_BITS = 20
_PART = (1 << _PART_BITS) - 1
CELL_TYPE = 7
"""The type of a KV cell: its keys are just the history up to it, its values its layer."""


def follow(history: int, token: int) -> int:
    """The digest of a token history with ``token`` appended; the empty one is 0."""
    return (history * 0x9E3779B97F4A7C15 + token * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) % (1 << 61) >> 1


def history_of(tokens: Sequence[int]) -> int:
    """The digest of a token history."""
    history = 0
    for token in tokens:
        history = follow(history, token)
    return history


@lru_cache(maxsize=4096)
def _random_scores(history: int, vocabulary: int) -> NDArray[np.float32]:
    """The scores of a model without a script; cached, since sampling them takes most of a row's time."""
    scores = np.random.default_rng(history).standard_normal(vocabulary).astype(np.float32)
    scores.flags.writeable = False
    return scores


def trail_of(layers: int) -> int:
    """The digest of passing layers ``0 <= layer < layers`` in order."""
    trail = 0
    for layer in range(layers):
        trail = _through(trail, layer)
    return trail


def _through(trail: int, layer: int) -> int:
    return (trail * 31 + layer + 1) & _PART


class _Row(NamedTuple):
    """The contents of a row's hidden state."""

    layer: int
    position: int
    token: int
    trail: int
    history: int

    def encoded(self) -> tuple[int, ...]:
        """The fields, with the history in three parts that fit a float32, and a checksum."""
        layer, position, token, trail, history = self
        low, middle, high = history & _PART, history >> _PART_BITS & _PART, history >> 2 * _PART_BITS
        check = layer + position + token + trail + low + middle + high & _PART
        return layer, position, token, trail, low, middle, high, check


def _decoded(values: list[int]) -> _Row:
    layer, position, token, trail, low, middle, high, check = values
    added = layer + position + token + trail + low + middle + high & _PART
    assert added == check, f"a hidden state was damaged on its way: {values}"
    return _Row(layer, position, token, trail, low | middle << _PART_BITS | high << 2 * _PART_BITS)


@dataclass
class FakeModel:
    """A model of ``layers`` layers whose tokens ``ends`` end a generation. Counts windows and samplers left open.

    A ``script`` has the next token for each history.
    """

    layers: int
    ends: frozenset[int] = frozenset()
    vocabulary: int = VOCABULARY
    script: Mapping[int, int] = field(default_factory=dict)
    gives_cells: bool = True
    has_state: bool = False
    """Its layers remember all tokens in one state, which cannot be cut back."""
    needs_state: bool = False
    """It also keeps earlier KV entries, but needs such a state to continue from them."""
    late: Callable[[Sampling], int] = lambda _: 0
    """The number of looks at a generation's next mask before it is ready."""
    open_windows: int = 0
    open_samplers: int = 0
    options: EngineOptions = field(
        default_factory=lambda: EngineOptions(
            context=4096, sequences=1, rows=512, threads=1, batch_threads=1, kv_type="f16", lock=False
        )
    )

    def first(self, last: int) -> FakeHiddenWindow:
        """The route's first window: layers 0 to ``last``, tokens in."""
        return FakeHiddenWindow(self, 0, last, takes_tokens=True)

    def middle(self, first: int, last: int) -> FakeHiddenWindow:
        """A window of layers ``first`` to ``last`` that takes hidden states."""
        return FakeHiddenWindow(self, first, last, takes_tokens=False)

    def tail(self, first: int) -> FakeLogitsWindow:
        """The route's last window."""
        return FakeLogitsWindow(self, first, self.layers, takes_tokens=False)

    def whole(self) -> FakeLogitsWindow:
        """The only window of a single device."""
        return FakeLogitsWindow(self, 0, self.layers, takes_tokens=True)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The model's logits after ``tokens``."""
        return self.scores(history_of(tokens))

    def scores(self, history: int) -> NDArray[np.float32]:
        """The logits after the tokens of ``history``."""
        if not self.script:
            return _random_scores(history, self.vocabulary)
        scores = np.zeros(self.vocabulary, np.float32)
        scores[self.script.get(history, 0)] = 1.0
        return scores

    def answer(self, prompt: Sequence[int], count: int, sampling: Sampling) -> list[int]:
        """The first ``count`` tokens of the completion, or those before its end token. Runs no window."""
        tokens, history = list(prompt), history_of(prompt)
        draws = _Draws(sampling, tokens, [])
        for _ in range(count):
            token = draws.draw(self.scores(history))
            if token in self.ends:
                break
            tokens.append(token)
            history = follow(history, token)
        return tokens[len(prompt) :]


class _Window:
    """Layers ``first`` to ``last`` and the KV cache of each sequence: the history at every position."""

    exchange = None

    def __init__(self, model: FakeModel, first: int, last: int, *, takes_tokens: bool) -> None:
        assert 0 <= first < last <= model.layers
        assert takes_tokens == (first == 0)
        self._model, self._first, self._last, self._takes_tokens = model, first, last, takes_tokens
        self._cells: dict[int, list[int]] = {}
        self._states: dict[int, tuple[int, list[int]]] = {}
        self._kept_from: dict[int, int] = {}
        """By sequence: the position before which only a state is known."""
        self._last_step: dict[int, int] = {}
        """By sequence: the start of its last step, until rows of it are removed or a step of several others comes."""
        self._open = True
        self.failure: EngineError | None = None
        """If set, the next ``forward`` raises it."""
        self.spoils: float | None = None
        """If set, every output of ``forward`` contains it."""
        self.steps: list[tuple[int, ...]] = []
        """The positions of every forward."""
        model.open_windows += 1

    def held(self, sequence: int) -> int:
        """The number of positions in the KV cache of ``sequence``."""
        return len(self._cells.get(sequence, []))

    def kv_remove(self, sequence: int, start: int, end: int) -> None:
        self._check_open()
        self._check_sequence(sequence)
        cells = self._cells.get(sequence, [])
        assert 0 <= start <= len(cells), f"removal from position {start} of a sequence of {len(cells)}"
        assert end == -1 or end >= len(cells), f"removal up to {end} would leave a hole in {len(cells)} positions"
        if self._model.has_state and 0 < start < len(cells):
            begins, maximum = self._last_step.pop(sequence, start), self._model.options.rollback
            assert begins < start >= len(cells) - maximum, f"a state after {len(cells)} cut back to {start}"
        del cells[start:]
        self._kept_from[sequence] = min(start, self._kept_from.get(sequence, 0))

    def state_keep(self, number: int, sequence: int, end: int) -> None:
        self._check_open()
        self._check_sequence(sequence)
        cells = self._cells.get(sequence, [])
        assert self._model.has_state, "cells can be cut anywhere: no state is needed"
        assert 0 < end == len(cells), f"a state after {end} of {len(cells)} positions"
        self._states[number] = sequence, cells[:]

    def state_restore(self, number: int, sequence: int, end: int) -> None:
        self._check_open()
        self._last_step.pop(sequence, None)
        if self.held(sequence) == end:
            return
        assert number in self._states, f"state {number} is not kept"
        _, cells = self._states[number]
        assert end == len(cells), f"state {number} is after {len(cells)} positions, not {end}"
        assert self._cells.get(sequence, [])[:end] == cells, "the state of another text"
        del self._cells[sequence][end:]
        self._kept_from[sequence] = end

    def state_forget(self) -> None:
        self._check_open()
        self._states.clear()

    def kv_copy(self, source: int, target: int, end: int) -> None:
        self._check_open()
        self._check_sequence(source)
        self._check_sequence(target)
        assert source != target, f"sequence {source} copied onto itself"
        origin = self._cells.get(source, [])
        assert 0 < end <= len(origin), f"copy of positions up to {end} of {len(origin)}"
        self._cells[target] = origin[:] if self._model.has_state else origin[:end]
        self._kept_from[target] = self._kept_from.get(source, 0)

    @property
    def layers(self) -> range:
        return range(self._first, self._last)

    @property
    def kv_layers(self) -> range:
        return self.layers

    @property
    def kv_supported(self) -> bool:
        return self._model.gives_cells

    @property
    def kv_shapes(self) -> list[CellShape]:
        states = [False, True] if self._model.needs_state else [False]
        return [CellShape(layer, CELL_TYPE, CELL_TYPE, 8, 1, each) for each in states for layer in self.layers]

    def kv_cells(self, sequence: int, start: int, end: int) -> list[LayerCells]:
        self._check_open()
        self._check_sequence(sequence)
        cells = self._cells.get(sequence, [])
        is_state = self._model.needs_state and start == end
        if is_state:
            assert 0 < end == len(cells), f"a state after {end} of {len(cells)} positions"
        else:
            assert 0 <= start < end <= len(cells), f"cells {start} to {end} of {len(cells)}"
            is_here = self._model.needs_state or start >= self._kept_from.get(sequence, 0)
            assert not self._model.has_state or is_here, "cells that are gone"
        keys = np.array(cells[-1:] if is_state else cells[start:end], np.int64).tobytes()
        return [
            LayerCells(
                layer=layer,
                start=start,
                end=end,
                key_type=CELL_TYPE,
                value_type=CELL_TYPE,
                keys=keys,
                values=bytes([layer]) * max(1, end - start),
            )
            for layer in self.layers
        ]

    def kv_restore(self, sequence: int, blocks: Sequence[Sequence[LayerCells]]) -> None:
        self._check_open()
        self._check_sequence(sequence)
        histories: list[int] = []
        if self._model.needs_state:
            *blocks, state = blocks
            for each in state:
                assert each.start == each.end == blocks[-1][0].end, "a state of another place"
                assert each.keys == bytes(blocks[-1][0].keys)[-8:], "the state of another text"
                assert each.values == bytes([each.layer]), "the state of another layer"
        for block in blocks:
            assert [each.layer for each in block] == list(self.layers), "a block has other layers than the window"
            for each in block:
                assert each.start == len(histories), f"cells from {each.start} on come after {len(histories)}"
                assert (each.key_type, each.value_type) == (CELL_TYPE, CELL_TYPE)
                assert each.values == bytes([each.layer]) * (each.end - each.start), "the cells of another layer"
                assert each.keys == block[0].keys, "layers of different texts"
            histories += np.frombuffer(block[0].keys, np.int64).tolist()
            assert len(histories) == block[0].end, f"cells up to {block[0].end} are {len(histories)}"
        assert histories, "nothing was restored"
        self._cells[sequence] = histories
        self._kept_from[sequence] = len(histories)

    def release(self) -> None:
        self._check_open()
        self._open = False
        self._model.open_windows -= 1

    def _through_layers(self, rows: Rows) -> list[_Row]:
        """Pass ``rows`` through every layer of the window."""
        self._check_open()
        self._check_rows(rows)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        self.steps.append(tuple(rows.positions))
        arriving = self._tokens(rows) if self._takes_tokens else self._hidden(rows)
        leaving = []
        trails: dict[int, int] = {}
        for row, position, sequences in zip(arriving, rows.positions, rows.sequences, strict=True):
            layer, at, token, trail, history = row
            assert layer == self._first, f"a row of layer {layer} came to a window of layer {self._first}"
            assert at == position, f"the hidden state of position {at} came at {position}"
            self._remember(row, position, sequences)
            if trail not in trails:
                trails[trail] = reduce(_through, self.layers, trail)
            leaving.append(_Row(self._last, position, token, trails[trail], history))
        firsts = zip(reversed(rows.positions), reversed(rows.sequences), strict=True)
        found = {sequence: position for position, sequences in firsts for sequence in sequences}
        self._last_step = found if len(found) > 1 else self._last_step | found
        return leaving

    def _tokens(self, rows: Rows) -> list[_Row]:
        content = rows.content
        assert content.dtype == np.int32, f"a first window takes int32 tokens, not {content.dtype}"
        assert content.shape == (len(rows),), f"{len(rows)} rows with tokens of shape {content.shape}"
        arriving = []
        added: dict[tuple[int, int], int] = {}
        for token, position, sequences in zip(content.tolist(), rows.positions, rows.sequences, strict=True):
            assert 0 <= token < self._model.vocabulary, f"token {token} is outside the vocabulary"
            before = added.get((sequences[0], position - 1), self._before(sequences[0], position))
            history = follow(before, token)
            added |= {(sequence, position): history for sequence in sequences}
            arriving.append(_Row(0, position, token, 0, history))
        return arriving

    def _before(self, sequence: int, position: int) -> int:
        cells = self._cells.get(sequence, [])
        return cells[position - 1] if 0 < position <= len(cells) else 0

    def _hidden(self, rows: Rows) -> list[_Row]:
        content = rows.content
        assert content.dtype == np.float32, f"a window takes float32 hidden states, not {content.dtype}"
        assert content.shape == (len(rows), WIDTH), f"{len(rows)} rows with hidden states of shape {content.shape}"
        assert content.flags.c_contiguous, "hidden states that are not contiguous"
        return [_decoded(values) for values in content.astype(np.int64).tolist()]

    def _remember(self, row: _Row, position: int, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            cells = self._cells.setdefault(sequence, [])
            assert position >= len(cells), f"position {position} of sequence {sequence} comes twice"
            assert position == len(cells), f"position {len(cells)} of sequence {sequence} is missing before {position}"
            before = cells[-1] if cells else 0
            assert follow(before, row.token) == row.history, (
                f"layers {self._first} to {self._last}: the cache of sequence {sequence} at {position} is another text's"
            )
            cells.append(row.history)

    def _check_rows(self, rows: Rows) -> None:
        options = self._model.options
        assert 0 < len(rows) <= options.rows, f"{len(rows)} rows; 1 to {options.rows} are allowed"
        assert len(rows.sequences) == len(rows.outputs) == len(rows)
        assert len(rows.positions) == len(rows)
        for position in (min(rows.positions), max(rows.positions)):
            assert 0 <= position < options.context, f"position {position} is outside the context of {options.context}"
        for sequences in set(map(tuple, rows.sequences)):
            assert len(set(sequences)) == len(sequences) > 0, f"a row of sequences {sequences}"
            for sequence in sequences:
                self._check_sequence(sequence)
        numbers = [sequence for sequences in rows.sequences for sequence in sequences]
        assert (
            options.branches or len(set(numbers)) == 1 or numbers == list(range(numbers[0], numbers[0] + len(rows)))
        ), f"llama.cpp would compute rows of the sequences {numbers} in several parts"

    def _check_sequence(self, sequence: int) -> None:
        assert 0 <= sequence < self._model.options.numbers, f"sequence {sequence} does not exist"

    def _check_open(self) -> None:
        assert self._open, "a window was used after its release"


class FakeHiddenWindow(_Window):
    """A window whose output is the next window's input."""

    def forward(self, rows: Rows) -> Hidden:
        hidden = np.array([row.encoded() for row in self._through_layers(rows)], np.float32)
        if self.spoils is not None:
            hidden[-1, -1] = self.spoils
        return hidden


class FakeLogitsWindow(_Window):
    """The tail window or the whole model."""

    def __init__(self, model: FakeModel, first: int, last: int, *, takes_tokens: bool) -> None:
        super().__init__(model, first, last, takes_tokens=takes_tokens)
        self._trail = trail_of(model.layers)
        self._logits: dict[int, NDArray[np.float32]] = {}
        self._histories: dict[int, tuple[int, int]] = {}

    def forward(self, rows: Rows) -> None:
        self._logits, self._histories = {}, {}
        for i, row in enumerate(self._through_layers(rows)):
            assert row.trail == self._trail, f"row {i} did not go through every layer in order"
            self._histories[i] = row.history, row.position + 1
            if rows.outputs[i]:
                self._logits[i] = self._model.scores(row.history)
                if self.spoils is not None:
                    self._logits[i] = np.full_like(self._logits[i], self.spoils)

    def history(self, row: int) -> tuple[int, int]:
        """The digest of the text up to row ``row`` of the last step, and its number of tokens."""
        self._check_open()
        return self._histories[row]

    @property
    def wanted(self) -> set[int]:
        """The rows of the last step that requested logits."""
        return set(self._logits)

    def logits(self, row: int) -> NDArray[np.float32]:
        self._check_open()
        assert row in self._logits, f"row {row} of the last step wanted no logits"
        return self._logits[row]

    def sampler(self, sampling: Sampling, prompt: Sequence[int], sampled: Sequence[int]) -> FakeSampler:
        self._check_open()
        return FakeSampler(self, self._model, sampling, prompt, sampled)

    def is_end(self, token: int) -> bool:
        return token in self._model.ends


class _Draws:
    """The samples of one generation, each with its own generator; bias and presence penalty change the logits."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], sampled: Sequence[int]) -> None:
        self.sampling = sampling
        self._seen = [*prompt, *sampled]
        self._index = len(sampled)

    def draw(self, logits: NDArray[np.float32]) -> int:
        """Sample the next token and remember it."""
        token = self.at(logits, self._index)
        self._index += 1
        self._seen.append(token)
        return token

    def at(self, logits: NDArray[np.float32], index: int) -> int:
        """Sample token ``index``; penalties use the tokens known so far."""
        scores = logits.astype(np.float64)
        for token, bias in biases_in(self.sampling.logit_bias):
            scores[token] += bias
        if self.sampling.penalty_tokens > 0:
            scores[list(set(self._seen[-self.sampling.penalty_tokens :]))] -= self.sampling.presence_penalty
        if not self.sampling.is_greedy:
            random = np.random.default_rng(sampling_seed(self.sampling.seed, index))
            scores = scores / self.sampling.temperature + random.gumbel(size=len(scores))
        return int(scores.argmax())


class FakeSampler:
    """Samples for one generation, as ``FakeModel.answer`` does."""

    def __init__(
        self,
        window: FakeLogitsWindow,
        model: FakeModel,
        sampling: Sampling,
        prompt: Sequence[int],
        sampled: Sequence[int],
    ) -> None:
        self._window, self._model = window, model
        self._draws = _Draws(sampling, prompt, sampled)
        self._open = True
        self._late = model.late(sampling)
        self.mirostat_mu: float | None = None
        model.open_samplers += 1

    def is_ready(self, wait_s: float) -> bool:
        assert self._open, "a sampler was used after its release"
        self._late = max(0, self._late - 1)
        return not self._late

    def sample(self, row: int, kept: LogitsRow | None = None) -> int:
        assert self._open, "a sampler was used after its release"
        assert not self._late, "the ring would have waited for a mask"
        self._late = self._model.late(self._draws.sampling)
        if self._draws.sampling.grammar is not None:
            raise GrammarError("the fake follows no grammar")
        return self._draws.draw(self._window.logits(row) if kept is None else kept)

    def peek(self, logits: LogitsRow, index: int) -> int | None:
        assert self._open, "a sampler was used after its release"
        return None if self._draws.sampling.is_greedy else self._draws.at(logits, index)

    def release(self) -> None:
        assert self._open, "a sampler was released twice"
        self._open = False
        self._model.open_samplers -= 1
