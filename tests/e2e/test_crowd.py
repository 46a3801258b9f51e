"""After a crowd of clients a head uses no more than before, and gives the same completion."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.cluster import all_joined, heading
from tests.e2e.crowd import Crowd, resources_of
from tests.e2e.streams import ask, show

pytestmark = pytest.mark.slow

MAX_MORE = 6
"""Allowed increase in descriptors or threads: thread pools grow on demand."""
MAX_BYTES = 256 << 20
"""Allowed increase in memory: compute buffers have the size of the largest steps so far."""


@pytest.mark.parametrize(
    ("requests", "clients", "workers"),
    [(36, 8, 0), pytest.param(1000, 32, 2, marks=pytest.mark.matrix)],
)
async def test_every_request_of_a_crowd_ends_and_leaves_nothing_open(
    quick_model: Path, module_home, requests, clients, workers
):
    cluster = f"crowd-{secrets.token_hex(6)}"
    with ExitStack() as stack:
        stack.enter_context(all_joined([module_home(f"w{workers}-{i}") for i in range(workers)], cluster))
        who = ("--wait", workers, "--use-all") if workers else ("--alone",)
        arguments = (*who, "--context", 512, "--sequences", 4)
        head = stack.enter_context(heading(quick_model, module_home(f"head-{workers}"), cluster, *arguments))
        head.wait_serving()
        alone = ask(head, tokens=16).text
        await Crowd(head.url, seed=1).ask(clients, clients)  # creates the threads and buffers that stay
        before = resources_of(head)
        crowd = Crowd(head.url, seed=2)
        await crowd.ask(requests, clients)
        after = resources_of(head)
        show(f"{requests} requests of {clients} clients: {dict(crowd.ends)}; before {before}, after {after}")
        assert crowd.ends.total() == requests
        assert after.descriptors <= before.descriptors + MAX_MORE
        assert after.threads <= before.threads + MAX_MORE
        assert after.private_bytes <= before.private_bytes + MAX_BYTES
        assert ask(head, tokens=16).text == alone
        assert "Traceback" not in head.run.output
