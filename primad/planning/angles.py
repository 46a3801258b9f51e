"""A model whose angles are otherwise than it says (``--rope-*``, ``--yarn-*``): how far it reaches, and where it is cut."""

from __future__ import annotations

from dataclasses import replace

from halda import ModelProfile
from primad.engine.rope import Rope
from primad.gguf.architectures import layer_count, multiple_that_slides
from primad.gguf.header import Header


def with_rope(profile: ModelProfile, header: Header | None, rope: Rope) -> ModelProfile:
    """``profile``, of the model of ``header`` if there is a file, as it is with ``rope``.

    A window without a layer that slides may be one whose layers all do, over an endless window with the model's own angles:
    then it would not have those of ``rope``, so that every window has to have one.
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
