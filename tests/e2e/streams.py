"""Greedy answers as a client sees them while something happens to the cluster."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.cluster import PATIENCE_S, Head

STORY = "Once upon a time, in a village by the sea,"
TOKENS = 120
MIDDLE = 40
"""What happens to a device happens after so many pieces."""


@dataclass(frozen=True)
class Reported:
    """An answer as its client saw it; ``gap_s`` is the longest time between two pieces."""

    text: str
    finish: str | None
    error: dict[str, Any] | None
    gap_s: float
    took_s: float


def ask(
    head: Head, act: Callable[[], object] | None = None, *, tokens: int = TOKENS, middle: int = MIDDLE, **fields: Any
) -> Reported:
    """Stream an answer, greedy unless ``fields`` say else; after ``middle`` pieces of it ``act``, beside the reading.

    Nothing is drafted in an answer in which something happens, so that it does not end before.
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
    text, finish, error, pieces, gap_s = "", None, None, 0, 0.0
    start = latest = time.monotonic()
    acting: threading.Thread | None = None
    with httpx.stream("POST", f"{head.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.monotonic()
            gap_s, latest, pieces = max(gap_s, now - latest), now, pieces + 1
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                error = chunk["error"]
                break
            text += chunk["choices"][0]["text"]
            finish = chunk["choices"][0]["finish_reason"] or finish
            if act is not None and pieces == middle:
                acting = threading.Thread(target=act)
                acting.start()
    if acting is not None:
        acting.join()
    return Reported(text, finish, error, gap_s, time.monotonic() - start)


def show(line: str) -> None:
    """A measured figure, for who runs the tests with ``-s`` or ``-rP``."""
    sys.stdout.write(f"{line}\n")
