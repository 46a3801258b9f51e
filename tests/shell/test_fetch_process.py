"""A source in a process of its own that is killed or stopped while it sends."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq.asyncio

from primad.errors import ClusterError
from primad.gguf.header import read_header
from primad.gguf.layers import LayerCut, cut_layer
from primad.layers.cache import LayerCache
from primad.layers.fetch import fetch_layers
from primad.layers.server import LayerServer
from primad.layers.source_link import Transfers
from primad.network.contacts import Contact
from primad.network.gate import Gate
from primad.network.layer_messages import CHUNK_BYTES
from primad.trust.identity import new_identity
from tests.fakes.gguf import array, write_gguf
from tests.fakes.layers import here
from tests.fakes.source_link import judge_silence

PATIENCE_S = 180
SERVER = """
import asyncio, sys
from pathlib import Path
import zmq.asyncio
from primad.network.gate import Gate
from primad.trust.identity import new_identity
from primad.layers.server import LayerServer
from primad.gguf.header import read_header
from primad.gguf.layers import cut_layer

async def main():
    layer = cut_layer(read_header(Path(sys.argv[1])), 0).hashed()
    context, identity = zmq.asyncio.Context(), new_identity()
    async with Gate(context, lambda key: True):
        server = LayerServer(context, "127.0.0.1", identity, {layer.ref().digest: layer}.get, bytes_per_s=8e6)
        print(identity.public, server.port, flush=True)
        await server.run()

asyncio.run(main())
"""


@pytest.fixture
def model(tmp_path) -> Path:
    return write_gguf(tmp_path / "toy.gguf", {"blk.0.w.weight": array(CHUNK_BYTES // 4096 * 6, 1024)})


@pytest.fixture
def layer(model) -> LayerCut:
    return cut_layer(read_header(model), 0).hashed()


@contextmanager
def serving(model: Path) -> Iterator[tuple[subprocess.Popen[str], Contact]]:
    """A process that serves the layer of ``model`` at two chunks a second."""
    command = [sys.executable, "-c", SERVER, str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            key, port = process.stdout.readline().split()
            yield process, here("slow", key, int(port))
        finally:
            process.kill()


async def fetch(
    model: Path, layer: LayerCut, cache: LayerCache, number: int, *, other: bool, stalling: set[str]
) -> None:
    """Fetch ``layer``; when the first bytes arrive, send signal ``number`` to the source."""
    with serving(model) as (process, source):
        context, identity, started = zmq.asyncio.Context(), new_identity(), asyncio.Event()

        def arrived(_: int) -> None:
            if not started.is_set():
                process.send_signal(number)
                stalling.add(source.key)
                started.set()

        async def join(server: LayerServer) -> None:
            await started.wait()  # it answers only after the first one was hit
            await server.run()

        sources, server = [source], LayerServer(context, "127.0.0.1", identity, {layer.ref().digest: layer}.get)
        joining = asyncio.create_task(join(server))
        if other:
            sources.append(here("other", identity.public, server.port))
        try:
            async with asyncio.timeout(PATIENCE_S), Gate(context, lambda key: True):
                transfers = Transfers(context=context, identity=new_identity())
                await fetch_layers(transfers, sources, [layer.ref()], cache, arrived)
        finally:
            joining.cancel()
            await asyncio.wait([joining])
            context.destroy(linger=0)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="the system cannot stop a process")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
async def test_a_fetch_continues_without_a_killed_or_stopped_source(model, layer, tmp_path, monkeypatch, name):
    cache = LayerCache(tmp_path / "cache")
    stalling = judge_silence(monkeypatch) if name == "SIGSTOP" else set()  # a killed source is noticed at once
    await fetch(model, layer, cache, getattr(signal, name), other=True, stalling=stalling)
    assert cache.has(layer.ref())


async def test_a_source_that_is_killed_is_noticed_at_once(model, layer, tmp_path):
    """Its connection closed; no timeout was needed."""
    cache = LayerCache(tmp_path / "cache")
    with pytest.raises(ClusterError) as caught:
        await fetch(model, layer, cache, getattr(signal, "SIGKILL", signal.SIGTERM), other=False, stalling=set())
    assert str(caught.value) == f"layer {layer.ref().digest[:12]} cannot be fetched: slow closed the connection"
    with cache.part(layer.ref()) as part:
        assert part.present_bytes >= CHUNK_BYTES, "what arrived is kept"
