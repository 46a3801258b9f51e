"""The daemon's backend for the HTTP API: requests go to the head's ring process, tokens come back.

A generation outlives the ring that computes it: its prompt and the tokens sampled so far are stored here, and the next
ring resumes it. It ends with an error only if no ring is expected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Final, Protocol

import msgspec

from primad.api.answering.backend import Health, ModelSettings, Preparation, Prepared, ServedModel
from primad.api.answering.pieces import ModelPieces
from primad.daemon.pictures import PictureService
from primad.errors import PrimadError, PromptTooLongError, RequestError, RingError
from primad.head.model.fetching import PictureFetcher
from primad.head.model.seeing import prepare_seeing
from primad.head.model.text_service import TextService
from primad.kv.keys import KvBlock, follows
from primad.ring.chunks import ChunkSize
from primad.ring.messages import (
    Cancel,
    Finished,
    Generate,
    GenerationEvent,
    KvKept,
    PromptProgress,
    RingCommand,
    Sampled,
)
from primad.system.shares import Shares

MAX_WAITING: Final = 64
"""Number of generations that may run or wait concurrently for one caller; under contention callers share twice that
number."""
MAX_PICTURE_BYTES: Final = 512 << 20
"""Total bytes of encoded pictures for generations that run or wait; callers share them."""
MAX_UNREAD: Final = 8192
"""Number of events of a generation that may wait for their reader; divided by the number of log-probabilities per
event."""


A_MOMENT_S: Final = 10.0
"""When a ring breaks the next one computes after 2 to 5 s (``docs/faults.md``); after a longer time the health check
reports that no request makes progress. If no request is open, the warm-up pass of a ring counts as computing. The same
applies to an overdue step."""
MAX_RINGS: Final = 4
"""A request under which this many rings in a row broke without progress may be the cause, and ends."""


class SendCommands(Protocol):
    """Sends commands to the head's ring process, all together."""

    def __call__(self, *commands: RingCommand) -> Awaitable[None]:
        """Send ``commands``."""


StatusOf = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GoOn:
    """What a ring needs to resume requests: the ``blocks`` of KV cache that all its devices hold, by request.

    ``root`` returns the root of an owner's KV cache; empty without a cache. At most ``max_replayed`` tokens of a
    request are recomputed one by one. The ring cuts new prompts into ``chunks``.
    """

    root: Callable[[str], str]
    blocks: Mapping[int, Sequence[KvBlock]]
    max_replayed: int | None
    chunks: ChunkSize | None = None


FindsBlocks = Callable[[Sequence[int], str], Awaitable[tuple[str, list[KvBlock]]]]
"""Returns the root of the KV cache for a prompt of an owner, and the existing blocks."""


async def _no_blocks(prompt: Sequence[int], owner: str) -> tuple[str, list[KvBlock]]:
    return "", []


