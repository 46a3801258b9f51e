"""Links and names in the documents are valid."""

from __future__ import annotations

import re

import pytest

from primad.settings import config
from tests.fakes.documents import PAGES, ROOT, anchors, links, spans

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
_FILE = re.compile(r"(?:primad|solver|tests|tools|packaging|profiles|docs|examples)/[\w./-]+")
_IN_A_ROOM = re.compile(r"[a-z_]+/[\w/]+\.py")


@pages
def test_links_lead_somewhere(page):
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT), f"{link}: outside the repository"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pages
def test_files_that_are_named_are_there(page):
    if page.name == "CHANGELOG.md":
        return
    for span in spans(page):
        if _FILE.fullmatch(span) and "NAME" not in span and not span.endswith("_profiles"):
            assert (ROOT / span).exists(), span
        elif _IN_A_ROOM.fullmatch(span):
            assert (ROOT / "primad" / span).exists() or (ROOT / "solver" / span).exists(), span


def test_every_page_can_be_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        waiting += [
            (page.parent / link.partition("#")[0]).resolve() for link in links(page) if not link.startswith("#")
        ]
    assert set(PAGES) <= reached


def test_the_readme_is_short_and_names_the_two_commands_of_a_fresh_checkout():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    assert "./tools/demo" in text
    assert "./tools/test" in text


def test_every_key_of_the_configuration_is_documented():
    reported = set(spans(ROOT / "docs" / "install.md"))
    assert set(config.KEYS) <= reported
