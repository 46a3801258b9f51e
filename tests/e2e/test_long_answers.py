"""A worker dies late in a long answer: the pause is as short as early in it, and the text that of an undisturbed run.

The pauses are noted for ``tools/faults long``, which says how long they were; nothing here judges them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.e2e.cluster import wait_until
from tests.e2e.kept import Lab
from tests.e2e.streams import show

pytestmark = [pytest.mark.slow, pytest.mark.matrix]

AFTER = 60
"""Tokens behind the death."""
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
def test_the_pause_does_not_grow_with_the_answer(smollm2, new_home, record_property, kind, lengths):
    most = lengths[-1] + AFTER
    with ExitStack() as stack:
        lab = Lab(
            stack,
            smollm2,
            new_home,
            tokens=most,
            middle=most,
            context=most + 256,
            **KINDS[kind],
        )
        pieces = lab.undisturbed
        for length in lengths:
            first, _ = lab.two()
            before = lab.kv["computed_again_tokens"]
            told = lab.ask(killing(lab, first), tokens=length + AFTER, middle=length)
            again = lab.kv["computed_again_tokens"] - before
            show(f"{kind}: killed at {length}: gap {told.gap_s:.2f} s, {again} tokens again")
            record_property(f"gap_{length}", told.gap_s)
            assert told.error is None, lab.head.run.output
            assert pieces.startswith(told.text)
            assert again <= AGAIN


def test_eight_answers_at_once_go_on_from_their_cells(smollm2, new_home, record_property):
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
        first, _ = lab.two()
        before = lab.kv["computed_again_tokens"]

        def one(number: int) -> Any:
            act = killing(lab, first) if number == 0 else None
            return lab.ask(act, prompt=prompts[number])

        with ThreadPoolExecutor(count) as pool:
            disturbed = list(pool.map(one, range(count)))
        again = lab.kv["computed_again_tokens"] - before
        gap_s = max(told.gap_s for told in disturbed)
        show(f"{count} answers, killed at {length}: gap {gap_s:.2f} s, {again} tokens again")
        record_property(f"gap_{length}", gap_s)
        lab.two()
        for number, told in enumerate(disturbed):
            assert told.text == lab.ask(prompt=prompts[number]).text, number
            assert told.error is None
        assert again <= count * AGAIN


def killing(lab: Lab, name: str) -> Callable[[], None]:
    """What kills a worker as soon as its keeper has all that it was told of."""

    def act() -> None:
        wait_until(lambda: not lab.kv["lag_tokens"], "the keeper has all blocks")
        lab.workers[name].kill()

    return act