@dataclass(slots=True)
class _Open:
    """A generation: its request, its sampled tokens, and the queue of its events, with room for its end."""

    generate: Generate
    events: asyncio.Queue[GenerationEvent | PrimadError]
    read_tokens: int = 0
    """Reported progress of the prompt; a ring that restarts does not report it twice."""
    sampled: list[int] = field(default_factory=list)
    chain: list[KvBlock] = field(default_factory=list)
    """The blocks that its ring keeps, from the first position."""
    mirostat_mu: float | None = None
    chunks: ChunkSize | None = None
    """The chunks in which its prompt is computed, if known."""
    begun: bool = False
    ended: bool = False
    moved: bool = False
    """Whether it progressed in its ring."""
    breaks: int = 0
    """The number of rings in a row that broke before it progressed."""

    @property
    def computed(self) -> int:
        """The number of positions that its ring has computed, as far as reported."""
        return len(self.generate.prompt) + len(self.sampled) - 1 if self.sampled else self.read_tokens

    def kept(self, blocks: Iterable[KvBlock]) -> None:
        """Its ring keeps ``blocks``: the next ones, or ones that replace the last ones, which the ring did not have."""
        for block in blocks:
            while self.chain and self.chain[-1].end > block.start:
                self.chain.pop()
            if follows(self.chain, block):
                self.chain.append(block)

    def to_go_on(self, go_on: GoOn) -> Generate:
        """Return the request for a ring that has not seen it yet but holds the blocks of ``go_on``."""
        self.chain = list(go_on.blocks.get(self.generate.request, ()))
        if not self.computed:
            self.chunks = go_on.chunks
        there = max(len(self.generate.prompt), self.chain[-1].end if self.chain else 0)
        return msgspec.structs.replace(
            self.generate,
            sampled=list(self.sampled),
            sampling=msgspec.structs.replace(self.generate.sampling, mirostat_mu=self.mirostat_mu),
            root=go_on.root(self.generate.owner),
            blocks=list(self.chain),
            replays_rows=go_on.max_replayed is None or self.computed - there <= go_on.max_replayed,
            chunks=self.chunks,
        )

    def give(self, event: GenerationEvent | PrimadError) -> None:
        """Pass an event to the reader. A reader that lags too far gets an error, and nothing more."""
        if type(event) is not Finished and self.events.qsize() >= self.events.maxsize - 1:
            while not self.events.empty():
                self.events.get_nowait()
            self.ended = True
            event = RequestError(
                "the response was read too slowly; read it as it comes", status=408, code="read_too_slowly"
            )
        self.events.put_nowait(event)

    def fail(self, error: str) -> None:
        """End it with ``error``, unless it has ended."""
        if self.ended:
            return
        self.ended = True
        failed = Finished(
            request=self.generate.request,
            reason="error",
            error=error,
            prompt_tokens=0,
            completion_tokens=0,
            prompt_s=0,
            decode_s=0,
        )
        self.give(failed)


@dataclass(frozen=True, slots=True)
class _Ring:
    """The serving ring."""

    epoch: int
    send: SendCommands
    status: StatusOf
    chunks: ChunkSize | None


