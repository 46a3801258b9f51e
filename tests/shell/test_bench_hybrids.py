"""What ``tools/bench hybrids`` judges."""

from __future__ import annotations

import pytest

from tools.lab.hybrid_rows import AGAIN, RANDOM, RIGHT, SECOND, HybridRow


def row(case: str, devices: int, what: str, *, is_same: bool = True) -> HybridRow:
    found = {"beside": [10.0, 20.0], "found": [5.0, 30.0], "is_same": is_same, "note": ""}
    return HybridRow(model="m", case=case, devices=devices, what=what, **found)


@pytest.mark.parametrize(
    ("case", "devices", "what", "wanted"),
    [
        *(("turn", devices, what, (None, 0.2)) for devices in (1, 2) for what in (SECOND, AGAIN)),
        ("pause", 3, "s of pause", (None, 1.5)),
        ("mtp", 1, RIGHT, (1.3, None)),
        ("mtp", 2, RIGHT, (1.6, None)),
        ("mtp", 2, RANDOM, (0.97, None)),
        ("four", 2, "tokens/s of four requests", (None, None)),
    ],
)
def test_each_case_is_judged_by_the_ratios_of_its_runs(case, devices, what, wanted):
    (figure,) = HybridRow.figures([row(case, devices, what)])
    assert (figure.what, figure.values) == (f"m, {case}, {devices} devices: {what}", (0.5, 1.5))
    assert (figure.at_least, figure.at_most) == wanted


def test_drafts_that_change_a_text_fail_the_command():
    assert not row("mtp", 2, RIGHT).failures()
    assert row("mtp", 2, RIGHT, is_same=False).failures() == [f"mtp, 2 devices, {RIGHT}: the text DIFFERS"]
