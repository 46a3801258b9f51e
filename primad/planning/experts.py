"""How often a model's experts were picked on this device, as a plan counts it: those picked most stay in memory.

Ring processes keep count of the layers that they computed by expert. Other layers are taken for alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from halda import ModelProfile
from primad.gguf.digests import LayerDigests
from primad.gguf.header import Header
from primad.gguf.layers import cut_layer, layer_digest
from primad.settings.config import digests_file, usage_folder

GROUPS: Final = 8
"""So many steps tell the use of experts apart: more are no figures that one can count on."""


def with_expert_use(model: ModelProfile, header: Header, home: Path) -> ModelProfile:
    """``model``, which ``header`` is of, with what the folder ``home`` knows of the use of its experts."""
    if not model.experts:
        return model
    # It loads numpy, which a daemon does without where no model has experts.
    from primad.engine.streaming.expert_usage import UsageFolder, whole_model_key

    folder, digests = UsageFolder(usage_folder(home)), LayerDigests(header, digests_file(home))
    shares: list[float] = []
    for layer, profile in enumerate(model.layers):
        if not profile.expert_bytes:
            continue
        tree = digests.get(layer)
        keys = [whole_model_key(header.path, layer)]
        keys += [] if tree is None else [layer_digest(cut_layer(header, layer).size_bytes, tree)]
        most = max((folder.load(key, model.experts) for key in keys), key=lambda usage: usage.rows)
        shares += most.share().tolist() if most.used else []
    return replace(model, expert_use=grouped(shares, model.experts_used / model.experts)) if shares else model


def grouped(shares: Sequence[float], mean: float) -> tuple[float, ...]:
    """The probabilities ``shares`` that a row picks each expert, in groups of equal size, the largest first.

    Together a row picks as many as it does by the model: ``mean`` of each, on average.
    """
    ordered, count = sorted(shares, reverse=True), min(GROUPS, len(shares))
    ends = [i * len(shares) // count for i in range(count + 1)]
    groups = [sum(ordered[a:b]) / (b - a) for a, b in pairwise(ends)]
    scale = mean * count / sum(groups)
    return tuple(min(1.0, group * scale) for group in groups)
