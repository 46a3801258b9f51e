"""Pictures by URL: the addresses from which the head fetches them, and what a site cannot abuse."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from ipaddress import ip_interface

import httpx
import pytest

from primad.errors import RequestError
from primad.head.model.fetching import PictureFetcher, public_addresses
from primad.network.addresses import Interface
from tests.fakes.http import post
from tests.shell.test_http_pictures import BODIES, CHAT, ONE, TEXT, backend, shown

HOME = "127.0.0.1"
PUBLIC = ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822", "2002:5db8:d822::1"]


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.9.9.9",
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
        ),
        *("224.0.0.1", "239.255.255.250", "233.252.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "ff0e::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:93.184.216.34", "::7f00:1", "64:ff9b::7f00:1", "64:ff9b::c0a8:101"),
        *("2002:7f00:1::1", "2002:c0a8:101::1", "2001:0:7f00:1::1"),
    ],
)
def test_private_addresses_are_never_contacted(address):
    assert public_addresses([address, *PUBLIC]) == PUBLIC


def test_a_public_address_of_this_devices_own_network_is_of_this_network():
    own = Interface(name="eth0", index=1, up=True, addresses=(ip_interface("2606:2800:220:1::9/64"),))
    assert public_addresses(PUBLIC, [own]) == [PUBLIC[0], *PUBLIC[2:]]


@asynccontextmanager
async def site(*responses: bytes):
    """A server that answers each request with the next of ``responses``; its port and the requests so far."""
    asked, rest = list[bytes](), list(responses)

    async def serve(reader, writer):
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(rest.pop(0))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, HOME, 0) as server:
        yield server.sockets[0].getsockname()[1], asked


def response(body: bytes = b"", status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def fetcher(**how) -> PictureFetcher:
    return PictureFetcher(lambda found: [each for each in found if each == HOME], **how)


async def test_a_picture_is_the_response_body_and_its_site_learns_nothing_of_others():
    async with site(response(ONE, "200 OK", "Set-Cookie: a=b"), response(ONE)) as (port, asked):
        for _ in range(2):
            assert await fetcher().fetch(f"http://localhost:{port}/a.png?b", "a") == ONE
    lines = asked[1].decode().split("\r\n")
    assert lines[0] == "GET /a.png?b HTTP/1.1"
    assert f"Host: localhost:{port}" in lines
    assert not [line for line in lines if line.lower().startswith(("cookie", "authorization", "referer"))]


async def test_a_redirect_is_checked_like_the_first_url():
    async with site(response(ONE)) as (there, asked):
        moved = response(b"", "302 Found", f"Location: http://{HOME}:{there}/b")
        async with site(moved) as (port, _):
            assert await fetcher().fetch(f"http://{HOME}:{port}/a", "a") == ONE
        for place in (
            "http://127.0.0.2/",
            "http://[::1]/",
            "file:///etc/passwd",
            "ftp://localhost/",
            "http://a:b@localhost/",
        ):
            async with site(response(b"", "302 Found", f"Location: {place}")) as (port, _):
                with pytest.raises(RequestError, match="leads to"):
                    await fetcher().fetch(f"http://{HOME}:{port}/a", "a")
        assert len(asked) == 1


@pytest.mark.parametrize(
    ("responses", "why"),
    [
        ([response(b"", "302 Found", "Location: /a")] * 4, "redirects too often"),
        ([response(b"", "404 Not Found")], "status 404"),
        ([response(b"", "304 Not Modified")], "status 304"),
        ([b"HTTP/1.1 200 OK\r\n\r\n" + bytes(99)], "more than"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"], "cannot be fetched"),
        ([b"no HTTP"], "cannot be fetched"),
    ],
)
async def test_a_site_without_a_picture_is_one_clear_error_of_the_request(responses, why):
    async with site(*responses) as (port, _):
        with pytest.raises(RequestError, match=f"a: http://{HOME}:{port}/a .*{why}") as refused:
            await fetcher(max_bytes=98).fetch(f"http://{HOME}:{port}/a", "a")
    assert (refused.value.param, refused.value.status) == ("a", 400)


async def test_a_site_that_is_silent_is_given_up():
    with pytest.raises(RequestError, match="took longer than 0 s"):
        await fetcher(timeout_s=0).fetch(f"http://{HOME}:1/a", "a")


@pytest.mark.parametrize(
    "url", ["http://", "http:///a", "http://a b/", f"http://{'a' * 300}/", "https://[::1", "http://\0/"]
)
async def test_an_invalid_url_is_refused(url):
    with pytest.raises(RequestError, match="a: "):
        await fetcher().fetch(url, "a")


def test_an_address_of_ipv6_goes_into_a_url():
    assert str(httpx.URL("https://example.org:44/a?b").copy_with(host="2606::1")) == "https://[2606::1]:44/a?b"


def message_with_urls(*urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [TEXT, *parts]}]}


def test_a_picture_by_url_is_encoded_like_one_in_the_request():
    made = backend(fetches=True)
    made.fetcher.fetch = fetched
    assert post(made, CHAT, **message_with_urls("https://example.org/a", "http://example.org/a")).status_code == 200
    assert shown(made.calls[0].prompt) == "^[user]See <><>>"
    made.served = replace(made.served, fetches=False)
    assert post(made, CHAT, **BODIES[CHAT]).status_code == 200
    assert "--fetch-images" in post(made, CHAT, **message_with_urls("https://example.org/a")).text


def test_the_number_of_pictures_by_url_is_limited_and_file_urls_are_refused():
    made = backend(fetches=True)
    many = post(made, CHAT, **message_with_urls(*(f"https://example.org/{number}" for number in range(17))))
    assert (many.status_code, "16 images by URL" in many.text) == (400, True)
    assert "fetches no images (file: URL)" in post(made, CHAT, **message_with_urls("file:///etc/passwd")).text


async def fetched(url: str, called: str) -> bytes:
    return ONE
