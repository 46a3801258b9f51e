"""The page of a head with scripted answers: hostile text, thoughts, calls, keys, keyboard use."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from playwright.sync_api import Page, expect

from primad.api.http.access import Door
from primad.api.http.keys import ApiKey, digest_of
from tests.fakes.admin_api import FakeAdminApi, known
from tests.page.head import GUEST, OWNER, PLAIN, backend_with, send_message, served

THINKS = PLAIN + "{% if false %}<think></think>{% endif %}"
HERMES = PLAIN + "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
HOSTILE = (
    '# Title\n\n<img src=x onerror="window.hit=1"><script>window.hit=1</script> '
    "[link](javascript:window.hit=1) [fine](https://example.org/) ![picture](https://example.org/x.png)\n\n"
    '```html\n<b onclick="window.hit=1">code</b>\n```\n\n<style>body { display: none }</style>'
)


def test_text_of_a_model_is_never_executed(open_page):
    with served(backend_with(HOSTILE)) as url:
        page = open_page(url)
        send_message(page, "<b>Hello</b>")
        answer = page.locator(".message.assistant .text")
        expect(page.get_by_label("Regenerate")).to_be_visible()
        expect(page.locator(".message.user .said")).to_have_text("<b>Hello</b>")
        expect(answer).to_contain_text('<img src=x onerror="window.hit=1">')
        expect(answer).to_contain_text('<b onclick="window.hit=1">code</b>')
        page.get_by_label("Copy code").click()
        expect(page.locator("#news")).to_have_text("Copied.")
        assert page.locator(".text img, .text script, .text style, .text [onclick]").count() == 0
        assert page.locator(".text a").evaluate_all("all => all.map(each => each.href)") == [
            "",
            "https://example.org/",
            "https://example.org/x.png",
        ]
        assert page.evaluate("window.hit") is None


def test_thoughts_are_folded(open_page):
    with served(backend_with("<think>\nLet me see.\n</think>\n\nForty-two.", template=THINKS)) as url:
        page = open_page(url)
        send_message(page, "What is the answer?")
        summary = page.locator("details.thoughts summary")
        expect(summary).to_have_text(re.compile("^Thought"))
        expect(page.locator(".message.assistant > .text")).to_have_text("Forty-two.")
        expect(page.get_by_text("Let me see.")).to_be_hidden()
        summary.click()
        expect(page.get_by_text("Let me see.")).to_be_visible()


def test_tool_calls_are_shown_and_results_are_entered_by_hand(open_page):
    call = '<tool_call>\n{"name": "look_up", "arguments": {"word": "ring"}}\n</tool_call>'
    backend = backend_with(call, template=HERMES)
    with served(backend) as url:
        page = open_page(url)
        page.get_by_label("Settings").first.click()
        word = {"type": "object", "properties": {"word": {"type": "string"}}}
        tool = json.dumps([{"type": "function", "function": {"name": "look_up", "parameters": word}}])
        page.get_by_label("Tools (JSON)").fill(tool)
        send_message(page, "What is a ring?")
        expect(page.locator(".call")).to_contain_text("look_up")
        expect(page.locator(".call pre")).to_contain_text('"word": "ring"')
        page.get_by_label("Result of look_up").fill("a circle")
        page.get_by_role("button", name="Send result").click()
        expect(page.locator(".message.assistant")).to_have_count(2)
        expect(page.locator(".message.tool pre")).to_have_text("a circle")


def test_a_chat_is_stopped_regenerated_edited_and_saved(open_page):
    backend = backend_with("word " * 400, pause_s=0.02)
    with served(backend) as url:
        page = open_page(url)
        send_message(page, "Tell me a story")
        expect(page.locator(".message.assistant .text")).to_contain_text("word word")
        page.get_by_label("Stop", exact=True).click()
        expect(page.locator(".stats")).to_contain_text("stopped")
        page.get_by_label("Regenerate").click()
        expect(page.get_by_label("Stop", exact=True)).to_be_visible()
        page.get_by_label("Stop", exact=True).click()
        expect(page.locator(".message.assistant")).to_have_count(1)
        page.get_by_label("Edit").click()
        page.get_by_label("Edit the message").fill("Tell me another one")
        page.get_by_role("button", name="Send again").click()
        expect(page.locator(".message.user .said")).to_have_text("Tell me another one")
        expect(page.locator(".message.assistant .text")).to_contain_text("word word")
        page.get_by_label("Stop", exact=True).click()
        expect(page.locator(".stats")).to_contain_text("stopped")
        page.reload()
        expect(page.locator(".message.user .said")).to_have_text("Tell me another one")
        page.get_by_label('Delete "Tell me another one"').click()
        expect(page.locator(".message")).to_have_count(0)


def test_a_page_closed_during_a_response_keeps_the_question_and_the_text_so_far(open_page):
    backend = backend_with("word " * 400, pause_s=0.02)
    with served(backend) as url:
        page = open_page(url)
        send_message(page, "Tell me a story")
        expect(page.locator(".message.assistant .text")).to_contain_text("word word")
        page.reload()
        expect(page.locator(".message.user .said")).to_have_text("Tell me a story")
        expect(page.locator(".message.assistant .text")).to_contain_text("word word")
        page.get_by_label("Regenerate").click()
        expect(page.get_by_label("Stop", exact=True)).to_be_visible()
        page.get_by_label("Stop", exact=True).click()
        page.evaluate("""() => {
            const [chat] = JSON.parse(localStorage["primad.chats"]);
            localStorage["primad.chats"] = JSON.stringify([{ ...chat, messages: chat.messages.slice(0, 1) }]);
        }""")
        page.reload()
        page.get_by_label("Answer", exact=True).click()
        expect(page.locator(".message.assistant .text")).to_contain_text("word word")
        page.get_by_label("Stop", exact=True).click()
        expect(page.locator(".stats")).to_contain_text("stopped")


def test_settings_are_sent_and_a_wrong_one_is_named(open_page):
    backend = backend_with("Hi")
    with served(backend) as url:
        page = open_page(url)
        page.get_by_label("Settings").first.click()
        page.get_by_label("System prompt").fill("Be brief")
        page.get_by_label("Temperature").fill("0.5")
        send_message(page, "Hello")
        expect(page.locator(".message.assistant .text")).to_have_text("Hi")
        (call,) = backend.calls
        assert call.sampling.temperature == 0.5
        assert bytes(call.prompt[1:] if call.prompt[0] > 255 else call.prompt).startswith(b"system: Be brief")
        page.get_by_label("Temperature").fill("9")
        send_message(page, "Again")
        expect(page.get_by_role("alert")).to_contain_text("temperature")


def test_an_api_key_is_requested_and_saved(open_page, serious):
    with served(backend_with("Hi"), door=Door(lambda: [ApiKey(name="guest", digest=digest_of(GUEST))])) as url:
        page = open_page(url)
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("requires a key")
        assert serious(page) == []
        page.get_by_label("API key", exact=True).last.fill(GUEST)
        page.keyboard.press("Enter")
        expect(page.locator("#pill")).to_have_attribute("data-state", "serving")
        send_message(page, "Hello")
        expect(page.locator(".message.assistant .text")).to_have_text("Hi")
        page.reload()
        expect(page.locator("#pill")).to_have_attribute("data-state", "serving")
        page.get_by_role("tab", name="Devices").click()
        expect(page.locator("#devices")).to_contain_text("Only the owner of the head can change devices")


def test_a_hidden_tab_requests_nothing_until_it_is_shown(open_page):
    with served(backend_with("Hi")) as url:
        page = open_page(url)
        expect(page.locator("#pill")).to_have_attribute("data-state", "serving")
        with page.expect_event("requestfailed", lambda request: request.url.endswith("/ui/events")):
            turn(page, hidden=True)
        requests = []
        page.on("request", lambda request: requests.append(request.url))
        turn(page, hidden=True)
        assert not requests
        with page.expect_request("**/ui/events"):
            turn(page, hidden=False)
        expect(page.locator("#pill")).to_have_attribute("data-state", "serving")


def turn(page: Page, *, hidden: bool) -> None:
    """Hide or show the page, as switching tabs does."""
    page.evaluate(
        """hidden => {
            Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def test_tabs_are_chosen_by_arrow_keys(open_page):
    with served(backend_with("Hi")) as url:
        page = open_page(url)
        page.get_by_role("tab", name="Chat").focus()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name="Ring")).to_be_focused()
        expect(page.locator("#ring")).to_be_visible()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        expect(page.get_by_role("tab", name="Devices")).to_be_focused()
        expect(page.locator("#ring")).to_be_hidden()
        page.keyboard.press("Home")
        expect(page.get_by_role("tab", name="Chat")).to_be_focused()
        page.keyboard.press("End")
        expect(page.locator("#devices")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1180, 360])
