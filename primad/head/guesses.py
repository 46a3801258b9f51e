"""The model of ``--draft`` on another device of the fleet, for one ring of this head.

Its layers are cut and fetched as those of windows are. The ring serves meanwhile, and its texts are looked through. What the
ring process wants to be known goes to the device over the control link, and what that guesses comes back so. Where the
device is lost, or cannot load the model, the guessing goes on at the head, which has room for it in any case.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from primad.errors import ClusterError, PrimadError, ProtocolError
from primad.gguf.windows import vocabulary_size
from primad.head.ring_inputs import RingInputs
from primad.head.ways import Ways
from primad.head.worker_link import WorkerLink
from primad.layers.fetch import hash_layers, in_thread
from primad.network.messages import GuessesMade, GuessLoad, GuessRelease, GuessState, GuessText
from primad.ring.drafting.messages import Drafted, TextTask, check_drafted
from primad.ring.messages import GuessAt, GuessesHeard, RingCommand

logger = logging.getLogger(__name__)

AGAIN_S: Final = 5.0
"""What nobody answered is said again."""
MOST_UNTOLD: Final = 256

SendToRing = Callable[[RingCommand], Coroutine[Any, Any, None]]


class GuessesElsewhere:
    """Has ``worker`` guess for the ring of ``inputs``, whose process ``to_ring`` reaches. ``run`` it, ``ask`` it."""

    def __init__(self, inputs: RingInputs, worker: WorkerLink, ways: Ways, to_ring: SendToRing) -> None:
        self._inputs, self._worker, self._ways, self._to_ring = inputs, worker, ways, to_ring
        self._vocabulary = 0
        self._untold: asyncio.Queue[TextTask] = asyncio.Queue(MOST_UNTOLD)
        self._made: Drafted | None = None
        self._news = asyncio.Event()
        self._heard = asyncio.Event()
        self._error = ""
        self.is_ready = self.is_over = False

    @property
    def epoch(self) -> int:
        """The ring's."""
        return self._inputs.epoch

    @property
    def device(self) -> str:
        """Who guesses."""
        return self._worker.name

    async def run(self) -> None:
        """Have it guess until it is lost, and then have the head do so."""
        self._worker.guesses_for(self)
        try:
            await self._serve()
        except PrimadError as exc:
            self.is_ready, self.is_over = False, True
            self._inputs.reporter.say(f"{self.device} does not guess: {exc}; this device does")
            await self._to_ring(GuessAt(here=True))

    async def release(self) -> None:
        """The ring is over."""
        self._worker.forget_guesses(self)
        try:
            await self._worker.send(GuessRelease(epoch=self.epoch))
        except ClusterError:
            logger.debug("%s is gone, and guesses for nobody", self.device)

    def ask(self, task: TextTask) -> None:
        """What the ring process wants to be known; where too much of it waits it is lost, and so are guesses."""
        if self.is_ready and not self._untold.full():
            self._untold.put_nowait(task)

    def hear(self, message: GuessState | GuessesMade) -> None:
        """What the device says. Guesses that are none are dropped."""
        match message:
            case GuessState(ready=ready, error=error):
                self.is_ready, self._error = ready and not error, error
                self._heard.set()
            case GuessesMade(drafted=drafted):
                try:
                    check_drafted(drafted, self._vocabulary)
                except ProtocolError as exc:
                    logger.warning("%s: %s", self.device, exc)
                else:
                    self._made = drafted
        self._news.set()

    def lost(self, reason: str) -> None:
        """The device is gone."""
        self._error = reason
        self._heard.set()
        self._news.set()

    async def _serve(self) -> None:
        load = await self._load()
        while not self.is_ready:
            self._heard.clear()
            if self._error:
                raise ClusterError(self._error)
            await self._worker.send(load)
            try:
                async with asyncio.timeout(AGAIN_S):
                    while not self.is_ready and not self._error:
                        await self._heard.wait()
                        self._heard.clear()
            except TimeoutError:
                continue
        await self._to_ring(GuessAt(here=False))
        telling = asyncio.create_task(self._tell())
        try:
            while not self._error:
                self._news.clear()
                made, self._made = self._made, None
                if made is not None:
                    await self._to_ring(GuessesHeard(made))
                elif not self._error:
                    await self._news.wait()
        finally:
            telling.cancel()
        raise ClusterError(self._error)

    async def _tell(self) -> None:
        while True:
            task = await self._untold.get()
            try:
                await self._worker.send(GuessText(epoch=self.epoch, task=task))
            except ClusterError as exc:
                self.lost(str(exc))
                return

    async def _load(self) -> GuessLoad:
        draft, source = self._inputs.draft, self._inputs.service.draft_source
        assert draft is not None
        assert source is not None
        cutter = source.cutter
        await hash_layers(cutter, cutter.layers_of_all)
        self._vocabulary = vocabulary_size(source.header)
        return GuessLoad(
            epoch=self.epoch,
            window=await in_thread(cutter.without_text),
            vocabulary=self._vocabulary,
            context=draft.context,
            most=draft.most,
            first=draft.first,
            sources=await self._ways.sources(self._worker),
        )
