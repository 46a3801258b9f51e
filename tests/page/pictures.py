"""Remakes the pictures of docs/page.md for ``tools/test-page --pictures``: three processes with ten layers each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.cluster import Head, ring, run_primad
from tests.page.head import send_message

DOCS = Path(__file__).parents[2] / "docs"
NAMES = ("desk", "mini", "laptop")
QUESTION = "Write a Python function that adds two numbers, and explain how it works."


@pytest.fixture(scope="module")
def head(module_home, smollm2) -> Iterator[Head]:
    homes = [module_home(name) for name in NAMES]
    with ring(smollm2, homes, "page", "--windows", "10,10,10", "--rounds", "1") as (head, _):
        yield head


@pytest.fixture
def chat_with_pictures(head, open_page) -> Page:
    """The owner's page after an answer."""
    page = open_page(run_primad("page", "--print", "--head", f"desk:{head.port}").stdout.strip())
    expect(page.locator("#pill")).to_have_attribute("data-state", "serving")
    page.get_by_label("Settings").first.click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("104")
    page.get_by_label("Settings").first.click()
    send_message(page, QUESTION)
    expect(page.get_by_label("Regenerate")).to_be_visible()
    return page


def test_chat(chat_with_pictures):
    chat_with_pictures.mouse.move(0, 0)
    expect(chat_with_pictures.locator("#pill-text")).to_have_text("ready")
    chat_with_pictures.screenshot(path=str(DOCS / "page-chat.png"))


def test_ring(chat_with_pictures):
    send_message(chat_with_pictures, "Write a long story about a lighthouse and its keeper.")
    chat_with_pictures.get_by_role("tab", name="Ring").click()
    expect(chat_with_pictures.locator(".spark polyline")).to_have_attribute("points", re.compile(r"(\S+ ){8}"))
    chat_with_pictures.screenshot(path=str(DOCS / "page-ring.png"))
