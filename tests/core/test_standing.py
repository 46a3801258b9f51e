"""The status of a worker's stages: each change is counted, and a refusal is remembered until its release."""

from __future__ import annotations

import pytest

from primad.network.messages import Broken, Loaded, StageState, StageStates
from primad.worker.standing import MAX_REFUSED, Standing

BUSY = Broken(error="no room", fault="load")
LOADED = Loaded(port=4000, key="k" * 40)


def begun(epoch: int) -> StageState:
    return StageState(epoch=epoch, loaded=None, linked=False, broken=None)


def test_a_worker_that_was_never_asked_stands_as_a_head_that_heard_nothing_believes():
    assert Standing().message() == StageStates(revision=0, states=[])


def test_every_change_has_a_number_of_its_own():
    standing = Standing()
    seen = [standing.revision]
    for change in (
        lambda: standing.begin(3),
        lambda: standing.change(3, loaded=LOADED),
        lambda: standing.change(3, linked=True),
        lambda: standing.refuse(4, BUSY),
        lambda: standing.end(4),
        lambda: standing.change(3, broken=BUSY),
        lambda: standing.end(3),
    ):
        change()
        seen.append(standing.revision)
    assert seen == sorted(set(seen))
    assert standing.message().states == []


def test_a_change_concerns_one_stage():
    standing = Standing()
    standing.begin(3)
    standing.begin(4)
    standing.change(4, loaded=LOADED, linked=True)
    assert standing.message().states == [
        begun(3),
        StageState(epoch=4, loaded=LOADED, linked=True, broken=None),
    ]


def test_an_epoch_that_is_requested_again_starts_afresh():
    standing = Standing()
    standing.begin(3)
    standing.change(3, broken=BUSY)
    standing.end(3)
    standing.begin(3)
    assert standing.message().states == [begun(3)]


def test_the_end_of_what_never_began_is_no_change():
    standing = Standing()
    standing.end(3)
    assert standing.revision == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_flood_of_refusals_is_forgotten_from_its_beginning(again):
    standing = Standing()
    standing.begin(0)
    for epoch in range(1, 3 * MAX_REFUSED + 1):
        standing.refuse(epoch, BUSY)
        if again:
            standing.end(epoch)
            standing.refuse(epoch, BUSY)
    assert standing.epochs == [0, *range(2 * MAX_REFUSED + 1, 3 * MAX_REFUSED + 1)]


def test_a_stage_that_begins_after_a_refusal_is_not_forgotten():
    standing = Standing()
    standing.refuse(1, BUSY)
    standing.end(1)
    standing.begin(1)
    for epoch in range(2, 2 + MAX_REFUSED + 1):
        standing.refuse(epoch, BUSY)
    assert 1 in standing.epochs
