"""KV blocks over real sockets: several sources; sources that die, stall or lie; blocks kept and forgotten meanwhile."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from primad.kv import keys
from primad.kv.cells import MAX_LAYERS
from primad.kv.keys import KvBlock
from primad.kv.store import KvStore
from primad.layers.cells import CellsFetcher, bits_of, first_run, lacking_layers
from primad.layers.server import LayerServer
from primad.layers.source_link import Transfers
from primad.network.contacts import Contact
from primad.network.layer_messages import (
    CELLS_BYTES,
    AskPresent,
    Cells,
    FetchCells,
    Present,
    TransferRequest,
)
from primad.network.messages import MAX_BLOCKS
from primad.settings.timings import LayerTimings
from primad.system.wire import encode
from primad.trust.identity import new_identity
from tests.fakes.kv_cache import cells_of
from tests.fakes.layers import here
from tests.shell.test_fetch import ME, Reply, ended, links, replying_with

PATIENCE_S = 180.0
CELL_BYTES = 64


def chain(count: int, size: int = 16) -> list[KvBlock]:
    blocks: list[KvBlock] = []
    for number in range(count):
        tokens = range(number * size, number * size + size)
        blocks.append(keys.block("root", blocks[-1] if blocks else None, tokens, [tokens.stop]))
    return blocks


def holding(path, blocks: Sequence[KvBlock], layers: Sequence[int], cell_bytes: int = CELL_BYTES) -> KvStore:
    store = KvStore(path)
    for block in blocks:
        store.put(block, cells_of(block, layers, cell_bytes))
    return store


@asynccontextmanager
async def served(context: zmq.asyncio.Context, store: KvStore | None, device: str = "nas") -> AsyncIterator[Contact]:
    identity = new_identity()
    server = LayerServer(context, "127.0.0.1", identity, lambda _: None, cells=store)
    task = asyncio.create_task(server.run())
    try:
        yield here(device, identity.public, server.port)
        assert not task.done(), "the server ended"
    finally:
        await ended(task)


def fetcher(context: zmq.asyncio.Context, store: KvStore, **timings: float) -> CellsFetcher:
    return CellsFetcher(Transfers(context=context, identity=ME, timings=LayerTimings(**timings)), store)


def whole(store: KvStore, block: KvBlock, first: int, last: int) -> bool:
    return store.read(block.key, first, last) == cells_of(block, range(first, last), CELL_BYTES)


async def test_blocks_come_from_whoever_has_which_of_their_layers(tmp_path):
    blocks = chain(70)
    one = holding(tmp_path / "one", blocks, range(0, 4))
    other = holding(tmp_path / "other", blocks[:40], range(3, 9))
    mine = holding(tmp_path / "mine", blocks[:5], [2, 3])
    async with links() as context, served(context, one, "one") as a, served(context, other, "other") as b:
        held = await fetcher(context, mine).hold(blocks, [(1, 5), (7, 8)], [a, b], PATIENCE_S, verify=False)
        assert held == [True] * 40 + [False] * 30
    assert all(whole(mine, block, 1, 5) and whole(mine, block, 7, 8) for block in blocks[:40])
    assert all(mine.layers(block.key) == {1, 2, 3} for block in blocks[40:])


async def test_a_block_that_is_larger_than_a_reply_comes_in_pieces(tmp_path):
    (block,) = chain(1, size=512)
    cell_bytes = CELLS_BYTES // 512 + 1000
    there = holding(tmp_path / "there", [block], [0, 1, 2], cell_bytes)
    mine = KvStore(tmp_path / "mine")
    async with links() as context, served(context, there) as source:
        assert await fetcher(context, mine).hold([block], [(0, 3)], [source], PATIENCE_S, verify=False) == [True]
    assert mine.read(block.key, 0, 3) == cells_of(block, [0, 1, 2], cell_bytes)


async def test_a_damaged_block_is_fetched_again_and_not_sent_to_others(tmp_path):
    blocks = chain(3)
    good, spoilt = (holding(tmp_path / name, blocks, range(3)) for name in ("good", "spoilt"))
    (file,) = (tmp_path / "spoilt" / blocks[1].key).glob("*.cells")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    mine = KvStore(tmp_path / "mine")
    async with links() as context, served(context, spoilt, "spoilt") as bad, served(context, good) as source:
        held = await fetcher(context, mine).hold(blocks, [(0, 3)], [bad], PATIENCE_S, verify=False)
        assert held == [True, False, True]
        held = await fetcher(context, spoilt).hold(blocks, [(0, 3)], [source], PATIENCE_S, verify=True)
        assert held == [True] * 3
    assert not mine.layers(blocks[1].key)
    assert whole(spoilt, blocks[1], 0, 3)


async def test_a_device_without_a_store_has_nothing(tmp_path):
    async with links() as context, served(context, None) as source:
        mine = fetcher(context, KvStore(tmp_path / "mine"))
        assert await mine.hold(chain(2), [(0, 1)], [source], PATIENCE_S, verify=False) == [False, False]


def lies(blocks: Sequence[KvBlock]) -> list[Reply]:
    part = b"".join(bytes(piece) for piece in [b"primadKV", b"\xff" * 100])
    return [
        [encode(Cells(sizes=[len(part)])), part],
        [encode(Cells(sizes=[1 << 40])), b"x"],
        [encode(Cells(sizes=[-1]))],
        [encode(Cells(sizes=[10])), b"x" * 11],
        [encode(Cells(sizes=[10]))],
        [encode(Cells(sizes=[0] * (len(blocks) + 1)))],
        [encode(Present(held=[]))],
        [b"\xc1"],
    ]


@pytest.mark.parametrize("number", range(8))
async def test_a_lying_source_is_dropped_and_the_others_deliver(tmp_path, number):
    blocks = chain(4)
    good = holding(tmp_path / "good", blocks, range(2))
    mine = KvStore(tmp_path / "mine")

    def answer(request: TransferRequest) -> Reply:
        if isinstance(request, AskPresent):
            return [encode(Present(held=[]))]
        assert isinstance(request, FetchCells)
        return lies(blocks)[number]

    async with links() as context, replying_with(context, answer) as liar, served(context, good) as source:
        from_liar = await fetcher(context, mine).hold(blocks, [(0, 2)], [liar], PATIENCE_S, verify=False)
        assert from_liar == [False] * 4
        held = await fetcher(context, mine).hold(blocks, [(0, 2)], [liar, source], PATIENCE_S, verify=False)
        assert held == [True] * 4
    assert all(whole(mine, block, 0, 2) for block in blocks)


async def test_a_source_that_claims_large_blocks_and_sends_little_is_not_asked_for_the_rest(tmp_path):
    """The reply would reserve as much memory as the source claims, while it may send a little at a time."""
    blocks, requests = chain(4), list[FetchCells]()

    def answer(request: TransferRequest) -> Reply:
        if isinstance(request, AskPresent):
            return [encode(Present(held=[]))]
        assert isinstance(request, FetchCells)
        requests.append(request)
        return [encode(Cells(sizes=[1 << 20] * len(request.keys))), bytes(1 << 18)]

    async with links() as context, replying_with(context, answer) as liar:
        mine = fetcher(context, KvStore(tmp_path / "mine"))
        assert await mine.hold(blocks, [(0, 2)], [liar], PATIENCE_S, verify=False) == [False] * 4
    assert len(requests) == 1


async def test_the_content_of_another_block_is_refused(tmp_path):
    block, other = chain(2)
    store = holding(tmp_path / "there", [other], [0])
    part = store.part(other.key, 0, 1)
    assert part is not None

    def answer(request: TransferRequest) -> Reply:
        if isinstance(request, AskPresent):
            return [encode(Present(held=[]))]
        return [encode(Cells(sizes=[len(part)])), part]

    async with links() as context, replying_with(context, answer) as liar:
        mine = fetcher(context, KvStore(tmp_path / "mine"))
        assert await mine.hold([block], [(0, 1)], [liar], PATIENCE_S, verify=False) == [False]


@pytest.mark.parametrize("first", [1, 2, 4])
async def test_layers_that_were_not_requested_are_refused(tmp_path, first):
    (block,) = chain(1)
    part = holding(tmp_path / "there", [block], range(first, first + 2)).part(block.key, 0, 9)
    mine = holding(tmp_path / "mine", [block], [1])

    def answer(request: TransferRequest) -> Reply:
        return (
            [encode(Present(held=[]))] if isinstance(request, AskPresent) else [encode(Cells(sizes=[len(part)])), part]
        )

    async with links() as context, replying_with(context, answer) as liar:
        held = await fetcher(context, mine).hold([block], [(0, 3)], [liar], PATIENCE_S, verify=False)
        assert held == [False]
    assert mine.layers(block.key) == {1}


@given(st.sets(st.integers(0, 70)))
def test_layers_as_bits_are_a_set_of_them(layers):
    bits, runs = bits_of(layers), []
    while bits:
        run = first_run(bits)
        runs.append(run)
        bits &= ~bits_of(run)
    assert [layer for run in runs for layer in run] == sorted(layers)
    assert all(a.stop < b.start for a, b in pairwise(runs))
    assert not first_run(0)


def test_the_list_of_missing_layers_of_many_blocks_takes_little_memory(tmp_path, monkeypatch):
    # pathlib interns the names of files; Python's table of interned strings may then grow by megabytes at once
    monkeypatch.setattr(KvStore, "layers", lambda *_: frozenset())
    blocks = [KvBlock(key=f"{number:032x}", before="", start=0, end=1) for number in range(MAX_BLOCKS // 8)]
    tracemalloc.start()
    lacking = lacking_layers(KvStore(tmp_path), blocks, [(0, MAX_LAYERS)] * MAX_LAYERS, verify=False)
    _, max_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(lacking) == len(blocks)
    assert max_bytes < 1 << 20


async def test_the_wait_for_a_silent_source_ends_at_the_timeout(tmp_path):
    def answer(request: TransferRequest) -> Reply:
        return [encode(Present(held=[]))] if isinstance(request, AskPresent) else None

    async with links() as context, replying_with(context, answer) as silent:
        mine = fetcher(context, KvStore(tmp_path / "mine"), silence_timeout_s=PATIENCE_S)
        assert await mine.hold(chain(1), [(0, 1)], [silent], 0.05, verify=False) == [False]
