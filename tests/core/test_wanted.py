"""A head's requests to a worker: sent once, repeated after a reconnect, and dropped eventually."""

from __future__ import annotations

import pytest

from primad.head.members.wanted import WantedState
from primad.network.messages import Dismiss, Introduce, Link, LoadDraft, MeasureLinks, Ping, Release, ReleaseDraft
from tests.fakes.load import a_load

KEYS = {"address": "tcp://127.0.0.1:5", "key": "a", "sender": "b"}


def wanted(*messages, next_ping=1):
    table = WantedState()
    for message in messages:
        table.ask(message, next_ping)
    return table


def test_only_the_last_message_of_each_kind_is_sent_again():
    introduced = [Introduce(devices=[], revoked=revoked) for revoked in (["a"], ["b"])]
    table = wanted(introduced[0], a_load(3), a_load(4), Link(epoch=3, **KEYS), Release(epoch=4), a_load(5))
    table.ask(introduced[1], 2)
    table.ask(Dismiss(), 2)
    again = [introduced[1], Link(epoch=3, **KEYS), Release(epoch=4), a_load(5), Dismiss()]
    assert table.ask_again(3) == again
    assert table.ask_again(3) == again, "whichever of two resets lost it"


def test_a_message_without_state_is_not_sent_again():
    assert wanted(Ping(status=True)).ask_again(1) == []


def test_links_are_asked_for_until_they_are_measured():
    table = wanted(MeasureLinks(targets=[]))
    assert table.ask_again(1) == [MeasureLinks(targets=[])]
    table.measured()
    assert table.ask_again(1) == []


def a_draft(epoch):
    window = a_load(epoch).windows[0].spec
    return LoadDraft(epoch=epoch, window=window, vocabulary=9, context=64, maximum=8, first=2, sources=[])


def test_a_draft_model_is_asked_for_until_its_ring_ends_and_no_other_ring_wants_one():
    table = wanted(a_draft(3), a_draft(4))
    assert table.ask_again(1) == [a_draft(4)]
    table.ask(ReleaseDraft(epoch=3), 1)
    assert table.ask_again(1) == [a_draft(4)], "of a ring before it"
    table.ask(ReleaseDraft(epoch=4), 1)
    assert table.ask_again(1) == [ReleaseDraft(epoch=4)]


def test_an_epoch_is_released_until_the_worker_has_no_stage_in_it():
    table = wanted(a_load(3), Release(epoch=3))
    assert table.compare([3]) == [], "it is on its way"
    assert table.ask_again(1) == [Release(epoch=3)]
    table.compare([])
    assert table.ask_again(1) == []


def test_an_epoch_that_nobody_wants_is_released():
    assert wanted(a_load(3)).compare([2, 3]) == [Release(epoch=2)]


def test_a_load_is_ignored_once_two_later_pings_in_turn_show_no_stage():
    table = wanted(a_load(3), next_ping=5)
    assert table.ignored(4, 6) == [], "it was sent later"
    assert table.ignored(5, 7) == [], "the reply may have overtaken the end of the connection"
    assert table.ignored(6, 8) == [], "this ping was sent before that reply"
    assert table.ignored(7, 9) == [3]
    assert table.ignored(8, 10) == []


@pytest.mark.parametrize("change", ["shown", "released", "linked", "made again"])
def test_a_load_is_not_ignored_that_was_seen_or_is_asked_again(change):
    table = wanted(a_load(3), next_ping=5)
    table.ignored(5, 7)
    match change:
        case "shown":
            table.compare([3])
        case "released":
            table.ask(Release(epoch=3), 7)
        case "linked":
            table.ask(Link(epoch=3, **KEYS), 7)
        case _:
            table.ask_again(7)
    assert table.ignored(7, 9) == []
