"""Decide whether a model drafts with its own layer for multi-token prediction, and what that takes on the head."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

from halda import ModelProfile
from primad.engine.protocol import PREDICTOR_CELLS
from primad.errors import ConfigError
from primad.gguf.architectures.layers import drafting_layers, layer_count
from primad.gguf.architectures.tensors import layer_of
from primad.gguf.header import Header
from primad.planning.run_config import RunConfig

MAX_SHARE: Final = 0.05
"""Share of the head's memory, unless asked for explicitly: a layer of a large mixture of experts would make others
stream."""


def predicts(run: RunConfig, header: Header, why_not: str = "", *, free_bytes: int | None = None) -> bool:
    """Return whether the model of ``header`` drafts with its own layer as ``run`` says; a tensor-parallel group's does
    not.

    ``why_not``: a reason that prevents it. Unless asked for explicitly, the layer takes at most a small part of the
    ``free_bytes`` of the head (None: not known). Raises ``ConfigError`` where it was asked for and is impossible.
    """
    if run.speculate not in ("auto", "mtp") or run.parallel == "tensor":
        return False
    if not drafting_layers(header):
        name = header.text("general.architecture")
        why_not = f"{header.path.name} has no layer for multi-token prediction that is known to be right for '{name}'"
    if why_not and run.speculate == "mtp":
        raise ConfigError(f"--speculate mtp: {why_not}; leave it out")
    is_small = free_bytes is None or sum(_weights(header).values()) <= MAX_SHARE * free_bytes
    return not why_not and (is_small or run.speculate == "mtp")


def drafts_line(run: RunConfig, header: Header, *, drafts: bool) -> str:
    """Say how drafting with the model's own layer affects sharing layers; empty if it does not."""
    if run.speculate != "auto" or not drafting_layers(header):
        return ""
    if run.parallel == "tensor":
        return (
            "the model's layer for multi-token prediction drafts with --parallel pipeline only, not where devices share"
        )
    if run.parallel == "auto" and drafts:
        return "devices share no layers, since the model drafts with one of its own; --speculate lookup lets them"
    return ""


def _weights(header: Header) -> Counter[str]:
    """Bytes of the prediction layer, by type."""
    layers, found = layer_count(header), Counter[str]()
    for name, tensor in header.tensors.items():
        if (layer_of(name) or 0) >= layers:
            found[tensor.type.name] += tensor.bytes
    return found


def with_predicting(profile: ModelProfile, header: Header) -> ModelProfile:
    """Return ``profile`` with the prediction layer and its KV cache, which lie with the output matrix and are read once
    per draft."""
    found, kinds = Counter(profile.output_bytes_by_type), _weights(header)
    kinds[kinds.most_common(1)[0][0]] += (
        min(PREDICTOR_CELLS, profile.context_tokens) * profile.layers[-1].kv_bytes_per_token
    )
    return replace(profile, output_bytes_by_type=dict(found + kinds))
