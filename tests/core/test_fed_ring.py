"""The other devices stay busy while the head computes, on a simulated clock."""

from __future__ import annotations

import pytest

from primad.ring.grouping import Batching
from primad.ring.messages import Sampled
from tests.core.test_speculation import prompt
from tests.fakes.drafter import Nothing
from tests.fakes.engine import FakeModel
from tests.fakes.ring import GREEDY, generate
from tests.fakes.timed_ring import TimedRing

VISIT_S = 0.01
TOKENS = 60
SHARES = [(0.1, 1.0, 0.9), (0.5, 0.9, 0.5), (0.9, 0.9, 0.1), (0.3, 0.6, 0.6), (0.2, 0.9, 0.92), (0.3, 0.9, 0.7)]
"""Shares of a visit: the head's first window, the other device's window, the head's last window."""


@pytest.mark.parametrize("shares", SHARES)
def test_next_tokens_of_several_requests_come_as_fast_as_the_busiest_device_computes(shares):
    ring = TimedRing(
        2,
        visit_s=VISIT_S,
        shares=shares,
        context=256,
        depth=2,
        sequences=4,
        batching=Batching(rows=2, steps=2),
        drafter=Nothing,
    )
    for request in range(4):
        ring.head.submit(generate(request, prompt(5 + request), tokens=TOKENS))
    took_s = ring.finish()
    for request in range(4):
        reported = [event.token for event in ring.events if isinstance(event, Sampled) and event.request == request]
        assert reported == FakeModel(1).answer(prompt(5 + request), TOKENS, GREEDY)
    busiest_s = VISIT_S * max(shares[1], shares[0] + shares[2])
    assert took_s < 1.15 * busiest_s * 2 * TOKENS


@pytest.mark.parametrize("chunks", [4, 20])
@pytest.mark.parametrize("shares", [*SHARES, (0.5, 0.875, 0.625), (0.75, 0.875, 0.375), (0.5, 0.95, 0.55)])
def test_devices_wait_for_chunks_only_before_the_first_and_after_the_last(shares, chunks):
    ring = TimedRing(2, visit_s=VISIT_S, shares=shares, context=256, depth=2, rows=8, drafter=Nothing)
    ring.head.submit(generate(0, prompt(8 * chunks), tokens=1))
    ring.finish()
    begin, other, end = shares
    min_s = VISIT_S * max(begin + chunks * other + end, chunks * (begin + end))
    assert ring.reported_s[0] <= 1.06 * min_s
