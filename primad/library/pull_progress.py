"""How far a download is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PullProgress:
    """How far a download is: ``done_bytes`` of ``total_bytes`` of ``file``; ``total_bytes`` is None until it is known."""

    file: str
    done_bytes: int = 0
    total_bytes: int | None = None
