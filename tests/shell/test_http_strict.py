"""HTTP that two readers could understand differently is refused and its connection closed; plain HTTP is answered."""

from __future__ import annotations

import logging
import re

import h11
import pytest

from primad.api.http.strict import MAX_PARTS, MAX_TRAILERS, MIN_PART_BYTES, StrictConnection
from tests.fakes.backend import FakeBackend, replies
from tests.shell.gated import raw, until_closed
from tests.shell.test_http_patience import patient

BODY = b'{"messages": [{"role": "user", "content": "Hi"}]}'
SIZE = b"%d" % len(BODY)
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


def request(*headers: bytes, body: bytes = BODY, line: bytes = b"POST /v1/chat/completions HTTP/1.1") -> bytes:
    """A chat with ``headers``; the connection closes after its response."""
    always = (b"Host: localhost", b"Content-Type: application/json", b"Connection: close")
    return b"\r\n".join([line, *always, *headers, b"", b""]) + body


LENGTH, CODING = b"Content-Length: " + SIZE, b"Transfer-Encoding: chunked"
ACCEPTED = {
    "a length": request(LENGTH),
    "chunks": request(CODING, body=CHUNKED),
    "chunks by another case": request(b"transfer-encoding: Chunked", body=CHUNKED),
    "blanks around a length": request(b"Content-Length: \t" + SIZE + b" "),
    "HTTP/1.0": request(LENGTH, line=b"POST /v1/chat/completions HTTP/1.0"),
    "an extension of a chunk": request(CODING, body=CHUNKED.replace(b"\r\n{", b";a=b\r\n{")),
    "a trailer": request(CODING, body=CHUNKED[:-2] + b"X-Sum: 1\r\n\r\n"),
    "words of a header in a value": request(LENGTH, b"X-Said: content-length: 5, transfer-encoding: chunked"),
}
REFUSED = {
    "a length and chunks": request(LENGTH, CODING, body=CHUNKED),
    "chunks and a length": request(CODING, b"Content-Length: 4", body=CHUNKED),
    "a length and chunks by another case": request(b"CONTENT-LENGTH: 0", b"TRANSFER-ENCODING: CHUNKED", body=CHUNKED),
    "two lengths": request(LENGTH, b"Content-Length: 0"),
    "the same length twice": request(LENGTH, LENGTH),
    "a list of lengths": request(b"Content-Length: " + SIZE + b", " + SIZE),
    "a length with a sign": request(b"Content-Length: +" + SIZE),
    "a length below nothing": request(b"Content-Length: -1"),
    "a length in another base": request(b"Content-Length: 0x31"),
    "a length with a line between": request(b"Content-Length: 1_0"),
    "no length": request(b"Content-Length:"),
    "a length of many digits": request(b"Content-Length: " + b"9" * 40),
    "chunks twice": request(CODING, CODING, body=CHUNKED),
    "chunks behind another coding": request(b"Transfer-Encoding: gzip, chunked", body=CHUNKED),
    "another coding": request(b"Transfer-Encoding: identity"),
    "an unknown coding beside chunks": request(CODING, b"Transfer-Encoding: x", body=CHUNKED),
    "chunks with a tab before": request(b"Transfer-Encoding: \x0bchunked", body=CHUNKED),
    "chunks in HTTP/1.0": request(CODING, body=CHUNKED, line=b"POST /v1/chat/completions HTTP/1.0"),
    "a blank before a colon": request(b"Content-Length : " + SIZE),
    "a blank before a colon of chunks": request(b"Transfer-Encoding : chunked", body=CHUNKED),
    "a folded line": request(b"X-Long: a", b" b", LENGTH),
    "a folded coding": request(b"Transfer-Encoding:", b" chunked", body=CHUNKED),
    "a folded first line": request(b"", line=b"POST /v1/chat/completions HTTP/1.1\r\n Content-Length: 0"),
    "bare line feeds": request(LENGTH).replace(b"\r\n", b"\n"),
    "one bare line feed": request(LENGTH).replace(b"localhost\r\n", b"localhost\n"),
    "a head that ends with bare line feeds": request(LENGTH).replace(b"\r\n\r\n", b"\n\n"),
    "a bare carriage return": request(LENGTH, b"X-Long: a\rContent-Length: 0"),
    "a null": request(LENGTH, b"X-Long: a\x00b"),
    "no colon": request(LENGTH, b"X-Long"),
    "no name": request(LENGTH, b": a"),
    "no host": request(LENGTH).replace(b"Host: localhost\r\n", b""),
    "two hosts": request(LENGTH, b"Host: evil.example"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /v1/models\r\n\r\n",
    "HTTP/3.0": request(LENGTH, line=b"POST /v1/chat/completions HTTP/3.0"),
    "HTTP/1.12": request(LENGTH, line=b"POST /v1/chat/completions HTTP/1.12"),
    "blanks in a path": request(LENGTH, line=b"POST /v1/chat completions HTTP/1.1"),
    "two blanks in the first line": request(LENGTH, line=b"POST  /v1/chat/completions HTTP/1.1"),
    "an empty line first": b"\r\n\r\n" + request(LENGTH),
    "a head without end": b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 20_000,
    "too many header lines": request(*[b"X: y"] * 3_000, LENGTH),
}
WRONG_CHUNKS = {
    "no size": b"\r\n" + BODY,
    "a size with a sign": b"+" + CHUNKED,
    "a size below nothing": b"-1\r\n" + BODY,
    "a size with a prefix": b"0x" + CHUNKED,
    "a size of many digits": b"1" * 30 + b"\r\n" + BODY,
    "a bare line feed behind the size": CHUNKED.replace(b"\r\n", b"\n", 1),
    "more than the size": b"5\r\n" + BODY + b"\r\n0\r\n\r\n",
    "an extension without end": b"5;" + b"a" * 20_000,
    "a folded trailer without a name": CHUNKED[:-2] + b" a\r\n\r\n",
}


async def answer(port: int, printed: bytes) -> bytes:
    """Everything that the server sends for ``printed`` and a request hidden behind it."""
    reader, writer = await raw(port)
    writer.write(printed + SMUGGLED)
    printed = await until_closed(reader)
    writer.close()
    return printed


async def test_only_unambiguous_requests_get_responses(caplog):
    wrong = REFUSED | {name: request(CODING, body=body) for name, body in WRONG_CHUNKS.items()}
    backend = FakeBackend(lambda call: b"Hello")
    async with patient(backend) as port:
        for name, printed in ACCEPTED.items():
            got = await answer(port, printed)
            assert got.startswith(b"HTTP/1.1 200 "), (name, got)
            assert got.count(b"HTTP/1.1 ") == 1, (name, got)
        assert len(backend.calls) == len(ACCEPTED)
        for name, printed in wrong.items():
            got = await answer(port, printed)
            assert got.startswith(b"HTTP/1.1 400 "), (name, got)
            assert got.count(b"HTTP/1.1 ") == 1, (name, got)
            assert len(got) < 500, name
        assert len(backend.calls) == len(ACCEPTED), "nothing of what was refused was begun"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_later_requests_on_a_connection_are_parsed_as_strictly(caplog):
    first = request(LENGTH).replace(b"Connection: close\r\n", b"")
    async with patient(FakeBackend(replies("Hello"))) as port:
        for name, printed in REFUSED.items():
            got = await answer(port, first + printed)
            assert re.findall(rb"HTTP/1\.1 (\d+) ", got) == [b"200", b"400"], (name, got)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_wrong_chunk_after_an_early_response_ends_the_connection_without_a_traceback(caplog):
    late = request(CODING, body=b"").replace(b"Connection: close\r\n", b"")
    late = late.replace(b"application/json", b"text/plain\r\nOrigin: http://elsewhere")  # so that it is refused at once
    async with patient(FakeBackend(replies("Hello"))) as port:
        reader, writer = await raw(port)
        writer.write(late)
        assert b" 400 " in await reader.readline()
        writer.write(b"no chunk\r\n")
        assert b"HTTP/1.1" not in await until_closed(reader)
        writer.close()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("headers", [[], [(b"Content-Length", b"5")], [(b"Transfer-Encoding", b"chunked")]])
def test_a_response_has_the_bytes_that_h11_would_send(method, version, headers):
    def sent(connection: h11.Connection) -> list[bytes | None]:
        connection.receive_data(method.encode() + b" / HTTP/" + version + b"\r\nHost: localhost\r\n\r\n")
        while not isinstance(connection.next_event(), h11.EndOfMessage):
            pass
        response = h11.Response(status_code=200, headers=headers)
        pieces = [b""] if method == "HEAD" else [b"ab", b"", bytearray(b"cde")]
        events = [response, *(h11.Data(data=piece) for piece in pieces), h11.EndOfMessage()]
        return [connection.send(event) for event in events]

    strict = StrictConnection()
    assert sent(strict) == sent(h11.Connection(h11.SERVER))


@pytest.mark.parametrize(("part", "is_read"), [(1, False), (MIN_PART_BYTES, True), (99, True)])
def test_a_body_in_more_parts_than_its_size_is_worth_is_refused(part, is_read):
    connection, parts = StrictConnection(), MAX_PARTS * 9 // 8
    connection.receive_data(b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert type(connection.next_event()) is h11.Request
    wrong = None
    for _ in range(parts):
        connection.receive_data(b"%x\r\n%b\r\n" % (part, b"x" * part))
        try:
            assert type(connection.next_event()) is h11.Data
        except h11.RemoteProtocolError as exc:
            wrong = exc
            break
    assert (wrong is None) == is_read


@pytest.mark.parametrize("count", [0, MAX_TRAILERS, MAX_TRAILERS + 1])
def test_few_header_lines_may_follow_a_body(count):
    connection = StrictConnection()
    connection.receive_data(b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
    connection.receive_data(b"0\r\n" + b"t: x\r\n" * count + b"\r\n")
    assert [type(connection.next_event()) for _ in range(2)] == [h11.Request, h11.Data]
    if count <= MAX_TRAILERS:
        assert type(connection.next_event()) is h11.EndOfMessage
    else:
        with pytest.raises(h11.RemoteProtocolError, match=f"at most {MAX_TRAILERS} header lines may follow a body"):
            connection.next_event()
