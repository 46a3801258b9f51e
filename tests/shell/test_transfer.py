"""Layers are shipped by content: what arrives is the layer, or nothing stays and the reason is one clear error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq
import zmq.asyncio

from primad.cluster import transfer
from primad.cluster.messages import CHUNK_BYTES, Chunk, FetchChunk, NoChunk, decode_transfer
from primad.cluster.transfer import LayerServer, fetch_layers
from primad.errors import ClusterError, PrimadError, ProtocolError
from primad.gguf.cache import LayerCache
from primad.gguf.header import read_header
from primad.gguf.layers import HEADER_BYTES, LayerCut, LayerRef, cut_layer
from primad.ring.messages import encode
from tests.fakes.gguf import toy_arrays, write_gguf

PATIENCE_S = 20
Answer = Callable[[bytes], Sequence[bytes] | None]


@pytest.fixture
def layers(tmp_path) -> list[LayerCut]:
    arrays = toy_arrays() | {"blk.2.big.weight": np.ones((CHUNK_BYTES // 4096 * 5 + 1, 1024), np.float32)}
    return [cut_layer(read_header(write_gguf(tmp_path / "toy.gguf", arrays)), layer) for layer in range(3)]


@pytest.fixture
def cache(tmp_path) -> LayerCache:
    return LayerCache(tmp_path / "cache")


@asynccontextmanager
async def links() -> AsyncIterator[zmq.asyncio.Context]:
    """A ZeroMQ context, and a limit on the test's time."""
    context = zmq.asyncio.Context()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield context
    finally:
        context.destroy(linger=0)


@asynccontextmanager
async def served(context: zmq.asyncio.Context, layers: Sequence[LayerCut]) -> AsyncIterator[str]:
    """The endpoint of a server of ``layers``."""
    by_digest = {layer.ref().digest: layer for layer in layers}
    server = LayerServer(context, "127.0.0.1", by_digest.get)
    task = asyncio.create_task(server.run())
    try:
        yield f"tcp://127.0.0.1:{server.port}"
        assert not task.done(), "the server ended"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def answering(context: zmq.asyncio.Context, answer: Answer) -> AsyncIterator[str]:
    """The endpoint of a source that answers each request with the frames of ``answer(request)``, or not at all."""
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    async def serve() -> None:
        while True:
            peer, request = await router.recv_multipart()
            frames = answer(request)
            if frames is not None:
                await router.send_multipart([peer, *frames])

    task = asyncio.create_task(serve())
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        router.close()


def fetched(layers: Sequence[LayerCut], refs: Sequence[LayerRef], cache: LayerCache) -> list[int]:
    """Fetch ``refs`` from a server of ``layers``; what ``progress`` was told."""
    told: list[int] = []

    async def once() -> None:
        async with links() as context, served(context, layers) as endpoint:
            await fetch_layers(context, endpoint, refs, cache, told.append)

    asyncio.run(once())
    return told


def refusal(answer: Answer, ref: LayerRef, cache: LayerCache) -> PrimadError:
    """The error of fetching ``ref`` from a source that answers so; nothing may stay behind."""

    async def once() -> PrimadError:
        async with links() as context, answering(context, answer) as endpoint:
            with pytest.raises(PrimadError) as caught:
                await fetch_layers(context, endpoint, [ref], cache, lambda _: None)
            return caught.value

    error = asyncio.run(once())
    assert "\n" not in str(error)
    assert not cache.holds(ref)
    assert [path for path in cache.path(ref.digest).parent.rglob("*") if path.is_file()] == []
    return error


def content(layer: LayerCut) -> bytes:
    return b"".join(layer.chunks())


def asked(request: bytes) -> FetchChunk:
    message = decode_transfer(request)
    assert isinstance(message, FetchChunk)
    return message


def test_fetched_layers_are_in_the_cache(layers, cache):
    refs = [layer.ref() for layer in layers]
    told = fetched(layers, refs, cache)
    assert cache.missing(refs) == []
    assert sum(told) == sum(ref.size_bytes for ref in refs)
    assert max(told) <= CHUNK_BYTES
    for layer, ref in zip(layers, refs, strict=True):
        assert cache.path(ref.digest).read_bytes()[HEADER_BYTES:] == content(layer)


def test_nothing_to_fetch_asks_for_nothing(layers, cache):
    assert fetched([], [], cache) == []


def test_several_devices_fetch_at_once(layers, tmp_path):
    refs = [layer.ref() for layer in layers]
    caches = [LayerCache(tmp_path / str(number)) for number in range(3)]

    async def once() -> None:
        async with links() as context, served(context, layers) as endpoint, asyncio.TaskGroup() as group:
            for cache in caches:
                group.create_task(fetch_layers(context, endpoint, refs, cache, lambda _: None))

    asyncio.run(once())
    assert [cache.missing(refs) for cache in caches] == [[], [], []]


