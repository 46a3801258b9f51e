"""A device dies in the middle of a long answer: what it had computed is taken from the copy, and is not computed again.

How much was computed again is counted, never timed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Head, Primad, all_joined, heading, wait_until
from tests.e2e.streams import Told, ask, show

pytestmark = pytest.mark.slow

TOKENS, MIDDLE = 900, 300
AGAIN = 64
"""Rows that are in no block yet, those on their way round the ring, and a block that the keeper was not told of."""


class Lab:
    """A head and two workers, all on one machine; who dies is replaced before the next test."""

    def __init__(self, stack: ExitStack, model: Path, make_home: Callable[[str], Path]) -> None:
        self._stack, self._make_home = stack, make_home
        self._cluster = f"kept-{secrets.token_hex(6)}"
        self._count = 0
        self.workers: dict[str, Primad] = {}
        self.homes: dict[str, Path] = {}
        self.add(2)
        arguments = ("--wait", 2, "--use-all", "--context", 1024, "--sequences", 1)
        self.homes["head"] = make_home("head")
        self.head: Head = stack.enter_context(heading(model, self.homes["head"], self._cluster, *arguments, config=""))
        self.head.wait_serving()
        self.undisturbed = self.ask().text

    def add(self, count: int) -> list[str]:
        """Start more workers, all together; their names."""
        names = [f"w{self._count + 1 + each}" for each in range(count)]
        self._count += count
        self.homes |= {name: self._make_home(name) for name in names}
        runs = self._stack.enter_context(all_joined([self.homes[name] for name in names], self._cluster))
        self.workers |= dict(zip(names, runs, strict=True))
        return names

    def ask(self, act: Callable[[], object] | None = None) -> Told:
        return ask(self.head, act, tokens=TOKENS, middle=MIDDLE)

    @property
    def kv(self) -> dict[str, Any]:
        """What the head says of KV cells."""
        return dict(self.head.status()["kv"])

    def keeper_of(self, device: str) -> str:
        return next(copy["keeper"] for copy in self.kv["copies"] if copy["device"] == device)

    def two(self) -> tuple[str, str]:
        """The names of two workers that compute, and nobody else."""
        for name in [name for name, run in self.workers.items() if run.process.poll() is not None]:
            del self.workers[name]
        self.add(2 - len(self.workers))
        wait_until(lambda: self.computing() == set(self.workers), f"{list(self.workers)} compute")
        first, second = self.workers
        return first, second

    def computing(self) -> set[str]:
        return {device["name"] for device in self.head.status().get("devices", ()) if device["role"] == "worker"}

    def goes_on(self, act: Callable[[], object], most_again: int) -> None:
        """``act`` in the middle of an answer, of which at most so many tokens may be computed again."""
        before = self.kv
        told = self.ask(act)
        after = self.kv
        again = after["computed_again_tokens"] - before["computed_again_tokens"]
        show(f"gap {told.gap_s:.2f} s, {again} tokens again, {after}")
        assert (told.text, told.finish, told.error) == (self.undisturbed, "length", None), self.head.run.output
        assert after["restores"] > before["restores"]
        assert again <= most_again
        assert after["restored_tokens"] - before["restored_tokens"] + again >= MIDDLE - 1
        assert "Traceback" not in self.head.run.output

    def cells(self, name: str) -> list[Path]:
        """The files of KV cells on a device."""
        return sorted((self.homes[name] / "run" / "cells").glob("*/*.cells"))


@pytest.fixture(scope="module")
def lab(smollm2: Path, module_home) -> Iterator[Lab]:
    with ExitStack() as stack:
        yield Lab(stack, smollm2, module_home)


def test_a_worker_that_is_killed_has_left_its_cells(lab):
    first, _ = lab.two()

    def act() -> None:
        wait_until(lambda: not lab.kv["lag_tokens"], "the keeper has all blocks")
        lab.workers[first].kill()

    lab.goes_on(act, AGAIN)


def test_a_copy_with_a_flipped_byte_is_no_copy_from_there_on(lab):
    first, _ = lab.two()
    keeper = lab.keeper_of(first)
    spoilt: list[Path] = []

    def act() -> None:
        ((begin, last),) = next(each["windows"] for each in lab.head.status()["devices"] if each["name"] == first)
        copies = [path for path in lab.cells(keeper) if path.name == f"{begin}-{last}.cells"]
        spoilt.append(sorted(copies, key=lambda path: path.stat().st_mtime)[len(copies) // 2])
        flip(spoilt[0])
        lab.workers[first].kill()

    lab.goes_on(act, MIDDLE)
    assert not spoilt[0].exists()


def test_a_device_and_its_keeper_die_together(lab):
    first, second = lab.two()

    def act() -> None:
        for name in (first, second):
            lab.workers[name].kill()

    lab.goes_on(act, TOKENS)


def test_a_device_joins_and_takes_the_cells_of_its_layers(lab):
    first, second = lab.two()
    before = lab.kv["computed_again_tokens"]
    (third,) = lab.add(1)
    told = [lab.ask()]
    while lab.computing() != {first, second, third}:
        told.append(lab.ask())
    show(f"gaps {[f'{each.gap_s:.2f}' for each in told]}, {lab.kv}")
    assert {each.text for each in told} == {lab.undisturbed}
    assert lab.kv["computed_again_tokens"] - before <= AGAIN
    lab.workers.pop(third).stop()
    wait_until(lambda: lab.computing() == {first, second}, "two are left")


def test_a_device_leaves_and_its_cells_stay(lab):
    first, _ = lab.two()
    lab.goes_on(lab.workers[first].stop, AGAIN)


def test_nothing_is_kept_of_an_answer_that_is_over(lab):
    first, second = lab.two()
    lab.ask()

    def blocks(name: str) -> set[str]:
        return {path.name for path in (lab.homes[name] / "run" / "cells").glob("*")}

    wait_until(
        lambda: all(len(blocks(name)) <= 1 for name in ("head", first, second)), "what is left is the prompt's block"
    )


def flip(path: Path) -> None:
    """Another bit in the middle of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
