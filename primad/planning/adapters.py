"""LoRA adapters in a plan: what they take of memory, and where the model may be cut with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from halda import ModelProfile
from primad.errors import ConfigError
from primad.gguf.adapter import MAX_ADAPTERS, MOST, Adapter, open_adapter
from primad.gguf.header import Header


def parse_lora(texts: Iterable[str]) -> tuple[tuple[Path, float], ...]:
    """Files and scales as in ``FILE.gguf`` or ``FILE.gguf=0.5``. Raises ``ConfigError``."""
    found = []
    for text in texts:
        path, equals, scale = text.rpartition("=")
        if not equals or Path(text).exists():
            found.append((Path(text), 1.0))
            continue
        try:
            number = float(scale)
        except ValueError as exc:
            raise ConfigError(f"--lora {text}: its scale {scale!r} is no number; give one as in {path}=0.5") from exc
        if not abs(number) <= MOST:
            raise ConfigError(f"--lora {text}: give a scale between {-MOST:g} and {MOST:g}")
        found.append((Path(path), number))
    if len(found) > MAX_ADAPTERS:
        raise ConfigError(f"--lora: {len(found)} adapters are too many; give at most {MAX_ADAPTERS}")
    return tuple(found)


def open_adapters(given: Iterable[tuple[Path, float]], model: Header) -> tuple[Adapter, ...]:
    """The adapters in files, with their scales. Raises ``ModelError`` as ``open_adapter``."""
    return tuple(open_adapter(path, scale, model) for path, scale in given)


def with_adapters(profile: ModelProfile, adapters: Sequence[Adapter]) -> ModelProfile:
    """``profile`` with what ``adapters`` take beside each layer. One that changes more than layers keeps it whole."""
    if not adapters:
        return profile
    layers = tuple(
        replace(layer, adapter_bytes=sum(each.bytes_of(number) for each in adapters))
        for number, layer in enumerate(profile.layers)
    )
    is_cut = all(each.is_within_layers for each in adapters)
    return replace(profile, layers=layers, cut_multiple=profile.cut_multiple if is_cut else len(layers))


def check_adapters(adapters: Iterable[Adapter], *, several: bool) -> None:
    """Raises ``ConfigError`` for an adapter that ``several`` devices cannot have between them."""
    outside = next((each for each in adapters if not each.is_within_layers), None)
    if outside is not None and several:
        raise ConfigError(
            f"--lora {outside.header.path}: changes the token embedding or the output matrix, which is not cut exactly; "
            "serve with --alone, or leave it out"
        )
