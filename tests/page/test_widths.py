"""The page on a phone and on a desktop: nothing hides, jumps, breaks or overlaps, and each figure has a name."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from playwright.sync_api import Locator, Page, expect

from primad.api.http.access import Door
from primad.api.http.keys import ApiKey, digest_of
from primad.api.http.status import CompletionFigures, LinkStatus, RingForecast
from primad.errors import RingError
from primad.ring.messages import PromptProgress
from primad.settings.timings import ApiTimings
from tests.fakes.status import device, ring
from tests.page.head import GUEST, backend_with, send_message, served, store_chats

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
TABLET = {"viewport": {"width": 1280, "height": 800}, "has_touch": True, "is_mobile": True}
DESK = {"viewport": {"width": 1280, "height": 800}}
QUICK = ApiTimings(page_every_s=0.05)
LONG = [f"said {number}\n\n" + "a\n\n" * 12 for number in range(24)]
HOMES = ("living-room-mac-mini", "desk", "laptop-of-the-eldest", "nas", "attic", "old-gaming-tower", "kitchen", "pi")

at_both_widths = pytest.mark.parametrize("screen", [PHONE, DESK], ids=["390", "1280"])


@pytest.mark.parametrize("screen", [PHONE, TABLET], ids=["390", "1280"])
def test_a_deletion_is_visible_on_a_touch_screen_and_can_be_undone(open_page, serious, screen):
    with served(backend_with("Hi")) as url:
        page = open_page(url, **screen)
        store_chats(page, ["first", "one"], ["second", "two"])
        if screen is PHONE:
            page.get_by_role("button", name="Conversations").click()
        for title in ("first", "second"):
            expect(page.get_by_label(f'Delete "{title}"')).to_have_css("opacity", "1")
        for title, chat in (("first", "one"), ("second", "one")):  # the open one and another
            page.get_by_label(f'Delete "{title}"').tap()
            expect(page.get_by_label(f'Delete "{title}"')).to_have_count(0)
            undo = page.get_by_role("button", name=f'Undo: "{title}" is deleted')
            expect(undo).to_be_in_viewport()
            assert serious(page) == []
            undo.tap()
            assert page.locator(".chats li").all_text_contents() == ["first", "second"]
            expect(page.locator(".message.assistant .text")).to_have_text(chat)
        page.reload()
        assert page.locator(".chats li").all_text_contents() == ["first", "second"]


def test_a_conversation_deleted_during_a_response_stays_deleted(open_page):
    with served(backend_with("word", asyncio.Event())) as url:
        page = open_page(url)
        send_message(page, "Tell me a story")
        expect(page.locator(".message.assistant .text")).to_have_text("word")
        with page.expect_event("requestfailed"):
            page.get_by_label('Delete "Tell me a story"').click()
        expect(page.get_by_label("Send", exact=True)).to_be_visible()
        expect(page.locator(".chats li")).to_have_count(1)
        expect(page.locator(".chats .deleted")).to_be_visible()
        assert page.evaluate("localStorage['primad.chats']") == "[]"


@at_both_widths
@pytest.mark.parametrize("ends", [None, RingError("the ring broke")], ids=["well", "badly"])
def test_a_scrolled_up_view_stays_in_place_when_a_response_ends_and_shows_its_error(open_page, screen, ends):
    event = asyncio.Event()
    backend = backend_with("word", event, *([ends] if ends else ["!"]))
    with served(backend) as url:
        page = open_page(url, **screen)
        store_chats(page, LONG)
        send_message(page, "Go on")
        expect(page.locator(".message.assistant .text").last).to_have_text("word")
        log = page.locator("#log")
        log.evaluate("log => (log.scrollTop = 100)")
        backend.resume(event)
        expect(page.get_by_label("Send", exact=True)).to_be_visible()
        assert log.evaluate("log => log.scrollTop") == 100
        if ends:
            expect(page.get_by_role("alert").filter(has_text="the ring broke")).to_be_in_viewport(ratio=1)
            expect(page.get_by_role("button", name="Try again")).to_be_in_viewport(ratio=1)


@at_both_widths
def test_the_progress_of_a_prompt_is_shown(open_page, serious, screen):
    event = asyncio.Event()
    backend = backend_with(PromptProgress(request=1, tokens=7), event, "Hi")
    with served(backend) as url:
        page = open_page(url, **screen)
        send_message(page, "A long prompt")
        progress = page.get_by_label("Prompt", exact=True)
        expect(progress).to_be_in_viewport(ratio=1)
        total = len(backend.calls[0].prompt)
        assert progress.evaluate("bar => [bar.value, bar.max]") == [7, total]
        expect(page.locator(".reading")).to_have_text(f"7 of {total} tokens of the prompt")
        assert serious(page) == []
        backend.resume(event)
        expect(page.locator(".message.assistant .text")).to_have_text("Hi")
        expect(progress).to_have_count(0)


FORMULAS = (
    r"\(a_1 * b_1 = \frac{c}{d}\)",
    r"\[ \sum_{i=1}^n x_i \]",
    r"$x^*\{y\}^*$",
    "\\[\na\n- b \\\\\n= c\n\\]",
    "$$\n\\left\\{ a \\right\\}\n$$",
)
WORDS = ("internationalization", "responsibilities", "counterrevolutionary", "misunderstandings")
WRITTEN = (
    f"Inline {FORMULAS[0]}, {FORMULAS[1]} and {FORMULAS[2]}; $5 and $6.\n\n*where {FORMULAS[0]} is*\n\n{FORMULAS[3]}\n\n"
    f"{FORMULAS[4]}\n\nOne that was cut: \\(a + b\n\n- [ ] open\n- [x] **done**\n\n![a cat](https://example.org/cat.png) "
    f"[![a badge](https://example.org/badge.png)](https://example.org/)\n\n|{'|'.join(WORDS)}|\n|-|-|-|-|\n|{'|'.join(WORDS)}|\n"
)


@at_both_widths
def test_formulas_tasks_images_and_tables_of_a_response_are_rendered(open_page, serious, screen):
    with served(backend_with(WRITTEN)) as url:
        page = open_page(url, **screen)
        requests = list[str]()
        page.on("request", lambda request: requests.append(request.url))
        send_message(page, "Hello")
        expect(page.get_by_label("Regenerate")).to_be_visible()
        text = page.locator(".message.assistant .text")
        shown = text.locator(".formula").evaluate_all("all => all.map(each => each.textContent)")
        assert shown == [*FORMULAS[:3], FORMULAS[0], *FORMULAS[3:]]
        expect(text.locator("em")).to_have_text(f"where {FORMULAS[0]} is")
        expect(text).to_contain_text("One that was cut: \\(a + b")
        expect(text).to_contain_text("$5 and $6.")
        assert text.locator("li").all_inner_texts() == ["☐ open", "☑ done"]
        links = text.locator("a").evaluate_all("all => all.map(each => [each.textContent, each.href])")
        assert links == [
            ["Image: a cat", "https://example.org/cat.png"],
            ["Image: a badge", "https://example.org/"],
        ]
        assert all(each.startswith(url) for each in requests)
        assert lines_of_words(text.locator("th, td")) == [1] * 2 * len(WORDS)
        assert page.evaluate("document.documentElement.scrollWidth") <= screen["viewport"]["width"]
        assert serious(page) == []


def lines_of_words(locator: Locator) -> list[int]:
    """The number of lines that the text of each cell takes."""
    return locator.evaluate_all("""all => all.map(each => {
        const range = document.createRange();
        range.selectNodeContents(each);
        return new Set([...range.getClientRects()].map(line => line.top)).size;
    })""")


@at_both_widths
def test_a_wrong_key_is_reported_in_its_dialog(open_page, serious, screen):
    with served(backend_with("Hi"), door=Door(lambda: [ApiKey(name="guest", digest=digest_of(GUEST))])) as url:
        page = open_page(url, **screen)
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_role("alert")).to_have_count(0)
        key = page.get_by_label("API key", exact=True).last
        key.fill("another key")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_have_text(
            "Invalid key. Type it again, or ask the owner for another one."
        )
        expect(dialog.get_by_role("alert")).to_be_in_viewport(ratio=1)
        assert serious(page) == []
        key.fill(GUEST)
        page.keyboard.press("Enter")
        expect(page.locator("#pill")).to_have_attribute("data-state", "serving")
        expect(dialog).to_have_count(0)


@at_both_widths
def test_a_device_keeps_its_colour_while_others_come_and_go(open_page, screen):
    backend = backend_with("Hi")
    with served(backend, timings=QUICK) as url:
        page = open_page(url + "#ring", **screen)

        def colours_of(*names: str) -> dict[str, str]:
            backend.ring = ring(*(device(name) for name in names))
            for name in names:
                expect(page.get_by_role("article", name=name, exact=True)).to_be_visible()
            expect(page.locator(".device")).to_have_count(len(names))
            shown = page.evaluate(
                "[...document.querySelectorAll('.device .swatch')].map(each => getComputedStyle(each).backgroundColor)"
            )
            return dict(zip(names, shown, strict=True))

        first = colours_of("desk", "mini", "nas")
        assert len(set(first.values())) == 3
        second = colours_of("desk", "nas")
        assert second == {name: first[name] for name in second}
        third = colours_of("attic", "desk", "nas", "mini")
        assert first.items() <= third.items()
        assert len(set(third.values())) == 4
        page.reload()
        assert colours_of("nas", "attic") == {name: third[name] for name in ("nas", "attic")}


@at_both_widths
@pytest.mark.parametrize("number", [2, 3, 8])
def test_labels_of_the_ring_do_not_overlap_and_name_every_device(open_page, serious, screen, number):
    names = HOMES[:number]
    backend = backend_with("Hi")
    split = [
        msgspec.structs.replace(device(name), windows=[(at, at + 1), (at + 8, at + 9)]) for at, name in enumerate(names)
    ]
    links = [
        LinkStatus(source=one, target=other, round_trip_ms=12.34, late_ms=1.0, mbit_per_s=900.0)
        for one, other in zip(names, [*names[1:], names[0]], strict=True)
    ]
    backend.ring = ring(*split) | {"links": msgspec.to_builtins(links)}
    with served(backend) as url:
        page = open_page(url + "#ring", **screen)
        expect(page.locator(".picture .under").first).to_have_text("tokens/s decode")
        labels = boxes(page.locator(".ring-card :is(text, li)"))
        assert [pair for at, one in enumerate(labels) for pair in overlaps(one, labels[at + 1 :])] == []
        width = screen["viewport"]["width"]
        assert all(left >= 0 and right <= width for _, left, _, right, _ in labels)
        printed = " ".join(text for text, *_ in labels)
        assert all(printed.count(name) >= 2 for name in names)
        assert printed.count("12.3 ms") == 2 * number
        assert serious(page) == []


def boxes(parts: Locator) -> list[tuple[str, float, float, float, float]]:
    """The visible ``parts``: text, left, top, right, bottom."""
    return parts.evaluate_all("""all => all.map(each => [each.textContent, each.getBoundingClientRect()])
        .filter(([text, box]) => text && box.width)
        .map(([text, { left, top, right, bottom }]) => [text, left, top, right, bottom])""")


def overlaps(one: tuple, others: list[tuple]) -> list[tuple[str, str]]:
    text, left, top, right, bottom = one
    return [(text, its) for its, x, y, to_x, to_y in others if x < right and left < to_x and y < bottom and top < to_y]


@at_both_widths
def test_there_is_one_speed_and_it_has_a_name(open_page, screen):
    event = asyncio.Event()
    backend = backend_with("Hi", event, " there")
    measured = CompletionFigures(tpot_ms=50.0, predicted_tpot_ms=40.0, wrong=None)
    backend.ring |= {
        "measured": msgspec.to_builtins(measured),
        "predicted": msgspec.to_builtins(RingForecast(tokens_per_s=25.0, tpot_ms=40.0, ttft_ms=900.0)),
    }
    with served(backend, timings=QUICK) as url:
        page = open_page(url, **screen)
        expect(page.locator("#pill-text")).to_have_text("ready")
        send_message(page, "Hello")
        expect(page.locator("#pill-text")).to_have_text("answering")
        backend.resume(event)
        expect(page.locator(".stats")).to_contain_text("decode")
        page.get_by_role("tab", name="Ring").click()
        expect(page.locator(".picture .speed")).to_have_text("20.0")
        assert page.locator(".picture .under").all_text_contents() == ["tokens/s decode", "latest request"]
        assert facts(page) >= {("decode, latest request", "20.0 tokens/s"), ("decode, forecast", "25.0 tokens/s")}


def facts(page: Page) -> set[tuple[str, ...]]:
    """The figures next to the ring, each with its name."""
    return {
        tuple(each.all_inner_texts()) for each in (row.locator("dt, dd") for row in page.locator(".facts > div").all())
    }