def test_an_unknown_layer_is_one_clear_error(layers, cache):
    ref = layers[1].ref()
    with pytest.raises(ClusterError, match=f"cannot give layer {ref.digest[:12]}: this device does not have the layer"):
        fetched(layers[:1], [ref], cache)
    assert not cache.holds(ref)


def test_layers_before_an_unknown_one_stay(layers, cache):
    refs = [layer.ref() for layer in layers[:2]]
    with pytest.raises(ClusterError):
        fetched(layers[:1], refs, cache)
    assert cache.missing(refs) == refs[1:]


def test_a_model_file_that_changed_is_one_clear_error(layers, cache):
    ref = layers[0].ref()

    async def once() -> None:
        async with links() as context, served(context, layers) as endpoint:
            source = layers[0].sources[0]
            with source.path.open("r+b") as file:
                file.seek(source.offset)
                file.write(b"other")
            await fetch_layers(context, endpoint, [ref], cache, lambda _: None)

    with pytest.raises(ClusterError, match="bytes that arrived are not the layer's"):
        asyncio.run(once())
    assert not cache.holds(ref)


def test_a_model_file_that_went_away_is_one_clear_error(layers, cache):
    ref = layers[0].ref()

    async def once() -> None:
        async with links() as context, served(context, layers) as endpoint:
            layers[0].sources[0].path.unlink()
            await fetch_layers(context, endpoint, [ref], cache, lambda _: None)

    with pytest.raises(ClusterError, match=r"cannot give layer .*toy\.gguf: cannot be read: No such file"):
        asyncio.run(once())


def test_a_damaged_chunk_is_refused(layers, cache):
    wrong = bytearray(content(layers[0]))
    wrong[7] ^= 1
    error = refusal(
        lambda request: [encode(Chunk(digest=asked(request).digest, offset=0)), bytes(wrong)], layers[0].ref(), cache
    )
    assert isinstance(error, ClusterError)
    assert "are not the layer's" in str(error)


LIES: dict[str, tuple[Callable[[FetchChunk], list[bytes]], type[PrimadError], str]] = {
    "garbage": (lambda ask: [b"\xc1garbage"], ProtocolError, "not a control message"),
    "nothing": (lambda ask: [b""], ProtocolError, "not a control message"),
    "a request": (lambda ask: [encode(ask)], ProtocolError, "another chunk"),
    "no bytes": (lambda ask: [encode(Chunk(digest=ask.digest, offset=0))], ProtocolError, "another chunk"),
    "empty bytes": (lambda ask: [encode(Chunk(digest=ask.digest, offset=0)), b""], ProtocolError, "another chunk"),
    "two pieces": (
        lambda ask: [encode(Chunk(digest=ask.digest, offset=0)), b"a", b"b"],
        ProtocolError,
        "another chunk",
    ),
    "another place": (lambda ask: [encode(Chunk(digest=ask.digest, offset=4)), b"a"], ProtocolError, "another chunk"),
    "another layer": (lambda ask: [encode(Chunk(digest="cd" * 32, offset=0)), b"a"], ProtocolError, "another chunk"),
    "too much": (lambda ask: [encode(Chunk(digest=ask.digest, offset=0)), bytes(9999)], ClusterError, "more than its"),
    "a refusal": (
        lambda ask: [encode(NoChunk(digest=ask.digest, offset=0, reason="go\x1b[2J\naway"))],
        ClusterError,
        r"go\x1b[2J\naway",
    ),
}


@pytest.mark.parametrize(("lie", "kind", "why"), LIES.values(), ids=LIES.keys())
def test_a_source_that_lies_is_refused(layers, cache, lie, kind, why):
    error = refusal(lambda request: lie(asked(request)), layers[0].ref(), cache)
    assert isinstance(error, kind)
    assert why in str(error)


def test_a_source_that_answers_less_than_was_asked_is_refused(layers, cache):
    def answer(request: bytes) -> list[bytes]:
        ask = asked(request)
        return [encode(Chunk(digest=ask.digest, offset=ask.offset)), bytes(100)]

    assert "another chunk" in str(refusal(answer, layers[2].ref(), cache))


