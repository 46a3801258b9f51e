"""The metadata of a tiny model with the layers of a real one: the same number, the same kinds, the same experts.

Values that only give a size become small: widths, heads, ranks, the sliding window (so that a short prompt exceeds it)
and the vocabulary (unless llama.cpp tells models apart by it). Everything else, above all per-layer values, is the
model's own. Sizes that differ stay different, and multiples of a quantised KV block's size stay multiples of it.

Which sizes are linked differs by architecture, so there are two ways: ``WAYS[0]`` makes the hidden state as narrow as
possible, ``WAYS[1]`` keeps its proportion to the heads. llama.cpp itself shows which of them it computes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from typing import Final

from primad.gguf.architectures.cuts import counts_vocabulary
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Header, Scalar, Value, array_value, scalar_value
from primad.gguf.windows import vocabulary_size

WAYS: Final = ("narrow", "in proportion")
SLIDING_WINDOW: Final = 24
VOCABULARY: Final = 256
_WIDTH: Final = 64
_FORWARD: Final = 96
_EXPERT_FORWARD: Final = 32
_MIN_HEAD: Final = 16
_KV_BLOCK: Final = 32
"""Values of a block of q8_0 and q4_0."""
_CELLS: Final = tuple(f"attention.{part}_length{kind}" for part in ("key", "value") for kind in ("", "_swa"))
"""Widths of a head's keys and values in the KV cache."""
_HEAD_SIZES: Final = (
    *_CELLS,
    "attention.key_length_mla",
    "attention.value_length_mla",
    "attention.kv_lora_rank",
    "attention.q_lora_rank",
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "kda.head_dim",
)
_HEADS: Final = ("attention.head_count", "attention.head_count_kv")
_FORWARDS: Final = {
    "feed_forward_length": _FORWARD,
    "expert_feed_forward_length": _EXPERT_FORWARD,
    "expert_shared_feed_forward_length": _EXPERT_FORWARD,
    "expert_chunk_feed_forward_length": _EXPERT_FORWARD // 2,
}
_STATE_HEADS: Final = ("ssm.time_step_rank", "ssm.group_count")
_INNER, _STATE = "ssm.inner_size", "ssm.state_size"
_TWICE_THE_WIDTH: Final = frozenset(("jamba",))
"""Architectures with twice as many states as the hidden state is wide."""


def tiny_values(header: Header, way: str) -> dict[str, Value]:
    """Return the metadata of a tiny model like that of ``header``, which must be ``cuttable``, in one of the ``WAYS``.

    Raises ``ModelError`` for a size that is not a number.
    """
    name = header.text("general.architecture")
    sizes = _Sizes(header, name)
    values = {"general.architecture": header.values["general.architecture"]}
    for key, value in header.values.items():
        if not key.startswith(("general.", "tokenizer.", "split.")):
            values[key] = value
    for key, change in sizes.changes(way).items():
        if key in values:
            values[key] = _changed(values[key], change)
    values.update(sizes.added(way))
    vocabulary = vocabulary_size(header)
    if not counts_vocabulary(header):
        vocabulary = min(vocabulary, VOCABULARY)
    values[f"{name}.vocab_size"] = scalar_value(GGUFValueType.UINT32, vocabulary)
    values["tokenizer.ggml.model"] = scalar_value(GGUFValueType.STRING, "none")
    return values


_Change = Callable[[int], int]


