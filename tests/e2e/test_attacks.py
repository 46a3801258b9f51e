"""Attacks on a cluster that serves: strangers at every door, floods, and devices that were trusted too early.

Whatever they do, the answers of the cluster stay the same, its processes live, stay small and quiet, and nothing but a
greeting and a refusal leaves them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from primad.cluster.sockets import raise_descriptor_limit
from tests.e2e.attacks_house import House
from tests.e2e.attacks_wire import CLIENTS, RAW, Door, ask_as, burst, dribble, judge, send_raw

pytestmark = pytest.mark.slow
T = TypeVar("T")


@pytest.fixture(scope="module")
def house(smollm2: Path, module_home, tmp_path_factory) -> Iterator[House]:
    raise_descriptor_limit()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("PRIMAD_LOCAL_TRUST", str(tmp_path_factory.mktemp("family") / "local-devices"))
        yield House(stack, smollm2, module_home)


@pytest.fixture
def doors(house: House) -> list[Door]:
    """Every open TCP port, that of pairing included."""
    return house.doors(house.open_pairing().port)


def attacking(attack: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """The attack under way."""
    return asyncio.create_task(attack, name=name)


async def all_over(attacks: Sequence[tuple[Door, asyncio.Task[Any]]]) -> None:
    """Wait for all ``attacks``; none is still going on when its time is over."""
    await asyncio.wait([task for _, task in attacks])
    failed = [(door.owner, door.kind, door.port, task.get_name()) for door, task in attacks if task.exception()]
    assert not failed, f"these were not cut off, or failed: {failed}"


def test_a_stranger_gets_a_greeting_and_a_refusal_at_every_door(house: House, doors: list[Door]):
    async def attack() -> None:
        asked = [(door, attacking(ask_as(door, who), who)) for door in doors for who in CLIENTS]
        await all_over(asked)
        for door, answers in asked:
            for heard in answers.result():
                judge(door, heard)

    with house.undisturbed_by("strangers"):
        asyncio.run(attack())


def test_noise_of_every_kind_gets_nothing_at_every_door(house: House, doors: list[Door]):
    async def attack() -> None:
        sent = [(door, attacking(send_raw(door, data), name)) for door in doors for name, data in RAW.items()]
        await all_over(sent)
        for door, heard in sent:
            judge(door, heard.result())

    with house.undisturbed_by("noise"):
        asyncio.run(attack())


def test_who_says_a_byte_at_a_time_is_not_waited_for(house: House, doors: list[Door]):
    async def attack() -> None:
        slow = [(door, attacking(dribble(door), str(at))) for door in doors for at in range(20)]
        await all_over(slow)
        for door, heard in slow:
            judge(door, heard.result())

    with house.undisturbed_by("slow clients"):
        asyncio.run(attack())


def test_a_thousand_connections_a_second_at_every_door(house: House, doors: list[Door]):
    async def attack() -> None:
        for door in doors:
            for heard in await burst(door, 1000):
                judge(door, heard)

    with house.undisturbed_by("a burst"):
        asyncio.run(attack())
