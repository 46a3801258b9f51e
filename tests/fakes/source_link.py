"""Fetches that give up at once on some sources and wait arbitrarily long for others."""

from __future__ import annotations

import pytest

from primad.layers.source_link import SourceLink, Transfers
from primad.network.contacts import Contact
from primad.network.layer_messages import TransferMessage
from primad.settings.timings import LayerTimings


def judge_silence(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Silence counts as a stall only for sources whose key is in the returned set."""
    stalling: set[str] = set()
    begin, wait = SourceLink.__init__, SourceLink.answer
    keys: dict[SourceLink, str] = {}

    def begun(link: SourceLink, transfers: Transfers, source: Contact, place: str) -> None:
        begin(link, transfers, source, place)
        keys[link] = source.key

    async def answer(link: SourceLink, timeout_s: float) -> tuple[TransferMessage, memoryview | None]:
        if timeout_s == LayerTimings().silence_timeout_s:
            timeout_s = 0.05 if keys[link] in stalling else 1000.0
        return await wait(link, timeout_s)

    monkeypatch.setattr(SourceLink, "__init__", begun)
    monkeypatch.setattr(SourceLink, "answer", answer)
    return stalling
