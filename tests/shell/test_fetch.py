"""Layers over real sockets: several sources; sources that die, stall or lie; fetches that resume."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import logging
import os
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from primad.errors import ClusterError, DiskError
from primad.gguf import layers as layers_module
from primad.gguf.header import read_header
from primad.gguf.layers import HEADER_BYTES, LayerCut, LayerRef, cut_layer
from primad.layers import fetch as transfer
from primad.layers.cache import LayerCache
from primad.layers.fetch import fetch_layers, hash_in_thread, missing_layers
from primad.layers.server import READS_AT_ONCE, REQUESTS_WAITING, LayerServer, LayerSource
from primad.layers.source_link import Transfers
from primad.network.contacts import Contact
from primad.network.layer_messages import (
    CHUNK_BYTES,
    MAX_REQUEST_BYTES,
    AskPresent,
    Chunk,
    Digests,
    FetchChunk,
    FetchDigests,
    NoChunk,
    Present,
    TransferMessage,
    TransferRequest,
    decode_transfer,
)
from primad.network.sockets import endpoint, listen, open_socket
from primad.settings.timings import LayerTimings
from primad.system.tasks import in_thread
from primad.system.wire import encode
from primad.trust.identity import Identity, new_identity
from tests.fakes.control import gated
from tests.fakes.gguf import array, toy_arrays, write_gguf
from tests.fakes.layers import here, missing, put
from tests.fakes.source_link import judge_silence

PATIENCE_S = 180
PATIENT = {"reach_timeout_s": 1000.0}
ME = new_identity()
BIG_CHUNKS = 8

Reply = Sequence[bytes] | None
Answer = Callable[[TransferRequest], Reply]


@pytest.fixture(scope="module")
def layers(tmp_path_factory) -> list[LayerCut]:
    """Two layers of one chunk and one of eight."""
    arrays = toy_arrays() | {"blk.2.big.weight": array(CHUNK_BYTES // 4096 * (BIG_CHUNKS - 1) + 1, 1024)}
    model = read_header(write_gguf(tmp_path_factory.mktemp("model") / "toy.gguf", arrays))
    return [cut_layer(model, layer).hashed() for layer in range(3)]


@pytest.fixture
def cache(tmp_path) -> LayerCache:
    return LayerCache(tmp_path / "cache")


def links(
    allows: Callable[[str], bool] = lambda key: key == ME.public,
) -> AbstractAsyncContextManager[zmq.asyncio.Context]:
    """A ZeroMQ context that trusts this test, with a limit on the test's time."""
    return gated(allows, patience_s=PATIENCE_S)


