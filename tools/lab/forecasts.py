"""Times that primad promises: the maximum for each on an otherwise idle machine.

Tests record the times and judge none, as any machine may be slow for a while; ``tools/faults times`` judges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Promise:
    """At most ``limit_s``, and a description."""

    limit_s: float
    what: str


PROMISES: Final[Mapping[str, Promise]] = {
    "stop": Promise(2.0, "Ctrl-C or a termination signal ends a daemon or a command"),
    "recovery": Promise(4.0, "the next token after a device left, was killed or came"),
    "recovery from silence": Promise(8.0, "the next token after a device fell silent, including 4 s of waiting for it"),
    "recovery from a disk": Promise(10.0, "the next token after a disk failed or a layer file changed"),
    "serving again": Promise(20.0, "serving again after a worker or the head was started again"),
    "error without a plan": Promise(20.0, "the error for a waiting request that no device can compute any more"),
    "noticed": Promise(1.0, "a head notices that a worker's process has ended"),
    "cut off": Promise(20.0, "a connection without proof of identity is closed"),
    "answer in a flood": Promise(5.0, "a trusted device is answered while thousands of strangers connect"),
    "health under attack": Promise(0.1, "a head answers /health while it reads the worst requests"),
    "revoked": Promise(5.0, "the ring with a revoked device is cut"),
    "examined": Promise(60.0, "primad doctor has looked at this machine"),
}


def judged(found: Sequence[tuple[str, str, float]]) -> list[str]:
    """Return a line for each promise, kept or not, from (test, promise, seconds): the slowest, and the test that saw
    it."""
    lines = []
    for name, promise in PROMISES.items():
        seen = [(seconds, test) for test, kind, seconds in found if kind == name]
        if not seen:
            lines.append(f"not seen  {name}: {promise.what}")
            continue
        seconds, test = max(seen)
        word = "kept" if seconds <= promise.limit_s else "BROKEN"
        lines.append(f"{word:9} {name}: {seconds:.2f} of {promise.limit_s:g} s at most in {len(seen)} ({test})")
    return lines
