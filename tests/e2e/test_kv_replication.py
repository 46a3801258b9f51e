"""A device dies during a long completion: its KV cache is restored from the replica instead of being recomputed.

Recomputed tokens are counted; nothing is timed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.cluster import wait_until
from tests.e2e.kv_lab import Lab
from tests.e2e.streams import CompletionOverError, show

pytestmark = pytest.mark.slow

TOKENS, MIDDLE = 480, 240
AGAIN = 64
"""Tokens not yet in a block, tokens under way in the ring, and a block not yet replicated."""
FORMING_S = 0.5
"""Time in which the next ring is usually formed; with the time before, too short for a stopped process to count as
hanging."""


@pytest.fixture(scope="module")
def lab(quick_model: Path, module_home) -> Iterator[Lab]:
    with ExitStack() as stack:
        yield Lab(stack, quick_model, module_home, tokens=TOKENS, middle=MIDDLE)


def test_the_kv_cache_of_a_killed_worker_is_restored(lab):
    first, second = lab.two()

    def act() -> None:
        with lab.all_copied(first, second):
            lab.kill(first)

    lab.resumes_after(act, restored=MIDDLE - AGAIN, again=AGAIN)


def test_a_copy_with_a_flipped_byte_is_no_copy_from_there_on(lab):
    first, second = lab.two()
    replica = lab.replica_of(first)
    spoilt: list[Path] = []

    def act() -> None:
        with lab.all_copied(first, second):
            copies = lab.copied(replica)
            spoilt.append(copies[len(copies) // 2])
            flip(spoilt[0])
            lab.kill(first)

    lab.resumes_after(act, restored=MIDDLE // 2 - AGAIN)
    assert not spoilt[0].exists()


def test_a_device_and_its_replica_die_together(lab):
    first, second = lab.two()

    def act() -> None:
        for name in (first, second):
            lab.workers[name].kill()

    lab.resumes_after(act, still=True)


def test_a_joining_device_gets_the_kv_blocks_of_its_layers(lab):
    first, second = lab.two()
    before = lab.kv["computed_again_tokens"]
    (third,) = lab.add(1)
    reported = [lab.ask()]
    while lab.computing() != {first, second, third}:
        reported.append(lab.ask())
    show(f"gaps {[f'{each.gap_s:.2f}' for each in reported]}, {lab.kv}")
    assert {each.text for each in reported} == {lab.undisturbed}
    assert lab.kv["computed_again_tokens"] - before <= AGAIN
    lab.workers.pop(third).stop()
    wait_until(lambda: lab.computing() == {first, second}, "two are left")


def test_the_kv_cache_of_a_leaving_device_stays(lab):
    def act() -> None:
        first, second = lab.two()
        restores = lab.kv["restores"]
        with lab.all_copied(first, second):
            lab.workers[first].send_signal(signal.SIGINT)
            time.sleep(FORMING_S)
        lab.workers[first].wait_end()
        if lab.kv["restores"] == restores:
            raise CompletionOverError

    lab.resumes_after(act, restored=MIDDLE - AGAIN, again=AGAIN)


def test_kv_blocks_of_a_finished_request_are_removed(lab):
    first, second = lab.two()
    lab.ask()

    def blocks(name: str) -> set[str]:
        return {path.name for path in lab.cells(name).glob("*")}

    wait_until(
        lambda: all(len(blocks(name)) <= 1 for name in ("head", first, second)), "what is left is the prompt's block"
    )


def flip(path: Path) -> None:
    """Flip a bit in the middle of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
