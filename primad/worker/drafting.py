"""Drafts for a head, on a worker that has a whole small model and runs ahead of the head's text.

There is one model at a time. Its layers are fetched like those of windows, into the same cache. Drafts are optional:
nothing waits for them, and drafting stops as soon as this device's owner needs the memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq.asyncio

from halda import WindowAssignment
from primad.daemon.draft_process import DraftingProcess
from primad.daemon.layer_files import place_windows, release_files
from primad.daemon.node import Node
from primad.daemon.reporter import ReportLine
from primad.errors import PrimadError, RingError
from primad.gguf.header import read_header
from primad.gguf.windows import WindowPlan
from primad.network.messages import DraftModelState, DraftsMade, LoadDraft
from primad.ring.speculation.messages import DraftModel, TextTask
from primad.system.niceness import apply_nice
from primad.system.tasks import in_thread
from primad.worker.spare import bring_layers, check_room, until_memory_is_short
from primad.worker.stages import NotifyHead

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Loading:
    """A model that is loaded or loading for ring ``epoch``, the latest that requested it."""

    epoch: int
    load: LoadDraft
    task: asyncio.Task[None] | None = None
    process: DraftingProcess | None = None

    @property
    def state(self) -> DraftModelState:
        return DraftModelState(epoch=self.epoch, ready=self.process is not None)


class DraftService:
    """Drafts for the head that ``notify`` reaches; ``number`` returns a number that is unique among this worker's
    loads."""

    def __init__(
        self,
        node: Node,
        *,
        context: zmq.asyncio.Context,
        number: Callable[[], int],
        notify: NotifyHead,
        report_line: ReportLine,
    ) -> None:
        self._node, self._context = node, context
        self._number, self._notify, self._report_line = number, notify, report_line
        self._current: _Loading | None = None

    async def load(self, load: LoadDraft, threads: int) -> None:
        """Load the model of ``load`` for this number of ``threads``, unless it is loaded, and notify the head of its
        state."""
        current = self._current
        if current is None or not _is_same(current.load, load):
            await self.end()
            current = self._current = _Loading(load.epoch, load)
            current.task = asyncio.create_task(self._work(current, threads))
        current.epoch = load.epoch
        await self._notify(current.state)

    def notify(self, epoch: int, task: TextTask) -> None:
        """Pass on the text of ring ``epoch``; dropped if the model drafts for another one."""
        current = self._current
        if current is None or current.epoch != epoch or current.process is None:
            return
        try:
            current.process.notify(task)
        except RingError as exc:
            logger.warning("%s", exc)
            if current.task is not None:
                current.task.cancel()

    async def release(self, epoch: int) -> None:
        """End drafting if it is for ring ``epoch``, which has ended."""
        if self._current is not None and self._current.epoch == epoch:
            await self.end()

    async def end(self) -> None:
        """End drafting."""
        current, self._current = self._current, None
        if current is not None and current.task is not None:
            current.task.cancel()
            await asyncio.wait([current.task])

    async def stop(self, why: str) -> None:
        """Stop drafting, and notify the head of ``why``."""
        current = self._current
        if current is not None:
            await self.end()
            self._report_line(f"stops drafting: {why}")
            await self._notify(DraftModelState(epoch=current.epoch, ready=False, error=why))

    async def _work(self, current: _Loading, threads: int) -> None:
        number = self._number()
        error = "it was stopped"
        try:
            model = await self._fetch(current.load, number, threads)
            current.process = await DraftingProcess.start(self._node.workspace.run / f"draft-{number}.log")
            apply_nice(current.process.pid, self._node.config.nice)
            current.process.notify(model)
            self._report_line("drafting for the head with a small model")
            await self._notify(current.state)
            watching = asyncio.create_task(until_memory_is_short())
            try:
                hearing = asyncio.create_task(self._hear(current, current.process))
                done, _ = await asyncio.wait([watching, hearing], return_when=asyncio.FIRST_COMPLETED)
                await done.pop()
            finally:
                watching.cancel()
                hearing.cancel()
        except PrimadError as exc:
            error = str(exc)
        finally:
            if current.process is not None:
                await current.process.close()
            release_files(self._node.workspace, number)
            if self._current is current:  # it was not ended from outside
                self._current = None
                self._report_line(f"stops drafting: {error}")
                await self._notify(DraftModelState(epoch=current.epoch, ready=False, error=error))

    async def _hear(self, current: _Loading, process: DraftingProcess) -> None:
        async for drafted in process.drafts():
            await self._notify(DraftsMade(epoch=current.epoch, drafted=drafted))

    async def _fetch(self, load: LoadDraft, number: int, threads: int) -> DraftModel:
        """Fetch the whole model and place it for a process. Raises ``PrimadError`` on failure."""
        place, spec = self._node.workspace, load.window
        size = sum(ref.size_bytes for ref in spec.layers)
        takes = max(size, load.memory_bytes)
        await check_room(takes)
        await bring_layers(self._node, self._context, number, spec.layers, load.sources)
        assignment = WindowAssignment(
            first=0,
            last=spec.last,
            gpu_layers=0,
            output="cpu",
            layer_bytes=size,
            output_bytes=0,
            resident_bytes=size,
        )
        plan = WindowPlan(spec=spec, assignment=assignment, extra_buffers=False)
        (window,) = await in_thread(place_windows, place, [plan], number)
        await in_thread(read_header, Path(window.metadata))  # the head wrote it: check it before llama.cpp reads it
        return DraftModel(
            path=window.metadata,
            layers=spec.last,
            bytes=size,
            memory_bytes=takes,
            threads=threads,
            context=load.context,
            maximum=load.maximum,
            first=load.first,
            files=window.layers,
            vocabulary=load.vocabulary,
        )


def _is_same(one: LoadDraft, other: LoadDraft) -> bool:
    """Whether the same model is loaded in the same way."""
    return (one.window, one.context, one.maximum, one.first) == (
        other.window,
        other.context,
        other.maximum,
        other.first,
    )