def test_axe_finds_nothing_serious(open_page, serious, scheme, width):
    admin_api = FakeAdminApi([known("mini"), known("sofa", "no"), known("old", "revoked")])
    with served(backend_with(HOSTILE), admin_api=admin_api) as url:
        page = open_page(as_owner(url), color_scheme=scheme, viewport={"width": width, "height": 760})
        expect(page.locator("#pill")).to_have_attribute("data-state", "serving")
        send_message(page, "Hello")
        expect(page.get_by_label("Regenerate")).to_be_visible()
        assert serious(page) == []
        page.get_by_label("Settings").first.click()
        assert serious(page) == []
        page.get_by_label("Settings").first.click()
        page.get_by_role("tab", name="Ring").click()
        page.locator(".check input").first.check()
        page.get_by_role("button", name="Predict").click()
        expect(page.locator(".if-answer")).to_contain_text("tokens/s")
        assert serious(page) == []
        page.get_by_role("tab", name="Devices").click()
        page.get_by_role("button", name="Show a pairing code").click()
        expect(page.locator(".code-words")).to_be_visible()
        assert serious(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_owner_pauses_caps_and_approves(open_page):
    admin_api = FakeAdminApi([known("mini"), known("sofa", "no")])
    with served(backend_with("Hi"), admin_api=admin_api) as url:
        page = open_page(as_owner(url))
        page.get_by_role("tab", name="Devices").click()
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_role("button", name="Resume")).to_be_visible()
        page.get_by_label("Memory at most").fill("2.5")
        page.keyboard.press("Enter")
        expect(page.locator("#news")).to_have_text("At most 2.5 GB of mini will be used.")
        page.get_by_role("button", name="Approve").click()
        expect(page.get_by_role("dialog")).to_contain_text("primad devices trust desk --key")
        page.get_by_role("dialog").get_by_role("button", name="Approve").click()
        expect(page.get_by_role("button", name="Approve")).to_have_count(0)
        expect(page.get_by_role("article", name="sofa")).to_contain_text("On sofa type:primad devices trust desk --key")
        assert (admin_api.known[0].is_paused, admin_api.known[0].ram_bytes) == (True, 2_500_000_000)


