"""Decides which model a typed name means: one rule for every command.

A name is what the model's program calls it: ``llama3.2:1b``, ``org/repo:Q4_K_M``, ``Qwen3-8B-Q4_K_M``. A typed name
means, in this order: models with exactly that name, models with that name in other case, and models that it is short
for. A short form leaves out what comes before a ``/``, and what follows a ``:``, ``/``, ``-`` or ``_``: ``qwen3-8b`` is
short for ``Qwen/Qwen3-8B-GGUF:Q4_K_M``, but ``llama3`` is not short for ``llama3.2:1b``, which is another model.
Ollama's ``:latest`` may follow any name. If several models have a name, it means the one that is shown by it, as
nothing else would mean that model.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Final

MAX_CHARS: Final = 512
MAX_NEAREST: Final = 3
_LATEST: Final = ":latest"
_BEHIND: Final = (":", "/", "-", "_")
_NEARLY: Final = 0.5
"""Similarity, from 0 to 1, from which a name may be a typing error of another."""


def meant(typed: str, names: Sequence[Sequence[str]]) -> list[int]:
    """Return the models that ``typed`` may mean, as indices of ``names``, which lists all names of each."""
    folded = typed.casefold()
    if not folded or len(typed) > MAX_CHARS:
        return []
    exact = [place for place, own in enumerate(names) if typed in own]
    lower = [[name.casefold() for name in own] for own in names]
    alike = exact or [place for place, own in enumerate(lower) if folded in own]
    alike = [place for place in alike if lower[place][0] == folded] or alike
    found = alike or [place for place, own in enumerate(lower) if any(is_short(folded, name) for name in own)]
    return found or (meant(typed[: -len(_LATEST)], names) if folded.endswith(_LATEST) else [])


def is_short(typed: str, name: str) -> bool:
    """Return whether ``typed`` is short for ``name``, both in the same case."""
    begins = [0, *(place + 1 for place, letter in enumerate(name) if letter == "/")]
    return any(name.startswith(typed, begin) and (name[begin + len(typed) :][:1] in ("", *_BEHIND)) for begin in begins)


def nearest(typed: str, names: Sequence[Sequence[str]]) -> list[str]:
    """Return the first names of the models whose names are most similar to ``typed``, the most similar first."""
    shown: dict[str, str] = {}
    for own in (*((each[0],) for each in names), *names):  # the shown name of a model is that model's
        for name in own:
            for form in (name, name.rpartition("/")[2], name.rpartition("/")[2].partition(":")[0]):
                shown.setdefault(form.casefold(), own[0])
    close = difflib.get_close_matches(typed.casefold()[:MAX_CHARS], shown, n=4 * MAX_NEAREST, cutoff=_NEARLY)
    return list(dict.fromkeys(shown[form] for form in close))[:MAX_NEAREST]
