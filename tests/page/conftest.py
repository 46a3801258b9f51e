"""A headless browser, and checks on every page opened in it: no console error, nothing that axe finds serious."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright here; tools/test-page sets it up")

from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright  # noqa: E402

from tests.e2e.conftest import _network_of_its_own  # noqa: E402, F401

PATIENCE_MS = 180_000
expect.set_options(timeout=PATIENCE_MS)
NO_WORDS = ("null", "undefined", "NaN")
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def browser(_network_of_its_own: None) -> Iterator[Browser]:  # noqa: F811
    """Chromium, in the module's network."""
    path = os.environ.get("PRIMAD_CHROMIUM", "/usr/bin/chromium")
    if not Path(path).is_file():
        pytest.skip(f"{path}: no such browser; tools/test-page installs one")
    with sync_playwright() as playwright:
        on_console = [
            "--use-fake-device-for-media-stream",
            "--use-fake-ui-for-media-stream",
        ]  # a fake microphone that beeps
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--no-proxy-server", *on_console]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages, each in its own browser profile; fails if one wrote to its console or shows a "null"."""
    pages, complaints = list[Page](), list[str]()

    def on_console(message: ConsoleMessage) -> None:
        expected = "Failed to load resource" in message.text  # a refused request, which tests provoke
        if message.type in ("error", "warning") and not expected:
            complaints.append(message.text)

    def opened(url: str, **more: object) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1180, "height": 800}} | more))
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        pages.append(page)
        page.on("console", on_console)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    yield opened
    for page in pages:
        shown = " ".join(page.locator("#ring, #devices").all_text_contents())
        complaints += [f"a word of the page: {word}" for word in NO_WORDS if re.search(rf"\b{word}\b", shown)]
        page.context.close()
    assert not complaints


@pytest.fixture(scope="session")
def serious() -> Callable[[Page], list[str]]:
    """Lists what axe finds serious on a page in its current state."""
    script = (Path(os.environ["PRIMAD_TEST_PAGE"]) / "axe.min.js").read_text()

    def judge(page: Page) -> list[str]:
        session = page.context.new_cdp_session(page)  # scripts of the debugger bypass the page's policy
        session.send("Runtime.evaluate", {"expression": f"{script};0"})
        found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")
        session.detach()
        return [
            f"{each['id']}: {json.dumps([node['target'] for node in each['nodes']])}"
            for each in found["violations"]
            if each["impact"] in SERIOUS
        ]

    return judge
