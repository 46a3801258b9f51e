"""News for the owner from a step of the membership core."""

from __future__ import annotations

from dataclasses import replace

import pytest

from primad.membership.news import News, NewsKind, news
from primad.membership.step import step
from primad.membership.types import Event, Formed, Lost, Measured, Seen, Solved, State, Welcomed
from tests.fakes.membership import SETTINGS


def reported(*events: Event) -> list[News]:
    """All news of ``events``, a tenth of a second apart."""
    state, found = State(settings=replace(SETTINGS, look_s=0.0, gone_after_s=60.0), started_s=0.0), list[News]()
    for number, event in enumerate(events):
        before = state
        state, effects = step(state, event, number / 10)
        found += news(before, state, effects)
    return found


START = (Seen("nas", True), Welcomed("nas"), Measured(frozenset({"nas"})))
SERVING = (*START, Solved(1, frozenset({"nas"}), 5.0), Formed(1))


def test_a_device_that_is_spoken_to_joined():
    assert reported(*START[:2]) == [News(NewsKind.JOINED, "nas joined")]


def test_a_ring_names_its_devices():
    assert reported(*SERVING)[1:] == [News(NewsKind.RING, "head, nas form ring 1")]


def test_a_lost_device_is_reported_once_and_the_next_ring_gives_the_reason():
    found = reported(*SERVING, Lost("nas", "its link broke"), Solved(2, frozenset(), 9.0), Formed(2))
    lines = [(each.kind, each.text) for each in found[2:]]
    assert (NewsKind.GONE, "nas is gone: its link broke") in lines
    assert [text for _, text in lines].count("nas is gone: its link broke") == 1
    assert lines[-1] == (NewsKind.RING, "head form ring 2, because of a ring that broke")


@pytest.mark.parametrize("events", [(), (Seen("stranger", False),)], ids=["nothing", "stranger"])
def test_a_device_that_is_only_in_sight_is_no_news(events):
    assert reported(*events) == []
