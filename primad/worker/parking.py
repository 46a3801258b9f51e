"""Keeps the ring process of the last ended ring loaded for a while, for the next request for its windows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from primad.daemon.loaded_process import LoadedProcess, LoadKey
from primad.gguf.layers import LayerRef
from primad.network.messages import Load
from primad.ring.messages import Reopen
from primad.settings.config import Config
from primad.system.tasks import Tasks

REOPEN_S: Final = 5.0
"""A process with its windows loaded reopens in milliseconds; one that takes this long hangs."""


class Parking:
    """Holds one process for ``config.keep_loaded_s``; others are ended."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._kept: LoadedProcess | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._ending = Tasks()

    async def reopen(self, load: Load, content: LoadKey) -> LoadedProcess | None:
        """Return the parked process, serving ``load``; None if it has not loaded ``content`` or does not respond."""
        if self._kept is None or self._kept.ended or self._kept.content != content:
            return None
        process = self._take()
        assert process is not None
        answers = False
        try:
            answers = await self._reopens(process, load)
        finally:
            if not answers:  # also when cancelled: nothing else would end the process
                self.end(process)
        return process if answers else None

    async def _reopens(self, process: LoadedProcess, load: Load) -> bool:
        process.forget_events()
        reopen = Reopen(
            ring=load.ring,
            epoch=load.epoch,
            windows=[plan.spec.window for plan in load.windows],
            route=load.route,
            host=self._config.host,
            step_timeout_s=load.step_timeout_s,
            assignments=[plan.assignment for plan in load.windows],
            read_ahead_bytes=load.read_ahead_bytes,
        )
        await process.send(reopen)
        return await process.answers(REOPEN_S)

    def put(self, process: LoadedProcess) -> None:
        """Park ``process``, and end the previous one; if the owner wants none kept, end it."""
        if process.ended or self._config.keep_loaded_s <= 0:
            self.end(process)
            return
        previous = self._take()
        self._kept = process
        self._expiry = asyncio.get_running_loop().call_later(self._config.keep_loaded_s, self._expire)
        if previous is not None:
            self.end(previous)

    def end(self, process: LoadedProcess) -> asyncio.Task[None]:
        """End ``process``, whether or not the caller waits for it."""
        return self._ending.start(process.close())

    async def unload(self) -> None:
        """End the parked process, and wait for its end."""
        process = self._take()
        if process is not None:
            await asyncio.wait([self.end(process)])  # it ends even if the caller is cancelled

    async def unload_if_it_has(self, refs: Iterable[LayerRef]) -> None:
        """End the parked process if it has loaded any of ``refs``, whose files are damaged.

        It may have mapped damaged weights.
        """
        windows = () if self._kept is None else self._kept.content.windows
        loaded = {ref.digest for plan in windows for ref in plan.spec.files}
        if any(ref.digest in loaded for ref in refs):
            await self.unload()

    async def close(self) -> None:
        """End all processes, and wait for them."""
        await self.unload()
        await self._ending.wait()

    def _take(self) -> LoadedProcess | None:
        process, self._kept = self._kept, None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        return process

    def _expire(self) -> None:
        process = self._take()
        assert process is not None
        self.end(process)
