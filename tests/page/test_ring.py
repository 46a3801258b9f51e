"""The page of real daemons: it chats, shows the ring, pairs a device and shows a device's death."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from primad.trust.local_trust import VARIABLE as LOCAL_TRUST
from tests.e2e.cluster import Head, Primad, primad, ring, run_primad

NAMES = ("desk", "mini", "laptop")


@pytest.fixture(scope="module")
def devices(module_home, smollm2) -> Iterator[tuple[Head, dict[str, Primad]]]:
    """A serving head and its two workers."""
    homes = [module_home(name) for name in NAMES]
    with ring(smollm2, homes, "page", "--sequences", "2") as (head, workers):
        yield head, dict(zip(NAMES[1:], workers, strict=True))


@pytest.fixture
def owned(devices, module_home, open_page) -> Callable[[], Page]:
    """Opens the page as ``primad page`` does."""
    head, _ = devices

    def opened() -> Page:
        reported = run_primad("page", "--print", "--head", f"desk:{head.port}")
        page = open_page(reported.stdout.strip())
        expect(page.locator("#pill")).to_have_attribute("data-state", "serving")
        return page

    return opened


def send_message(page: Page, text: str, *, maximum: int | None = None) -> None:
    """Ask ``text`` with at most ``maximum`` tokens of answer."""
    if maximum is not None:
        page.get_by_label("Settings").first.click()
        page.get_by_label("Max tokens").fill(str(maximum))
        page.get_by_label("Settings").first.click()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def revoke(page: Page, name: str) -> None:
    page.get_by_role("article", name=name).get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()


def test_the_page_loads_and_chats(owned, serious):
    page = owned()
    page.get_by_label("Settings").first.click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Settings").first.click()
    send_message(page, "Write a Python function that adds two numbers, and explain how it works.", maximum=104)
    expect(page.get_by_label("Regenerate")).to_be_visible()
    expect(page.locator(".stats")).to_have_text(re.compile(r"\d+ tokens · decode .* tokens/s · TTFT "))
    assert len(page.locator(".message.assistant .text").inner_text()) > 10
    assert serious(page) == []


def test_the_shown_ring_is_that_of_the_status(devices, owned, serious):
    head, _ = devices
    page = owned()
    send_message(page, "Write a long story about a lighthouse and its keeper.", maximum=300)
    page.get_by_role("tab", name="Ring").click()
    expect(page.locator(".picture .under").first).to_have_text("tokens/s decode")
    status = head.status()
    assert {each["name"] for each in status["devices"]} == set(NAMES)
    for each in status["devices"]:
        card = page.get_by_role("article", name=each["name"])
        expect(card).to_contain_text(f"{each['layers']} layer")
    expect(page.locator(".events")).to_contain_text("mini joined")
    expect(page.locator(".spark polyline")).to_have_attribute("points", re.compile(r"(\S+ ){6}"))
    assert serious(page) == []
    page.locator(".check", has_text="mini").locator("input").check()
    page.get_by_role("button", name="Predict").click()
    expect(page.locator(".if-answer")).to_contain_text("tokens/s")
    expect(page.locator(".if-layers")).not_to_contain_text("mini")


def test_a_device_pairs_with_the_code_on_screen_and_is_revoked(owned, module_home, tmp_path):
    page = owned()
    page.get_by_role("tab", name="Devices").click()
    page.get_by_role("button", name="Show a pairing code").click()
    code = page.locator(".code-words").inner_text()
    home = module_home("sofa")
    base = ("join", "--home", home, "--name", "sofa", "--cluster", "page", "--code", code)
    with primad(*base, **{LOCAL_TRUST: str(tmp_path / "another user")}) as worker:
        worker.wait_for("paired with desk")
        card = page.get_by_role("article", name="sofa")
        expect(card).to_contain_text("trusted")
        expect(card).to_contain_text("paired")
        revoke(page, "sofa")
        expect(card).to_contain_text("revoked")


def test_a_device_that_runs_already_pairs_by_the_code_that_it_shows(owned, module_home, tmp_path):
    page = owned()
    page.get_by_role("tab", name="Devices").click()
    home = module_home("attic")
    base = ("join", "--home", home, "--name", "attic", "--cluster", "page")
    with primad(*base, **{LOCAL_TRUST: str(tmp_path / "another user")}) as worker:
        worker.wait_for("attic is waiting for a head")
        reported = run_primad("pair", "--json", "--home", home)
        page.get_by_label("Its code").fill(json.loads(reported.stdout)["code"])
        page.get_by_role("button", name="Pair", exact=True).click()
        worker.wait_for("paired with desk")
        card = page.get_by_role("article", name="attic")
        expect(card).to_contain_text("paired")
        expect(card).to_contain_text(re.compile("ready|serving"))  # depends on the plan
        revoke(page, "attic")
        expect(card).to_contain_text("primad devices revoke desk")


def test_a_paused_device_leaves_the_ring_and_returns_when_resumed(owned):
    page = owned()
    page.get_by_role("tab", name="Devices").click()
    page.get_by_role("article", name="mini").get_by_role("button", name="Pause").click()
    page.get_by_role("tab", name="Ring").click()
    expect(page.locator(".others")).to_contain_text("mini ready: paused by the owner of this head")
    expect(page.get_by_role("article", name="laptop")).to_be_visible()
    page.get_by_role("tab", name="Devices").click()
    page.get_by_role("article", name="mini").get_by_role("button", name="Resume").click()
    page.get_by_role("tab", name="Ring").click()
    expect(page.get_by_role("article", name="mini")).to_be_visible()


def test_a_dead_device_is_shown_as_lost_and_the_response_continues(devices, owned):
    _, workers = devices
    page = owned()
    send_message(page, "Write a long story about a lighthouse and its keeper.", maximum=400)
    expect(page.locator(".message.assistant .text")).to_contain_text(re.compile(r"\w+ \w+ \w+"))
    page.get_by_role("tab", name="Ring").click()
    workers["laptop"].kill()
    expect(page.locator(".events .gone").first).to_contain_text("laptop is gone")
    expect(page.locator(".events .ring").first).to_contain_text("because of a ring that broke")
    expect(page.get_by_role("article", name="laptop")).to_have_count(0)
    expect(page.get_by_role("article", name="mini")).to_be_visible()
    expect(page.locator("#pill")).to_have_attribute("data-state", "serving")
    page.get_by_role("tab", name="Chat").click()
    expect(page.get_by_label("Regenerate")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
