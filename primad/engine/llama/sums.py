"""Sums over the ranks of a tensor-parallel group, in the middle of llama.cpp's graph.

A rank multiplies its activations by its columns of a matrix; the result is a part of a sum. It stays one through linear
operations: a scale, a bias that only rank 0 has, weights of experts, the selection of output rows, the sum of two
parts. Where something else reads it, a norm or the residual, it must be the total. llama.cpp names only some of these
nodes, so names are not used: a matrix that was cut by columns is known by its own name, and what follows by the graph.

Nothing says in advance which node reads another. So a new graph is stopped at each part: when the callback is called
for another node, which reads the part, the part is computed, and the total replaces it. The next step of the same shape
has the same graph, and is stopped only at the parts that were exchanged.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Hashable
from typing import Final

import numpy as np

from primad.engine.protocol import GroupExchange, Hidden
from primad.engine.tensor import Tensor
from primad.errors import EngineError, PrimadError

_COLUMNS: Final = re.compile(
    rb"blk\.(\d+)\.(attn_output|ssm_out|shortconv\.out_proj|time_mix_output|ffn_down(_exps|_shexp|_chexps)?)\.weight\b"
)
"""Matrices that are cut by columns, or are zero on all ranks but the first (``gguf/share_rules.py``); the pattern also
matches the name of a copy on another device."""
_SHARED_BIAS: Final = re.compile(rb"blk\.\d+\.(attn_output|ffn_down(_exps|_shexp|_chexps)?)\.bias\b")
_MATRIX: Final = frozenset((b"MUL_MAT", b"MUL_MAT_ID"))
_MOVES: Final = frozenset((b"VIEW", b"RESHAPE", b"PERMUTE", b"TRANSPOSE", b"CONT", b"GET_ROWS", b"SUM_ROWS"))
_ADDS: Final = frozenset((b"ADD", b"ADD_ID"))


class Sums:
    """Exchanges the partial sums of one window with the other ranks. ``ggml`` is libggml-base.

    With the other ranks' parts of layer ``last``, rank 0 has the window's result. So they are sent only after ``prove``
    has checked that the weights are the model's; it raises ``EngineError`` if not. None: the result is gathered after
    the step.
    """

    def __init__(
        self, ggml: ctypes.CDLL, exchange: GroupExchange, *, last: int | None, prove: Callable[[], None]
    ) -> None:
        self._ggml, self._exchange = ggml, exchange
        self._last = None if last is None or exchange.rank == 0 else b"%d" % last
        self._prove = prove
        self._layer = b""
        """Layer of the matrix that made the latest part."""
        self._proven: set[int] = set()
        """Parts of the last layer, sent only after ``prove``."""
        self._shape: Hashable = None
        self._seen: dict[int, bool] = {}
        """For each node seen in this graph, whether it is a part of a sum."""
        self._unread: set[int] = set()
        """Parts that no node has read yet. One that stays here went elsewhere as a copy between two devices'
        memories."""
        self._graphs = 0
        self._order: list[int] = []
        """The nodes that were exchanged, in order."""
        self._sizes: dict[int, int] = {}
        self._computed: set[int] = set()
        self._next = 0
        self._awaited: int | None = None
        self.is_known = False
        """Whether the graph is the same as in the step before."""
        self.error: PrimadError | None = None
        ggml.ggml_backend_buffer_is_host.restype = ctypes.c_bool
        ggml.ggml_backend_buffer_is_host.argtypes = [ctypes.c_void_p]
        ggml.ggml_op_name.restype, ggml.ggml_op_name.argtypes = ctypes.c_char_p, [ctypes.c_int]
        self._values: Hidden = np.empty(0, np.float32)

    def begin(self, shape: Hashable) -> None:
        """Prepare for a step of this ``shape``: equal shapes have equal graphs."""
        self.is_known = shape == self._shape and self._graphs == 1 and bool(self._order)
        self._shape, self._next, self._awaited = shape, 0, None
        self._computed.clear()
        self._seen.clear()
        if not self.is_known:
            self._graphs, self._order = 0, []
            self._unread.clear()
            self._sizes.clear()
            self._proven.clear()

    def check(self) -> None:
        """Raise the error of an exchange."""
        error, self.error = self.error, None
        if error is not None:
            self._shape = None
            raise error

    def end(self) -> None:
        """Finish a computed step. Raises ``EngineError`` if a sum was missed."""
        if not self._order or self._unread or (self.is_known and self._next != len(self._order)):
            self._shape = None
            raise EngineError(
                "llama.cpp computed a window without the sums of its group; its build is unknown to primad"
            )

    def forget(self) -> None:
        """Expect another graph in the next step."""
        self._shape = None

    @property
    def waits(self) -> bool:
        """Whether a node was requested, and is reported next."""
        return self._awaited is not None

    def wants(self, node: int) -> bool:
        """Return whether ``node``, which is computed next, is to be reported afterwards."""
        if self.error is not None:
            is_wanted = True
        elif self.is_known:
            is_wanted = node in self._sizes
        else:
            is_wanted = self._learn(node)
        self._awaited = node if is_wanted else None
        return is_wanted

    def computed(self, node: int) -> bool:
        """Handle the computed ``node``, which was requested. Returns False to stop the graph after an error."""
        self._awaited = None
        if self.is_known and self.error is None:
            self._computed.add(node)
            while self._next < len(self._order) and self._order[self._next] in self._computed:
                self._exchange_node(self._order[self._next])
                self._next += 1
        return self.error is None

    def _learn(self, node: int) -> bool:
        if node in self._seen or not self._seen:
            self._graphs += 1
            self._seen.clear()
            if Tensor.from_address(node).name != self._name(node):
                self.error = EngineError(
                    "llama.cpp's tensors have an unknown layout: groups do not work with this build"
                )
                return True
        tensor = Tensor.from_address(node)
        parts = [source for source in tensor.sources if source and self._seen.get(source)]
        op: bytes = self._ggml.ggml_op_name(tensor.op)
        is_part = False
        self._unread.difference_update(parts)
        if parts:
            is_part = self._is_linear(tensor, op, parts)
            if not is_part:
                for part in dict.fromkeys(parts):
                    if self._seen[part]:
                        if self._layer == self._last:
                            self._proven.add(part)
                        self._exchange_node(part)
                        self._order.append(part)
                        self._settle(Tensor.from_address(part).data)
        elif op in _MATRIX and (columns := _COLUMNS.search(self._name(tensor.sources[0]))) is not None:
            is_part, self._layer = True, columns[1]
        self._seen[node] = is_part
        if is_part:
            self._unread.add(node)
        return is_part or self.error is not None

    def _settle(self, place: int) -> None:
        """Mark each node that reads memory at ``place`` as a total."""
        for node, is_part in self._seen.items():
            if is_part and Tensor.from_address(node).data == place:
                self._seen[node] = False

    def _is_linear(self, tensor: Tensor, op: bytes, parts: list[int]) -> bool:
        """Whether the node turns ``parts`` into a part, as it would turn their totals into its total."""
        if op in _MOVES:
            return True
        if op == b"SCALE":
            return not tensor.op_params[1]  # else it adds a bias
        others = [source for source in tensor.sources if source and source not in parts]
        if op in _ADDS:
            bias = others[:1]
            return not bias or _SHARED_BIAS.search(self._name(bias[0])) is not None
        if op == b"MUL_MAT_ID":  # the second matrix of an experts' adapter, applied to the first one's result
            return parts == [tensor.sources[1]] and b".lora_b" in self._name(tensor.sources[0])
        return op in (b"MUL", b"MUL_MAT") and len(parts) == 1 and bool(others)

    def _name(self, node: int) -> bytes:
        name: bytes = self._ggml.ggml_get_name(node)
        return name

    def _exchange_node(self, node: int) -> None:
        if self.error is not None:
            return
        size, count = int(self._ggml.ggml_nbytes(node)), int(self._ggml.ggml_nelements(node))
        if size != 4 * count or self._sizes.setdefault(node, size) != size:
            self.error = EngineError("llama.cpp computes sums of another type or order; its build is unknown to primad")
            return
        if not count:
            return
        place = Tensor.from_address(node)
        is_here = place.buffer and self._ggml.ggml_backend_buffer_is_host(place.buffer)
        if is_here:  # no copy: prefill has megabytes
            floats = (ctypes.c_float * count).from_address(place.data)
            values: Hidden = np.frombuffer(floats, np.float32)  # type: ignore[call-overload]
        else:
            if len(self._values) < count:
                self._values = np.empty(count, np.float32)
            values = self._values[:count]
            self._ggml.ggml_backend_tensor_get(node, values.ctypes.data, 0, size)
        try:
            if node in self._proven:
                self._prove()
            self._exchange.sum(values)
        except PrimadError as exc:
            self.error = exc  # it cannot propagate through C
            return
        if not is_here:
            self._ggml.ggml_backend_tensor_set(node, values.ctypes.data, 0, size)
