"""Choose a draft model and compute what it takes.

``--draft auto`` chooses one of the local models and says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from halda import ModelProfile
from halda.cost import kv_bytes_per_token
from primad.errors import ConfigError, ModelError
from primad.gguf.architectures.layers import block_count
from primad.gguf.header import Header
from primad.gguf.hub import kept_models
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.gguf.vocabulary import vocabulary_difference
from primad.ring.speculation.messages import DraftModel
from primad.settings.quantities import show_bytes
from primad.system.processors import usable_cores

MAX_CONTEXT: Final = 4096
"""Largest context of the draft model: its KV cache has no room for more tokens, and it drafts nothing after them."""
BESIDE_BYTES: Final = 128 << 20
"""Memory of its process besides weights and KV cache."""
AUTO: Final = Path("auto")
"""Value of ``--draft`` that asks to choose a model."""
USUAL: Final = 0.1
"""Typical size of draft models in the literature, relative to the other model: accepted often enough, and fast."""
MAX: Final = 0.5


def draft_profile(path: Path, header: Header, *, header_only: bool = False) -> tuple[Header, ModelProfile]:
    """Open the model file ``path``, whose header may be enough, as a draft model for the model of ``header``.

    Raises ``ConfigError`` with the difference where it cannot draft for it, and ``ModelError`` for a bad file.
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
    kv = sum(kv_bytes_per_token(layer, "f16") for layer in profile.layers) * min(context, MAX_CONTEXT)
    return profile.size_bytes + kv + BESIDE_BYTES


def draft_model(path: Path, header: Header, *, context: int, threads: int | None) -> DraftModel:
    """Return the model file ``path`` as draft model for the model of ``header``, on ``threads`` threads or half of all
    cores.

    Raises as ``draft_profile``.
    """
    own, profile = draft_profile(path, header)
    return DraftModel(
        path=str(path),
        layers=block_count(own),
        bytes=profile.size_bytes,
        memory_bytes=memory_of(profile, context),
        threads=threads or max(1, usable_cores() // 2),
        context=min(context, MAX_CONTEXT),
    )


def no_room_here(model: DraftModel, free_bytes: int) -> str:
    """Say that this device has only ``free_bytes`` of memory for ``model``."""
    takes, free = show_bytes(model.memory_bytes), show_bytes(free_bytes)
    return f"--draft {model.path}: takes {takes} of memory, and {free} are free here"


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The chosen model file, or None, and ``why``, in a line."""

    path: Path | None
    why: str

    def __str__(self) -> str:
        return f"no draft model: {self.why}" if self.path is None else f"draft model {self.path}: {self.why}"


@dataclass(frozen=True, slots=True)
class _Candidate:
    path: Path
    share: float
    same_architecture: bool
    memory_bytes: int


def models_here(header: Header, models: Path) -> list[Path]:
    """Files that may draft for the model of ``header``: those downloaded by name into folder ``models``, and its
    neighbours."""
    kept = [model.files[0] for model in kept_models(models) if model.whole]
    return list(dict.fromkeys([*kept, *sorted(header.path.parent.glob("*.gguf"))]))


def choose_draft(header: Header, paths: Iterable[Path], *, context: int, free_bytes: int | None) -> DraftChoice:
    """Choose the one of ``paths`` that drafts for the model of ``header`` within ``free_bytes`` of memory (None: any
    amount).

    It has the same tokens and at most half of the weights. A model of the same architecture is preferred, then the one
    whose size is nearest to a tenth. Files that cannot be read as models are skipped.
    """
    size = model_profile(header).size_bytes
    found = _candidates(header, size, paths, context)
    fitting = [each for each in found if free_bytes is None or each.memory_bytes <= free_bytes]
    if not fitting:
        return DraftChoice(None, _none(header, free_bytes if found else None))
    best = min(fitting, key=lambda each: (not each.same_architecture, _far(each.share), str(each.path)))
    others = f"; of {len(fitting)} candidates its size is nearest to a tenth" if len(fitting) > 1 else ""
    why = f"it has the tokens of {header.path.name} and {best.share:.2g} of its weights{others}"
    return DraftChoice(best.path, why)


def _far(share: float) -> float:
    return max(share / USUAL, USUAL / share)


def _candidates(header: Header, size: int, paths: Iterable[Path], context: int) -> list[_Candidate]:
    found = []
    for path in paths:
        try:
            own = open_model(path)
            profile = model_profile(own)
            if not profile.size_bytes <= MAX * size or profile.is_recurrent or vocabulary_difference(header, own):
                continue
        except ModelError:
            continue
        found.append(
            _Candidate(
                path=path,
                share=profile.size_bytes / size,
                same_architecture=profile.architecture == header.text("general.architecture"),
                memory_bytes=memory_of(profile, context),
            )
        )
    return found


def _none(header: Header, free_bytes: int | None) -> str:
    if free_bytes is not None:
        return (
            f"those that could draft for {header.path.name} do not fit the {show_bytes(free_bytes)} that are free here"
        )
    return (
        f"none of the models here has the tokens of {header.path.name} and at most half of its weights; primad pull fetches "
        "a smaller one of its family"
    )
