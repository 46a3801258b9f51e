"""The fault matrix as data: every fault in every phase of a cluster's life, and what primad then promises.

The tests (``tests/homelab/test_faults.py``) perform it, and the table of ``docs/faults.md`` shows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from tools.lab.pages import between

FAULTS: Final = (
    "kill -9",
    "SIGSTOP",
    "ring process aborts",
    "link cut",
    "half-open TCP",
    "disk full",
    "layer file corrupted",
    "slow device",
)
PHASES: Final = {
    "pairing": "the device proves that it knows the code",
    "profiling": "its links are being measured",
    "transfer": "its layers are on their way to it",
    "loading": "its ring process loads the layers",
    "prefill": "of a prompt of some 1,500 tokens",
    "decode": "of a response",
    "long response": "after 800 tokens",
    "idle": "serving, without requests",
}
"""When a fault happens to a worker. Up to loading, the ring of the other devices serves meanwhile."""


class Outcome(StrEnum):
    """How a cell ends."""

    CONTINUES = "continues"
    """The device keeps its part; nothing is interrupted."""
    NEW_RING = "new ring"
    """The response continues in a ring without the device, which takes part again once it is well."""
    LATER = "joins later"
    """The others' ring responds undisturbed; the device takes part once it is well."""
    ERROR = "clear error"
    """One line says what is wrong and what to do; the others' ring responds undisturbed; the next try succeeds."""
    NONE = "-"
    """The fault cannot happen then."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault in one phase: how it ends and what that means. ``printed`` is what the head or the device reports to
    its owner: a regular expression in which ``{device}`` is the device's name, empty if there is nothing to report.
    """

    fault: str
    phase: str
    outcome: Outcome
    what: str
    printed: str = ""

    @property
    def id(self) -> str:
        """The cell's name in tests."""
        return f"{self.fault} in {self.phase}"


_Promise = tuple[Outcome, str, str]
_GONE = "^{device} is gone: "
_NO_RING = "the device runs no ring process yet"
_BACK = "the head connects again as soon as it replies"

_REPAIRED = "the digest shows it before loading; the layer is fetched again"


def _away(restarted: str, resumed: str, cable: str, packets: str) -> dict[str, _Promise]:
    """Return the outcomes for a device that disappears before it serves, and what happens when it is back."""
    return {
        "kill -9": (Outcome.LATER, restarted, _GONE),
        "SIGSTOP": (Outcome.LATER, f"{resumed}: {_BACK}", _GONE),
        "link cut": (Outcome.LATER, f"{cable}: {_BACK}", _GONE),
        "half-open TCP": (Outcome.LATER, f"{packets}: {_BACK}", _GONE),
    }


_NO_PAIRING: _Promise = (
    Outcome.ERROR,
    "one line after ten seconds; the next try pairs them",
    "^primad: error: .*no response within",
)
_PAIRING: Mapping[str, _Promise] = {
    "kill -9": (Outcome.LATER, "neither side trusts the other; the same code pairs them at the next try", ""),
    "SIGSTOP": (
        Outcome.LATER,
        "it pairs when it resumes, or reports a timeout, and the next try pairs them",
        "^(paired with|primad: error: .*(no response within|no pairing there))",
    ),
    "ring process aborts": (Outcome.NONE, _NO_RING, ""),
    "link cut": _NO_PAIRING,
    "half-open TCP": _NO_PAIRING,
    "disk full": (
        Outcome.ERROR,
        "it reports that it cannot save its keys; with disk space the next try pairs them",
        "^primad: error: ",
    ),
    "layer file corrupted": (Outcome.NONE, "a device that is not paired has no layers", ""),
    "slow device": (Outcome.CONTINUES, "they pair, slower", "^paired with "),
}
_PROFILING: Mapping[str, _Promise] = {
    **_away(
        "its links are measured after a restart",
        "its links are measured when it resumes",
        "its links are measured when the cable is back",
        "its links are measured when packets pass again",
    ),
    "ring process aborts": (Outcome.NONE, _NO_RING, ""),
    "disk full": (
        Outcome.CONTINUES,
        "nothing is written; a ring that needs disk space there is formed when there is some",
        "",
    ),
    "layer file corrupted": (Outcome.CONTINUES, _REPAIRED, ""),
    "slow device": (Outcome.CONTINUES, "it is measured, slower", ""),
}
_TRANSFER: Mapping[str, _Promise] = {
    **_away("what arrived is not sent again after a restart", *["what arrived is not sent again"] * 3),
    "ring process aborts": (Outcome.NONE, _NO_RING, ""),
    "disk full": (
        Outcome.ERROR,
        "the head names the device; nothing half-written stays, and plans leave it out",
        "^{device}: .*(cannot be written|do not fit).*make room",
    ),
    "layer file corrupted": (Outcome.CONTINUES, _REPAIRED, ""),
    "slow device": (Outcome.CONTINUES, "its layers arrive later", ""),
}
_LOADING: Mapping[str, _Promise] = {
    **_away("the attempt is abandoned; it joins after a restart", *["the attempt is abandoned"] * 3),
    "ring process aborts": (
        Outcome.LATER,
        "the attempt is abandoned, and repeated a few seconds later",
        "^{device}: the ring process was ended by SIGABRT",
    ),
    "disk full": (Outcome.CONTINUES, "everything is written before loading; it joins", ""),
    "layer file corrupted": (Outcome.CONTINUES, "found before the ring serves; the layer is fetched again", ""),
    "slow device": (Outcome.CONTINUES, "it joins later", ""),
}
_ASKED: Mapping[str, _Promise] = {
    "kill -9": (Outcome.NEW_RING, "noticed at once, as connections end", _GONE),
    "SIGSTOP": (Outcome.NEW_RING, "suspected after 1.5 s of silence, gone after 4 s", _GONE),
    "ring process aborts": (
        Outcome.NEW_RING,
        "its daemon reports it at once, and stays up",
        "^{device}: the ring process was ended by SIGABRT",
    ),
    "link cut": (Outcome.NEW_RING, "suspected after 1.5 s of silence, gone after 4 s", _GONE),
    "half-open TCP": (Outcome.NEW_RING, "suspected after 1.5 s of silence, gone after 4 s", _GONE),
    "disk full": (Outcome.CONTINUES, "the KV cache is no longer saved; it is recomputed if needed", ""),
    "layer file corrupted": (
        Outcome.CONTINUES,
        "the layer in memory is intact; the next start finds the damage by digest and fetches the layer again",
        "",
    ),
    "slow device": (Outcome.CONTINUES, "slower; its daemon still answers", ""),
}
_PROMISES: Final[Mapping[str, Mapping[str, _Promise]]] = {
    "pairing": _PAIRING,
    "profiling": _PROFILING,
    "transfer": _TRANSFER,
    "loading": _LOADING,
    "prefill": _ASKED,
    "decode": _ASKED,
    "long response": _ASKED,
    "idle": _ASKED,
}

