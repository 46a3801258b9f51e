"""The repository's documents, parsed: links, anchors, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/*/*.md", "solver/*/*.md", "examples/*.md", "profiles/*.md")
    for path in ROOT.glob(pattern)
    if path.is_file()
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"[A-Z_]+=.*")


@dataclass(frozen=True)
class Fence:
    """A fenced block: its page, language and text."""

    page: Path
    language: str
    text: str


def fences(page: Path, language: str) -> list[Fence]:
    """The page's blocks in ``language``."""
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [Fence(page, kind, text) for kind, text in found if kind == language]


def commands(page: Path) -> list[tuple[str, ...]]:
    """Every command of the page's ``sh`` blocks as words, without comments and leading assignments."""
    return [words for fence in fences(page, "sh") for words in _commands(fence.text)]


def _commands(text: str) -> Iterator[tuple[str, ...]]:
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and _ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        if words:
            yield tuple(words)


def spans(page: Path) -> list[str]:
    """Text between back quotes in the page."""
    return _SPAN.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))


def links(page: Path) -> list[str]:
    """Targets of the page's links within the repository."""
    text = _SPAN.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))
    return [target for target in _LINK.findall(text) if "://" not in target and not target.startswith("mailto:")]


def anchors(page: Path) -> set[str]:
    """The page's anchors, as GitHub derives them from headings."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower()).replace(" ", "-")
        for heading in _HEADING.findall(text)
    }
