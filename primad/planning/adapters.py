"""Adjust a model's profile for a plan: LoRA adapters, changed RoPE scaling, and measured expert usage.

``--rope-*`` and ``--yarn-*`` change how long a context the model supports and where it can be cut.

Ring processes count how often each expert of their layers was picked on this device; the most used ones stay in memory.
Layers without counts are assumed to behave alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from halda import ModelProfile
from primad.engine.rope import Rope
from primad.errors import ConfigError
from primad.gguf.adapter import MAX, MAX_ADAPTERS, Adapter, open_adapter
from primad.gguf.architectures.cuts import multiple_that_slides
from primad.gguf.architectures.layers import layer_count
from primad.gguf.digests import LayerDigests
from primad.gguf.header import Header, TensorInfo
from primad.gguf.layers import cut_layer, layer_digest
from primad.settings.config import digests_file, usage_folder

GROUPS: Final = 8
"""Number of groups that describe how unequally experts are used: finer groups would not be reliable."""


def parse_lora(texts: Iterable[str]) -> tuple[tuple[Path, float], ...]:
    """Parse files and scales as in ``FILE.gguf`` or ``FILE.gguf=0.5``. Raises ``ConfigError``."""
    found = []
    for text in texts:
        path, equals, scale = text.rpartition("=")
        if not equals or Path(text).exists():
            found.append((Path(text), 1.0))
            continue
        try:
            number = float(scale)
        except ValueError as exc:
            raise ConfigError(f"--lora {text}: its scale {scale!r} is not a number; give one as in {path}=0.5") from exc
        if not abs(number) <= MAX:
            raise ConfigError(f"--lora {text}: give a scale between {-MAX:g} and {MAX:g}")
        found.append((Path(path), number))
    if len(found) > MAX_ADAPTERS:
        raise ConfigError(f"--lora: {len(found)} adapters are too many; give at most {MAX_ADAPTERS}")
    return tuple(found)


def open_adapters(given: Iterable[tuple[Path, float]], model: Header) -> tuple[Adapter, ...]:
    """Open the adapter files with their scales. Raises ``ModelError`` as ``open_adapter``."""
    return tuple(open_adapter(path, scale, model) for path, scale in given)


def with_adapters(profile: ModelProfile, adapters: Sequence[Adapter]) -> ModelProfile:
    """Return ``profile`` with the memory and time that ``adapters`` add to each layer.

    Adapters of the token embedding count with the first layer, those of the output matrix with the last: the head has
    both. An adapter of a matrix that is in no window keeps the model whole.
    """
    if not adapters:
        return profile
    count = len(profile.layers)
    tensors = [[tensor for each in adapters for tensor in each.tensors_of(layer)] for layer in range(count + 1)]
    tensors[count - 1] += tensors.pop()
    layers = [
        replace(
            layer,
            adapter_bytes=layer.adapter_bytes + sum(each.bytes for each in own),
            adapter_reads=Counter(layer.adapter_reads) + Counter(_reads(own, profile)),
        )
        for layer, own in zip(profile.layers, tensors, strict=True)
    ]
    for a, b in filter(None, (each.embedding for each in adapters)):
        reads = Counter(layers[0].adapter_reads) + Counter({b.type.name: b.bytes})
        layers[0] = replace(layers[0], adapter_bytes=layers[0].adapter_bytes + a.bytes + b.bytes, adapter_reads=reads)
    changed = replace(profile, layers=tuple(layers))
    return changed if whole_line(adapters) is None else changed.uncut


def _reads(tensors: Iterable[TensorInfo], profile: ModelProfile) -> dict[str, int]:
    """Bytes by type that one token reads of ``tensors``; of tensors for experts only the share that it uses."""
    found: Counter[str] = Counter()
    for tensor in tensors:
        experts = tensor.shape[2] if len(tensor.shape) > 2 else 1
        used = min(profile.experts_used, experts) if experts > 1 else 1
        found[tensor.type.name] += tensor.bytes * used // experts
    return dict(found)


def whole_line(adapters: Iterable[Adapter]) -> str | None:
    """Return why one device must have the whole model with ``adapters``; None where the model can be cut."""
    each = next((each for each in adapters if each.strange is not None), None)
    if each is None or each.strange is None:
        return None
    changed = each.strange.rpartition(".lora_")[0]
    return f"--lora {each.header.path}: changes '{changed}', which no window has; one device serves the model whole"


def check_adapters(adapters: Iterable[Adapter], *, several: bool) -> None:
    """Raise ``ConfigError`` for an adapter that needs the whole model on one device if there are ``several``."""
    line = whole_line(adapters)
    if line is not None and several:
        raise ConfigError(f"{line}: give --single-device, or leave it out")


def with_rope(profile: ModelProfile, header: Header | None, rope: Rope) -> ModelProfile:
    """Return ``profile`` as it is with ``rope``; ``header`` is the header of its file, if there is one.

    In a window without a sliding layer, llama.cpp may treat all layers as sliding over an unbounded window with the
    model's own RoPE angles, so ``rope`` would have no effect. Every window must therefore have a sliding layer.
    """
    if not rope.is_changed:
        return profile
    original, multiple = profile.context_tokens, profile.cut_multiple
    if header is not None:
        key = f"{profile.architecture}.rope.scaling.original_context_length"
        original = header.count(key, original) or original
        while multiple < layer_count(header) and multiple % multiple_that_slides(header):
            multiple += profile.cut_multiple
    return replace(profile, context_tokens=rope.reach(profile.context_tokens, original), cut_multiple=multiple)


def with_expert_use(model: ModelProfile, header: Header, home: Path) -> ModelProfile:
    """Return ``model``, the model of ``header``, with the expert usage recorded in the folder ``home``."""
    if not model.experts:
        return model
    # This loads numpy, which a daemon needs only if a model has experts.
    from primad.engine.streaming.expert_usage import UsageFolder, whole_model_key

    folder, digests = UsageFolder(usage_folder(home)), LayerDigests(header, digests_file(home))
    shares: list[float] = []
    for layer, profile in enumerate(model.layers):
        if not profile.expert_bytes:
            continue
        tree = digests.get(layer)
        keys = [whole_model_key(header.path, layer)]
        keys += [] if tree is None else [layer_digest(cut_layer(header, layer).size_bytes, tree)]
        maximum = max((folder.load(key, model.experts) for key in keys), key=lambda usage: usage.rows)
        shares += maximum.share().tolist() if maximum.used else []
    return replace(model, expert_use=grouped(shares, model.experts_used / model.experts)) if shares else model


def grouped(shares: Sequence[float], mean: float) -> tuple[float, ...]:
    """Average ``shares``, the probabilities that a token picks each expert, in groups of equal size, the largest first.

    The result is scaled so that a token picks as many experts in all as the model says: ``mean`` of each on average.
    """
    ordered, count = sorted(shares, reverse=True), min(GROUPS, len(shares))
    ends = [i * len(shares) // count for i in range(count + 1)]
    groups = [sum(ordered[a:b]) / (b - a) for a, b in pairwise(ends)]
    scale = mean * count / sum(groups)
    return tuple(min(1.0, group * scale) for group in groups)
