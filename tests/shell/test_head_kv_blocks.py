"""A head that manages KV blocks: replicas are notified, rings resume from blocks, and unneeded ones are dropped
everywhere.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from primad.head.rings import kv_backup
from primad.head.rings.kv_backup import KvBackup
from primad.kv import keys
from primad.kv.cells import LayerCells
from primad.kv.keys import KvBlock
from primad.kv.store import KvStore
from primad.network.messages import KvForget
from primad.ring.keeping import prompt_blocks
from primad.ring.messages import Generate
from tests.core.test_tensor_plans import group
from tests.fakes.control import FakeDevice
from tests.fakes.http import PATIENCE_S
from tests.fakes.ring import GREEDY
from tests.fakes.rings import LAYERS, FakeRing
from tests.shell.test_head_daemon import Lab, Stream, header, lab

__all__ = ["header", "lab"]

PROMPT = list(range(100, 140))
"""Two chunks of 16 tokens and a remainder."""


def chain(count: int, tokens: int = 2) -> list[KvBlock]:
    """KV blocks of a request; the first is its two-token prompt."""
    blocks: list[KvBlock] = []
    for number in range(count):
        blocks.append(keys.block("root", blocks[-1] if blocks else None, [number] * tokens, [tokens * (number + 1)]))
    return blocks


def own_blocks(here: Lab, blocks: list[KvBlock]) -> KvStore:
    """Blocks as the head's ring process would have kept them."""
    store = KvStore(here.home / "cells")
    for block in blocks:
        size = 4 * (block.end - block.start)
        contents = [
            LayerCells(
                layer=layer,
                start=block.start,
                end=block.end,
                key_type=1,
                value_type=1,
                keys=b"k" * size,
                values=b"v" * size,
            )
            for layer in range(LAYERS)
        ]
        store.put(block, contents)
    return store


async def wait_left(store: KvStore, *blocks: KvBlock) -> None:
    """Wait until ``blocks`` are all that the head has: it removes its own after notifying the workers."""
    async with asyncio.timeout(PATIENCE_S):
        while [block.key for block in store.list()] != [block.key for block in blocks]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def serving_request(here: Lab, *names: str) -> tuple[list[FakeDevice], FakeRing, Stream, int]:
    """A ring of ``names`` that keeps KV blocks, and a request that it computes."""
    here.rings.keeps = True
    devices = [here.device(name) for name in names]
    here.start()
    ring = await here.serves(*names)
    stream, request = await here.stream(ring)
    return devices, ring, stream, request


async def figures(here: Lab) -> dict[str, int]:
    return (await here.backend.status())["kv"]


async def test_a_replica_is_sent_the_blocks_to_hold_and_their_source(lab):
    async with lab() as here:
        (nas, lap), ring, _, request = await serving_request(here, "nas", "lap")
        assert ring.generates[0].root
        blocks = chain(3)
        ring.keep(request, *blocks)
        await nas.wait(lambda: any(hold.blocks == blocks for hold in nas.held))
        await lap.wait(lambda: any(hold.blocks == blocks for hold in lap.held))
        reported = {copy["device"]: copy["replica"] for copy in (await figures(here))["copies"]}
        assert reported == {"nas": "lap", "lap": "nas"}
        (layers,) = [ring.plan.windows_of("lap")[0][1]]
        assert nas.held[0].layers == [(layers.first, layers.last)]
        assert [source.device for source in nas.held[0].sources] == ["lap"]


async def test_a_replica_is_notified_again_of_missing_blocks(lab):
    async with lab() as here:
        (nas, _), ring, _, request = await serving_request(here, "nas", "lap")
        first, second = chain(2)
        nas.lacks.add(second.key)
        ring.keep(request, first, second)
        await nas.wait(lambda: any(hold.blocks == [second] for hold in nas.held))
        assert (await figures(here))["lag_tokens"] == 2
        nas.lacks.clear()
        before = len(nas.held)
        await nas.wait(lambda: len(nas.held) > before)


async def test_all_devices_are_notified_of_unneeded_blocks_and_which_were_prompts(lab):
    async with lab() as here:
        (nas,), ring, stream, request = await serving_request(here, "nas")
        prompt, sampled = chain(2)
        store = own_blocks(here, [prompt, sampled])
        ring.keep(request, prompt, sampled)
        ring.draw(request, 5)
        ring.finish(request)
        await stream.ends()
        ring.forget(prompt, sampled)
        reported = [await nas.hear(KvForget), await nas.hear(KvForget)]
        assert {forget.lasting: forget.keys for forget in reported} == {True: [prompt.key], False: [sampled.key]}
        await wait_left(store)


