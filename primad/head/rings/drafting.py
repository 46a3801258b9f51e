"""Runs the model of ``--draft`` on another device of the fleet, for one ring of this head.

Its layers are cut and fetched like those of windows. Meanwhile the ring serves with prompt lookup. Notifications of the
ring process go to the device over the control link, and drafts come back the same way. If the device is lost or paused,
or cannot load the model, the head drafts, if it has room, until the device can again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from primad.errors import ClusterError, PrimadError, ProtocolError
from primad.gguf.windows import vocabulary_size
from primad.head.members.worker_link import WorkerLink
from primad.head.rings.ring_inputs import FindsWorker, RingInputs
from primad.head.rings.routes import RingAddresses
from primad.layers.fetch import hash_layers
from primad.network.messages import DraftInput, DraftModelState, DraftsMade, LoadDraft, ReleaseDraft
from primad.ring.messages import DraftPlaceChanged, DraftsHeard, RingCommand
from primad.ring.speculation.messages import Drafted, TextTask, check_drafted
from primad.system.tasks import in_thread

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""How often to check whether the device may be used."""
TRY_S: Final = (30.0, 600.0)
"""Pause before a device that failed is tried again: the first one, and the longest. A device that reconnects is tried
immediately."""
MAX_UNREPORTED: Final = 256

SendToRing = Callable[[RingCommand], Coroutine[Any, Any, None]]


class RemoteDrafter:
    """Has ``device``, which ``find`` returns while it may be used, draft for the ring of ``inputs``; ``to_ring`` sends
    to the ring process. Start it with ``run``, pass tasks to ``ask``.
    """

    def __init__(
        self, inputs: RingInputs, device: str, find: FindsWorker, ring_addresses: RingAddresses, to_ring: SendToRing
    ) -> None:
        self._inputs, self._device, self._find = inputs, device, find
        self._ring_addresses, self._to_ring = ring_addresses, to_ring
        self._worker: WorkerLink | None = None
        self._vocabulary = 0
        self._unreported: asyncio.Queue[TextTask] = asyncio.Queue(MAX_UNREPORTED)
        self._made: Drafted | None = None
        self._news = asyncio.Event()
        self._heard = asyncio.Event()
        self._error = ""
        self._is_ready = self._is_over = False

    @property
    def epoch(self) -> int:
        """The ring's epoch."""
        return self._inputs.epoch

    @property
    def place(self) -> str | None:
        """The device that drafts now, or None."""
        if self._is_ready:
            return self._device
        return self._inputs.forecast.plan.head if self._is_over and self._inputs.service.head_has_room else None

    async def run(self) -> None:
        """Have the device draft whenever it may and can, otherwise the head."""
        last_reason, pause_s = "", TRY_S[0]
        while True:
            worker = self._worker = self._find()
            try:
                if worker is None:
                    raise ClusterError("it is not here, or paused")
                await self._serve(worker)
            except PrimadError as exc:
                was_ready, self._is_ready = self._is_ready, False
                await self._fall_back(str(exc), is_new=was_ready or str(exc) != last_reason)
                last_reason, pause_s = str(exc), TRY_S[0] if was_ready else min(2 * pause_s, TRY_S[1])
            await self.release()
            await self._until_it_may(worker, pause_s)

    async def _fall_back(self, why: str, *, is_new: bool) -> None:
        has_room = self._inputs.service.head_has_room
        if is_new:
            instead = "this device does" if has_room else "nothing does, for this device has no room"
            self._inputs.reporter.report_line(f"{self._device} does not draft: {why}; {instead}")
        if not self._is_over:
            self._is_over = True
            await self._to_ring(DraftPlaceChanged("here" if has_room else "nowhere"))

    async def _until_it_may(self, lost: WorkerLink | None, pause_s: float) -> None:
        """Wait until there is another link to the device, or the ``lost`` one may be tried again."""
        until_s = time.monotonic() + pause_s
        while True:
            await asyncio.sleep(LOOK_S)
            found = self._find()
            if found is not None and (found is not lost or time.monotonic() >= until_s):
                return

    async def release(self) -> None:
        """Tell the device that it need not draft any more."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.forget_drafts(self)
        try:
            await worker.send(ReleaseDraft(epoch=self.epoch))
        except ClusterError:
            logger.debug("%s is gone and stops drafting", self._device)

    def ask(self, task: TextTask) -> None:
        """Queue a notification of the ring process for the device. If too many wait it is dropped, and so are its
        drafts."""
        if self._is_ready and not self._unreported.full():
            self._unreported.put_nowait(task)

    def hear(self, message: DraftModelState | DraftsMade) -> None:
        """Handle a message of the device. Invalid drafts are dropped."""
        match message:
            case DraftModelState(ready=ready, error=error):
                self._is_ready, self._error = ready and not error, error
                self._heard.set()
            case DraftsMade(drafted=drafted):
                try:
                    check_drafted(drafted, self._vocabulary)
                except ProtocolError as exc:
                    logger.warning("%s: %s", self._device, exc)
                else:
                    self._made = drafted
        self._news.set()

    def lost(self, reason: str) -> None:
        """The device is gone, or may not be used any more."""
        self._error = self._error or reason
        self._heard.set()
        self._news.set()

    async def _serve(self, worker: WorkerLink) -> None:
        """Have ``worker`` draft. Raises the ``PrimadError`` that ends it."""
        self._error, self._made = "", None
        worker.drafts_for(self)
        watching = asyncio.create_task(self._watch(worker))
        try:
            await self._until_ready(worker)
            self._unreported = asyncio.Queue(MAX_UNREPORTED)
            self._is_over = False
            await self._to_ring(DraftPlaceChanged("elsewhere"))
            telling = asyncio.create_task(self._notify(worker))
            try:
                await self._pass_on()
            finally:
                telling.cancel()
        finally:
            watching.cancel()

    async def _watch(self, worker: WorkerLink) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._find() is not worker:
                self.lost("it is gone, or paused by the owner of this head")
                return

    async def _until_ready(self, worker: WorkerLink) -> None:
        load = await self._load(worker)
        await worker.send(load)
        while not self._is_ready:
            if self._error:
                raise ClusterError(self._error)
            await self._heard.wait()
            self._heard.clear()

    async def _pass_on(self) -> None:
        while not self._error:
            self._news.clear()
            made, self._made = self._made, None
            if made is not None:
                await self._to_ring(DraftsHeard(made))
            elif not self._error:
                await self._news.wait()
        raise ClusterError(self._error)

    async def _notify(self, worker: WorkerLink) -> None:
        while True:
            task = await self._unreported.get()
            try:
                await worker.send(DraftInput(epoch=self.epoch, task=task))
            except ClusterError as exc:
                self.lost(str(exc))
                return

    async def _load(self, worker: WorkerLink) -> LoadDraft:
        draft, source = self._inputs.draft, self._inputs.service.draft_source
        assert draft is not None
        assert source is not None
        cutter = source.cutter
        await hash_layers(cutter, cutter.layers_of_all)
        self._vocabulary = vocabulary_size(source.header)
        return LoadDraft(
            epoch=self.epoch,
            window=await in_thread(cutter.without_text),
            vocabulary=self._vocabulary,
            context=draft.context,
            maximum=draft.maximum,
            first=draft.first,
            sources=await self._ring_addresses.sources(worker),
            memory_bytes=draft.memory_bytes,
        )
