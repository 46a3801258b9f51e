"""A worker dies late in a long completion: the pause is as short as early in it, and no token changes.

The pauses are recorded for ``tools/faults long``, which shows them; they are not judged here.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.e2e.cluster import primad, wait_until
from tests.e2e.kv_lab import Lab
from tests.e2e.streams import show

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(1800)]

AFTER = 60
"""Tokens after the death."""
BEHIND = 1500
"""Tokens after a planned change: a joining device is measured first."""
AGAIN = 64
KINDS: dict[str, dict[str, Any]] = {
    "f16": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "q8_0": {"serving": ("--kv-type", "q8_0")},
    "streamed": {"joining": ("--max-ram", "100MB"), "serving": ("--max-ram", "250MB")},
}


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [("f16", (100, 800, 2500, 8000)), ("seeded", (100, 800)), ("q8_0", (100, 800)), ("streamed", (100, 800))],
)
def test_the_pause_does_not_grow_with_the_length_of_the_text(smollm2, new_home, record_property, kind, lengths):
    maximum = lengths[-1] + AFTER
    with ExitStack() as stack:
        lab = Lab(
            stack,
            smollm2,
            new_home,
            tokens=maximum,
            middle=maximum,
            context=maximum + 100,
            **KINDS[kind],
        )
        pieces = lab.undisturbed
        for length in lengths:
            first, second = lab.two()
            before = lab.kv["computed_again_tokens"]
            reported = lab.ask(killing(lab, first, second), tokens=length + AFTER, middle=length)
            again = lab.kv["computed_again_tokens"] - before
            show(f"{kind}: killed at {length}: gap {reported.gap_s:.2f} s, {again} tokens again")
            record_property(f"gap_{length}", reported.gap_s)
            assert reported.error is None, lab.head.run.output
            assert pieces.startswith(reported.text)
            assert again <= AGAIN


def test_pauses_departures_and_joins_late_in_a_request_recompute_little(smollm2, new_home, record_property):
    length = 2500
    maximum = length + BEHIND
    with ExitStack() as stack:
        lab = Lab(stack, smollm2, new_home, tokens=maximum, middle=length, context=maximum + 100)
        first, second = lab.two()
        changes: dict[str, tuple[Callable[[], object], int]] = {
            "pause": (lambda: run_command(lab, "pause", first), 1),
            "resume": (lambda: run_command(lab, "resume", first), 2),
            "leave": (lambda: lab.workers.pop(second).stop(), 1),
            "join": (lambda: lab.add(1), 2),
        }
        for name, (change, workers) in changes.items():
            before = lab.kv
            reported = lab.ask(changing(lab, change, workers))
            after = lab.kv
            again = after["computed_again_tokens"] - before["computed_again_tokens"]
            show(f"{name} at {length}: gap {reported.gap_s:.2f} s, {again} tokens again")
            record_property(f"gap_{name}", reported.gap_s)
            assert (reported.text, reported.error) == (lab.undisturbed, None), lab.head.run.output
            assert after["restores"] > before["restores"], "it was over before"
            assert again <= AGAIN


def test_eight_concurrent_requests_resume_from_their_kv_blocks(smollm2, new_home, record_property):
    count, length = 8, 300
    prompts = [f"Chapter {number}. Once upon a time" for number in range(count)]
    with ExitStack() as stack:
        lab = Lab(
            stack,
            smollm2,
            new_home,
            tokens=length + AFTER,
            middle=length,
            sequences=count,
            serving=("--batching", "exact"),
        )
        first, second = lab.two()
        act = killing(lab, first, second)
        before = lab.kv["computed_again_tokens"]

        def request_number(number: int) -> Any:
            return lab.ask(act if number == 0 else None, prompt=prompts[number])

        with ThreadPoolExecutor(count) as pool:
            disturbed = list(pool.map(request_number, range(count)))
        again = lab.kv["computed_again_tokens"] - before
        gap_s = max(reported.gap_s for reported in disturbed)
        show(f"{count} answers, killed at {length}: gap {gap_s:.2f} s, {again} tokens again")
        record_property(f"gap_{length}", gap_s)
        lab.two()
        for number, reported in enumerate(disturbed):
            assert reported.text == lab.ask(prompt=prompts[number]).text, number
            assert reported.error is None
        assert again <= count * AGAIN


def run_command(lab: Lab, command: str, name: str) -> None:
    """Run a ``primad`` command with the home of a worker."""
    with primad(command, "--home", lab.homes[name]) as run:
        assert run.wait_end() == 0


def changing(lab: Lab, change: Callable[[], object], workers: int) -> Callable[[], None]:
    """Return a function that makes a ``change`` and waits until this number of workers computes."""

    def act() -> None:
        change()
        wait_until(lambda: len(lab.computing()) == workers, f"{workers} compute")

    return act


def killing(lab: Lab, name: str, other: str) -> Callable[[], None]:
    """Return a function that kills a worker once its replica is complete, while the ``other`` worker is stopped."""

    def act() -> None:
        with lab.all_copied(name, other):
            lab.kill(name)

    return act
