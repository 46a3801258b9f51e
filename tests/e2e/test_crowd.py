"""After a crowd of clients a head holds what it held before, and answers as it did."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.cluster import all_joined, heading
from tests.e2e.crowd import Crowd, held
from tests.e2e.streams import ask, show

pytestmark = pytest.mark.slow

MAX_MORE = 6
"""Descriptors or threads more than before that are no leak: a pool of threads grows when it is needed."""
MAX_BYTES = 256 << 20
"""More memory than before that is no leak: of compute buffers as much is there as the largest steps until then used."""


@pytest.mark.parametrize(
    ("requests", "clients", "workers"),
    [(36, 8, 0), pytest.param(1000, 32, 2, marks=pytest.mark.matrix)],
)
async def test_every_request_of_a_crowd_ends_and_nothing_is_left_of_it(
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
        await Crowd(head.url, seed=1).ask(clients, clients)  # threads and buffers that stay are made now
        before = held(head)
        crowd = Crowd(head.url, seed=2)
        await crowd.ask(requests, clients)
        after = held(head)
        show(f"{requests} requests of {clients} clients: {dict(crowd.ends)}; before {before}, after {after}")
        assert crowd.ends.total() == requests
        assert after.descriptors <= before.descriptors + MAX_MORE
        assert after.threads <= before.threads + MAX_MORE
        assert after.private_bytes <= before.private_bytes + MAX_BYTES
        assert ask(head, tokens=16).text == alone
        assert "Traceback" not in head.run.output
