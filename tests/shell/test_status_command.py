"""``primad status`` against a scripted endpoint."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from primad.api.answering.backend import Health
from primad.api.http.status import (
    CompletionFigures,
    LinkStatus,
    MemoryFigures,
    PlannedFigures,
    RingForecast,
    TokenCounts,
    WrongTerm,
    status_body,
    wrong_line,
)
from primad.cli import status as status_command
from tests.fakes.embeddings import FakeEmbeddings
from tests.fakes.http import answering
from tests.fakes.status import DRAFTS, KV, MEMORY, PLANNED, device, ring

SERVING = Health(serving=True, taken=True, detail="serving with 2 devices")
FORECAST = RingForecast(tokens_per_s=4.2, tpot_ms=238, ttft_ms=900)


class Endpoint:
    """A head that answers ``/status`` with ``body`` and ``status``; ``asked`` counts requests."""

    def __init__(self) -> None:
        self.body, self.status, self.requests = b"", 200, 0
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                endpoint.requests += 1
                self.send_response(endpoint.status if self.path == "/status" else 404)
                self.send_header("content-length", str(len(endpoint.body)))
                self.end_headers()
                self.wfile.write(endpoint.body)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def emits(self, plain: dict, health: Health = SERVING) -> None:
        self.body = msgspec.json.encode(status_body(health, None, plain))


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint()
    with answering(found.server):
        yield found


def row(out: str, first: str) -> list[str]:
    """The words after ``first`` in the line that begins with it."""
    (line,) = [line for line in out.splitlines() if line.strip().startswith(first)]
    return line.strip().removeprefix(first).split()


def test_the_table_has_a_row_for_each_device_and_the_plan_below(command, endpoint):
    endpoint.emits(ring(device("desk", role="head"), device("lap"), predicted=FORECAST))
    code, out, err = command("status", "--url", endpoint.url)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "serving with 2 devices, epoch 4, 2 rounds per token, forecast: 4.20 tokens/s"
    for name in ("desk", "lap"):
        assert row(out, name) == ["26", "23", "3", "200", "MB", "310", "MB", "62.5", "ms", "some", "5.00", "GB"]
    planned = [line.split() for line in out.splitlines() if line.strip().startswith("planned")]
    assert planned == [["planned", "22", "4", "300", "MB", "400", "MB", "20.0", "ms", "2.90", "GB"]] * 2
    header = " ".join(out.splitlines()[1:4])
    for column in ("device", "layers", "resident", "streamed", "ahead", "read", "stall", "pressure", "memory"):
        assert column in header


def test_an_output_matrix_that_streams_is_named_and_no_plan_has_it(command, endpoint):
    memory = msgspec.structs.replace(MEMORY, streams_output=True)
    endpoint.emits(ring(device("desk", role="head", memory=memory, predicted=PLANNED)))
    _, out, _ = command("status", "--url", endpoint.url)
    assert row(out, "desk")[:7] == ["26", "23", "3", "+", "output", "200", "MB"]
    assert row(out, "planned")[:4] == ["22", "4", "300", "MB"]


def test_it_fits_a_terminal_of_80_columns(command, endpoint, monkeypatch):
    console = type(status_command.tables)(force_terminal=True, color_system=None, width=80, soft_wrap=True)
    monkeypatch.setattr(status_command, "tables", console)
    endpoint.emits(ring(device("living-room")))
    _, out, _ = command("status", "--url", endpoint.url)
    assert max(map(len, out.splitlines())) <= 80
    assert row(out, "living-room") == ["26", "23", "3", "200", "MB", "310", "MB", "62.5", "ms", "some", "5.00", "GB"]


def test_unknown_figures_are_question_marks(command, endpoint):
    endpoint.emits(ring(device("desk", ring=None, memory=MemoryFigures(), predicted=PlannedFigures())))
    code, out, _ = command("status", "--url", endpoint.url)
    assert code == 0
    assert row(out, "desk ") == ["26", *"???????"]
    assert "planned" not in out
    assert "desk: timed out" in out


def test_a_device_that_computes_a_prompt_is_shown_as_computing(command, endpoint):
    endpoint.emits(ring(device("desk", ring=None, memory=MemoryFigures(), computes=True)))
    _, out, _ = command("status", "--url", endpoint.url)
    assert "desk: computes a long step" in out
    assert "timed out" not in out


def test_a_wrong_plan_is_reported_with_its_term(command, endpoint):
    wrong = WrongTerm(term="hops", device=None, predicted_ms=1, measured_ms=80, is_beyond=True)
    measured = CompletionFigures(tpot_ms=320, predicted_tpot_ms=238, wrong=wrong)
    endpoint.emits(ring(device("desk", role="head")) | {"measured": msgspec.to_builtins(measured)})
    _, out, _ = command("status", "--url", endpoint.url)
    assert out.splitlines()[-1] == f"{wrong_line(measured)}"
    assert "320 ms, not 238 ms" in out
    assert "the hops between devices: 80.0 ms, not 1.00 ms" in out


def test_a_plan_that_comes_true_is_not_reported(command, endpoint):
    measured = CompletionFigures(tpot_ms=240, predicted_tpot_ms=238, wrong=None)
    endpoint.emits(ring(device("desk", role="head")) | {"measured": msgspec.to_builtins(measured)})
    assert "240" not in command("status", "--url", endpoint.url)[1]


def test_devices_outside_the_ring_are_listed(command, endpoint):
    endpoint.emits(ring(device("desk", role="head"), device("lap"), lap="serving", nas="discovered"))
    _, out, _ = command("status", "--url", endpoint.url)
    assert out.splitlines()[-1] == "nas: discovered"
    assert "lap: " not in out


def test_the_model_for_embeddings_has_a_line(command, endpoint):
    endpoint.body = msgspec.json.encode(status_body(SERVING, None, ring(), FakeEmbeddings().status()))
    _, out, _ = command("status", "--url", endpoint.url)
    assert "small for embeddings: alive, 70.0 MB, 9 requests, 1 of them with errors, 120 tokens in 1.5 s" in out


def test_it_shows_kv_replication_and_resumed_requests(command, endpoint):
    endpoint.body = msgspec.json.encode(status_body(SERVING, None, ring() | {"kv": msgspec.to_builtins(KV)}))
    _, out, _ = command("status", "--url", endpoint.url)
    assert "nas: its KV cache is not replicated, no link of it carries them" in out
    assert "KV cache replicated: lap's by desk; 46.0 MB now, 12 tokens behind" in out
    assert (
        "3 times a ring resumed requests of another one: 2000 tokens were restored within 0.4 s, 31 recomputed" in out
    )


def test_it_shows_where_pictures_are_encoded(command, endpoint):
    pictures = {"device": "lap", "alive": False, "encoded": 3, "encoded_elsewhere": 2}
    endpoint.body = msgspec.json.encode(status_body(SERVING, None, ring() | {"pictures": pictures}))
    assert "3 images encoded, 2 by other devices; lap encodes" in command("status", "--url", endpoint.url)[1]


def test_it_shows_the_acceptance_of_drafts(command, endpoint):
    endpoint.body = msgspec.json.encode(status_body(SERVING, None, ring() | {"drafts": msgspec.to_builtins(DRAFTS)}))
    _, out, _ = command("status", "--url", endpoint.url)
    assert "75% accepted, 15% skipped; 1.75 tokens per ring pass; draft model on nas" in out


def test_it_shows_whether_windows_of_the_model_were_checked(command, endpoint):
    line = "windows of this model: checked bit for bit on 2026-11-25"
    endpoint.body = msgspec.json.encode(status_body(SERVING, None, ring() | {"checked": line}))
    assert line in command("status", "--url", endpoint.url)[1]
    endpoint.body = msgspec.json.encode(status_body(SERVING, None, ring()))
    assert "windows of this model" not in command("status", "--url", endpoint.url)[1]


def test_before_the_first_ring(command, endpoint):
    endpoint.emits({}, Health(serving=False, taken=False, detail="looking for devices"))
    assert command("status", "--url", endpoint.url) == (0, "looking for devices\n", "")


def test_json_output_is_the_response_of_the_endpoint(command, endpoint):
    endpoint.emits(ring(device("desk")))
    code, out, err = command("status", "--json", "--url", endpoint.url)
    assert (code, err) == (0, "")
    assert out == endpoint.body.decode() + "\n"
    assert json.loads(out)["devices"][0]["memory"]["stall_ms_per_token"] == 62.5


def test_control_characters_of_an_endpoint_are_escaped(command, endpoint):
    endpoint.emits(
        ring(device("\x1b[2Jdesk", predicted=PlannedFigures())),
        Health(serving=True, taken=True, detail="a\x1b]0;b\x07"),
    )
    _, out, _ = command("status", "--url", endpoint.url)
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "\\x1b[2Jdesk" in out


@pytest.mark.parametrize("arguments", [(), ("--json",), ("--watch",)])
def test_no_head_is_one_clear_error(command, endpoint, arguments):
    endpoint.server.shutdown()  # a thread that begins to serve a closed socket would print its error
    endpoint.server.server_close()
    code, out, err = command("status", *arguments, "--url", endpoint.url)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"primad: error: {endpoint.url}: ")
    assert err.endswith("is 'primad serve' running?\n")


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"hello", b'{"serving": 1}', b"\xff", b'{"x":' + b"[" * 100_000])
def test_something_else_there_is_one_clear_error(command, endpoint, body):
    endpoint.body = body
    code, out, err = command("status", "--url", endpoint.url)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"primad: error: {endpoint.url}: responds, but not like a head of this version of primad")


def test_a_refusal_is_one_clear_error(command, endpoint):
    endpoint.status = 404
    code, out, err = command("status", "--url", endpoint.url)
    assert (code, out) == (2, "")
    assert "returned 404" in err


def test_an_invalid_address_is_refused(command):
    code, out, err = command("status", "--url", "http://127.0.0.1:x")
    assert (code, out) == (2, "")
    assert "--url http://127.0.0.1:x: not an address" in err


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_watching_repeats_until_ctrl_c(command, endpoint, monkeypatch, arguments):
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        endpoint.emits(ring(device("desk"), epoch=4 + len(waits)))
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status_command.time, "sleep", sleep)
    endpoint.emits(ring(device("desk")))
    code, out, err = command("status", "--watch", *arguments, "--url", endpoint.url)
    assert (code, err) == (130, "stopped\n")
    assert (waits, endpoint.requests) == ([1.0] * 3, 3)
    named = '"epoch":{}' if arguments else "epoch {},"
    assert [named.format(epoch) in out for epoch in (4, 5, 6, 7)] == [True, True, True, False]


def test_devices_without_layers_are_listed_with_the_reason(command, endpoint):
    left_out = [{"device": "nas", "reason": "the ring would be 31% slower with it"}]
    endpoint.emits(ring(device("desk", role="head"), nas="ready") | {"left_out": left_out})
    _, out, _ = command("status", "--url", endpoint.url)
    assert out.splitlines()[-1] == "nas: ready, the ring would be 31% slower with it"


def test_watching_shows_speed_hops_and_events(command, endpoint, monkeypatch):
    desk, lap = device("desk", role="head"), device("lap")
    now = [100.0]
    more = {
        "links": [
            msgspec.to_builtins(LinkStatus(source="lap", target="desk", round_trip_ms=0.4, late_ms=1.0, mbit_per_s=900))
        ],
        "events": [{"at_s": 1_700_000_000.0, "kind": "joined", "text": "lap \x1b joined"}],
    }

    def emit(written: int) -> None:
        tokens = TokenCounts(prompt=5, completion=written, answers_open=2)
        endpoint.body = msgspec.json.encode(status_body(SERVING, None, ring(desk, lap) | more, None, tokens))

    def sleep(seconds: float) -> None:
        if now[0] > 100.0:
            raise KeyboardInterrupt
        now[0] += 2.0
        emit(50)

    monkeypatch.setattr(status_command.time, "sleep", sleep)
    monkeypatch.setattr(status_command, "_now_s", lambda: now[0])
    emit(10)
    _, out, _ = command("status", "--watch", "--url", endpoint.url)
    assert "? tokens/s now; 2 open requests, 10 tokens generated" in out
    assert "20.0 tokens/s now; 2 open requests, 50 tokens generated" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("desk", "lap"))][-2:]
    assert rows == [
        ["desk", "0-25", "?", "?", "1.00", "ms", "?", "-"],
        ["lap", "0-25", "?", "?", "1.00", "ms", "0.40", "ms", "-"],
    ]
    assert "lap \\x1b joined" in out
    assert "\x1b" not in out


def test_watching_on_a_terminal_draws_in_place(command, endpoint, monkeypatch):
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        endpoint.emits(ring(device("desk"), epoch=5))
        if len(waits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(status_command.time, "sleep", sleep)
    monkeypatch.setattr(status_command, "tables", type(status_command.tables)(force_terminal=True, width=100))
    endpoint.emits(ring(device("desk")))
    _, out, err = command("status", "--watch", "--url", endpoint.url)
    assert err == "stopped\n"
    assert "epoch 4," in out
    assert "epoch 5," in out
    assert "\x1b[1A" in out, "the cursor goes up over what was shown"
    assert out.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_watching_continues_while_the_head_is_unreachable(command, endpoint, monkeypatch, is_terminal):
    looks = 0

    def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        endpoint.status = 503 if looks == 1 else 200
        endpoint.emits(ring(device("desk"), epoch=4 + looks))
        if looks == 3:
            endpoint.status = 401

    monkeypatch.setattr(status_command.time, "sleep", sleep)
    monkeypatch.setattr(status_command, "tables", type(status_command.tables)(force_terminal=is_terminal, width=200))
    endpoint.emits(ring(device("desk")))
    code, out, err = command("status", "--watch", "--url", endpoint.url)
    assert "epoch 4," in out
    assert "returned 503; is it a head, 'primad serve'? (retrying every second, until Ctrl-C)" in out
    assert "epoch 5," not in out
    assert "epoch 6," in out
    assert (code, looks) == (2, 3), "with another key waiting is of no use"
    assert err == f"primad: error: {endpoint.url}: requires an API key; give --api-key KEY, or set PRIMAD_API_KEY\n"


def test_watching_cuts_no_line_and_draws_no_more_than_the_terminal_holds(command, endpoint, monkeypatch):
    screen, at_first = io.StringIO(), ""

    def sleep(_: float) -> None:
        nonlocal at_first
        at_first = screen.getvalue()
        raise KeyboardInterrupt

    console = type(status_command.tables)(force_terminal=True, color_system=None, width=80, height=10, file=screen)
    monkeypatch.setattr(status_command, "tables", console)
    monkeypatch.setattr(status_command.time, "sleep", sleep)
    endpoint.emits(ring(device("desk")) | {"kv": msgspec.to_builtins(KV)})
    command("status", "--watch", "--url", endpoint.url)
    assert at_first.count("\n") < 10, "what is above the screen could not be drawn over"
    assert "2000 tokens were restored within 0.4 s, 31 recomputed" in " ".join(screen.getvalue().split())