CELLS: Final = tuple(Cell(fault, phase, *_PROMISES[phase][fault]) for phase in PHASES for fault in FAULTS)
"""All cells, phase by phase."""


_CHOSEN: Final = frozenset(
    {
        ("kill -9", "prefill"),
        ("link cut", "decode"),
        ("disk full", "transfer"),
    }
)


def is_chosen(cell: Cell) -> bool:
    """Whether every test run includes the cell; the others are for ``tools/faults``.

    Left out are those that ``tests/e2e/test_recovery.py`` covers without a lab (kill -9, SIGSTOP and a ring process
    that ends, during a response), damaged layer files, which ``tests/e2e/test_disk_faults.py`` covers, ``kill -9`` in
    transfer, where others keep what was sent as well, and half-open TCP in decode: without incoming packets it is
    indistinguishable from a cut link.
    """
    return (cell.fault, cell.phase) in _CHOSEN


# ---- the table ------------------------------------------------------------------------------------------------------

PAGE: Final = Path(__file__).parents[2] / "docs" / "faults.md"
BEGIN: Final = "<!-- written by tools/faults -->"
END: Final = "<!-- end of what tools/faults writes -->"

Seconds = Mapping[str, float]
"""For each cell id, the seconds from the fault to the next token."""


def with_table(page: str, seconds: Seconds) -> str:
    """Return ``page`` with its table replaced."""
    return between(page, BEGIN, END, f"\n\n{table(seconds)}\n")


def pages_seconds(page: str) -> dict[str, float]:
    """Return the times in the table of ``page``."""
    found = {}
    for fault in FAULTS:
        row = next((line for line in page.splitlines() if line.startswith(f"| **{fault}** |")), "")
        for phase, entry in zip(PHASES, row.split("|")[2:-1], strict=False):
            if (match := re.search(r", ([0-9.]+) s", entry)) is not None:
                found[f"{fault} in {phase}"] = float(match[1])
    return found


def table(seconds: Seconds) -> str:
    """Return the matrix in Markdown: a row per fault, a column per phase."""
    lines = [f"| | {' | '.join(PHASES)} |", f"|---|{'---|' * len(PHASES)}"]
    for fault in FAULTS:
        row = [_entry(cell, seconds) for cell in CELLS if cell.fault == fault]
        lines.append(f"| **{fault}** | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def meanings() -> str:
    """Return the meaning of each cell in Markdown; phases whose cells all mean the same are combined."""
    lines: list[str] = []
    alike: dict[tuple[str, ...], list[str]] = {}
    for phase in PHASES:
        cells = tuple(f"* {cell.fault}: {_word(cell)}{cell.what}" for cell in CELLS if cell.phase == phase)
        alike.setdefault(cells, []).append(phase)
    for cells, phases in alike.items():
        lines += ["; ".join(f"**{phase}** ({PHASES[phase]})" for phase in phases), "", *cells, ""]
    return "\n".join(lines)


def _word(cell: Cell) -> str:
    return "cannot be: " if cell.outcome is Outcome.NONE else f"{cell.outcome}; "


def _entry(cell: Cell, seconds: Seconds) -> str:
    if cell.outcome is Outcome.NONE or cell.id not in seconds:
        return str(cell.outcome)
    return f"{cell.outcome}, {seconds[cell.id]:.1f} s"
