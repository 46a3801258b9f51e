"""Nonsense from a peer is logged now and then, with a count."""

from __future__ import annotations

import logging

from primad.system.complaints import Complaints

LOG = logging.getLogger("complaints")


def test_a_flood_of_complaints_is_a_line_now_and_then(caplog):
    now_s = [0.0]
    complaints = Complaints(LOG, 10.0, lambda: now_s[0])
    complaints.add("refused a message", "too short")
    for number in range(500):
        now_s[0] = number / 100
        complaints.add("refused a message", "too long")
    for now_s[0] in (10.0, 20.0):
        complaints.add("refused a connection", "not trusted")
    assert [record.getMessage() for record in caplog.records] == [
        "refused a message (1 so far): too short",
        "refused a connection (502 so far): not trusted",
        "refused a connection (503 so far): not trusted",
    ]