class _Sizes:
    """Divisors of the sizes of one model."""

    def __init__(self, header: Header, name: str) -> None:
        self._header, self._name = header, name
        heads = self._numbers(_HEADS)
        self._heads = _divisor([each for each in heads if each > 1], 2)
        self._width, maximum = header.count(f"{name}.embedding_length"), max(heads, default=0)
        self._default = self._width // maximum if maximum else 0
        sizes = self._numbers(_HEAD_SIZES) or [self._default]
        cells = self._numbers(_CELLS) or [self._default]
        self._size = _divisor(sizes, 2, cells, _MIN_HEAD)
        if all(each % _KV_BLOCK == 0 for each in cells):
            self._size = math.gcd(self._size, _divisor([each // _KV_BLOCK for each in cells], 1))

    def _numbers(self, keys: Iterable[str]) -> list[int]:
        """Return all integers above 0 at these keys."""
        found = []
        for key in keys:
            value = self._header.values.get(f"{self._name}.{key}")
            items = [] if value is None else value.items() if value.is_array else [value.scalar()]
            found += [int(each) for each in items if isinstance(each, int) and each > 0]
        return found

    def _embedding(self, way: str) -> int:
        if way == WAYS[0]:
            return min(self._width, _WIDTH)
        return max(self._width // (self._heads * self._size), 8)

    def changes(self, way: str) -> dict[str, _Change]:
        """Return for each key the change of its number, or of each of its numbers."""
        heads, size, embedding = self._heads, self._size, self._embedding(way)
        inner, state = self._inner(way)
        changes: dict[str, _Change] = {
            **dict.fromkeys(_HEADS, lambda count: count if count <= 1 else max(count // heads, 1)),
            **dict.fromkeys(_HEAD_SIZES, lambda length: length // size),
            "embedding_length": lambda _: embedding,
            "rope.dimension_sections": lambda part: part and max(part // size, 1),
            "attention.sliding_window": lambda window: min(window, SLIDING_WINDOW),
            **dict.fromkeys(_STATE_HEADS, lambda count: count and max(count // inner, 1)),
            _INNER: lambda length: length // (inner * state),
            _STATE: lambda length: length // state,
        }
        for key, maximum in _FORWARDS.items():
            order = sorted(set(self._numbers((key,))))
            changes[key] = _in_order(order, maximum)
        if self._name in _TWICE_THE_WIDTH:
            changes[_INNER] = lambda _: 2 * embedding
            changes[_STATE] = changes["ssm.time_step_rank"] = lambda count: count
        return {f"{self._name}.{key}": change for key, change in changes.items()}

    def _inner(self, way: str) -> tuple[int, int]:
        """Return the divisor of the number of heads with a state, and of the size of one."""
        heads = self._numbers(_STATE_HEADS)
        inner, state = self._numbers((_INNER,)), self._numbers((_STATE,))
        if not inner or not heads or self._name in _TWICE_THE_WIDTH:
            return 1, 1
        divisor = _divisor([each for each in heads if each > 1], 2)
        each = max(inner[0] // max(heads[0], 1), 1)
        return divisor, _divisor([each, *state], _MIN_HEAD)

    def added(self, way: str) -> dict[str, Value]:
        """Return the head size, if the model derives it from its width, which differs now."""
        if way != WAYS[0] or not self._default:
            return {}
        lacking = [f"{self._name}.{key}" for key in _CELLS[::2]]
        size = scalar_value(GGUFValueType.UINT32, max(self._default // self._size, 1))
        return {key: size for key in lacking if key not in self._header.values}


def _divisor(numbers: list[int], minimum: int, others: list[int] | None = None, others_min: int = 1) -> int:
    """Return the largest divisor of all ``numbers`` that leaves at least ``minimum`` of each, and ``others_min`` of the
    ``others``."""
    common = math.gcd(*numbers) if numbers else 1
    room = min((each // minimum for each in numbers), default=1)
    room = min(room, *(each // others_min for each in others or ()), common)
    return next(each for each in range(max(room, 1), 0, -1) if common % each == 0)


def _in_order(numbers: list[int], maximum: int) -> _Change:
    """Return a change: the smallest of ``numbers`` becomes ``maximum``, or stays if it is less, and each further one is
    a third of that larger than the one before."""
    places = {each: min(each, maximum + place * (maximum // 3)) for place, each in enumerate(numbers)}
    return lambda number: places.get(number, number)


def _changed(value: Value, change: _Change) -> Value:
    """Return ``value`` with each of its integers changed; unchanged if the type cannot hold them."""

    def changed(item: Scalar) -> Scalar:
        return change(item) if isinstance(item, int) and not isinstance(item, bool) else item

    if value.item_type == GGUFValueType.STRING:
        return value
    try:
        if value.is_array:
            return array_value(value.item_type, [changed(item) for item in value.items()])
        return scalar_value(value.type, changed(value.scalar()))
    except struct.error:
        return value