async def test_blocks_that_only_some_devices_of_a_lost_ring_kept_are_dropped(lab):
    async with lab() as here:
        (nas, lap), ring, _, request = await serving_request(here, "nas", "lap")
        kept, unreported = blocks = chain(2)
        store = own_blocks(here, blocks)
        ring.begin_to_keep(*blocks)
        ring.keep(request, kept)
        await lap.leave()
        ring.breaks("lap", "lap is gone")
        await here.serves("nas", after=ring.epoch)
        assert (await nas.hear(KvForget)).keys == [unreported.key]
        await wait_left(store, kept)


async def test_blocks_that_a_repeated_request_keeps_again_are_not_dropped(lab):
    async with lab() as here:
        (nas,), ring, _, request = await serving_request(here, "nas")
        dropped, again = blocks = chain(2)
        store = own_blocks(here, blocks)
        ring.keep(request, *blocks)
        ring.forget(*blocks)
        ring.begin_to_keep(again)
        assert (await nas.hear(KvForget)).keys == [dropped.key]
        await wait_left(store, again)


async def test_a_new_ring_resumes_from_the_blocks_that_all_its_devices_hold(lab):
    async with lab() as here:
        (nas, lap), ring, stream, request = await serving_request(here, "nas", "lap")
        ring.draw(request, *range(10, 18))
        await stream.has(*range(10, 18))
        blocks = chain(4)
        own_blocks(here, blocks)
        nas.lacks.add(blocks[3].key)
        ring.keep(request, *blocks)
        await lap.leave()
        ring.breaks("lap", "lap is gone")
        after = await here.serves("nas", after=ring.epoch)
        await here.rings.find(lambda each: each is after and bool(each.generates))
        (generate,) = after.generates
        assert generate.blocks == blocks[:3]
        assert generate.sampled == list(range(10, 18))
        generate_of = next(hold for hold in nas.held if hold.verify)
        assert generate_of.blocks == blocks
        assert generate_of.layers == [(window.first, window.last) for _, window in after.plan.windows_of("nas")]
        assert {source.device for source in generate_of.sources} >= {"desk"}
        kv = await figures(here)
        assert (kv["restores"], kv["restored_tokens"], kv["computed_again_tokens"]) == (1, 6, 3)
        after.keep(request, blocks[3])
        after.draw(request, 18)
        after.finish(request)
        assert (await stream.ends()).reason == "stop"


async def test_a_joining_device_is_queried_while_the_old_ring_serves_and_after_it(lab):
    async with lab() as here:
        _, ring, stream, request = await serving_request(here, "nas")
        here.solver.value = lambda count: 10.0 / count
        blocks = chain(2)
        own_blocks(here, blocks)
        ring.draw(request, 10, 11, 12)
        ring.keep(request, *blocks)
        lap = here.device("lap")
        after = await here.serves("lap", "nas", after=ring.epoch)
        assert ring.drained
        assert [hold.verify for hold in lap.held[:2]] == [True, False]
        assert all(hold.blocks == blocks for hold in lap.held[:2])
        await here.rings.find(lambda each: each is after and bool(each.generates))
        assert after.generates[0].blocks == blocks
        assert (await figures(here))["computed_again_tokens"] == 0
        after.finish(request)
        await stream.ends()


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_ring_without_replication_gets_no_blocks(lab, keeps):
    async with lab() as here:
        (_, lap), ring, _, request = await serving_request(here, "nas", "lap")
        blocks = chain(2)
        own_blocks(here, blocks)
        ring.keep(request, *blocks)
        here.rings.keeps = keeps
        await lap.leave()
        ring.breaks("lap", "lap is gone")
        after = await here.serves("nas", after=ring.epoch)
        await here.rings.find(lambda each: each is after and bool(each.generates))
        assert (after.generates[0].blocks == blocks) == keeps
        assert bool(after.generates[0].root) == keeps
        assert ((await figures(here)) is None) == (not keeps)
        assert any(line.startswith("the KV cache is not saved") for line in here.printed) == (not keeps)


async def test_a_group_gets_no_kv_blocks_from_a_ring_without_its_shares():
    node = SimpleNamespace(config=SimpleNamespace(name="desk"))
    backup = KvBackup(SimpleNamespace(node=node, reporter=None), None, None, None)
    ring = SimpleNamespace(keeps=True, plan=group(("desk", 1), ("nas", 1)))
    assert await backup.bring(ring, {1: chain(2)}) == {}
    await backup.prepare(ring, {1: chain(2)})


