"""Strangers' announcements neither displace nor keep out a trusted device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.head.members.sight import Sight
from primad.network.peer import MAX_OF_ONE, Peer
from primad.trust.identity import new_identity
from primad.trust.labels import Labels

NAS, LAPTOP, STRANGER, OTHER = (new_identity().public for _ in range(4))
TRUSTED: Final[Mapping[str, str]] = {NAS: "nas", LAPTOP: "lap"}
GOOD: Final = Peer(
    device="nas",
    cluster="home",
    role="worker",
    version="1",
    protocol=5,
    addresses=("10.0.0.2",),
    port=7770,
    key=NAS,
    pairing=None,
)
FAKE: Final = replace(GOOD, key=STRANGER, addresses=("10.0.0.66",), port=9)


def sight_of(*announced: Mapping[str, Peer]) -> Sight:
    """The sight after these announcements, one after the other."""
    sight = Sight("desk", "home")
    for each in announced:
        sight.look(each, TRUSTED)
    return sight


def test_a_device_is_called_what_it_is_trusted_as_whatever_it_calls_itself():
    sight = sight_of({"a": replace(GOOD, device="lap"), "b": replace(GOOD, device="desk", key=LAPTOP)})
    assert {label: each.key for label, each in sight.devices.items()} == {"nas": NAS, "lap": LAPTOP}
    assert sight.impostors == []


@pytest.mark.parametrize(
    "announced",
    [
        [{"nas": FAKE}, {"nas": FAKE, "nas-2": GOOD}],
        [{"nas": GOOD}, {"nas": GOOD, "x": FAKE}],
        [{"nas": GOOD}, {"x": FAKE, "nas": GOOD}],
        [{"nas": GOOD}, {"nas": FAKE}],
        [{"nas": GOOD}, {"nas": FAKE}, {"nas": replace(FAKE, cluster="away", role="head")}],
        [{"nas": GOOD}, {"nas": FAKE}, {"nas": replace(FAKE, key=OTHER)}],
        [{"nas": GOOD}, {"nas": replace(FAKE, device="x")}],
    ],
    ids=["first", "after", "before", "in its place", "as no worker", "as two", "under another name"],
)
def test_a_stranger_does_not_displace_a_device_that_is_trusted(announced):
    sight = sight_of(*announced)
    assert sight.devices["nas"].trusted
    assert sight.devices["nas"].places() == [("10.0.0.2", 7770)]


def test_two_devices_that_took_one_mdns_name_at_once_are_both_seen():
    second = replace(GOOD, key=LAPTOP, addresses=("10.0.0.3",))
    sight = sight_of({"nas": GOOD}, {"nas": second}, {"nas": GOOD})
    assert {label: each.places() for label, each in sight.devices.items()} == {
        "nas": [("10.0.0.2", 7770)],
        "lap": [("10.0.0.3", 7770)],
    }
    sight.look({"nas": GOOD}, {NAS: "nas"})
    assert set(sight.devices) == {"nas"}


def test_an_announcement_of_a_trusted_key_elsewhere_adds_a_place_and_hides_none():
    """Whatever the order, all places are tried, a few at a time."""
    elsewhere = {f"x{at}": replace(GOOD, addresses=(f"10.9.9.{at}",), is_measuring=True) for at in range(50)}
    orders = (
        [{"nas": GOOD}, elsewhere | {"nas": GOOD}],
        [{"nas": GOOD} | elsewhere],
        [elsewhere, elsewhere | {"nas": GOOD}],
    )
    for announced in orders:
        nas = sight_of(*announced).devices["nas"]
        turns = [nas.places(turn) for turn in range(2 * len(nas.peers) // MAX_OF_ONE)]
        assert ("10.0.0.2", 7770) in [place for places in turns for place in places]
        assert max(map(len, turns)) == MAX_OF_ONE
        assert not nas.is_measuring, "one of them announces that it can be greeted"
    assert sight_of(*orders[0]).devices["nas"].places()[0] == ("10.0.0.2", 7770)


def test_a_device_that_is_no_longer_announced_is_out_of_sight_and_comes_back_at_its_new_place():
    assert sight_of({"nas": GOOD}, {}).devices == {}
    assert sight_of({"nas": GOOD}, {"nas": FAKE}, {}).devices == {}
    moved = replace(GOOD, addresses=("10.0.0.3",))
    assert sight_of({"nas": GOOD}, {"nas": FAKE}, {"nas": moved}).devices["nas"].places() == [("10.0.0.3", 7770)]


def test_strangers_get_the_names_that_are_left():
    strangers = {
        "a": replace(FAKE, device="sofa"),
        "b": replace(FAKE, device="lap"),
        "c": replace(FAKE, device="desk"),
        "d": replace(FAKE, device="sofa", key=OTHER),
        "e": replace(FAKE, device="far", cluster="other"),
    }
    sight = sight_of(strangers)
    assert {label: (each.key, each.trusted) for label, each in sight.devices.items()} == {"sofa": (STRANGER, False)}
    assert [peer.device for peer in sight.impostors] == ["lap", "desk"]


def test_a_device_is_a_stranger_once_its_trust_ends_and_none_once_it_begins():
    sight = sight_of({"nas": GOOD, "sofa": replace(FAKE, device="sofa")})
    sight.look({"nas": GOOD, "sofa": replace(FAKE, device="sofa")}, {STRANGER: "nas"})
    assert {label: (each.key, each.trusted) for label, each in sight.devices.items()} == {"nas": (STRANGER, True)}
    assert [peer.key for peer in sight.impostors] == [NAS]


KEYS: Final = [new_identity().public for _ in range(5)]


@given(
    st.lists(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(["desk", "a", "b", "a-2", "b-2", "c"])), max_size=6)
)
def test_a_label_is_of_one_key_and_stays_with_it(steps):
    labels, before = Labels("desk"), dict[str, str]()
    for step in steps:
        trusted = {name: key for key, name in step.items()}  # no two have one name
        now = labels.of({key: name for name, key in trusted.items()})
        assert now.keys() == set(trusted.values())
        assert len({"desk", *now.values()}) == len(now) + 1
        assert {key: now[key] for key in now.keys() & before.keys()} == {
            key: before[key] for key in now.keys() & before.keys()
        }
        before = now
