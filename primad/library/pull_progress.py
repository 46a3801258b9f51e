"""The progress of a download."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PullProgress:
    """``done_bytes`` of ``total_bytes`` of ``file`` are downloaded; ``total_bytes`` is None until it is known."""

    file: str
    done_bytes: int = 0
    total_bytes: int | None = None
