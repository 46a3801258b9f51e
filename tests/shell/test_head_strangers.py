"""Strangers announce what they like; the head's owner is not told of it without end."""

from __future__ import annotations

from primad.head.devices import MOST_TOLD
from tests.shell.test_head_daemon import Lab, header, lab, run

__all__ = ["header", "lab"]


def test_strangers_without_end_are_not_named_without_end(lab):
    async def test(here: Lab) -> None:
        for number in range(MOST_TOLD + 3):
            here.device(f"stranger-{number}", trusted=False)
        here.device("nas")
        here.start()
        await here.serves("nas")
        assert sum("is in sight, but not paired" in line for line in here.said) == MOST_TOLD
        assert sum("more devices that are not trusted" in line for line in here.said) == 1

    run(lab, test)
