"""Per-layer inputs: a row for each token and layer that some models take besides the hidden state (Gemma 4 E2B and
E4B).

llama.cpp looks these rows up by token, projects the token's embedding for each layer, and adds the two. A window has
its layers' part of the projection and computes it itself. So each hidden state travels with the embedding of its token,
the rows of all layers that may be in a window before the tail, and the token id: the tail is on the head, which has the
table and looks the tail's rows up. In a window's graph they are entered by the evaluation callback:

* the rows of its layers where the graph has looked them up (``SELECTED``),
* the embedding in place of the hidden state, once the first layer no longer needs that (``BEHIND``): the projection is
  computed after it and reads the same node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from primad.engine.protocol import Hidden
from primad.errors import EngineError

SCALED: Final = b"inp_scaled"
"""The graph's name of the hidden state before its first layer, which the projection reads too."""
SELECTED: Final = b"inp_per_layer_selected"
BEHIND: Final = b"attn_out-0"
"""The first node after which only the projection still reads ``SCALED``."""


_PADDING: Final = 0
"""The token whose rows llama.cpp uses for embeddings."""


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Inputs of one window's layers for some tokens: ``embedding`` (rows, width), and ``selected`` (rows, layers *
    each)."""

    embedding: Hidden
    selected: Hidden


class LayerTable:
    """The table of a model file with ``each`` values for every layer and token, whose rows are looked up.

    Rows of the first ``sent`` layers travel with the hidden state. A picture's tokens use the rows of the padding
    token, and as token id the one after the last.
    """

    def __init__(self, look_up: Callable[[NDArray[np.int32]], Hidden], each: int, sent: int, tokens: int) -> None:
        self._look_up, self._each, self._sent, self._tokens = look_up, each, sent, tokens
        self._scale = np.float32(math.sqrt(each))

    def selected(self, tokens: NDArray[np.int32], layers: range) -> Hidden:
        """Return rows (rows, layers * each) of ``tokens``, as llama.cpp looks them up.

        Raises ``WeightsError`` as ``TokenRows`` does.
        """
        known = np.where(tokens < self._tokens, tokens, _PADDING)
        found: Hidden = self._look_up(known)[:, self._each * layers.start : self._each * layers.stop] * self._scale
        return found

    def joined(self, embedding: Hidden, tokens: NDArray[np.int32]) -> Hidden:
        """Return what is sent to the first layer: hidden states with their inputs."""
        token = tokens.astype(np.int32).view(np.float32)[:, None]
        return np.hstack([embedding, embedding, self.selected(tokens, range(self._sent)), token])

    def of_picture(self, rows: Hidden) -> Hidden:
        """Return the same for a picture's ``rows``."""
        return self.joined(rows, np.full(len(rows), self._tokens, np.int32))

    def beside(
        self, content: Hidden, width: int, layers: range, look_up: Callable[[NDArray[np.int32]], Hidden]
    ) -> LayerInputs:
        """Return the inputs of ``layers`` from what was sent; those of tokens are looked up again.

        Raises ``EngineError`` for ids that are not tokens of the model.
        """
        tokens = np.ascontiguousarray(content[:, -1]).view(np.int32)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() <= self._tokens:
            raise EngineError("hidden states came back with tokens that the model does not have")
        is_picture = len(tokens) > 0 and tokens.min() == self._tokens
        embedding = np.ascontiguousarray(content[:, width : 2 * width]) if is_picture else look_up(tokens)
        return LayerInputs(embedding, self.selected(tokens, layers))


def split(content: Hidden, width: int, each: int, layers: range) -> tuple[Hidden, LayerInputs]:
    """Split what was sent into the hidden states (rows, width) and the inputs of ``layers``.

    Raises ``EngineError`` where the inputs are missing.
    """
    first, last = (2 * width + each * layer for layer in (layers.start, layers.stop))
    if content.shape[1] <= last:
        raise EngineError(
            f"hidden states came without the per-layer inputs of layers {layers.start} to {layers.stop - 1}"
        )
    hidden, embedding, selected = (
        np.ascontiguousarray(content[:, start:stop]) for start, stop in ((0, width), (width, 2 * width), (first, last))
    )
    return hidden, LayerInputs(embedding, selected)


def parts_of(content: Hidden, width: int, layers: range) -> tuple[Hidden, dict[int, Hidden]]:
    """Split what was sent for a picture into the hidden states (rows, width) and what each of ``layers`` adds to its
    output, by its number in the window. The first part after the hidden states is for layer 0, and so on."""
    parts = {
        layer - layers.start: np.ascontiguousarray(content[:, width * (layer + 1) : width * (layer + 2)])
        for layer in layers
        if width * (layer + 2) <= content.shape[1]
    }
    return np.ascontiguousarray(content[:, :width]), parts


def with_hidden(content: Hidden, hidden: Hidden) -> Hidden:
    """Return ``content`` with other ``hidden`` states, to be sent on."""
    following = content.copy()
    following[:, : hidden.shape[1]] = hidden
    return following
