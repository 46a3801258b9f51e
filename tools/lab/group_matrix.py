"""The fault matrix of tensor-parallel groups as data: what happens to a request when a device of a group fails.

The tests (``tests/homelab/test_group_faults.py``) perform it, and a table of ``docs/faults.md`` shows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tools.lab.matrix import Seconds
from tools.lab.pages import between

WINDOWS: Final = {"group of all": "12x3", "first of a group": "4,8x2", "other of a group": "4,8x2"}
"""Manual plans in which the failing device is a rank of a group of all layers, or the first or the other rank of a
group that is a place of a ring. One further worker takes over with the same share, so no token changes."""
PHASES: Final = ("prefill", "decode")
FAULTS: Final = (
    "kill -9",
    "SIGSTOP",
    "ring process aborts",
    "ring process stops",
    "power lost",
    "link cut",
    "half-open TCP",
    "cut off from the head",
    "cut off from the other rank",
    "paused by its owner",
    "disk full",
)
CONTINUES: Final = frozenset({"disk full"})
"""Faults that interrupt nothing; after the others a ring without the device takes over."""
_NAMED: Final = "^{device} (is gone|leaves)|^{device}: |{device} of this group "
_PRINTED: Final = {
    "paused by its owner": "^{device} leaves .*paused",
    "cut off from the other rank": " of this group ",
    "disk full": "",
}


@dataclass(frozen=True, slots=True)
class GroupCell:
    """One fault of a device in one ``place`` and phase; ``printed`` as in ``matrix.Cell``."""

    place: str
    phase: str
    fault: str

    @property
    def id(self) -> str:
        """The cell's name in tests."""
        return f"{self.fault} in {self.phase} of {self.place}"

    @property
    def printed(self) -> str:
        """What the head prints about it: a regular expression in which ``{device}`` is the device's name."""
        return _PRINTED.get(self.fault, _NAMED)


CELLS: Final = tuple(GroupCell(place, phase, fault) for place in WINDOWS for phase in PHASES for fault in FAULTS)
"""All cells, those of one plan together."""
_CHOSEN: Final = frozenset(
    {
        ("first of a group", "decode", "cut off from the other rank"),
        ("first of a group", "prefill", "link cut"),
    }
)


def is_chosen(cell: GroupCell) -> bool:
    """Whether every test run includes the cell; the others are for ``tools/faults``."""
    return (cell.place, cell.phase, cell.fault) in _CHOSEN


BEGIN: Final = "<!-- groups: written by tools/faults -->"
END: Final = "<!-- end of groups -->"


def with_table(page: str, seconds: Seconds, measured: str | None = None) -> str:
    """Return ``page`` with its table of groups updated, as last ``measured`` (day and commit), or as before."""
    return between(page, BEGIN, END, f"\n\n{table(seconds, measured or pages_measured(page))}\n")


def pages_measured(page: str) -> str:
    """Return when the times in the table of ``page`` were measured."""
    found = re.search(r"place by place \((.*)\):", page)
    return "" if found is None else found[1]


def table(seconds: Seconds, measured: str) -> str:
    """Return the seconds to the next token in Markdown: a row per fault, a column per phase, with the places in order.
    Faults that were not measured are left out."""
    lines = list[str]()
    for fault in FAULTS:
        cells = [_cells(fault, phase) for phase in PHASES]
        if any(cell.id in seconds for each in cells for cell in each):
            entries = (", ".join(_entry(cell, seconds) for cell in each) for each in cells)
            lines.append(f"| **{fault}** | {' | '.join(entries)} |")
    if lines:
        title = f"Seconds to the next token, place by place ({measured}):"
        lines[:0] = [title, "", f"| | {' | '.join(PHASES)} |", f"|---|{'---|' * len(PHASES)}"]
    return "".join(f"{line}\n" for line in lines)


def _cells(fault: str, phase: str) -> list[GroupCell]:
    return [GroupCell(place, phase, fault) for place in WINDOWS]


def _entry(cell: GroupCell, seconds: Seconds) -> str:
    return f"{seconds[cell.id]:.1f}" if cell.id in seconds else "-"


def pages_seconds(page: str) -> dict[str, float]:
    """Return the times in the table of ``page``."""
    found, own = dict[str, float](), page.partition(BEGIN)[2].partition(END)[0]
    for fault in FAULTS:
        row = next((line for line in own.splitlines() if line.startswith(f"| **{fault}** |")), "")
        for phase, entries in zip(PHASES, row.split("|")[2:-1], strict=False):
            pairs = zip(_cells(fault, phase), entries.split(","), strict=False)
            found |= {cell.id: float(entry) for cell, entry in pairs if entry.strip() != "-"}
    return found
