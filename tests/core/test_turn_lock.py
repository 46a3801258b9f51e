"""A lock that callers hold in turn."""

from __future__ import annotations

import asyncio

from primad.system.turn_lock import TurnLock


async def step() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def holding(lock: TurnLock, caller: str, held: list[str], end: asyncio.Event) -> asyncio.Task[None]:
    async def hold() -> None:
        async with lock.held(caller[0]):
            assert lock.is_held
            held.append(caller)
            await end.wait()

    return asyncio.create_task(hold())


async def test_a_caller_with_many_requests_waits_after_each_for_those_with_few():
    lock, held, end = TurnLock(), list[str](), asyncio.Event()
    tasks = [holding(lock, each, held, end) for each in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")]
    await step()
    assert held == ["a1"]
    end.set()
    await asyncio.gather(*tasks)
    assert held == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    assert not lock.is_held


async def test_a_caller_that_leaves_passes_on_the_lock_it_just_got():
    lock, held, end = TurnLock(), list[str](), asyncio.Event()
    first, left, given, last = (holding(lock, each, held, end) for each in ("a1", "b1", "c1", "d1"))
    await step()
    left.cancel()
    await step()
    first.cancel()
    await asyncio.sleep(0)
    given.cancel()
    await step()
    assert (held, lock.is_held) == (["a1", "d1"], True)
    end.set()
    await last
    assert (left.cancelled(), given.cancelled(), lock.is_held) == (True, True, False)
