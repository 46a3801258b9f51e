"""Greedy completions as a client sees them, while something happens to the cluster."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import psutil

from tests.e2e.cluster import PATIENCE_S, Head, ring_process, stopped

Outcome = TypeVar("Outcome")
STORY = "Once upon a time, in a village by the sea,"
TOKENS = 120
MIDDLE = 40
"""Number of chunks after which something happens to a device."""
STILL_S = 1.0
"""If the ring stands still for longer before ``act`` begins, which a paused machine may cause, the daemon might end it
meanwhile."""
LOOKS = 3
"""Number of checks whether the completion is open, while the ring is stopped: earlier tokens may still arrive."""


class CompletionOverError(Exception):
    """The completion ended before anything happened to a device."""


@dataclass(frozen=True)
class Reported:
    """A completion as its client saw it; ``gap_s`` is the longest time between two chunks."""

    text: str
    finish: str | None
    error: dict[str, Any] | None
    gap_s: float
    took_s: float


def ask(
    head: Head,
    act: Callable[[], object] | None = None,
    *,
    still: bool = False,
    tokens: int = TOKENS,
    middle: int = MIDDLE,
    **fields: Any,
) -> Reported:
    """Stream a completion, greedy unless ``fields`` say otherwise; call ``act`` in a thread after ``middle`` chunks.

    If the completion has ended by then, since the client may be late, ``act`` is not called and the request is
    repeated; likewise if ``act`` raises ``CompletionOverError``. With ``still`` the head's ring process is stopped until
    ``act`` returns, which must not take long: the daemon checks every second whether it hangs; if the time before is
    long, the request is repeated too. With ``act`` there is no speculation, so that the completion lasts.
    """
    body = {
        "prompt": STORY,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "logit_bias": {"0": -100, "2": -100},
        **({} if act is None else {"speculate": False}),
        **fields,
    }
    if act is None:
        return _read(head, body)
    with ThreadPoolExecutor(1) as pool:
        while True:
            acting = _Acting(head, act, pool, still=still)
            reported = _read(head, body, acting, middle)
            if acting.outcome.result():
                return reported


class _Acting:
    """Calls ``act`` while a completion is computed; with ``still`` the ring is stopped until ``done_s``.

    ``outcome`` is whether the completion was still open.
    """

    def __init__(self, head: Head, act: Callable[[], object], pool: ThreadPoolExecutor, *, still: bool) -> None:
        self._head, self._act, self._pool, self._still = head, act, pool, still
        self._ring = ring_process(head.run)
        self.done_s = 0.0

    def begin(self) -> None:
        self.outcome = self._pool.submit(self._happen)

    def _happen(self) -> bool:
        try:
            if self._still:
                with in_the_middle(self._head, self._ring):
                    self._act()
                    self.done_s = time.monotonic()
                return True
            with stopped(self._ring) as stands:
                if not stands or not is_open(self._head):
                    return False
            self._act()
        except CompletionOverError:
            return False
        return True


@contextmanager
def in_the_middle(head: Head, ring: psutil.Process) -> Iterator[None]:
    """``ring``, the ring process of ``head``, stands still in the block, while a completion is open. Raises
    ``CompletionOverError`` if none is, or if the ring has stood still for too long already."""
    began = time.monotonic()
    with stopped(ring) as stands:
        if not stands or not is_open(head) or time.monotonic() - began > STILL_S:
            raise CompletionOverError
        yield


def repeated(request: Callable[[], Outcome]) -> Outcome:
    """Return the result of ``request``, which is repeated while its completion is over too early."""
    while True:
        with suppress(CompletionOverError):
            return request()


def is_open(head: Head) -> bool:
    """Whether a completion will go on when the ring, of which a process is stopped, continues."""
    return all(head.answers() for _ in range(LOOKS))


def _read(head: Head, body: dict[str, Any], acting: _Acting | None = None, middle: int = 0) -> Reported:
    """Read a completion; ``acting`` begins after ``middle`` chunks. Time with a stopped ring is not a gap."""
    text, finish, error, pieces, gap_s = "", None, None, 0, 0.0
    start = latest = time.monotonic()
    with httpx.stream("POST", f"{head.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.monotonic()
            since = latest if acting is None else max(latest, acting.done_s)
            gap_s, latest, pieces = max(gap_s, now - since), now, pieces + 1
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                error = chunk["error"]
                break
            text += chunk["choices"][0]["text"]
            finish = chunk["choices"][0]["finish_reason"] or finish
            if acting is not None and pieces == middle:
                acting.begin()
    assert acting is None or pieces >= middle, f"{pieces} pieces have no number {middle}: {text!r}, {error}"
    return Reported(text, finish, error, gap_s, time.monotonic() - start)


def show(line: str) -> None:
    """Print a measured figure, shown with ``-s`` or ``-rP``."""
    sys.stdout.write(f"{line}\n")
