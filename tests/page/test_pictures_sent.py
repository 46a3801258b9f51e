"""Pictures on the page: pasted, dropped or chosen, shown with their cost, sent with the question."""

from __future__ import annotations

import base64
import re
from dataclasses import replace

from playwright.sync_api import expect

from tests.page.head import backend_with, send_message, served
from tools.lab.mmproj import noise, tone

DROP = """([name, data]) => {
  const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
  const moved = new DataTransfer();
  moved.items.add(new File([bytes], "b.png", { type: "image/png" }));
  const target = document.getElementById("question");
  const event = name === "paste"
    ? new ClipboardEvent("paste", { clipboardData: moved, bubbles: true, cancelable: true })
    : new DragEvent("drop", { dataTransfer: moved, bubbles: true, cancelable: true });
  target.dispatchEvent(event);
}"""


def test_pictures_are_added_shown_with_their_cost_and_sent(open_page):
    backend = backend_with("Noise.")
    backend.served = replace(backend.served, sees=True)
    with served(backend) as url:
        page = open_page(url)
        row = page.locator(".attached li")
        page.locator("#pictures").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": noise(1)})
        expect(row).to_have_count(1)
        for number, how in enumerate(("paste", "drop"), start=2):
            page.evaluate(DROP, [how, base64.b64encode(noise(number)).decode()])
            expect(row).to_have_count(number)
        expect(row.get_by_text("6 tokens")).to_have_count(3)
        page.get_by_label("Remove b.png").last.click()
        expect(row).to_have_count(2)
        send_message(page, "What is it?")
        expect(page.locator(".message.user img")).to_have_count(2)
        expect(page.locator(".message.assistant .text")).to_have_text("Noise.")
        expect(row).to_have_count(0)
        assert len(backend.calls[-1].pictures) == 2
        page.reload()
        expect(page.locator(".message.user img")).to_have_count(2)


def test_without_an_encoder_the_page_names_the_missing_file(open_page):
    backend = backend_with("Noise.")
    backend.served = replace(backend.served, lacks_encoder="put mmproj.gguf next to it")
    with served(backend) as url:
        page = open_page(url)
        page.locator("#pictures").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": noise(1)})
        expect(page.locator(".attached .failed")).to_contain_text("put mmproj.gguf next to it")


def test_audio_is_chosen_or_recorded_played_removed_and_sent_if_the_model_takes_it(open_page):
    backend = backend_with("A beep.")
    backend.served = replace(backend.served, sees=True)
    with served(backend) as url:
        page = open_page(url)
        expect(page.get_by_label("Add images or audio")).to_be_visible()
        expect(page.get_by_label("Record audio")).to_be_hidden()
    backend.served = replace(backend.served, hears=True)
    with served(backend) as url:
        page = open_page(url)
        row = page.locator(".attached li")
        page.locator("#pictures").set_input_files({"name": "a.wav", "mimeType": "audio/wav", "buffer": tone(1)})
        expect(row).to_have_count(1)
        record = page.locator("#record")
        record.click()
        expect(record).to_have_attribute("aria-pressed", "true")
        expect(record).to_have_attribute("title", re.compile("Stop after"))
        record.click()
        expect(row).to_have_count(2)
        expect(row.locator("audio[src^='data:audio/wav;base64,UklGR']")).to_have_count(2)
        expect(row.get_by_text("6 tokens")).to_have_count(2)
        page.get_by_label("Remove a.wav").click()
        expect(row).to_have_count(1)
        send_message(page, "What is it?")
        expect(page.locator(".message.user audio")).to_have_count(1)
        expect(page.locator(".message.assistant .text")).to_have_text("A beep.")
        assert len(backend.calls[-1].pictures) == 1
