"""The page of a head with several models: choosing, loading, unloading, downloading and deleting one."""

from __future__ import annotations

import asyncio

from playwright.sync_api import Page, expect

from primad.api.answering.models import ModelState
from primad.library.pull_progress import PullProgress
from primad.settings.timings import ApiTimings
from tests.fakes.models import FakeModels, backend_of, without_model
from tests.page.head import OWNER, PLAIN, send_message, served

QUICK = ApiTimings(page_every_s=0.05, admitted_s=0.05)


def two() -> FakeModels:
    return FakeModels(backend_of("one", "I am one", template=PLAIN), backend_of("two", "I am two", template=PLAIN))


def opened_by_owner(open_page, url: str) -> Page:
    page = open_page(url)
    page.evaluate(f"sessionStorage.setItem('primad.owner', {OWNER!r})")
    page.reload()
    return page


def test_a_model_is_chosen_loads_before_its_response_and_stays_chosen(open_page, serious):
    models = two()
    models.gates["two"] = asyncio.Event()
    with served(without_model(), models=models, timings=QUICK) as url:
        page = open_page(url)
        page.get_by_label("Model", exact=True).select_option("two")
        send_message(page, "Who are you?")
        expect(page.locator(".message .reading")).to_contain_text("Ready in about 12 s.")
        assert serious(page) == []
        models.loop.call_soon_threadsafe(models.gates["two"].set)
        expect(page.locator(".message.assistant .text")).to_have_text("I am two")
        page.reload()
        expect(page.get_by_label("Model", exact=True)).to_have_value("two")
        page.get_by_label("Model", exact=True).select_option("one")
        send_message(page, "And now?")
        expect(page.locator(".message.assistant .text").last).to_have_text("I am one")


def test_everybody_can_load_and_unload_models_and_see_their_memory(open_page, serious):
    models = two()
    models.change("two", memory_bytes={"desk": 2_000_000_000})
    with served(without_model(), models=models, timings=QUICK) as url:
        page = open_page(url)
        page.get_by_role("tab", name="Models").click()
        one = page.get_by_label("one", exact=True)
        one.get_by_role("button", name="Load").click()
        expect(one.locator(".tag")).to_have_text("loaded")
        page.get_by_label("two", exact=True).get_by_role("button", name="Forecast").click()
        expect(page.get_by_label("two", exact=True)).to_contain_text(
            "decode 12.5 tokens/s, first token of 512 after 800 ms"
        )
        expect(page.get_by_label("two", exact=True)).to_contain_text("on desk, nas; one would be unloaded.")
        one.get_by_role("button", name="Unload").click()
        expect(one.locator(".tag")).to_have_text("unloaded")
        expect(page.get_by_label("two", exact=True)).to_contain_text("2.00 GB on desk")
        assert page.get_by_role("button", name="Delete").count() == 0
        assert page.get_by_label("From Hugging Face").count() == 0
        assert serious(page) == []
    assert models.state["one"].state is ModelState.UNLOADED


def test_the_owner_downloads_and_deletes(open_page, serious):
    models = two()
    models.files = [PullProgress(file="x.gguf", done_bytes=5_000_000, total_bytes=10_000_000)]
    with served(without_model(), models=models, timings=QUICK) as url:
        page = opened_by_owner(open_page, url)
        page.get_by_role("tab", name="Models").click()
        expect(page.get_by_text("50.0 GB free.")).to_be_visible()
        page.get_by_label("From Hugging Face").fill("owner/repo:Q4_K_M")
        page.get_by_role("button", name="Download").click()
        expect(page.locator("#news")).to_have_text("owner/repo:Q4_K_M is downloaded.")
        page.get_by_label("From Hugging Face").fill("repo")
        page.get_by_role("button", name="Download").click()
        expect(page.get_by_role("alert")).to_contain_text("name it as owner/repo")
        page.get_by_label("two", exact=True).get_by_role("button", name="Delete").click()
        assert serious(page) == []
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(page.locator("#news")).to_have_text("two is deleted.")
    assert (models.pulled, models.deleted) == (["owner/repo:Q4_K_M"], ["two"])


def test_a_head_of_one_model_hides_the_choice_of_models(open_page):
    with served(backend_of("one", template=PLAIN), timings=QUICK) as url:
        page = open_page(url)
        expect(page.locator("#model-line")).to_contain_text("one")
        expect(page.get_by_role("tab", name="Models")).to_be_hidden()
        expect(page.get_by_label("Model", exact=True)).to_be_hidden()
