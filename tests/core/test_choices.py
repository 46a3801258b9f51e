"""Concurrent choices of one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

import pytest

from primad.api.answering.choices import together
from primad.errors import RingError


class Writing:
    """Choices of ``parts`` parts each; records which are open."""

    def __init__(self, parts: int = 3, fails: int | None = None) -> None:
        self.parts, self.fails = parts, fails
        self.open: set[int] = set()
        self.max_open = self.given = 0

    async def write(self, place: int) -> AsyncGenerator[int, None]:
        self.open.add(place)
        self.max_open = max(self.max_open, len(self.open))
        try:
            for part in range(self.parts):
                await asyncio.sleep(0)
                if place == self.fails:
                    raise RingError("broken")
                self.given += 1
                yield part
        finally:
            self.open.remove(place)

    def begins(self, count: int):
        return [partial(self.write, place) for place in range(count)]


@pytest.mark.parametrize(("count", "at_once", "maximum"), [(1, 4, 1), (3, 1, 1), (5, 2, 2), (3, 9, 3)])
async def test_each_choice_yields_all_its_parts_in_order_and_a_bounded_number_is_open(count, at_once, maximum):
    writing = Writing()
    reported = [each async for each in together(writing.begins(count), at_once)]
    for place in range(count):
        assert [part for where, part in reported if where == place] == [0, 1, 2]
    assert (writing.max_open, writing.open) == (maximum, set())


async def test_one_at_a_time_each_ends_before_the_next_begins():
    reported = [place async for place, _ in together(Writing().begins(3), 1)]
    assert reported == sorted(reported)


@pytest.mark.parametrize("fails", [0, 2])
async def test_an_error_in_one_choice_ends_all(fails):
    writing = Writing(parts=50, fails=fails)
    with pytest.raises(RingError, match="broken"):
        assert [each async for each in together(writing.begins(3), 3)]
    assert writing.open == set()


async def test_closing_the_iterator_closes_all_choices_and_none_runs_far_ahead():
    writing = Writing(parts=1000)
    choices = together(writing.begins(4), 4)
    for _ in range(5):
        await anext(choices)
    for _ in range(100):
        await asyncio.sleep(0)
    assert writing.given <= 5 + 1 + 4, "taken, given, and one that each holds"
    await choices.aclose()
    assert writing.open == set()
