"""A model that guesses: whether it can for another one, and the memory that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from halda import ModelProfile
from halda.cost import kv_bytes_per_token
from primad.errors import ConfigError
from primad.gguf.architectures import block_count
from primad.gguf.header import Header
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.gguf.vocabulary import vocabulary_difference
from primad.ring.speculation.messages import DraftModel
from primad.settings.quantities import show_bytes
from primad.system.processors import usable_cores

MOST_CONTEXT: Final = 4096
"""Behind more tokens it guesses nothing: its KV cache has no room for them."""
BESIDE_BYTES: Final = 128 << 20
"""What its process takes beside weights and KV cache."""


def draft_profile(path: Path, header: Header, *, header_only: bool = False) -> tuple[Header, ModelProfile]:
    """The model file ``path``, of which the header may be enough, as one that can guess for that of ``header``.

    Raises ``ConfigError`` where it cannot, with the difference, and ``ModelError`` for a bad file.
    """
    own = open_model(path, header_only=header_only)
    profile = model_profile(own)
    if profile.is_recurrent:
        raise ConfigError(
            f"--draft {path}: layers of {profile.name} keep a state that cannot be cut back; choose another model"
        )
    difference = vocabulary_difference(header, own)
    if difference is not None:
        raise ConfigError(
            f"--draft {path}: has other tokens than {header.path.name}: {difference}; choose a smaller model of its family"
        )
    return own, profile


def memory_of(profile: ModelProfile, context: int) -> int:
    """Bytes that the process of ``profile`` takes for texts of at most ``context`` tokens."""
    kv = sum(kv_bytes_per_token(layer, "f16") for layer in profile.layers) * min(context, MOST_CONTEXT)
    return profile.size_bytes + kv + BESIDE_BYTES


def draft_model(path: Path, header: Header, *, context: int, threads: int | None) -> DraftModel:
    """The model file ``path`` as the one that guesses for that of ``header``, on half of all cores or so many ``threads``.

    Raises as ``draft_profile``.
    """
    own, profile = draft_profile(path, header)
    return DraftModel(
        path=str(path),
        layers=block_count(own),
        bytes=profile.size_bytes,
        memory_bytes=memory_of(profile, context),
        threads=threads or max(1, usable_cores() // 2),
        context=min(context, MOST_CONTEXT),
    )


def no_room_here(model: DraftModel, free_bytes: int) -> str:
    """What a device says that has only so much free memory."""
    takes, free = show_bytes(model.memory_bytes), show_bytes(free_bytes)
    return f"--draft {model.path}: takes {takes} of memory, and {free} are free here"
