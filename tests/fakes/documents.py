"""The documents of the repository, taken apart: links, anchors, and the commands that they show."""

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
    """A fenced block: its page, its language and what stands in it."""

    page: Path
    language: str
    text: str


def fences(page: Path, language: str) -> list[Fence]:
    """The page's blocks of the language."""
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [Fence(page, kind, text) for kind, text in found if kind == language]


def commands(page: Path) -> list[tuple[str, ...]]:
    """Every command of the page's ``sh`` blocks as words, without comments and assignments before it."""
    return [words for fence in fences(page, "sh") for words in _commands(fence.text)]


def _commands(text: str) -> Iterator[tuple[str, ...]]:
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and _ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        if words:
            yield tuple(words)


def spans(page: Path) -> list[str]:
    """What stands between back quotes in the page's text."""
    return _SPAN.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))


def links(page: Path) -> list[str]:
    """Where the page's links lead that stay in the repository."""
    text = _SPAN.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))
    return [target for target in _LINK.findall(text) if "://" not in target and not target.startswith("mailto:")]


def anchors(page: Path) -> set[str]:
    """The places of a page that a link can name, as GitHub makes them from headings."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower()).replace(" ", "-")
        for heading in _HEADING.findall(text)
    }
