"""While a head with a ring of two gets hostile requests, it serves ``/health`` and other clients; nothing is left."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import PATIENCE_S, Head, all_joined, heading
from tests.e2e.crowd import resources_of
from tests.e2e.streams import ask, show
from tests.e2e.test_crowd import MAX_BYTES, MAX_MORE
from tests.figures import note
from tests.shell.test_http_hostile import HOSTILE

pytestmark = [pytest.mark.slow, pytest.mark.matrix]

HEALTH = """
import http.client, sys, time
while not sys.stdin.closed:
    begin = time.monotonic()
    link = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
    link.request("GET", "/health")
    status = link.getresponse().status
    link.close()
    print(begin, time.monotonic() - begin, status, flush=True)
    time.sleep(0.02)
"""
"""Polls in its own process, so that this one does not delay it."""


@contextmanager
def health_polled(port: int) -> Iterator[list[tuple[float, int]]]:
    """Poll ``/health`` meanwhile; yield the seconds and status of each request so far."""
    looks: list[tuple[float, int]] = []
    with subprocess.Popen([sys.executable, "-c", HEALTH, str(port)], stdout=subprocess.PIPE, text=True) as asking:

        def read() -> None:
            for line in asking.stdout or ():
                _, took_s, status = line.split()
                looks.append((float(took_s), int(status)))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield looks
        finally:
            asking.kill()
            reader.join()


class Listener:
    """A client that repeats one request."""

    def __init__(self, head: Head) -> None:
        self.texts: list[str] = []
        self.gap_s = 0.0
        self._head, self._is_running = head, True
        self._thread = threading.Thread(target=self._listen)

    def _listen(self) -> None:
        while self._is_running:
            reported = ask(self._head, tokens=200)
            self.texts.append(reported.text if reported.error is None else str(reported.error))
            self.gap_s = max(self.gap_s, reported.gap_s)

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_running = False
        self._thread.join()


def test_hostile_requests_delay_neither_health_nor_others_and_leave_nothing(quick_model: Path, module_home):
    cluster = f"hostile-{secrets.token_hex(6)}"
    with ExitStack() as stack:
        stack.enter_context(all_joined([module_home("worker")], cluster))
        arguments = ("--wait", 1, "--use-all", "--context", 8192, "--sequences", 4)
        head = stack.enter_context(heading(quick_model, module_home("head"), cluster, *arguments))
        head.wait_serving()
        alone = ask(head, tokens=200).text
        bodies = [(to, body if isinstance(body, bytes) else json.dumps(body).encode()) for to, body in HOSTILE]
        with httpx.Client(
            base_url=head.url, timeout=PATIENCE_S, headers={"Content-Type": "application/json"}
        ) as client:
            client.post("/v1/chat/completions", content=bodies[0][1])  # creates the threads and buffers that stay
            before = resources_of(head)
            with health_polled(head.port) as looks, Listener(head) as listener:
                for to, body in bodies:
                    seen = len(looks)
                    status = client.post(to, content=body).status_code
                    assert status < 500 or status == 501, (to, body[:80], status)
                    slowest_s = max((took_s for took_s, _ in looks[seen:]), default=0.0)
                    show(f"{slowest_s * 1e3:6.1f} ms {status} {to} {body[:60]!r}")
                    note("health under attack", slowest_s)
        after = resources_of(head)
        show(
            f"longest gap of the other client {listener.gap_s:.2f} s in {len(listener.texts)} answers; {before}, {after}"
        )
        assert {status for _, status in looks} == {200}
        assert set(listener.texts) == {alone}
        assert after.descriptors <= before.descriptors + MAX_MORE
        assert after.threads <= before.threads + MAX_MORE
        assert after.private_bytes <= before.private_bytes + MAX_BYTES
        assert "Traceback" not in head.run.output
