"""What the layers of some models take beside the hidden state: a row for each token and layer (Gemma 4 E2B and E4B).

llama.cpp looks those rows up by token, projects the token's embedding for each layer, and adds both up. A window has the
part of the projection that is of its layers and computes that itself. So behind a hidden state there travel the embedding
of its token, the rows of all layers that may be in a window before the tail, and the token: the tail is the head's, as is
the table, and looks its rows up. In a window's graph they go in through the evaluation callback:

* the rows of its layers where the graph has looked them up (``SELECTED``),
* the embedding where the graph had the hidden state, once the first layer does not need that any more (``BEHIND``): the
  projection is computed after it and reads the same node.
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
"""What the graph calls the hidden state before its first layer, which the projection reads too."""
SELECTED: Final = b"inp_per_layer_selected"
BEHIND: Final = b"attn_out-0"
"""The first node at which nothing but the projection still needs ``SCALED``."""


_PADDING: Final = 0
"""The token whose rows llama.cpp takes for embeddings."""


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Of some rows and the layers of one window: the ``embedding`` (rows, width), and ``selected`` (rows, layers * each)."""

    embedding: Hidden
    selected: Hidden


class LayerTable:
    """The table of a model file with ``each`` values for every layer and token, of which rows are looked up.

    Those of the first ``sent`` layers travel. A picture's rows have those of the padding token, and the number behind the
    last token in place of theirs.
    """

    def __init__(self, look_up: Callable[[NDArray[np.int32]], Hidden], each: int, sent: int, tokens: int) -> None:
        self._look_up, self._each, self._sent, self._tokens = look_up, each, sent, tokens
        self._scale = np.float32(math.sqrt(each))

    def selected(self, tokens: NDArray[np.int32], layers: range) -> Hidden:
        """Rows (rows, layers * each) of ``tokens``, as llama.cpp looks them up. Raises ``WeightsError`` as ``TokenRows``."""
        known = np.where(tokens < self._tokens, tokens, _PADDING)
        found: Hidden = self._look_up(known)[:, self._each * layers.start : self._each * layers.stop] * self._scale
        return found

    def joined(self, embedding: Hidden, tokens: NDArray[np.int32]) -> Hidden:
        """What travels, before the first layer."""
        token = tokens.astype(np.int32).view(np.float32)[:, None]
        return np.hstack([embedding, embedding, self.selected(tokens, range(self._sent)), token])

    def of_picture(self, rows: Hidden) -> Hidden:
        """What travels of a picture's ``rows``."""
        return self.joined(rows, np.full(len(rows), self._tokens, np.int32))

    def beside(
        self, content: Hidden, width: int, layers: range, look_up: Callable[[NDArray[np.int32]], Hidden]
    ) -> LayerInputs:
        """What ``layers`` take beside the hidden states of what travelled: of tokens it is looked up again.

        Raises ``EngineError`` for tokens that are none.
        """
        tokens = np.ascontiguousarray(content[:, -1]).view(np.int32)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() <= self._tokens:
            raise EngineError("hidden states came back with tokens that the model does not have")
        is_picture = len(tokens) > 0 and tokens.min() == self._tokens
        embedding = np.ascontiguousarray(content[:, width : 2 * width]) if is_picture else look_up(tokens)
        return LayerInputs(embedding, self.selected(tokens, layers))


def split(content: Hidden, width: int, each: int, layers: range) -> tuple[Hidden, LayerInputs]:
    """The hidden states (rows, width) of what travels, and what ``layers`` take beside them.

    Raises ``EngineError`` where that is not among it.
    """
    first, last = (2 * width + each * layer for layer in (layers.start, layers.stop))
    if content.shape[1] <= last:
        raise EngineError(
            f"hidden states came without what layers {layers.start} to {layers.stop - 1} take beside them"
        )
    hidden, embedding, selected = (
        np.ascontiguousarray(content[:, start:stop]) for start, stop in ((0, width), (width, 2 * width), (first, last))
    )
    return hidden, LayerInputs(embedding, selected)


def parts_of(content: Hidden, width: int, layers: range) -> tuple[Hidden, dict[int, Hidden]]:
    """The hidden states (rows, width) of what travels of a picture, and what each of ``layers`` adds to its output, by its
    number among them: the first part behind the hidden states is layer 0's, and so on."""
    parts = {
        layer - layers.start: np.ascontiguousarray(content[:, width * (layer + 1) : width * (layer + 2)])
        for layer in layers
        if width * (layer + 2) <= content.shape[1]
    }
    return np.ascontiguousarray(content[:, :width]), parts


def with_hidden(content: Hidden, hidden: Hidden) -> Hidden:
    """What travels on: ``content`` with other ``hidden`` states."""
    following = content.copy()
    following[:, : hidden.shape[1]] = hidden
    return following
