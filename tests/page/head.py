"""A head with scripted answers, and its page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from playwright.sync_api import Page

from primad.api.http.access import OPEN, Admission, Door
from tests.fakes.backend import ByteVocabulary, FakeBackend, replies
from tests.fakes.http import served_in_thread
from tests.fakes.status import device, ring

OWNER, GUEST = "the-owner's-key-is-long", "a-guest's-key-is-long"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class SlowBackend(FakeBackend):
    """Pauses before each token, so that a test can look at an unfinished answer, or waits for an event."""

    pause_s = 0.0
    loop: asyncio.AbstractEventLoop

    def resume(self, event: asyncio.Event) -> None:
        """Let a script that waits for ``event`` continue."""
        self.loop.call_soon_threadsafe(event.set)

    async def generate(self, *arguments: Any, **more: Any) -> AsyncGenerator[Any, None]:
        self.loop = asyncio.get_running_loop()
        async for event in super().generate(*arguments, **more):
            await asyncio.sleep(self.pause_s)
            yield event


def backend_with(*texts: Any, template: str = PLAIN, pause_s: float = 0.0) -> SlowBackend:
    """A head of two devices that answers with ``texts``."""
    backend = SlowBackend(replies(*texts), vocabulary=ByteVocabulary(chat_template=template))
    backend.pause_s = pause_s
    backend.served = replace(backend.served, sequences=4)
    backend.ring = ring(device("desk", role="head"), device("mini"), old="ready")
    return backend


@contextmanager
def served(backend: FakeBackend, door: Door = OPEN, **more: Any) -> Iterator[str]:
    """The app under uvicorn in a thread; its URL."""
    admission = Admission(door=door, owner_key=OWNER)
    with served_in_thread(backend, graceful_s=1, admission=admission, **more) as url:
        yield f"{url}/"


def store_chats(page: Page, *chats: list[str]) -> None:
    """Store conversations as the page does, latest first: alternating questions and answers; the first question is the
    title.
    """
    stored = [
        {
            "id": str(number),
            "title": printed[0],
            "messages": [
                {"role": "assistant", "content": text, "thought": "", "calls": [], "stats": {}}
                if at % 2
                else {"role": "user", "content": text}
                for at, text in enumerate(printed)
            ],
        }
        for number, printed in enumerate(chats)
    ]
    page.evaluate("kept => localStorage.setItem('primad.chats', JSON.stringify(kept))", stored)
    page.reload()


def send_message(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