@pytest.mark.parametrize(("max_s", "tokens"), [(0.5, True), (0.4, False)])
async def test_recomputation_beyond_the_limit_in_seconds_runs_in_chunks(lab, max_s, tokens):
    async with lab() as here:
        here.more_options = {"exact_replay_s": max_s}  # at an assumed 20 tokens/s
        (_, lap), ring, stream, request = await serving_request(here, "nas", "lap")
        ring.draw(request, *range(10))
        await stream.has(*range(10))
        await lap.leave()
        ring.breaks("lap", "lap is gone")
        after = await here.serves("nas", after=ring.epoch)
        await here.rings.find(lambda each: each is after and bool(each.generates))
        assert after.generates[0].replays_rows == tokens


# ---- prompts ---------------------------------------------------------------------------------------------------------


async def generate_of(here: Lab, ring: FakeRing, owner: str, prompt: list[int] = PROMPT) -> Generate:
    """The ``Generate`` that ``ring`` gets for a request of ``owner``, which is cancelled at once."""
    before = len(ring.generates)
    generate_of = Generate(
        request=0, prompt=prompt, sampled=[], max_tokens=9, sampling=GREEDY, logprobs=None, owner=owner
    )
    answer = here.backend.generate(generate_of)
    reading = asyncio.create_task(anext(answer))
    await here.rings.find(lambda each: each is ring and len(each.generates) > before)
    reading.cancel()
    await asyncio.wait([reading])
    await answer.aclose()
    return ring.generates[-1]


def blocks_of(here: Lab, generate: Generate) -> list[KvBlock]:
    """The blocks of its prompt that can be reused."""
    assert here.daemon is not None
    chunking = here.serving.kv._chunking
    assert chunking is not None
    return prompt_blocks(chunking, generate.prompt, generate.root)[:-1]


@pytest.mark.parametrize("shares", [False, True])
async def test_a_prompt_is_found_for_its_key_and_for_all_where_prefixes_are_shared(lab, tmp_path, shares):
    async with lab() as here:
        here.rings.keeps, here.more_options = True, {"share_prefixes": shares}
        nas = here.device("nas")
        here.start(kv_cache=str(tmp_path / "cache"))
        ring = await here.serves("nas")
        assert here.daemon is not None
        here.daemon._held.store.limit_bytes = 1 << 30
        generate = await generate_of(here, ring, "ann")
        assert generate.blocks == []
        blocks = blocks_of(here, generate)
        assert [block.end for block in blocks] == [16, 32]
        own_blocks(here, blocks)
        assert (await generate_of(here, ring, "ann")).blocks == blocks
        assert [hold.blocks for hold in nas.held if hold.verify] == [blocks]
        for_bob = await generate_of(here, ring, "bob")
        assert (for_bob.root == generate.root) == shares
        assert for_bob.blocks == []  # they have another key, or are in a sequence of the ring already
        ring.forget(*blocks)
        assert ((await generate_of(here, ring, "bob")).blocks == blocks) == shares
        assert (await figures(here))["found_tokens"] == 32 + 32 * shares


async def test_prompt_blocks_that_a_worker_lacks_are_computed(lab, tmp_path):
    async with lab() as here:
        here.rings.keeps = True
        nas = here.device("nas")
        here.start(kv_cache=str(tmp_path / "cache"))
        ring = await here.serves("nas")
        blocks = blocks_of(here, await generate_of(here, ring, ""))
        own_blocks(here, blocks)
        nas.lacks.add(blocks[1].key)
        assert (await generate_of(here, ring, "")).blocks == blocks[:1]
        assert (await nas.hear(KvForget)).keys == [blocks[1].key]


async def test_a_prompt_of_a_model_with_states_is_found_up_to_one_that_every_device_has(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(KvBackup, "_has_states", True)
    monkeypatch.setattr(kv_backup, "MIN_FIND_S", 30.0)
    async with lab() as here:
        here.rings.keeps = True
        nas = here.device("nas")
        here.start(kv_cache=str(tmp_path / "cache"))
        ring = await here.serves("nas")
        assert here.daemon is not None
        here.daemon._held.store.limit_bytes = 1 << 30
        first, second = blocks_of(here, await generate_of(here, ring, ""))
        prefix = [first, keys.state_behind(first)]
        own_blocks(here, [*prefix, second])
        assert (await generate_of(here, ring, "")).blocks == prefix
        ring.forget(*prefix)
        own_blocks(here, [keys.state_behind(second)])
        nas.lacks.add(keys.state_behind(second).key)
        assert (await generate_of(here, ring, "")).blocks == prefix


async def test_without_a_cache_no_prompt_is_looked_for(lab):
    async with lab() as here:
        here.rings.keeps = True
        nas = here.device("nas")
        here.start()
        ring = await here.serves("nas")
        own_blocks(here, blocks_of(here, await generate_of(here, ring, "")))
        assert (await generate_of(here, ring, "")).blocks == []
        assert nas.held == []
