"""Bytes per weight of each GGUF quantisation type."""

from __future__ import annotations

from typing import Final

BYTES_PER_WEIGHT: Final = {
    "F32": 4.0,
    "F16": 2.0,
    "BF16": 2.0,
    "Q8_0": 34 / 32,
    "Q6_K": 210 / 256,
    "Q5_K": 176 / 256,
    "Q5_0": 22 / 32,
    "Q5_1": 24 / 32,
    "Q4_K": 144 / 256,
    "Q4_0": 18 / 32,
    "Q4_1": 20 / 32,
    "Q3_K": 110 / 256,
    "Q2_K": 84 / 256,
    "IQ4_NL": 18 / 32,
    "IQ4_XS": 136 / 256,
    "IQ3_S": 110 / 256,
    "IQ3_XXS": 98 / 256,
    "IQ2_S": 82 / 256,
    "IQ2_XS": 74 / 256,
    "IQ2_XXS": 66 / 256,
    "IQ1_M": 56 / 256,
    "IQ1_S": 50 / 256,
    "TQ1_0": 54 / 256,
    "TQ2_0": 66 / 256,
    "MXFP4": 17 / 32,
}
"""Bytes of a block divided by its number of weights."""


def family(kind: str) -> str:
    """Return the group of types with similar kernels: blocks of 32 weights, K-quants, types with tables, floats."""
    if kind.endswith("_K"):
        return "K"
    if kind.startswith("IQ"):
        return "IQ"
    return "F" if kind.startswith(("F", "BF")) else "blocks"


def bytes_per_weight(kind: str) -> float:
    """Return bytes per weight; a type newer than the table counts as one byte."""
    return BYTES_PER_WEIGHT.get(kind, 1.0)
