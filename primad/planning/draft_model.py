"""A draft model: which one it is, and what it takes.

``--draft auto``: which of the models that are here drafts for another one, and why.
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
"""Behind more tokens it drafts nothing: its KV cache has no room for them."""
BESIDE_BYTES: Final = 128 << 20
"""Memory of its process besides weights and KV cache."""
AUTO: Final = Path("auto")
"""The value of ``--draft`` that has primad look for a model."""
USUAL: Final = 0.1
"""Draft models have a tenth of the weights of the other one in the literature: right often enough, and quick."""
MAX: Final = 0.5


def draft_profile(path: Path, header: Header, *, header_only: bool = False) -> tuple[Header, ModelProfile]:
    """Read the model file ``path``, or only its header, as a draft model for that of ``header``.

    Raises ``ConfigError`` with the difference if it cannot draft for it, and ``ModelError`` for a bad file.
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
    """The model file ``path`` as draft model for that of ``header``, on half of all cores or on ``threads`` threads.

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
    """The message of a device that has only ``free_bytes`` of memory free."""
    takes, free = show_bytes(model.memory_bytes), show_bytes(free_bytes)
    return f"--draft {model.path}: takes {takes} of memory, and {free} are free here"


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The chosen model file, None if there is none, and ``why``, in one line."""

    path: Path | None
    why: str

    def __str__(self) -> str:
        return f"nothing drafts: {self.why}" if self.path is None else f"{self.path} drafts: {self.why}"


@dataclass(frozen=True, slots=True)
class _Candidate:
    path: Path
    share: float
    same_architecture: bool
    memory_bytes: int


def models_here(header: Header, models: Path) -> list[Path]:
    """Files that may draft for that of ``header``: those fetched by name into folder ``models``, and its neighbours."""
    kept = [model.files[0] for model in kept_models(models) if model.whole]
    return list(dict.fromkeys([*kept, *sorted(header.path.parent.glob("*.gguf"))]))


def choose_draft(header: Header, paths: Iterable[Path], *, context: int, free_bytes: int | None) -> DraftChoice:
    """The one of ``paths`` that drafts for the model of ``header`` in so much free memory (None: any amount).

    It has the same tokens and at most half of the weights. One of the same architecture is taken before others, then the
    one with most nearly a tenth of them. Files that cannot be read as models are passed over.
    """
    size = model_profile(header).size_bytes
    found = _candidates(header, size, paths, context)
    fitting = [each for each in found if free_bytes is None or each.memory_bytes <= free_bytes]
    if not fitting:
        return DraftChoice(None, _none(header, free_bytes if found else None))
    best = min(fitting, key=lambda each: (not each.same_architecture, _far(each.share), str(each.path)))
    others = f"; of {len(fitting)} that could it is the one with most nearly a tenth" if len(fitting) > 1 else ""
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
