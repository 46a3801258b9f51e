"""Compute a tiny model whole and in windows, and compare the logits bit for bit. For child processes.

The steps are those of a ring: a prompt in two chunks that exceeds the sliding window, another sequence between them,
single tokens, two sequences in one step if the model supports that, and a sequence that restarts while the other
continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from halda.assignment import in_memory
from primad.certify.keys import KeyChange
from primad.engine.llama.embedding import TokenEmbedding
from primad.engine.llama.windows import FirstWindow, MiddleWindow, TailWindow, WholeModel
from primad.engine.protocol import EngineOptions, GroupExchange, KvType, Rows, WindowSource
from primad.gguf.architectures.layers import layer_count, recurrent_layers
from primad.gguf.header import Header
from primad.gguf.layers import LayerRef, layer_header
from primad.gguf.windows import ModelCutter, vocabulary_size

ROWS: Final = 64
CONTEXT: Final = 256
_PROMPT, _OTHER, _ANEW, _DECODED = 90, 33, 41, 3
Logits = list[NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class TinyStep:
    """One token per item: ``tokens`` of ``sequences`` at ``positions``; the last token of each sequence wants
    logits."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    sequences: tuple[int, ...]

    def rows(self, content: NDArray[np.float32] | NDArray[np.int32]) -> Rows:
        """Return them as a window takes them."""
        outputs = [
            i == len(self.sequences) - 1 or self.sequences[i + 1] != each for i, each in enumerate(self.sequences)
        ]
        return Rows(
            content=content,
            positions=self.positions,
            sequences=[[sequence] for sequence in self.sequences],
            outputs=outputs,
        )


def steps(vocabulary: int, *, together: bool) -> Iterator[TinyStep | int]:
    """Yield what is computed; a number is a sequence to be removed. ``together``: also two sequences in one step."""
    noise, ends = np.random.default_rng(0), [0, 0]

    def step(*counts: tuple[int, int]) -> TinyStep:
        tokens, positions, sequences = list[int](), list[int](), list[int]()
        for sequence, count in counts:
            tokens += noise.integers(1, vocabulary, count).tolist()
            positions += range(ends[sequence], ends[sequence] + count)
            sequences += [sequence] * count
            ends[sequence] += count
        return TinyStep(tuple(tokens), tuple(positions), tuple(sequences))

    yield step((0, ROWS))
    yield step((1, _OTHER))
    yield step((0, _PROMPT - ROWS))
    for _ in range(_DECODED):
        yield step((0, 1))
        yield step((1, 1))
    for _ in range(2 if together else 0):
        yield step((0, 1), (1, 1))
    yield 1
    ends[1] = 0
    yield step((1, _ANEW))
    for _ in range(_DECODED):
        yield step((1, 1))
        yield step((0, 1))


def steps_of(header: Header) -> list[TinyStep | int]:
    """Return the steps for the model; with a state, the sequences of concurrent requests are computed one by one."""
    return list(steps(vocabulary_size(header), together=not any(recurrent_layers(header))))


def _whole(header: Header, kv_type: KvType) -> WholeModel:
    source = WindowSource(
        window=0,
        metadata=str(header.path),
        layers=(),
        assignment=in_memory(0, layer_count(header), output="cpu"),
        extra_buffers=False,
    )
    return WholeModel(source, _options(kv_type), frozenset(), vocabulary=vocabulary_size(header))


def whole_logits(header: Header, kv_type: KvType) -> Logits:
    """Return the logits of every step. Raises ``EngineError``."""
    model, found = _whole(header, kv_type), Logits()
    try:
        for step in steps_of(header):
            if isinstance(step, int):
                model.kv_remove(step, 0, -1)
                continue
            rows = step.rows(np.array(step.tokens, np.int32))
            model.forward(rows)
            found += [model.logits(i).copy() for i, wanted in enumerate(rows.outputs) if wanted]
    finally:
        model.release()
    return found


def looks_ahead(header: Header) -> bool:
    """Whether logits depend on later tokens: such a model cannot generate token by token. Raises ``EngineError``."""
    found = Logits()
    for later in (1, 2):
        model = _whole(header, "f16")
        try:
            tokens = np.array([1, 2, 3, *(3 + later * each for each in (1, 2, 3))], np.int32)
            outputs = [False, False, True, False, False, True]
            model.forward(Rows(content=tokens, positions=range(6), sequences=[[0]] * 6, outputs=outputs))
            found.append(model.logits(2).copy())
        finally:
            model.release()
    return not np.array_equal(found[0][1:], found[1][1:])


