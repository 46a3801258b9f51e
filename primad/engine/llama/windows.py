"""Loads and runs windows: first, middle and tail of a ring, and the whole model on one device.

``gguf/windows.py`` writes their files.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from primad.engine.binding import llama
from primad.engine.layer_inputs import LayerInputs, parts_of, split, with_hidden
from primad.engine.llama.embedding import TokenEmbedding
from primad.engine.llama.group_logits import GroupLogits
from primad.engine.llama.model import LlamaModel
from primad.engine.llama.predictor import LlamaPredictor
from primad.engine.llama.tap import Tap
from primad.engine.masks import Allowed, GrammarMask, Words
from primad.engine.protocol import EngineOptions, GroupExchange, Hidden, Rows, Sampling, WindowSource
from primad.engine.sampling import ChainSampler, DrySamplers, GreedySampler
from primad.engine.streaming.pages import FileRange, Pages
from primad.engine.vocabulary import LlamaVocabulary
from primad.errors import EngineError
from primad.gguf.architectures.layers import block_count, layer_count
from primad.gguf.architectures.tensors import layer_of
from primad.gguf.header import Header, read_header

logger = logging.getLogger(__name__)


MAX_OUTPUT_ROWS: Final = 64
"""Tokens of one step that may want logits: bounds the logits buffer (vocabulary * 4 bytes each)."""


def _give_back_zeros(header: Header) -> None:
    """Free the zeros that llama.cpp read for placeholder layers, which are all layer tensors of its first split."""
    zeros = [tensor for name, tensor in header.tensors.items() if layer_of(name) is not None]
    begin, end = min(each.offset for each in zeros), max(each.offset + each.bytes for each in zeros)
    pages = Pages([FileRange(str(header.path), begin, end - begin)])
    with suppress(EngineError):  # those for a GPU are no longer mapped
        pages.find()
        pages.release()
    pages.close()


class _HiddenWindow(LlamaModel):
    """A window with hidden states as input and output."""

    def __init__(self, source: WindowSource, options: EngineOptions, exchange: GroupExchange | None = None) -> None:
        assert source.assignment.output != "gpu"
        layers = source.assignment.layers
        header = read_header(Path(source.metadata))
        behind = block_count(header) - layers  # placeholder layers, which are not computed
        super().__init__(
            source, options, tap=Tap(layers - 1), outputs=options.rows, predicting=behind, exchange=exchange
        )
        if behind:
            _give_back_zeros(header)

    def forward(self, rows: Rows) -> Hidden:
        content = self._shared(rows)
        if not self._each and content.shape[1] == self._width:
            return self._forward(rows)
        if not self._each:
            hidden, self._deeper = parts_of(content, self._width, self.layers)
            following = self._forward(replace(rows, content=hidden))
            self._deeper = {}
            is_over = content.shape[1] <= self._width * (self.layers.stop + 1)
            return following if is_over else with_hidden(content, following)
        hidden, self._inputs = split(content, self._width, self._each, self.layers)
        return with_hidden(content, self._forward(replace(rows, content=hidden)))

    def _forward(self, rows: Rows) -> Hidden:
        if len(rows) > 1 and self._begins_window_cells(rows.positions):
            self._tap.clear()  # a repeated step would use other cells
        hidden = self._compute(rows)
        if hidden is None and self._tap.sums is None:  # the other ranks would not repeat it
            self._repeat(rows)
            hidden = self._tap.take()
        if hidden is None or len(hidden) != len(rows):
            raise EngineError(
                "llama.cpp computed a window without its last layer's output; its build is unknown to primad"
            )
        return hidden

    def _compute(self, rows: Rows) -> Hidden | None:
        """Compute the output; None where the graph was rebuilt and has the output at another node's old address."""
        self._decode(rows, every_row_out=True)
        has_same_graph = self._quiet.kept_graph()
        if self._quiet.is_on:
            llama.llama_synchronize(self._context)
            return self._tap.read()
        if self._tap.has_cut:
            self._quiet.begin()
        elif has_same_graph and len(rows) == 1 and not self._tap.must_see and self._quiet.has_one_part:
            self._tap.cut()
        return self._tap.take()

    def _repeat(self, rows: Rows) -> None:
        """Compute ``rows`` again with an empty callback cache: the graph was rebuilt."""
        logger.debug("graph rebuilt: repeating a step of %d rows", len(rows))
        self._tap.clear()
        for position, sequences in zip(rows.positions, rows.sequences, strict=True):
            for sequence in sequences:
                self.kv_remove(sequence, position, position + 1)
        self._decode(rows, every_row_out=True)


class FirstWindow(_HiddenWindow):
    """The route's first window: input is token ids or a picture's rows, output hidden states."""

    def __init__(
        self,
        source: WindowSource,
        options: EngineOptions,
        embedding: TokenEmbedding,
        exchange: GroupExchange | None = None,
    ) -> None:
        super().__init__(source, options, exchange)
        self._embedding = embedding

    def forward(self, rows: Rows) -> Hidden:
        return super().forward(replace(rows, content=self._embedding.first(rows)))


class MiddleWindow(_HiddenWindow):
    """Any window but the first and the tail: input and output are hidden states."""