class Counting:
    """A layer that logs its reads, and before each calls ``stop`` with their number."""

    def __init__(self, layer: LayerCut, log: list[int], stop: Callable[[int], object] = lambda _: None) -> None:
        self.size_bytes = layer.size_bytes
        self.tree = layer.tree
        self._layer, self._log, self._stop = layer, log, stop

    def read(self, offset: int, size: int) -> bytes:
        self._log.append(offset // CHUNK_BYTES)
        self._stop(len(self._log))
        return self._layer.read(offset, size)


@asynccontextmanager
async def served(
    context: zmq.asyncio.Context,
    layers: Sequence[LayerCut],
    device: str = "head",
    log: list[int] | None = None,
    stop: Callable[[int], object] = lambda _: None,
) -> AsyncIterator[Contact]:
    """A server of ``layers``; ``log`` and ``stop`` are those of ``Counting``."""
    noted: list[int] = [] if log is None else log
    by_digest: dict[str, LayerSource] = {layer.ref().digest: Counting(layer, noted, stop) for layer in layers}
    async with running(context, by_digest, device) as source:
        yield source


@asynccontextmanager
async def running(
    context: zmq.asyncio.Context, by_digest: dict[str, LayerSource], device: str, **options: float | None
) -> AsyncIterator[Contact]:
    identity = new_identity()
    server = LayerServer(context, "127.0.0.1", identity, by_digest.get, **options)
    task = asyncio.create_task(server.run())
    try:
        yield here(device, identity.public, server.port)
        assert not task.done(), "the server ended"
    finally:
        await ended(task)


@asynccontextmanager
async def replying_with(context: zmq.asyncio.Context, answer: Answer, device: str = "liar") -> AsyncIterator[Contact]:
    """A source that answers each request with the frames of ``answer(request)``, or not at all."""
    identity = new_identity()
    router, port = listen(context, zmq.ROUTER, "127.0.0.1", None, identity=identity)

    async def serve() -> None:
        while True:
            peer, frame = await router.recv_multipart()
            request = decode_transfer(frame)
            assert isinstance(request, TransferRequest)
            frames = answer(request)
            if frames is not None:
                await router.send_multipart([peer, *frames])

    task = asyncio.create_task(serve())
    try:
        yield here(device, identity.public, port)
        assert not task.done(), task.exception()
    finally:
        await ended(task)
        router.close()


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def honest(layers: Sequence[LayerCut], lie: Answer = lambda _: None, *, silent: bool = False) -> Answer:
    """Answers as a server of ``layers`` does, unless ``lie`` has a reply; if ``silent``, it sends no chunk."""
    by_digest = {layer.ref().digest: layer for layer in layers}

    def answer(request: TransferRequest) -> Reply:
        if isinstance(request, AskPresent):
            return [encode(Present(held=[digest in by_digest for digest in request.digests]))]
        if (reported := lie(request)) is not None or silent:
            return reported
        layer = by_digest[request.digest]
        if isinstance(request, FetchDigests):
            return [encode(Digests(digest=request.digest, tree=layer.tree()))]
        return [encode(Chunk(digest=request.digest, offset=request.offset)), layer.read(request.offset, request.size)]

    return answer


async def fetch(
    context: zmq.asyncio.Context,
    sources: Sequence[Contact],
    layers: Sequence[LayerCut],
    cache: LayerCache,
    progress: Callable[[int], None] = lambda _: None,
    **timings: float,
) -> None:
    refs = [layer.ref() for layer in layers]
    transfers = Transfers(context=context, identity=ME, timings=LayerTimings(**timings))
    await fetch_layers(transfers, sources, refs, cache, progress)


def whole(cache: LayerCache, layers: Sequence[LayerCut]) -> None:
    """Assert that the cache has the layers, byte for byte."""
    assert missing(cache, [layer.ref() for layer in layers]) == []
    for layer in layers:
        assert cache.path(layer.ref().digest).read_bytes()[HEADER_BYTES:] == b"".join(layer.chunks())


def files(cache: LayerCache) -> list[Path]:
    return [path for path in cache.path("x").parent.rglob("*") if path.is_file()]


# ---- one source -----------------------------------------------------------------------------------------------------


async def test_fetched_layers_are_in_the_cache(layers, cache):
    reported: list[int] = []
    async with links() as context, served(context, layers) as source:
        await fetch(context, [source], layers, cache, reported.append)
    whole(cache, layers)
    assert sum(reported) == sum(layer.size_bytes for layer in layers)
    assert max(reported) <= CHUNK_BYTES


async def test_fetching_nothing_sends_no_request(layers, cache):
    async with links() as context:
        await fetch(context, [], [], cache)


async def test_a_cached_layer_is_not_sent_and_counts_as_progress(layers, cache):
    log: list[int] = []
    reported: list[int] = []
    async with links() as context, served(context, layers, log=log) as source:
        await fetch(context, [source], layers[:1], cache)
        await fetch(context, [source], layers[:2], cache, reported.append)
    assert len(log) == 2
    assert sum(reported) == sum(layer.size_bytes for layer in layers[:2])


async def test_several_devices_fetch_at_once(layers, tmp_path):
    caches = [LayerCache(tmp_path / str(number)) for number in range(3)]
    async with links() as context, served(context, layers) as source, asyncio.TaskGroup() as group:
        for cache in caches:
            group.create_task(fetch(context, [source], layers, cache))
    for cache in caches:
        whole(cache, layers)


async def test_a_server_that_waits_holds_no_chunk_that_it_sent(layers, cache):
    class Data(bytearray):
        """Bytes that support weak references."""

    sent = list[weakref.ref[Data]]()

    class Weak(Counting):
        def read(self, offset: int, size: int) -> Data:
            data = Data(super().read(offset, size))
            sent.append(weakref.ref(data))
            return data

    async with (
        links() as context,
        running(context, {each.ref().digest: Weak(each, []) for each in layers}, "h") as source,
    ):
        await fetch(context, [source], layers, cache)
        while any(each() is not None for each in sent):  # noqa: ASYNC110  (ZeroMQ's own thread releases the last ones)
            await asyncio.sleep(0)
    assert sent


async def test_two_fetches_of_one_cache_take_turns(layers, cache):
    log: list[int] = []
    async with links() as context, served(context, layers, log=log) as source, asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(fetch(context, [source], layers, cache))
    whole(cache, layers)
    assert len(log) == BIG_CHUNKS + 2


async def test_a_device_serves_what_it_fetched(layers, cache, tmp_path):
    second = LayerCache(tmp_path / "second")
    async with links() as context:
        async with served(context, layers) as source:
            await fetch(context, [source], layers, cache)
        by_digest = {layer.ref().digest: cache.reader(layer.ref().digest) for layer in layers}
        cache.place(layers[2].ref(), number=7, split=8)
        async with running(context, by_digest, "worker") as source:  # type: ignore[arg-type]
            await fetch(context, [source], layers, second)
    whole(second, layers)


async def test_the_first_address_that_replies_is_used(layers, cache):
    async with links() as context, served(context, layers) as source:
        with socket.socket() as silent:
            with contextlib.suppress(OSError):  # some systems have no other loopback addresses
                silent.bind(("127.0.0.2", source.port))
                silent.listen()
            many = here("head", source.key, source.port, "nonsense", "127.0.0.2", "127.0.0.3", "127.0.0.1")
            await fetch(context, [many], layers, cache)
    whole(cache, layers)


async def test_addresses_that_lead_to_one_device_are_one_source(layers, cache):
    log: list[int] = []
    async with links() as context, served(context, layers, log=log) as source:
        await fetch(context, [here("head", source.key, source.port, *source.addresses * 16)], layers, cache)
    whole(cache, layers)
    assert len(log) == BIG_CHUNKS + 2


# ---- several sources ------------------------------------------------------------------------------------------------


async def test_two_sources_share_the_work(layers, cache):
    """Neither sends anything before the other is asked as well."""
    logs: tuple[list[int], list[int]] = ([], [])
    requested = (threading.Event(), threading.Event())

    def meet(own: int) -> None:
        requested[own].set()
        assert requested[1 - own].wait(PATIENCE_S)

    async with (
        links() as context,
        served(context, layers, "one", logs[0], lambda _: meet(0)) as one,
        served(context, layers, "two", logs[1], lambda _: meet(1)) as two,
    ):
        await fetch(context, [one, two], layers, cache)
    whole(cache, layers)
    assert all(logs)
    assert len(logs[0]) + len(logs[1]) == BIG_CHUNKS + 2, "no chunk is sent twice"


async def test_each_source_sends_the_layers_that_only_it_has(layers, cache):
    async with (
        links() as context,
        served(context, layers[:1], "one") as one,
        served(context, layers[1:], "two") as two,
    ):
        await fetch(context, [one, two], layers, cache)
    whole(cache, layers)


async def test_a_source_that_dies_in_the_middle_is_left_out(layers, cache, caplog):
    """The other source sends nothing before."""
    hit = threading.Event()

    async def kill(dead: asyncio.Event, task: asyncio.Task[None]) -> None:
        await dead.wait()
        await ended(task)

    async with (
        links() as context,
        served(context, layers, "alive", stop=lambda _: hit.wait(PATIENCE_S)) as alive,
    ):
        dying = new_identity()
        log: list[int] = []
        dead = asyncio.Event()
        loop = asyncio.get_running_loop()

        def die(count: int) -> None:
            if count >= 2 and not hit.is_set():
                loop.call_soon_threadsafe(dead.set)
                hit.set()

        by_digest: dict[str, LayerSource] = {layer.ref().digest: Counting(layer, log, die) for layer in layers}
        server = LayerServer(context, "127.0.0.1", dying, by_digest.get)
        task = asyncio.create_task(server.run())
        killer = asyncio.create_task(kill(dead, task))
        source = here("dying", dying.public, server.port)
        await fetch(context, [source, alive], layers, cache)
        await killer
    whole(cache, layers)


async def test_a_source_that_sends_other_bytes_is_left_out_and_named(layers, cache, caplog):
    """The other source sends nothing before."""

    def lines() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "primad.layers.fetch"]

    def wait_left_out(_: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not lines() and time.monotonic() < deadline:
            time.sleep(0.001)

    def lie(request: TransferRequest) -> Reply:
        if isinstance(request, FetchChunk):
            return [encode(Chunk(digest=request.digest, offset=request.offset)), bytes(request.size)]
        return None

    with caplog.at_level(logging.WARNING, "primad.layers.fetch"):
        async with (
            links() as context,
            replying_with(context, honest(layers, lie)) as liar,
            served(context, layers, stop=wait_left_out) as source,
        ):
            await fetch(context, [liar, source], layers, cache)
    whole(cache, layers)
    (record,) = lines()
    assert record.getMessage().startswith(
        "no more layers are fetched from liar: sent bytes that are not those of layer"
    )


async def test_a_source_that_stalls_is_replaced(layers, cache, monkeypatch):
    """A source that falls silent after its first replies does not hold up the fetch."""
    stalling = judge_silence(monkeypatch)
    async with (
        links() as context,
        replying_with(context, honest(layers, silent=True)) as stalled,
        served(context, layers) as source,
    ):
        stalling.add(stalled.key)
        await fetch(context, [stalled, source], layers, cache)
    whole(cache, layers)


async def test_an_unreachable_source_does_not_matter_if_another_has_all_layers(layers, cache):
    async with links() as context, served(context, layers) as source:
        vanished = here("gone", new_identity().public, 1)
        await fetch(context, [vanished, source], layers, cache)
    whole(cache, layers)


# ---- no source is left ----------------------------------------------------------------------------------------------


async def refusal(answer: Answer, layer: LayerCut, cache: LayerCache, **timings: float) -> ClusterError:
    """The error of fetching ``layer`` from a source with these replies."""
    async with links() as context, replying_with(context, answer) as source:
        with pytest.raises(ClusterError) as caught:
            await fetch(context, [source], [layer], cache, **timings)
    assert "\n" not in str(caught.value)
    assert not cache.has(layer.ref())
    return caught.value


async def test_an_unknown_layer_is_one_clear_error(layers, cache):
    async with links() as context, served(context, layers[:1]) as source:
        with pytest.raises(ClusterError) as caught:
            await fetch(context, [source], layers[1:], cache)
    wanted = ", ".join(layer.ref().digest[:12] for layer in layers[1:])
    assert str(caught.value) == f"layer {wanted} cannot be fetched: head does not have it"


async def test_no_source_is_one_clear_error(layers, cache):
    async with links() as context:
        with pytest.raises(ClusterError, match="no device was named that has it"):
            await fetch(context, [], layers[:1], cache)


async def test_a_model_file_that_changed_is_one_clear_error(tmp_path, cache):
    model = read_header(write_gguf(tmp_path / "toy.gguf", toy_arrays()))
    layer = cut_layer(model, 0).hashed()
    async with links() as context, served(context, [layer]) as source:
        with layer.sources[0].path.open("r+b") as file:
            file.seek(layer.sources[0].offset)
            file.write(b"other")
        with pytest.raises(ClusterError, match="head sent bytes that are not those of layer"):
            await fetch(context, [source], [layer], cache)
    assert not cache.has(layer.ref())


async def test_a_model_file_that_went_away_is_one_clear_error(tmp_path, cache):
    model = read_header(write_gguf(tmp_path / "toy.gguf", toy_arrays()))
    layer = cut_layer(model, 0).hashed()
    async with links() as context, served(context, [layer]) as source:
        layer.sources[0].path.unlink()
        with pytest.raises(ClusterError, match=r"head cannot give layer .*toy\.gguf: cannot be read: No such file"):
            await fetch(context, [source], [layer], cache)


def chunk_lie(answer: Callable[[FetchChunk], Reply]) -> Answer:
    return lambda request: answer(request) if isinstance(request, FetchChunk) else None


def tree_lie(answer: Callable[[FetchDigests], Reply]) -> Answer:
    return lambda request: answer(request) if isinstance(request, FetchDigests) else None


LIES: dict[str, tuple[Answer, str]] = {
    "garbage": (chunk_lie(lambda ask: [b"\xc1garbage"]), "not a message about layers"),
    "nothing": (chunk_lie(lambda ask: [b""]), "not a message about layers"),
    "a request": (chunk_lie(lambda ask: [encode(ask)]), "FetchChunk that was not asked for"),
    "no bytes": (chunk_lie(lambda ask: [encode(Chunk(digest=ask.digest, offset=0))]), "Chunk that was not asked"),
    "empty bytes": (chunk_lie(lambda ask: [encode(Chunk(digest=ask.digest, offset=0)), b""]), "Chunk that was not"),
    "two pieces": (chunk_lie(lambda ask: [encode(Chunk(digest=ask.digest, offset=0)), b"a", b"b"]), "3 frames"),
    "another place": (
        chunk_lie(lambda ask: [encode(Chunk(digest=ask.digest, offset=CHUNK_BYTES)), b"a"]),
        "a different piece than requested",
    ),
    "a crooked place": (chunk_lie(lambda ask: [encode(Chunk(digest=ask.digest, offset=4)), b"a"]), "not asked for"),
    "a negative place": (
        chunk_lie(lambda ask: [encode(Chunk(digest=ask.digest, offset=-CHUNK_BYTES)), b"a"]),
        "a different piece than requested",
    ),
    "another layer": (chunk_lie(lambda ask: [encode(Chunk(digest="cd" * 32, offset=0)), b"a"]), "a different piece"),
    "too much": (
        chunk_lie(lambda ask: [encode(Chunk(digest=ask.digest, offset=0)), bytes(9999)]),
        "not those of layer",
    ),
    "too little": (chunk_lie(lambda ask: [encode(Chunk(digest=ask.digest, offset=0)), b"a"]), "not those of layer"),
    "a refusal": (
        chunk_lie(lambda ask: [encode(NoChunk(digest=ask.digest, offset=0, reason="go\x1b[2J\naway"))]),
        r"go\x1b[2J\naway",
    ),
    "another tree": (tree_lie(lambda ask: [encode(Digests(digest=ask.digest, tree=bytes(32)))]), "digests of chunks"),
    "no tree": (tree_lie(lambda ask: [encode(Digests(digest=ask.digest, tree=b""))]), "digests of chunks"),
    "a tree of another layer": (
        tree_lie(lambda ask: [encode(Digests(digest="cd" * 32, tree=bytes(32)))]),
        "a different piece",
    ),
    "a tree refused": (tree_lie(lambda ask: [encode(NoChunk(digest=ask.digest, offset=None, reason="no"))]), ": no"),
}


@pytest.mark.parametrize(("lie", "why"), LIES.values(), ids=LIES.keys())
async def test_a_source_that_lies_is_refused(layers, cache, lie, why):
    assert why in str(await refusal(honest(layers, lie), layers[0], cache))


@pytest.mark.parametrize(
    "held", [Present(held=[]), Present(held=[True] * 5), NoChunk(digest="", offset=None, reason="")], ids=repr
)
async def test_a_source_that_does_not_list_its_layers_is_refused(layers, cache, held: TransferMessage):
    error = await refusal(lambda request: [encode(held)], layers[0], cache)
    assert "did not say which layers it holds" in str(error)


async def test_a_silent_source_is_given_up(layers, cache):
    error = await refusal(lambda request: None, layers[0], cache, reach_timeout_s=0.1)
    assert "sent nothing for 0.1 s" in str(error)


async def test_a_source_that_falls_silent_is_given_up(layers, cache):
    error = await refusal(honest(layers, silent=True), layers[0], cache, silence_timeout_s=0.1)
    assert "liar sent nothing for 0.1 s" in str(error)


async def test_a_source_where_nobody_listens_is_given_up_at_once(layers, cache):
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        vanished = here("gone", new_identity().public, reserved.getsockname()[1])

        async def once() -> None:
            async with links() as context:
                await fetch(context, [vanished], layers[:1], cache, **PATIENT)

        with pytest.raises(ClusterError, match=r"gone tcp://127\S* nothing responds there"):
            await once()


async def test_a_source_with_another_key_is_given_up(layers, cache):
    async with links() as context, served(context, layers) as source:
        other = here("head", new_identity().public, source.port)
        with pytest.raises(ClusterError, match=r"layer .* cannot be fetched: head tcp://127"):
            await fetch(context, [other], layers[:1], cache, reach_timeout_s=1.0)
    assert files(cache) == []


async def test_a_device_that_is_not_trusted_gets_nothing(layers, cache):
    log: list[int] = []
    async with links(lambda key: False) as context, served(context, layers, log=log) as source:
        with pytest.raises(ClusterError, match=r"head tcp://127.* does not trust this device"):
            await fetch(context, [source], layers[:1], cache, **PATIENT)
    assert (log, files(cache)) == ([], [])


async def test_a_source_that_is_no_endpoint_is_one_clear_error(layers, cache):
    async with links() as context:
        with pytest.raises(ClusterError, match=r"odd .* is no endpoint"):
            await fetch(context, [here("odd", new_identity().public, 1, "tcp://127.0.0.1")], layers[:1], cache)


# ---- early ends -----------------------------------------------------------------------------------------------------


async def test_only_a_few_chunks_are_requested_at_a_time(layers, cache):
    requested: list[int] = []
    enough = asyncio.Event()

    def answer(request: TransferRequest) -> Reply:
        if not isinstance(request, FetchChunk):
            return honest(layers)(request)
        requested.append(request.offset // CHUNK_BYTES)
        if len(requested) == transfer.UNDER_WAY:
            enough.set()
        return None

    async with links() as context, replying_with(context, answer) as source:
        task = asyncio.create_task(fetch(context, [source], [layers[2]], cache))
        await enough.wait()
        assert not (await asyncio.wait([task], timeout=0.3))[0]
        await ended(task)
    assert requested == list(range(transfer.UNDER_WAY))


async def test_chunks_that_arrived_before_a_stop_are_not_sent_again(layers, cache, tmp_path):
    logs: tuple[list[int], list[int]] = ([], [])
    reported: list[int] = []
    third = asyncio.Event()

    def arrived(size: int) -> None:
        reported.append(size)
        if len(reported) == 3:
            third.set()

    async with links() as context, served(context, layers, log=logs[0]) as source:
        task = asyncio.create_task(fetch(context, [source], layers[2:], cache, arrived))
        await third.wait()
        await ended(task)
    assert not cache.has(layers[2].ref())
    with cache.part(layers[2].ref()) as part:
        lacking = part.lacking()
    assert 0 < len(lacking) <= BIG_CHUNKS - len(reported) <= BIG_CHUNKS - 3
    reported.clear()
    async with links() as context, served(context, layers, log=logs[1]) as source:
        await fetch(context, [source], layers[2:], LayerCache(tmp_path / "cache"), reported.append)
    whole(cache, layers[2:])
    assert sorted(logs[1]) == lacking
    assert sum(reported) == layers[2].size_bytes, "what was here counts as progress"


async def test_layers_that_are_complete_stay_when_another_fails(layers, cache):
    def answer(request: TransferRequest) -> Reply:
        if isinstance(request, FetchChunk) and request.digest == layers[1].ref().digest:
            return [encode(NoChunk(digest=request.digest, offset=request.offset, reason="gone"))]
        return honest(layers)(request)

    async with links() as context, replying_with(context, answer) as source:
        with pytest.raises(ClusterError, match=f"layer {layers[1].ref().digest[:12]} cannot be fetched"):
            await fetch(context, [source], layers[:2], cache)
    assert missing(cache, [layer.ref() for layer in layers[:2]]) == [layers[1].ref()]


async def test_a_disk_that_is_full_is_one_clear_error_and_leaves_nothing(layers, cache, monkeypatch, tmp_path):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def once() -> None:
        async with links() as context, served(context, layers) as source:
            await fetch(context, [source], layers, cache)

    monkeypatch.setattr("primad.layers.partial.write_at", full)
    with pytest.raises(DiskError, match=rf"{tmp_path / 'cache'}: layer .* cannot be written: No space left on device"):
        await once()
    assert files(cache) == []
    monkeypatch.undo()
    await once()
    whole(cache, layers)


@pytest.fixture
def small_disk(tmp_path):
    """A real disk of 12 MiB."""
    if getattr(os, "geteuid", int)() != 0 or not Path("/proc/mounts").exists():
        pytest.skip("mounting a small disk needs root on Linux")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "primad-test", folder], check=False)
    if mounted.returncode != 0:
        pytest.skip("this machine lets nobody mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


async def test_a_real_disk_without_room_is_refused_before_anything_is_sent(layers, small_disk):
    cache, log = LayerCache(small_disk / "layers"), list[int]()
    async with links() as context, served(context, layers, log=log) as source:
        with pytest.raises(DiskError, match="bytes of layers do not fit"):
            await fetch(context, [source], layers, cache)
    assert (log, files(cache)) == ([], [])


async def test_a_real_disk_that_fills_while_layers_arrive(layers, small_disk, monkeypatch):
    cache = LayerCache(small_disk / "layers")
    monkeypatch.setattr(cache, "make_room", lambda _: None)
    async with links() as context, served(context, layers) as source:
        with pytest.raises(DiskError, match="No space left on device"):
            await fetch(context, [source], [layers[0], layers[2]], cache)
    assert {path.stem for path in files(cache)} <= {layers[0].ref().digest}
    monkeypatch.undo()
    assert missing(cache, [layers[2].ref()]) == [layers[2].ref()]


# ---- the server -----------------------------------------------------------------------------------------------------

DIGEST = "ab" * 32
GARBAGE = {
    "nothing": [b""],
    "random bytes": [bytes(range(256))],
    "two frames": [encode(FetchChunk(digest=DIGEST, offset=0, size=1)), b""],
    "a chunk": [encode(Chunk(digest=DIGEST, offset=0))],
    "no chunk": [encode(NoChunk(digest=DIGEST, offset=0, reason=""))],
    "nested without end": [b"\x91" * 100_000],
    "too many layers": [encode(AskPresent(digests=[""] * 5000))],
}
IMPOSSIBLE = {
    "a negative offset": {"offset": -1},
    "an offset behind the end": {"offset": 1 << 62},
    "no size": {"size": 0},
    "a negative size": {"size": -1},
    "too much at once": {"size": CHUNK_BYTES + 1},
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_for_the_server_is_refused_with_a_line_and_others_are_served(layers, cache, caplog, frames):
    await _send_then_fetch(layers, cache, caplog, frames)


@pytest.mark.parametrize("ask", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
async def test_an_impossible_request_is_refused_with_a_line_and_others_are_served(layers, cache, caplog, ask):
    request = {"digest": layers[0].ref().digest, "offset": 0, "size": 1} | ask
    await _send_then_fetch(layers, cache, caplog, [encode(FetchChunk(**request))])


def _client(context: zmq.asyncio.Context, source: Contact, identity: Identity = ME) -> zmq.asyncio.Socket:
    client = open_socket(context, zmq.DEALER, identity=identity, server=source.key)
    client.connect(endpoint(source.addresses[0], source.port))
    return client


async def _send_then_fetch(layers: list[LayerCut], cache: LayerCache, caplog, frames: Sequence[bytes]) -> None:
    ref = layers[0].ref()
    with caplog.at_level(logging.WARNING, "primad.layers.server"):
        async with links() as context, served(context, layers) as source:
            odd = _client(context, source)
            await odd.send_multipart(frames)
            await odd.send(encode(FetchChunk(digest=ref.digest, offset=0, size=8)))
            assert await odd.recv_multipart() == [
                encode(Chunk(digest=ref.digest, offset=0)),
                layers[0].read(0, 8),
            ]
            await fetch(context, [source], layers[:1], cache)
            odd.close()
    assert cache.has(ref)
    (record,) = [record for record in caplog.records if record.name == "primad.layers.server"]
    assert record.getMessage().startswith("refused a message on the layer link (1 so far): ")


async def test_raw_bytes_on_the_port_of_the_server_disturb_nobody(layers, cache):
    async with links() as context, served(context, layers) as source:
        _, writer = await asyncio.open_connection("127.0.0.1", source.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 1000)
        await writer.drain()
        await fetch(context, [source], layers[:1], cache)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    assert cache.has(layers[0].ref())


async def test_a_request_that_is_too_large_is_not_received(layers, cache):
    async with links() as context, served(context, layers) as source:
        odd = _client(context, source)
        await odd.send(bytes(MAX_REQUEST_BYTES + 1))
        await odd.send(encode(AskPresent(digests=[""])))
        await odd.recv_multipart()  # over the connection after the closed one
        await fetch(context, [source], layers[:1], cache)
        odd.close()
    assert cache.has(layers[0].ref())


@pytest.mark.parametrize("digest", ["", "../secret", "/etc/passwd", "x" * 100_000])
async def test_the_server_reads_nothing_but_layers(layers, digest):
    async with links() as context, served(context, layers) as source:
        client = _client(context, source)
        for request in (FetchChunk(digest=digest, offset=0, size=6), FetchDigests(digest=digest)):
            await client.send(encode(request))
            (frame,) = await client.recv_multipart()
            assert isinstance(decode_transfer(frame), NoChunk)
        client.close()


async def test_a_greedy_device_is_bounded_and_delays_itself_only(layers, caplog):
    greedy, modest = new_identity(), new_identity()
    ref, log, may_read = layers[2].ref(), list[int](), threading.Semaphore(0)

    def lines() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "primad.layers.server"]

    with caplog.at_level(logging.WARNING, "primad.layers.server"):
        slow: dict[str, LayerSource] = {
            ref.digest: Counting(layers[2], log, lambda _: may_read.acquire(timeout=PATIENCE_S))
        }
        async with (
            links(lambda key: True) as context,
            running(context, slow, "head", complain_every_s=1000.0) as source,
        ):
            grabbing, patient_client = _client(context, source, greedy), _client(context, source, modest)
            for _ in range(20 * REQUESTS_WAITING):
                await grabbing.send(encode(FetchChunk(digest=ref.digest, offset=0, size=CHUNK_BYTES)))
            while not lines():  # queries are answered while all readers are busy
                await patient_client.send(encode(AskPresent(digests=[ref.digest])))
                assert await patient_client.recv_multipart() == [encode(Present(held=[True]))]
            await patient_client.send(encode(FetchChunk(digest=ref.digest, offset=CHUNK_BYTES, size=8)))
            await patient_client.send(encode(AskPresent(digests=[ref.digest])))
            await patient_client.recv_multipart()  # so the request before it is queued
            while len(log) < READS_AT_ONCE:  # noqa: ASYNC110  (nothing notifies)
                await asyncio.sleep(0)
            may_read.release(READS_AT_ONCE)
            while len(log) < 2 * READS_AT_ONCE:  # noqa: ASYNC110  (nothing notifies)
                await asyncio.sleep(0)
            assert 1 in log, "its turn comes after those that were being read"
            may_read.release(20 * REQUESTS_WAITING)
            _, data = await patient_client.recv_multipart()
            assert data == layers[2].read(CHUNK_BYTES, 8)
            grabbing.close()
            patient_client.close()
    assert len(lines()) == 1
    assert len(log) <= REQUESTS_WAITING + READS_AT_ONCE + 1


async def test_a_key_that_is_no_longer_trusted_gets_no_reply(layers, caplog):
    trusted = {ME.public}
    async with links() as context:
        identity, ref = new_identity(), layers[0].ref()
        find = {ref.digest: layers[0]}.get
        server = LayerServer(context, "127.0.0.1", identity, find, allows=trusted.__contains__)
        task = asyncio.create_task(server.run())
        client = _client(context, here("head", identity.public, server.port))
        request = encode(FetchChunk(digest=ref.digest, offset=0, size=8))
        await client.send(request)
        assert len(await client.recv_multipart()) == 2
        trusted.clear()
        await client.send(request)
        while "its sender is not trusted any more" not in caplog.text:
            assert not await client.poll(20)
        assert not await client.poll(200)
        client.close()
        await ended(task)


async def test_a_capped_server_and_a_capped_fetch_still_deliver(layers, cache, tmp_path):
    by_digest: dict[str, LayerSource] = {layer.ref().digest: layer for layer in layers}
    async with links() as context, running(context, by_digest, "head", bytes_per_s=200e6) as source:
        refs = [layer.ref() for layer in layers]
        transfers = Transfers(context=context, identity=ME, bytes_per_s=400e6)
        await fetch_layers(transfers, [source], refs, cache, lambda _: None)
    whole(cache, layers)


async def test_a_layer_is_requested_once(layers, cache):
    log: list[int] = []
    async with links() as context, served(context, layers, log=log) as source:
        refs: list[LayerRef] = [layers[0].ref()] * 3
        await fetch_layers(Transfers(context=context, identity=ME), [source], refs, cache, lambda _: None)
    assert log == [0]


# ---- abandoned hashing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["in the cache", "in the model"])
async def test_stopping_waits_for_the_hash_of_one_chunk_and_not_of_the_layer(layers, cache, monkeypatch, place):
    big = layers[2]
    put(cache, big)
    again = LayerCache(cache.path(big.ref().digest).parent)  # it has not scanned the folder yet
    fresh = dataclasses.replace(big, known=None)
    started, may_continue, hashed, digest = threading.Event(), threading.Event(), [], layers_module.chunk_digest

    def slowly(chunk: bytes | memoryview) -> bytes:
        started.set()
        assert may_continue.wait(PATIENCE_S)
        hashed.append(len(chunk))
        return digest(chunk)

    monkeypatch.setattr(layers_module, "chunk_digest", slowly)
    work = missing_layers(again, [big.ref()]) if place == "in the cache" else hash_in_thread(fresh.hashed, None)
    waiting = asyncio.create_task(work)
    assert await asyncio.to_thread(started.wait, PATIENCE_S)
    waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done(), "nothing is read any more once it ended"
    may_continue.set()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert len(hashed) == 1
    if place == "in the cache":
        assert again.has(big.ref()), "what was not read whole is not damaged"


async def test_an_error_that_nobody_awaits_any_more_is_not_logged():
    """The waiter is cancelled twice, as a task of a group that ends is."""
    started, may_fail, complaints = threading.Event(), threading.Event(), list[object]()

    def fails() -> None:
        started.set()
        assert may_fail.wait(PATIENCE_S)
        raise DiskError("the disk is full")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    others = asyncio.all_tasks()
    waiting = asyncio.create_task(in_thread(fails))
    assert await asyncio.to_thread(started.wait, PATIENCE_S)
    waiting.cancel()
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    may_fail.set()
    await asyncio.wait(asyncio.all_tasks() - others)
    gc.collect()
    assert complaints == []
