"""Strangers announce what they like; the head's owner is not told of it without end."""

from __future__ import annotations

import pytest

from primad.head import devices as devices_module
from primad.head.devices import MOST_TOLD
from primad.trust.identity import new_identity
from primad.trust.trust import BY_HAND, PAIRED, trusted_now
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


@pytest.mark.parametrize("how", [None, PAIRED, BY_HAND, "introduced by desk"])
def test_a_head_opens_a_code_by_itself_only_while_it_trusts_nobody(lab, monkeypatch, how):
    async def test(here: Lab) -> None:
        monkeypatch.setattr(devices_module, "is_loopback", lambda _: False)
        if how is not None:
            here.trust.add(trusted_now("nas", new_identity().public, how))
        here.start()
        await here.serves()
        assert any(line.startswith("to add a device, run there: primad join --code") for line in here.said) == (not how)

    run(lab, test)