class _LogitsWindow(LlamaModel):
    """A window that ends in logits."""

    def __init__(
        self,
        source: WindowSource,
        options: EngineOptions,
        ends: frozenset[int],
        *,
        vocabulary: int,
        file: Path | None = None,
        predicting: int = 0,
        predicts: bool = False,
        embedding: TokenEmbedding | None = None,
        exchange: GroupExchange | None = None,
    ) -> None:
        assert exchange is None or not predicts
        assert source.assignment.output == "gpu" or not source.assignment.gpu_layers
        super().__init__(
            source,
            options,
            tap=Tap(None),
            outputs=MAX_OUTPUT_ROWS,
            predicting=predicting,
            predicts=predicts,
            exchange=exchange,
        )
        self._logits = None if exchange is None else GroupLogits(exchange, vocabulary)
        self.predictor = self._open_predictor() if predicts else None
        self._ends = ends
        own = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._logits_type = ctypes.c_float * (vocabulary if exchange is None else own)
        self._logits_at: int | None = None
        self._last_logits: NDArray[np.float32]
        self._vocabulary = vocabulary
        self._embedding = embedding
        self._words = Words(lambda: LlamaVocabulary(file or Path(source.metadata)))
        self._dry = DrySamplers(self._words)

    def _open_predictor(self) -> LlamaPredictor | None:
        """Open the drafter that uses the model's own layers; without it generation continues."""
        try:
            return LlamaPredictor(self._model, self._context, self._context_params(MAX_OUTPUT_ROWS), self._options)
        except EngineError as exc:
            logger.warning("%s", exc)
            return None

    def forward(self, rows: Rows) -> None:
        self._decode(rows, every_row_out=False)
        if self._logits is not None:
            self._logits.gather({row: self._own_logits(row) for row, wanted in enumerate(rows.outputs) if wanted})
        if not self._tap.must_see:
            self._quiet.begin()

    def logits(self, row: int) -> NDArray[np.float32]:
        return self._own_logits(row) if self._logits is None else self._logits.row(row)

    def _own_logits(self, row: int) -> NDArray[np.float32]:
        """Return this window's logits of ``row``; in a share those of its part of the vocabulary."""
        address = ctypes.c_void_p.from_buffer(llama.llama_get_logits_ith(self._context, row)).value
        if address is None:
            raise EngineError(f"row {row} of the last step has no logits")
        if address != self._logits_at:  # mostly the address is that of the last token's
            self._logits_at = address
            self._last_logits = np.frombuffer(self._logits_type.from_address(address), np.float32)  # type: ignore[call-overload]
        return self._last_logits

    def sampler(
        self, sampling: Sampling, prompt: Sequence[int], sampled: Sequence[int]
    ) -> GreedySampler | ChainSampler:
        takes_likeliest, mask = sampling.is_greedy and not sampling.changes_logits, None
        if sampling.grammar is not None:
            mask = GrammarMask(self._words, sampling.grammar, sampled, lists=not takes_likeliest)
        allowed = Allowed(sampling, self._ends, len(sampled), mask, vocabulary=self._vocabulary)
        if takes_likeliest:
            return GreedySampler(self, allowed)
        return ChainSampler(
            self._context if self._logits is None else None,
            self,
            self._dry,
            sampling,
            prompt,
            sampled,
            allowed,
            context_tokens=self._options.context,
        )

    def is_end(self, token: int) -> bool:
        return token in self._ends

    def release(self) -> None:
        self._dry.release()
        self._words.release()
        if self.predictor is not None:
            self.predictor.release()
        super().release()


class TailWindow(_LogitsWindow):
    """The route's last window: hidden states in, logits out. ``embedding`` has the table of per-layer inputs."""

    def forward(self, rows: Rows) -> None:
        content = self._shared(rows)
        if self._each:
            self._inputs = self._beside(content, rows.positions)
            rows = replace(rows, content=np.ascontiguousarray(content[:, : self._width]))
        elif content.ndim > 1 and content.shape[1] > self._width:  # a tail with all layers gets token ids
            hidden, self._deeper = parts_of(content, self._width, self.layers)
            rows = replace(rows, content=hidden)
        super().forward(rows)
        self._deeper = {}

    def _beside(self, content: Hidden, positions: Sequence[int]) -> LayerInputs:
        """Return the per-layer inputs; in a group rank 0 looks them up for all."""
        if self.exchange is None or self.exchange.rank == 0:
            assert self._embedding is not None
            assert self._embedding.layers is not None
            look_up = partial(self._embedding.rows, positions=positions)
            found = self._embedding.layers.beside(content, self._width, self.layers, look_up)
        else:
            sizes = (self._width, self._each * len(self.layers))
            found = LayerInputs(*(np.empty((len(content), size), np.float32) for size in sizes))
        if self.exchange is not None:
            self.exchange.spread(found.embedding.reshape(-1))
            self.exchange.spread(found.selected.reshape(-1))
        return found


class ShareWindow(TailWindow):
    """A share of the tail, or of the whole model; the latter ``takes_tokens`` and pictures' rows on rank 0 of its
    group. Other ranks have no logits and so no ``vocabulary``."""

    def __init__(
        self,
        source: WindowSource,
        options: EngineOptions,
        ends: frozenset[int],
        *,
        exchange: GroupExchange,
        vocabulary: int = 0,
        embedding: TokenEmbedding | None = None,
        takes_tokens: bool = False,
        file: Path | None = None,
    ) -> None:
        header = read_header(Path(source.metadata))
        super().__init__(
            source,
            options,
            ends,
            vocabulary=vocabulary,
            file=file,
            predicting=block_count(header) - layer_count(header),
            embedding=embedding,
            exchange=exchange,
        )
        self._begins = takes_tokens

    def forward(self, rows: Rows) -> None:
        if self._begins:
            assert self._embedding is not None
            rows = replace(rows, content=self._embedding.first(rows))
        super().forward(rows)


class WholeModel(_LogitsWindow):
    """The single window of a single-device plan: the user's file unchanged, token ids in, logits out.

    The last ``predicting`` layers are for multi-token prediction and not part of the window.
    """

    _takes_tokens: ClassVar = True
