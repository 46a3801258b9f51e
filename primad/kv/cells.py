"""The KV cells of one sequence in one layer, as bytes that any device can take in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCells:
    """Positions ``start <= p < end`` of a sequence in layer ``layer`` of the whole model.

    ``keys`` and ``values`` hold cell behind cell, of ggml types ``key_type`` and ``value_type``; every cell of a layer takes
    the same number of bytes.
    """

    layer: int
    start: int
    end: int
    key_type: int
    value_type: int
    keys: bytes
    values: bytes
