"""Detects a blocked event loop: work that grows with a request belongs elsewhere, or must be done in parts."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

MAX_S = 0.05


@contextmanager
def watched_loop() -> Iterator[list[str]]:
    """Callbacks that take over ``MAX_S`` of the thread's processor time, which a busy machine does not change."""
    late: list[str] = []
    run = asyncio.Handle._run

    def timed(handle: Any) -> None:
        begin = time.thread_time()
        run(handle)
        took = time.thread_time() - begin
        if took > MAX_S:
            late.append(f"{took * 1e3:.0f} ms in {handle!r}")

    gc.collect()
    gc.freeze()  # exclude existing objects, those of the tests, from collections
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.Handle, "_run", timed)
            yield late
    finally:
        gc.unfreeze()