class RingBackend:
    """Serves the API from rings that come and go.

    ``attach`` the serving ring; ``hold`` while open generations wait for the next one; ``fail`` if there is none. A
    generation that has not begun after ``max_wait_s`` is refused.
    """

    def __init__(
        self,
        *,
        texts: TextService | None = None,
        max_waiting: int = MAX_WAITING,
        max_wait_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._texts = texts
        self._clock = clock
        self._stands_since_s: float | None = None
        """The time since which nothing has been computed for open requests; None while requests progress."""
        self._places = Shares(2 * max_waiting, minimum=1)
        self._picture_bytes = Shares(MAX_PICTURE_BYTES)
        self._max_wait_s = max_wait_s
        self._served: ServedModel | None = None
        self._ring: _Ring | None = None
        self._holding = False
        self._handing_over = False
        self._detail = "starting"
        self._requests = count(1)
        self._open: dict[int, _Open] = {}
        self._unsent: list[Generate] = []
        self.find_blocks: FindsBlocks = _no_blocks
        self.pictures: PictureService | None = None
        self._fetcher = PictureFetcher()
        self.around: Callable[[], dict[str, Any]] = dict
        """Returns the rest of the status, also without a ring."""
        self.created = int(time.time())

    def health(self) -> Health:
        taken = self._ring is not None or self._holding
        stood_s = 0.0 if self._stands_since_s is None else self._clock() - self._stands_since_s
        if not taken or stood_s <= A_MOMENT_S:
            return Health(serving=taken, taken=taken, detail=self._detail)
        return Health(serving=False, taken=True, detail=f"no request makes progress: {self._detail}")

    def model(self) -> ServedModel | None:
        return self._served

    async def pieces(self) -> ModelPieces:
        """The model's tokens as text. Raises ``EngineError`` when its vocabulary cannot be loaded."""
        assert self._texts is not None, "a backend without texts serves what was prepared elsewhere"
        return await self._texts.pieces()

    async def prepare(
        self, preparation: Preparation[Prepared], body: bytes, served: ModelSettings | None, *, owner: str = ""
    ) -> Prepared:
        texts, pictures = self._texts, self.pictures
        assert texts is not None, "as above"
        if pictures is None:
            return await texts.prepare(preparation, body, served, owner=owner)
        return await prepare_seeing(
            lambda seen: texts.prepare(preparation, body, served, owner=owner, seen=seen),
            partial(pictures.encode, owner=owner),
            self._fetcher,
        )

    async def status(self) -> dict[str, Any]:
        """Return the ring's status, if there is a ring, and the rest."""
        return (await self._ring.status() if self._ring is not None else {}) | self.around()

    @property
    def generations(self) -> int:
        """The number of open generations."""
        return len(self._open)

    @property
    def is_generating(self) -> bool:
        """Whether a ring has computed something for an open generation."""
        return any(each.computed and not each.ended for each in self._open.values())

    def describe(self, detail: str) -> None:
        """Set the line about the state for the health check."""
        self._detail = detail

    def chains(self) -> dict[int, list[KvBlock]]:
        """The blocks of every open generation that has some."""
        return {request: list(each.chain) for request, each in self._open.items() if each.chain and not each.ended}

    def tokens_again(self, blocks: Mapping[int, Sequence[KvBlock]]) -> tuple[int, int]:
        """Return, for all open generations, how many computed tokens are in ``blocks``, and how many are not."""
        there = again = 0
        for request, generation in self._open.items():
            if not generation.ended:
                chain = blocks.get(request, ())
                end = min(chain[-1].end, generation.computed) if chain else 0
                there, again = there + end, again + generation.computed - end
        return there, again

    async def attach(
        self,
        served: ServedModel,
        epoch: int,
        send: SendCommands,
        status: StatusOf,
        detail: str,
        go_on: GoOn = GoOn(root=lambda _: "", blocks={}, max_replayed=None),
    ) -> None:
        """Ring ``epoch`` serves from now on: every open generation resumes there, in the order of requests.

        A generation whose prompt does not fit the new context ends with an error.
        """
        self._served, self._ring, self._detail = served, _Ring(epoch, send, status, go_on.chunks), detail
        self._holding = False
        self._handing_over = False
        self._rest()
        self._unsent.clear()
        for request, generation in list(self._open.items()):
            if len(generation.generate.prompt) >= served.context_tokens:
                generation.fail(f"the prompt exceeds the available context size, which is now {served.context_tokens}")
            elif request in self._open and not generation.ended:  # a client may leave while the others are sent
                await send(generation.to_go_on(go_on))

    def hand_over(self) -> None:
        """The serving ring finishes its steps and gets no new generations; the next ring does."""
        self._handing_over = True

    def hold(self, detail: str) -> None:
        """No ring serves, but one will: open and new generations wait."""
        self._ring, self._holding, self._handing_over, self._detail = None, True, False, detail
        if self._stands_since_s is None:
            self._stands_since_s = self._clock()
        for generation in self._open.values():
            generation.breaks = 0 if generation.moved else generation.breaks + 1
            generation.moved = False
            if generation.breaks >= MAX_RINGS:
                generation.fail(f"{MAX_RINGS} rings in a row broke before this request made progress; {detail}")

    def overdue(self, epoch: int, waited_s: float) -> None:
        """A step of ring ``epoch`` has been out for ``waited_s``, which is much longer than usual."""
        if self._ring is None or self._ring.epoch != epoch or not self._open:
            return
        if self._stands_since_s is None:
            self._stands_since_s = self._clock() - waited_s

    def _rest(self) -> None:
        """Stop the clock if no request waits: a serving ring has proved by its warm-up pass that it computes."""
        if self._ring is not None and all(generation.ended for generation in self._open.values()):
            self._stands_since_s = None

    def fail(self, error: str) -> None:
        """No ring serves and none is expected: every open generation ends with ``error``."""
        self._ring, self._holding, self._handing_over, self._detail = None, False, False, error
        for generation in self._open.values():
            generation.fail(error)

    def deliver(self, epoch: int, event: GenerationEvent) -> None:
        """Pass an event of ring ``epoch`` to its reader; events of older rings, or without a reader, are dropped."""
        generation = self._open.get(event.request)
        if generation is None or generation.ended or self._ring is None or self._ring.epoch != epoch:
            return
        generation.begun = True
        self._stands_since_s = None
        match event:
            case Sampled():
                generation.sampled.append(event.token)
                generation.mirostat_mu = event.mirostat_mu
            case PromptProgress() if event.tokens <= generation.read_tokens:
                return
            case PromptProgress():
                generation.read_tokens = event.tokens
            case Finished():
                generation.ended = True
        generation.moved = True
        generation.give(event)

    def kept(self, epoch: int, event: KvKept) -> int:
        """Ring ``epoch`` keeps the next blocks of a generation; return its prompt's number of tokens.

        For a generation that has ended, return the end of the last block: the ring then reports blocks of its prompt
        only.
        """
        generation = self._open.get(event.request)
        if generation is None:
            return event.blocks[-1].end
        if self._ring is not None and self._ring.epoch == epoch:
            generation.kept(event.blocks)
        return len(generation.generate.prompt)

    async def generate(self, asked: Generate, *, may_expire: bool = True) -> AsyncGenerator[GenerationEvent, None]:
        prompt, owner = asked.prompt, asked.owner
        self._check_served(prompt)
        if may_expire and not self._places.has_room(owner):
            raise RequestError(
                "too many of your requests are waiting already; try again later", status=429, code="queue_full"
            )
        size = sum(len(each.content) for each in asked.pictures) if may_expire else 0  # choices of a request share them
        if size and not self._picture_bytes.has_room(owner, size):
            raise RequestError(
                "the images of your requests have too many bytes together; try again later",
                status=429,
                code="too_many_bytes",
            )
        with self._places.held(owner), self._picture_bytes.held(owner, size):
            ring = self._ring
            root, blocks = await self.find_blocks(prompt, owner)
            self._check_served(prompt)  # the ring may have ended meanwhile
            request = next(self._requests)
            generate = msgspec.structs.replace(
                asked,
                request=request,
                reports_begin=may_expire and self._max_wait_s is not None,
                root=root,
                blocks=blocks if ring is self._ring else [],
            )
            generation = _Open(
                generate=generate,
                chain=list(generate.blocks),
                chunks=None if self._ring is None else self._ring.chunks,
                events=asyncio.Queue(MAX_UNREAD // (1 + (asked.logprobs or 0)) + 1),
            )
            self._open[request] = generation
            finished = False
            expiry: asyncio.TimerHandle | None = None
            try:
                await self._submit(generate)
                if may_expire and self._max_wait_s is not None:
                    expiry = asyncio.get_running_loop().call_later(self._max_wait_s, self._expire, generation)
                while not finished:
                    event = await generation.events.get()
                    if isinstance(event, PrimadError):
                        raise event
                    finished = type(event) is Finished
                    yield event
            finally:
                del self._open[request]
                self._rest()
                if expiry is not None:
                    expiry.cancel()
                if generate in self._unsent:
                    self._unsent.remove(generate)
                elif not finished and self._ring is not None:
                    await self._ring.send(Cancel(request))

    def _check_served(self, prompt: Sequence[int]) -> None:
        """Raise ``RingError`` if no ring serves or is expected, ``PromptTooLongError`` for its context, which may have
        shrunk."""
        if self._ring is None and not self._holding:
            raise RingError(f"the model cannot be served now: {self._detail}")
        if self._served is not None and len(prompt) >= self._served.context_tokens:
            raise PromptTooLongError(len(prompt), self._served.context_tokens, "prompt")

    def _expire(self, generation: _Open) -> None:
        """Refuse the generation, unless it has begun."""
        if generation.begun or generation.ended:
            return
        generation.ended = True
        waited = f"the request waited {self._max_wait_s:g} s, the limit of this server"
        if self._ring is None:
            generation.give(RingError(f"{waited}: {self._detail}"))
        else:
            error = RequestError(f"{waited} for others; try again later", status=429, code="waited_too_long")
            generation.give(error)

    async def _submit(self, generate: Generate) -> None:
        """Pass it to the ring, together with the others of the same turn of the event loop.

        So all choices of a request are there before the first one's prompt is computed, and the prompt is computed
        once.
        """
        self._unsent.append(generate)
        await asyncio.sleep(0)
        unsent, self._unsent = self._unsent, []
        if unsent and self._ring is not None and not self._handing_over:
            await self._ring.send(*unsent)