def test_a_code_that_another_device_shows_pairs_it(open_page, serious):
    admin_api = FakeAdminApi()
    with served(backend_with("Hi"), admin_api=admin_api) as url:
        page = open_page(as_owner(url), viewport={"width": 390, "height": 400})
        page.get_by_role("tab", name="Devices").click()
        page.get_by_label("Its code").fill("7-lamp-river")
        page.get_by_role("button", name="Pair", exact=True).click()
        expect(page.get_by_role("alert")).to_contain_text("wrong code")
        expect(page.get_by_role("alert")).to_be_in_viewport(ratio=1)
        assert serious(page) == []
        page.get_by_label("Its code").fill("9-maple-stone")
        page.get_by_label("Its address").fill("192.168.1.20:41234")
        page.keyboard.press("Enter")
        expect(page.get_by_role("article", name="sofa")).to_contain_text("trusted")
        expect(page.get_by_label("Its code")).to_have_value("")
        assert admin_api.calls[-1] == ("bring_code", "9-maple-stone", "192.168.1.20:41234")


def as_owner(url: str) -> str:
    """The address that ``primad page`` opens."""
    answer = httpx.post(f"{url}ui/ticket", json={}, headers={"authorization": f"Bearer {OWNER}"}, trust_env=False)
    return f"{url}#ticket={answer.json()['ticket']}"
