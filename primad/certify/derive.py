"""Derive an entry for an architecture that is not in the table, from the model's header and the order of its graph's
nodes.

The metadata is cut as the header suggests: keys with one value per layer are sliced. Properties that depend on the
layer number implicitly (layers with a sliding window, rotation or experts in turn) require cuts at a multiple of
layers, which is tried. Hidden states enter where the graph has looked up tokens: the first node of their shape. Nodes
between it and the first layer change them (a scale, positions, a norm); the route's first window computes these itself,
and the others are fed after them. A layer's output is the last node of that shape whose name has its number, the same
name in each layer.

All this is a guess. ``check.py`` tries whether windows made this way equal the whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from primad.errors import ModelError
from primad.gguf.architecture import Architecture, Recurrent, Sliding
from primad.gguf.architectures.cuts import LEFT_TO_TRIAL, cut_multiple, cuttable
from primad.gguf.architectures.layers import block_count, layer_count, recurrent_layers
from primad.gguf.architectures.table import is_unknown
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Header

MAX_MULTIPLES: Final = 12
_MAX_EXITS: Final = 3
_NUMBERED: Final = re.compile(r"(.+)-(\d+)")
_UNNAMED: Final = re.compile(r"node_\d+|.* \(.*\)|leaf_\d+")
_SLIDING: Final = "attention.sliding_window"
_PATTERN: Final = "attention.sliding_window_pattern"


class GraphNode(msgspec.Struct, frozen=True):
    """A node of a model's graph; ``is_hidden``: it has the size of its tokens' hidden states."""

    name: str
    is_hidden: bool


def provisional(header: Header) -> Header:
    """Return ``header`` with an entry that still lacks the names of the graph.

    Raises ``NotCutError`` for a model that is known not to be cuttable, ``ModelError`` for an incomplete one.
    """
    if not is_unknown(header):
        cuttable(header)
    name, layers = header.text("general.architecture"), block_count(header)
    prefix = f"{name}."
    arrays = {
        key.removeprefix(prefix): value
        for key, value in header.values.items()
        if key.startswith(prefix) and value.is_array and len(value) == layers
    }
    pattern = arrays.pop(_PATTERN, None)
    sliding = Sliding.NEVER
    if _is_above_0(header, f"{prefix}{_SLIDING}"):
        is_given = pattern is not None and pattern.item_type != GGUFValueType.STRING and any(pattern.items())
        sliding = Sliding.NEEDED if is_given else Sliding.FIXED
    entry = Architecture(
        name=name,
        tied_output_fallback="output.weight" not in header.tensors,
        sliding=sliding,
        is_fed=True,
        knows=LEFT_TO_TRIAL,
        by_layer=frozenset(key for key, value in arrays.items() if value.item_type != GGUFValueType.STRING),
        recurrent=Recurrent.TENSORS,
        output_norm="output_norm" if "output_norm.weight" in header.tensors else "",
        predicts=True,
    )
    found = replace(header, derived=entry)
    if not any(recurrent_layers(found)):
        found = replace(header, derived=replace(entry, recurrent=Recurrent.NEVER))
    cuttable(found)
    return found


def _is_above_0(header: Header, key: str) -> bool:
    value = header.values.get(key)
    if value is None or value.is_array:
        return value is not None
    size = value.scalar()
    return isinstance(size, int) and size > 0


def derived(header: Header, names: Architecture, multiple: int) -> Header:
    """Return ``header``, which is ``provisional``, with the ``names`` of its graph and cuts at this ``multiple``."""
    assert header.derived is not None
    entry = replace(
        header.derived,
        cut_multiple=multiple,
        entries=names.entries,
        exit=names.exit,
        last_exit=names.last_exit,
    )
    return replace(header, derived=entry)


def multiples(header: Header) -> list[int]:
    """Return multiples at which windows may begin, smallest first, limited in number. The header must be
    ``provisional``."""
    found: list[int] = []
    assert header.derived is not None
    for each in range(1, layer_count(header)):
        multiple = cut_multiple(replace(header, derived=replace(header.derived, cut_multiple=each)))
        if multiple < layer_count(header) and multiple not in found:
            found.append(multiple)
    return found[:MAX_MULTIPLES]


def named(header: Header, nodes: Sequence[GraphNode]) -> list[Architecture]:
    """Return possible names of the input and output nodes, likeliest first, as entries in which nothing else counts.

    Raises ``ModelError`` if no node can be an input or an output.
    """
    name, layers = header.text("general.architecture"), layer_count(header)
    often = Counter(node.name for node in nodes)
    hidden = [(place, node.name) for place, node in enumerate(nodes) if node.is_hidden and often[node.name] == 1]
    first = next(
        (place for place, node in enumerate(nodes) if not node.is_hidden and _NUMBERED.fullmatch(node.name)), None
    )
    entries = dict.fromkeys((_entries(hidden), _entries_before(hidden, first)))
    ways = [
        Architecture(name=name, entries=each, exit=leaves, last_exit=leaves_last)
        for each in entries
        for leaves, leaves_last in _exits(hidden, layers)
    ]
    if not ways or not ways[0].entries:
        raise ModelError(f"no node of its graph is known as the way {'out of its layers' if ways else 'in'}")
    return ways


def _entries(hidden: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """Return the node of the tokens' embeddings, and the nodes after it up to the first layer's."""
    found: list[str] = []
    for _, name in hidden:
        if found and _NUMBERED.fullmatch(name):
            break
        if not found or not _UNNAMED.fullmatch(name):
            found.append(name)
    return tuple(found)


def _entries_before(hidden: Sequence[tuple[int, str]], first: int | None) -> tuple[str, ...]:
    """Return those before the node ``first``, including nodes numbered like the first layer whose name no other layer
    has."""
    often = Counter(match[1] for _, name in hidden if (match := _NUMBERED.fullmatch(name)) is not None)
    found = list(_entries(hidden)[:1])
    for place, name in hidden[1:]:
        match = _NUMBERED.fullmatch(name)
        is_inside = match is not None and often[match[1]] > 1
        if first is not None and place < first and not is_inside and not _UNNAMED.fullmatch(name):
            found.append(name)
    return tuple(found)


def _exits(hidden: Sequence[tuple[int, str]], layers: int) -> Iterator[tuple[str, str]]:
    places: dict[str, dict[int, int]] = {}
    for place, name in hidden:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            places.setdefault(match[1], {})[int(match[2])] = place
    last = max((each[layers - 1] for each in places.values() if layers - 1 in each), default=0)
    behind = next((name for place, name in hidden if place > last and not _UNNAMED.fullmatch(name)), "")
    complete = [stem for stem, each in places.items() if each.keys() >= set(range(layers - 1))]
    for stem in sorted(complete, key=lambda stem: -places[stem][0])[:_MAX_EXITS]:
        yield f"{stem}-{{layer}}", "" if layers - 1 in places[stem] else behind
    if hidden and behind:  # a layer's output that is named after its use in the next one
        match = _NUMBERED.fullmatch(hidden[0][1])
        if match is not None and match[1] in complete:
            yield f"{match[1]}-{{after}}", behind