class TinyRoute:
    """The windows of one tiny model between ``cuts``, opened from files in ``folder`` as a device does, with a
    ``change``. With an ``exchange`` it is one window, a share of the ``whole`` model."""

    def __init__(
        self,
        cutter: ModelCutter,
        cuts: Sequence[int],
        folder: Path,
        kv_type: KvType,
        change: KeyChange,
        *,
        whole: Header | None = None,
        exchange: GroupExchange | None = None,
    ) -> None:
        self._cutter, self._folder, self._options = cutter, folder, _options(kv_type)
        whole = whole or cutter.header
        self._embedding, self._vocabulary = TokenEmbedding.of(whole), vocabulary_size(whole)
        self._exchange = exchange
        self._windows: list[FirstWindow | MiddleWindow] = []
        self._tail: TailWindow | None = None
        try:
            for number, (first, last) in enumerate(pairwise(cuts)):
                self._open(number, first, last, change)
        except BaseException:
            self.release()
            raise

    def _open(self, number: int, first: int, last: int, change: KeyChange) -> None:
        header = self._cutter.header
        spec = self._cutter.spec(number, first, last, lambda values: change(values, first, last))
        metadata = self._folder / f"window-{number}.gguf"
        spec.write_metadata(metadata)
        is_tail = last == layer_count(header)
        files = WindowSource(
            window=number,
            metadata=str(metadata),
            layers=tuple(self._file(split, ref) for split, ref in enumerate(spec.layers, start=1)),
            assignment=in_memory(first, last, output="cpu" if is_tail else "none"),
            extra_buffers=False,
        )
        if is_tail:
            self._tail = TailWindow(
                files,
                self._options,
                frozenset(),
                vocabulary=self._vocabulary,
                embedding=self._embedding,
                exchange=self._exchange,
            )
        elif first == 0:
            self._windows.append(FirstWindow(files, self._options, self._embedding))
        else:
            self._windows.append(MiddleWindow(files, self._options))

    def _file(self, split: int, ref: LayerRef) -> str:
        """Return the layer file of ``ref``; only its header depends on the window and the place in it."""
        path = self._folder / f"{ref.digest}.gguf"
        header = layer_header(ref.tensors, number=split - 1, split=split)
        if path.exists():
            with path.open("r+b") as file:
                file.write(header)
        else:
            source = self._cutter.source(ref.digest)
            assert source is not None
            path.write_bytes(header + b"".join(source.chunks()))
        return str(path)

    def logits(self) -> Iterator[NDArray[np.float32]]:
        """Yield the logits of every step. Raises ``EngineError``."""
        assert self._tail is not None
        for step in steps_of(self._cutter.header):
            if isinstance(step, int):
                for window in (*self._windows, self._tail):
                    window.kv_remove(step, 0, -1)
                continue
            state: NDArray[np.float32] | NDArray[np.int32] = np.array(step.tokens, np.int32)
            for window in self._windows:
                state = window.forward(step.rows(state))
            rows = step.rows(state)
            self._tail.forward(rows)
            yield from (self._tail.logits(i).copy() for i, wanted in enumerate(rows.outputs) if wanted)

    def share_logits(self, steps: Sequence[TinyStep | int]) -> Logits:
        """Return the logits of every step of a share, empty except on the first rank. Raises ``EngineError``."""
        assert self._tail is not None
        assert self._exchange is not None
        found = Logits()
        for step in steps:
            if isinstance(step, int):
                self._tail.kv_remove(step, 0, -1)
                continue
            rows = step.rows(self._embedding.rows(np.array(step.tokens, np.int32), step.positions))
            self._tail.forward(rows)
            if not self._exchange.rank:
                found += [self._tail.logits(i).copy() for i, wanted in enumerate(rows.outputs) if wanted]
        return found

    def release(self) -> None:
        """Free all memory."""
        for window in (*self._windows, *([self._tail] if self._tail is not None else [])):
            window.release()


def difference(found: Iterator[NDArray[np.float32]], expected: Logits) -> str:
    """Return in words where logits first differ, and by how much; empty if they are bit-identical.

    Logits of token 0, which is NaN, are left out.
    """
    for number, (logits, wanted) in enumerate(zip(found, expected, strict=True)):
        if not np.array_equal(logits[1:], wanted[1:]):
            if not np.isfinite(logits[1:]).all():
                return f"logits {number + 1} of {len(expected)} are NaN or infinite: something bypasses the input node"
            return f"logits {number + 1} of {len(expected)} differ by {np.abs(logits[1:] - wanted[1:]).max():.2g}"
    return ""


def is_finite(logits: Logits) -> bool:
    """Whether all logits but token 0's are numbers, and not all equal."""
    return all(np.isfinite(each[1:]).all() and each[1:].std() > 0 for each in logits)


def _options(kv_type: KvType) -> EngineOptions:
    return EngineOptions(
        context=CONTEXT, sequences=2, rows=ROWS, threads=1, batch_threads=1, kv_type=kv_type, lock=False
    )
