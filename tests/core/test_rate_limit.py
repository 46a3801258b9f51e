"""The bandwidth cap and the limit on logged complaints: time is an argument, nothing waits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primad.layers.rate_limit import BURST_S, TokenBucket


def test_without_a_cap_nothing_waits():
    assert TokenBucket(None).take(1 << 40, 0.0) == 0


def test_after_a_pause_a_burst_goes_at_once_and_no_more():
    bucket = TokenBucket(1000.0)
    assert bucket.take(int(1000 * BURST_S), 0.0) == 0
    assert bucket.take(500, 0.0) == pytest.approx(0.5)
    assert bucket.take(int(1000 * BURST_S), 3600.0) == 0
    assert bucket.take(100, 3600.0) == pytest.approx(0.1)


@settings(deadline=None)
@given(
    st.floats(1.0, 1e9),
    st.lists(st.tuples(st.integers(1, 4 << 20), st.floats(0.0, 100.0)), min_size=1, max_size=50),
)
def test_no_stretch_of_time_carries_more_than_the_cap_and_the_burst(rate, sends):
    bucket, now_s, sent = TokenBucket(rate), 0.0, []
    for size, pause_s in sends:
        now_s += pause_s
        sent.append((now_s + bucket.take(size, now_s), size))
    assert [at_s for at_s, _ in sent] == sorted(at_s for at_s, _ in sent)
    for first in range(len(sent)):
        carried = 0
        for at_s, size in sent[first:]:
            # Data sent at the end of the interval does not count.
            allowed = rate * (at_s - sent[first][0] + BURST_S) + sent[first][1]
            assert carried <= allowed * (1 + 1e-6) + 1
            carried += size
