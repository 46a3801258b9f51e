"""``Stream`` reports a completion's text, the time of each token, and the end; needs no lab."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.http import answering
from tests.homelab.cluster import CLIENT
from tests.homelab.running import PATIENCE_S
from tests.homelab.stream import Stream, settled


def piece(text: str | None = None, reason: str | None = None) -> str:
    return json.dumps({"choices": [{"delta": {"content": text} if text else {}, "finish_reason": reason}]})


ERROR = json.dumps({"error": {"message": "b went away", "code": "service_unavailable"}})


@contextmanager
def server(status: int, events: Sequence[str]) -> Iterator[str]:
    """Serve these events, or a body, for every request; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Retry-After", "3")
            self.end_headers()
            for event in events:
                self.wfile.write(f"data: {event}\n\n".encode() if status == 200 else event.encode())

        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(events[0].encode())

        def log_message(self, format: str, *args: Any) -> None:
            return

    with answering(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


def client(*words: str) -> list[dict[str, Any]]:
    done = subprocess.run([*CLIENT, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def streamed(printed: list[dict[str, Any]]) -> Stream:
    return Stream(SimpleNamespace(lines=[(0.0, json.dumps(line)) for line in printed]))  # type: ignore[arg-type]


def asked(status: int, *events: str) -> Stream:
    with server(status, events) as url:
        return streamed(client("chat", url, "{}"))


def test_a_stream_is_read_to_its_end() -> None:
    stream = asked(200, piece("The "), piece("sky"), piece(reason="stop"), "[DONE]")
    assert stream.text == "The sky"
    assert len(stream.times) == 2
    assert stream.times == sorted(stream.times)
    assert (stream.status, stream.finish_reason, stream.error, stream.end) == (200, "stop", None, "done")
    assert settled(stream)


def test_an_error_event_ends_a_stream() -> None:
    stream = asked(200, piece("The "), ERROR)
    assert stream.error == json.loads(ERROR)["error"]
    assert (stream.text, stream.finish_reason) == ("The ", None)
    assert settled(stream)


@pytest.mark.parametrize("events", [(), (piece("The "),), (piece("The "), "[DONE]"), (piece("x", "stop"), ERROR)])
def test_a_silent_or_contradictory_end_is_not_an_end(events: tuple[str, ...]) -> None:
    assert not settled(asked(200, *events))


def test_a_refusal_is_an_error_with_its_status() -> None:
    stream = asked(503, ERROR)
    assert (stream.status, stream.retry_after) == (503, "3")
    assert stream.error is not None
    assert settled(stream)


def test_gaps_are_between_tokens() -> None:
    printed = [{"at": at, "event": json.loads(piece("x"))} for at in (10.0, 10.1, 12.6, 12.7)]
    stream = streamed(printed)
    assert stream.longest_gap_s == pytest.approx(2.5)
    assert stream.recovered_s(10.05) == pytest.approx(2.55)  # not the token at 10.1, which was already under way
    assert stream.recovered_s(11.0) == pytest.approx(1.6)
    assert stream.recovered_s(12.7) is None
    assert streamed(printed[:1]).longest_gap_s == 0


def test_health_is_queried_and_awaited() -> None:
    with server(200, ['{"status": "ok"}']) as url:
        for words in (("health", url), ("wait", url, "5")):
            (printed,) = client(*words)
            assert (printed["status"], printed["body"]) == (200, {"status": "ok"})
    (printed,) = client("health", url)  # the server has ended
    assert printed["status"] == 0