def test_a_silent_source_is_given_up(layers, cache, monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK_TIMEOUT_S", 0.05)
    error = refusal(lambda request: None, layers[0].ref(), cache)
    assert isinstance(error, ClusterError)
    assert f"sent nothing of layer {layers[0].ref().digest[:12]} for 0.05 s" in str(error)


def test_a_source_that_is_not_there_is_given_up(layers, cache, monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK_TIMEOUT_S", 0.05)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"

        async def once() -> None:
            async with links() as context:
                await fetch_layers(context, endpoint, [layers[0].ref()], cache, lambda _: None)

        with pytest.raises(ClusterError, match="sent nothing of layer"):
            asyncio.run(once())


@pytest.mark.parametrize("source", ["", "nonsense", "tcp://", "http://127.0.0.1:1", "tcp://127.0.0.1:x"])
def test_a_source_that_is_no_endpoint_is_one_clear_error(layers, cache, source):
    async def once() -> None:
        async with links() as context:
            await fetch_layers(context, source, [layers[0].ref()], cache, lambda _: None)

    with pytest.raises(ClusterError, match="layers cannot be fetched from"):
        asyncio.run(once())


def test_at_most_a_few_chunks_are_asked_for_at_a_time(layers, cache):
    asked_for: list[int] = []

    def answer(request: bytes) -> None:
        asked_for.append(asked(request).offset)

    async def once() -> None:
        async with links() as context, answering(context, answer) as endpoint:
            task = asyncio.create_task(fetch_layers(context, endpoint, [layers[2].ref()], cache, lambda _: None))
            await asyncio.wait([task], timeout=0.2)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(once())
    assert asked_for == [number * CHUNK_BYTES for number in range(transfer.REQUESTS_UNDER_WAY)]


def test_a_cancelled_fetch_leaves_nothing(layers, cache, tmp_path):
    ref = layers[2].ref()
    first = asyncio.Event()

    async def once() -> None:
        async with links() as context, served(context, layers) as endpoint:
            task = asyncio.create_task(fetch_layers(context, endpoint, [ref], cache, lambda _: first.set()))
            await first.wait()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(once())
    assert not cache.holds(ref)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


# ---- garbage for the server -----------------------------------------------------------------------------------------

DIGEST = "ab" * 32
GARBAGE = {
    "nothing": [b""],
    "random bytes": [bytes(range(256))],
    "two frames": [encode(FetchChunk(digest=DIGEST, offset=0, size=1)), b""],
    "a chunk": [encode(Chunk(digest=DIGEST, offset=0)), b"data"],
    "no chunk": [encode(NoChunk(digest=DIGEST, offset=0, reason=""))],
    "nested without end": [b"\x91" * 100_000],
}
ASKS = {
    "a negative offset": {"offset": -1},
    "an offset behind the end": {"offset": 1 << 62},
    "no size": {"size": 0},
    "a negative size": {"size": -1},
    "too much at once": {"size": CHUNK_BYTES + 1},
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_for_the_server_is_refused_with_a_line_and_others_are_served(layers, cache, caplog, frames):
    _send_then_fetch(layers, cache, caplog, frames)


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS.keys())
def test_an_impossible_request_is_refused_with_a_line_and_others_are_served(layers, cache, caplog, ask):
    request = {"digest": layers[0].ref().digest, "offset": 0, "size": 1} | ask
    _send_then_fetch(layers, cache, caplog, [encode(FetchChunk(**request))])


def _send_then_fetch(layers: list[LayerCut], cache: LayerCache, caplog, frames: Sequence[bytes]) -> None:
    ref = layers[0].ref()

    async def once() -> None:
        async with links() as context, served(context, layers) as endpoint:
            stranger = context.socket(zmq.DEALER)
            stranger.connect(endpoint)
            await stranger.send_multipart(frames)
            known = FetchChunk(digest=ref.digest, offset=0, size=8)
            await stranger.send(encode(known))
            reply = await stranger.recv_multipart()
            assert reply == [encode(Chunk(digest=ref.digest, offset=0)), content(layers[0])[:8]]
            await fetch_layers(context, endpoint, [ref], cache, lambda _: None)
            stranger.close()

    with caplog.at_level(logging.WARNING, "primad.cluster.transfer"):
        asyncio.run(once())
    assert cache.holds(ref)
    (record,) = caplog.records
    assert record.getMessage().startswith("refused a message on the layer link: ")


def test_raw_bytes_on_the_port_of_the_server_disturb_nobody(layers, cache):
    async def once() -> None:
        async with links() as context, served(context, layers) as endpoint:
            _, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))
            writer.write(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 1000)
            await writer.drain()
            await fetch_layers(context, endpoint, [layers[0].ref()], cache, lambda _: None)
            writer.close()

    asyncio.run(once())
    assert cache.holds(layers[0].ref())


def test_the_server_reads_nothing_but_layers(layers, cache, tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    for digest in ("", "../secret", str(tmp_path / "secret"), "x" * 100_000):
        ref = LayerRef(digest, 6, layers[0].ref().tensors)

        async def once(ref: LayerRef = ref) -> list[bytes]:
            async with links() as context, served(context, layers) as endpoint:
                stranger = context.socket(zmq.DEALER)
                stranger.connect(endpoint)
                await stranger.send(encode(FetchChunk(digest=ref.digest, offset=0, size=6)))
                reply = await stranger.recv_multipart()
                stranger.close()
                return reply

        (frame,) = asyncio.run(once())
        assert isinstance(decode_transfer(frame), NoChunk)
