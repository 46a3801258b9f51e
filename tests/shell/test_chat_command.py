"""``primad chat`` against a scripted endpoint."""

from __future__ import annotations

import base64
import io
import json
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from primad.cli import chat as chat_command
from primad.cli import main as cli
from primad.cli.conversation import Received
from primad.cli.endpoint import in_our_words, opened, reached
from primad.errors import ClusterError
from tests.fakes.http import answering
from tools.lab.mmproj import noise


def event(**delta: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Endpoint:
    """Answers each request with the next of ``answers``; ``asked`` has the requests."""

    def __init__(self) -> None:
        self.requests: list[list[dict[str, str]]] = []
        self.paths: list[str] = []
        self.requested_models: list[str | None] = []
        self.replies: list[tuple[int, bytes]] = []
        self.models: tuple[int, bytes] = 200, b'{"data": [{"id": "toy"}]}'
        self.health: tuple[int, bytes] = 200, b'{"detail": "serving with 1 device"}'
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, content = {"/v1/models": endpoint.models, "/health": endpoint.health}[self.path]
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_POST(self) -> None:
                endpoint.paths.append(self.path)
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                endpoint.requests.append(body["messages"])
                endpoint.requested_models.append(body.get("model"))
                status, content = endpoint.replies.pop(0)
                self.send_response(status)
                self.send_header("content-length", str(len(content) + (not content.endswith((DONE, b"}")))))
                self.end_headers()
                self.wfile.write(content)  # one byte short where the stream breaks off

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def emits(self, *events: bytes, status: int = 200) -> None:
        self.replies.append((status, b"".join(events)))

    def contents(self, request: int) -> list[str]:
        return [each["content"] for each in self.requests[request]]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint()
    with answering(found.server):
        yield found


Types = Callable[..., tuple[int, str, str]]


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint) -> Types:
    """Runs ``primad chat``, typing ``lines`` unless it reads standard input; returns exit code and outputs."""
    monkeypatch.setenv("PRIMAD_LOG", "WARNING")
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*arguments: str, lines: tuple[str, ...] | None = (), url: str = endpoint.url) -> tuple[int, str, str]:
        left = list(lines or ())

        def read() -> str:
            if not left:
                raise EOFError
            return left.pop(0)

        if lines is not None:
            monkeypatch.setattr(chat_command, "line_reader", lambda _: read)
        monkeypatch.setattr(sys, "argv", ["primad", "chat", "--url", url, *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as exc:
            code = int(exc.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_another_program_gets_the_response_to_one_question_without_reasoning(chat: Types, endpoint: Endpoint):
    endpoint.emits(event(reasoning_content="hm"), event(content="Be"), event(content="cause."), DONE)
    assert chat("Why?") == (0, "Because.\n", "")


def test_another_model_of_the_endpoint_is_chosen_by_name(chat: Types, endpoint: Endpoint):
    endpoint.emits(event(content="so"), DONE)
    endpoint.emits(event(content="so"), DONE)
    assert chat("Why?") == (0, "so\n", "")
    assert "llama3.2:1b at http" in chat("--model", "llama3.2:1b", lines=("Why?",))[2]
    assert endpoint.requested_models == [None, "llama3.2:1b"]


def test_characters_that_the_output_cannot_encode_are_escaped(chat: Types, endpoint: Endpoint, monkeypatch):
    """On Windows, for example, output to a file or pipe is not UTF-8."""
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", write_through=True)
    monkeypatch.setattr(sys, "stdout", narrow)
    endpoint.emits(event(content="Größe \N{GRINNING FACE}"), DONE)
    assert chat("How large?")[0] == 0
    assert narrow.buffer.getvalue() == "Größe \\U0001f600\n".encode("latin-1")


def test_text_typed_in_a_locale_without_utf_8_arrives(chat: Types, endpoint: Endpoint):
    endpoint.emits(event(content="so"), DONE)
    typed = ["Größe".encode().decode("ascii", "surrogateescape"), "Gr\udcf6\udcdfe"]
    assert chat("--system", typed[0], typed[1]) == (0, "so\n", "")
    assert endpoint.contents(0) == ["Größe", "Gr\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}e"]


def test_the_conversation_is_sent_with_the_next_question(chat: Types, endpoint: Endpoint, tmp_path: Path):
    endpoint.emits(event(content="1"), DONE)
    endpoint.emits(event(content="2"), DONE)
    file = tmp_path / "said.json"
    code, out, _ = chat(lines=("/system Be brief.", "one?", "two?", f"/save {file}", "/quit", "never read"))
    assert (code, out) == (0, "1\n2\n")
    assert endpoint.contents(1) == ["Be brief.", "one?", "1", "two?"]
    assert [printed["content"] for printed in json.loads(file.read_text())["messages"]][-1] == "2"


def test_a_picture_is_sent_with_the_question_after_it(chat: Types, endpoint: Endpoint, tmp_path: Path):
    endpoint.emits(event(content="a cat"), DONE)
    good, bad = tmp_path / "a.png", tmp_path / "b.png"
    good.write_bytes(noise(1))
    bad.write_bytes(b"no picture")
    code, out, err = chat(lines=("/image", f"/image {bad}", f"/image {good}", "what?"))
    assert (code, out) == (0, "a cat\n")
    assert "not an image of a known format" in err
    ((picture, text),) = endpoint.contents(0)
    assert base64.b64decode(picture["image_url"]["url"].partition(",")[2]) == noise(1)
    assert text == {"type": "text", "text": "what?"}


def test_a_picture_is_found_by_a_path_as_terminals_write_dropped_files(chat: Types, endpoint: Endpoint, tmp_path: Path):
    (tmp_path / "my cat's.png").write_bytes(noise(1))
    plain = f"{tmp_path}/my cat's.png"
    shown = (plain, f'"{plain}"', plain.replace(" ", "\\ ").replace("'", "\\'"))
    endpoint.emits(event(content="three cats"), DONE)
    chat(lines=(*(f"/image {each}" for each in shown), f"/image '{plain}", "what?"))
    assert [each["type"] for each in endpoint.contents(0)[0]] == [*["image_url"] * 3, "text"]


def test_regenerate_repeats_the_question_without_the_response_and_clear_forgets(chat: Types, endpoint: Endpoint):
    for text in ("1", "one", "three"):
        endpoint.emits(event(content=text), DONE)
    assert chat(lines=("/regenerate", "one?", "/regenerate", "/clear", "three?"))[:2] == (0, "1\none\nthree\n")
    assert [endpoint.contents(request) for request in range(3)] == [["one?"], ["one?"], ["three?"]]


@pytest.mark.parametrize(
    ("status", "events", "reported"),
    [
        (503, (b'{"error": {"message": "no ring serves"}}',), "no ring serves"),
        (
            200,
            (event(content="so"), b'data: {"error": {"message": "primad is stopping"}}\n\n', DONE),
            "primad is stopping",
        ),
        (200, (event(content="so"),), "the head ended during the response"),
        (200, (b"data: [1]\n\n", DONE), "not like an OpenAI endpoint"),
    ],
)
def test_an_error_is_printed_and_the_conversation_continues(
    chat: Types, endpoint: Endpoint, status: int, events: tuple[bytes, ...], reported: str
):
    endpoint.emits(*events, status=status)
    endpoint.emits(event(content="yes"), DONE)
    code, out, err = chat(lines=("one?", "/regenerate"))
    assert code == 0
    assert out.endswith("yes\n")
    assert reported in err
    assert "Traceback" not in err
    assert endpoint.contents(1) == ["one?"]


def test_an_unreachable_head_is_one_clear_error(chat: Types):
    with socket.socket() as occupied:  # bound, but not listening
        occupied.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{occupied.getsockname()[1]}"
        expected = f"primad: error: {url}: no response; is 'primad serve' running?\n"
        assert chat("Why?", url=url) == (2, "", expected)


BROKEN = (
    ("http_proxy", "http://127.0.0.1:9"),
    ("ALL_PROXY", "http://127.0.0.1:9"),
    ("all_proxy", "socks5://127.0.0.1:9"),
    ("HTTP_PROXY", "ftp://127.0.0.1:9"),
    ("http_proxy", "http://[broken"),
    ("NO_PROXY", "http://[broken"),
    ("SSL_CERT_FILE", "/nonexistent.pem"),
    ("SSL_CERT_FILE", __file__),
)
"""Shell variables that must not affect requests to a head on this device."""


def test_no_proxy_leads_to_a_head_of_this_device(chat: Types, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch):
    for name, value in BROKEN:
        endpoint.emits(event(content="yes"), DONE)
        with monkeypatch.context() as shell:
            shell.setenv(name, value)
            assert chat("Why?") == (0, "yes\n", ""), (name, value)


def test_an_invalid_variable_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch):
    there = reached("http://desk.invalid:8080", None, None)
    for name, value in (*BROKEN[2:4], *BROKEN[6:]):
        with monkeypatch.context() as shell:
            shell.setenv(name, value)
            with pytest.raises(ClusterError, match=rf"desk.invalid:8080: {name}\b.* cannot be used") as caught:
                opened(httpx.Client, there, 1)
            assert len(str(caught.value).splitlines()) == 1
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert "http_proxy" in str(in_our_words(there, httpx.ConnectError("refused")))


@pytest.mark.parametrize("behind", ["/v1", "/v1/", "/"])
def test_the_url_that_serve_prints_for_clients_is_accepted(chat: Types, endpoint: Endpoint, behind: str):
    endpoint.emits(event(content="yes"), DONE)
    assert chat("Why?", url=endpoint.url + behind) == (0, "yes\n", "")
    assert endpoint.paths == ["/v1/chat/completions"]


def test_lines_from_another_program_get_responses_without_a_prompt_sign(
    chat: Types, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
):
    for text in ("1", "2"):
        endpoint.emits(event(content=text), DONE)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one?\ntwo?\n"))
    assert chat(lines=None)[:2] == (0, "1\n2\n")


def test_a_missing_key_is_reported_once(chat: Types, endpoint: Endpoint):
    endpoint.emits(b'{"error": {"message": "send an API key"}}', status=401)
    reported = f"primad: error: {endpoint.url}: requires an API key; give --api-key KEY, or set PRIMAD_API_KEY\n"
    assert chat("Why?") == (2, "", reported)


def test_a_conversation_starts_with_the_name_of_the_model(chat: Types, endpoint: Endpoint):
    assert chat() == (0, "", f"toy at {endpoint.url}\nend with Ctrl-D\n")
    endpoint.models, endpoint.health = (200, b'{"data": []}'), (503, b'{"detail": "planning"}')
    assert f"no model yet at {endpoint.url}; not serving yet: planning\n" in chat()[2]


def test_an_unusable_endpoint_fails_before_the_first_question(chat: Types, endpoint: Endpoint):
    never_read = ("Why?",)
    endpoint.models = 401, b"{}"
    assert chat(lines=never_read) == (
        2,
        "",
        f"primad: error: {endpoint.url}: requires an API key; give --api-key KEY, or set PRIMAD_API_KEY\n",
    )
    several = [{"id": name, "status": {"value": "unloaded"}} for name in ("small", "large")]
    endpoint.models = 200, json.dumps({"data": several}).encode()
    assert f"{endpoint.url}: offers small, large; choose one with --model" in chat(lines=never_read)[2]
    endpoint.models = 404, b"nothing"
    assert "returned 404; is it a primad endpoint?" in chat(lines=never_read)[2]
    assert "no response" in chat(lines=never_read, url="http://127.0.0.1:9")[2]
    assert endpoint.requests == []


def test_prompt_progress_is_no_part_of_the_response(chat: Types, endpoint: Endpoint):
    read = b'data: {"choices": [], "prompt_progress": {"total": 9, "processed": 4}}\n\n'
    received = Received()
    assert received.take(read.decode().strip(), 0.0) == []
    assert received.read == "processing the prompt: 4 of 9 tokens"
    endpoint.emits(read, event(content="so"), DONE)
    assert chat("Why?") == (0, "so\n", "")


def test_an_unknown_command_shows_the_known_ones(chat: Types, endpoint: Endpoint, tmp_path: Path):
    code, out, err = chat(lines=("/sytem x", "/save", f"/save {tmp_path / 'no' / 'where'}", "/system"))
    assert (code, out, endpoint.requests) == (0, "", [])
    assert "/sytem: no such command" in err
    assert "/regenerate" in err
    assert "name the file" in err
    assert "No such file" in err
    assert "there is no system message" in err
