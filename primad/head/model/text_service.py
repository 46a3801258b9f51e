"""The head's side of its text processes, which turn requests into prompts: schedules requests and bounds their cost.

Most requests take milliseconds. One that takes ``quick_s`` is slow. Only one slow request runs at a time, so that
another process is free for all others. A request that takes ``max_s`` is refused, and so is one that makes its process
end, hang or grow; the next request gets a new process. Time in which a process waited for a processor does not count.
Callers take turns.

Starting a process takes as long as hundreds of usual requests. So a caller whose request ended the free process is held
back: for a while all its requests, slow or not, run only where slow ones do, untried ones first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, Final

import msgspec

from primad.api.answering.backend import ModelSettings, Preparation, Prepared
from primad.api.answering.job import SEEDS
from primad.api.answering.pictures import PicturesWantedError
from primad.api.answering.pieces import ModelPieces
from primad.errors import EngineError, PrimadError, RequestError, RingError
from primad.head.model.text_messages import (
    Failed,
    LoadText,
    PicturesWanted,
    Prepare,
    PreparedRequest,
    RequestRefused,
    TextReady,
    TextReply,
)
from primad.settings.quantities import show_bytes
from primad.system.children.asked_child import AskedChild, EndedError
from primad.system.gpus import NO_GPU
from primad.system.processors import OwnTime
from primad.system.shares import Shares, Turns
from primad.system.tasks import Tasks, resolve

MAX_PROCESSES: Final = 2
MAX_WAITING: Final = 256
"""Number of requests of one caller that may wait for their turn; fewer under contention."""

_decoder = msgspec.msgpack.Decoder(TextReply)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLimits:
    """Limits of a request. ``memory_bytes`` is what a process may use in addition to its vocabulary."""

    quick_s: float = 1.0
    max_s: float = 15.0
    memory_bytes: int = 1 << 30
    load_s: float = 120.0
    look_s: float = 0.1
    idle_s: float = 60.0
    """A second process that has been idle for this long ends."""
    rest_s: float = 10.0


@dataclass(slots=True, eq=False)
class _Turn:
    """A request on its way."""

    task: Prepare
    owner: str
    reply: asyncio.Future[TextReply]
    is_slow: bool = False
    ends: int = 0
    """Number of processes that have ended during it, which need not be its fault: all that ran may have been killed
    before it came, so it gets one more attempt than there are processes."""


class _TooMuchError(Exception):
    """The process was ended because a request exceeded a limit; the text says which."""


class _LaterError(Exception):
    """The process was ended; the request is retried when no other slow one runs."""


class _Child(AskedChild):
    is_busy = True
    loaded_bytes = 0
    ending: asyncio.TimerHandle | None = None


class TextService:
    """Prepares requests for the model file ``path`` (empty: for requests that need no model). ``began`` gets each
    process's id."""

    def __init__(
        self,
        path: str,
        chat_template: str | None,
        *,
        limits: TextLimits = TextLimits(),
        began: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._path, self._chat_template, self._limits, self._began = path, chat_template, limits, began
        self._children: list[_Child] = []
        self._dying: set[_Child] = set()
        self._places = Shares(2 * MAX_WAITING, minimum=1)
        self._quick, self._slow = Turns[_Turn](), Turns[_Turn]()
        self._running: set[_Turn] = set()
        self._resting: dict[str, asyncio.TimerHandle] = {}
        self._tasks = Tasks()
        self._pieces: ModelPieces | None = None
        self._loading = asyncio.Lock()
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return [child.pid for child in self._children]

    def begin(self) -> None:
        """Start the first process before a request waits for it."""
        if not self._children and self._starting is None:
            self._starting = self._tasks.start(self._begin_another())

    async def pieces(self) -> ModelPieces:
        """Return the model's tokens as text. Raises ``EngineError`` if the file cannot be loaded."""
        async with self._loading:
            if self._pieces is None:
                child, ready = await self._begin(reports_pieces=True)
                assert ready.pieces is not None, "they were asked for"
                self._pieces = ModelPieces(ready.pieces)
                self._free(child)
        return self._pieces

    async def prepare(
        self,
        preparation: Preparation[Prepared],
        body: bytes,
        settings: ModelSettings | None,
        *,
        owner: str = "",
        seen: Mapping[str, Sequence[int]] = {},
    ) -> Prepared:
        """As ``Backend.prepare``, with pictures whose token ids are in ``seen``; raises ``PicturesWantedError`` for
        others."""
        if self._closed:
            raise RingError("primad is stopping")
        if not self._places.has_room(owner):
            raise RequestError(
                "many requests of this caller are waiting to be read already; try again later",
                status=429,
                code="queue_full",
            )
        task = Prepare(
            what=f"{preparation.__module__}:{preparation.__name__}",  # ty: ignore
            body=body,
            settings=settings,
            seed=secrets.randbelow(SEEDS),
            now=datetime.now().astimezone(),
            seen={digest: list(ids) for digest, ids in seen.items()},
        )
        turn = _Turn(task, owner, asyncio.get_running_loop().create_future())
        with self._places.held(owner):
            self._quick.add(owner, turn)
            self._pump()
            reply = await turn.reply
        match reply:
            case PreparedRequest() as prepared:
                for line in prepared.lines:
                    logger.info("%s", line)
                made: Prepared = msgspec.msgpack.decode(prepared.made, type=_kind(preparation))
                return made
            case PicturesWanted(pictures=pictures):
                raise PicturesWantedError(pictures)
            case RequestRefused() as refused:
                raise refused.error()
            case Failed() as failed:
                raise AssertionError(f"the text process: {failed.message}")
            case other:
                raise AssertionError(f"a reply to another task: {other}")

    async def close(self) -> None:
        """End all processes; waiting requests end with the error that primad is stopping."""
        self._closed = True
        for resting in self._resting.values():
            resting.cancel()
        self._refuse_all(RingError("primad is stopping"))
        await self._tasks.close()
        for child in list(self._children):
            await self._bury(child)
        for child in list(self._dying):  # the task that awaited their end was cancelled
            await child.end()

    def _pump(self) -> None:
        """Give free processes to waiting requests, and start another process if there is none for them."""
        for child in [each for each in self._children if not each.is_busy]:
            turn = self._next()
            if turn is None:
                break
            self._take(child)
            self._running.add(turn)
            self._tasks.start(self._run(child, turn))
        if self._wants_another:
            self._starting = self._tasks.start(self._begin_another())

    def _next(self) -> _Turn | None:
        """Return the next request; only one slow request runs at a time. Requests whose client left are dropped."""
        lanes: list[tuple[Turns[_Turn], Collection[str]]] = [(self._quick, self._resting)]
        if not self._slow_runs:
            lanes += [(self._quick, ()), (self._slow, ())]
        for turns, left_out in lanes:
            while (turn := turns.next_but(left_out)) is not None:
                if not turn.reply.done():
                    return turn
        return None

    def _rest(self, owner: str) -> None:
        """Hold back ``owner`` for a while, whose request cost others a process."""

        def rested() -> None:
            del self._resting[owner]
            self._pump()

        if (before := self._resting.get(owner)) is not None:
            before.cancel()
        self._resting[owner] = asyncio.get_running_loop().call_later(self._limits.rest_s, rested)

    def _refuse_all(self, error: PrimadError) -> None:
        """Fail all waiting requests with ``error``."""
        for turns in (self._quick, self._slow):
            while turns:
                _fail(turns.next(), error)

    @property
    def _slow_runs(self) -> bool:
        return any(turn.is_slow for turn in self._running)

    @property
    def _wants_another(self) -> bool:
        if self._closed or (self._starting is not None and not self._starting.done()):
            return False
        if not self._children:
            return bool(self._quick or self._slow)
        return bool(self._quick) and self._slow_runs and len(self._children) < MAX_PROCESSES

    async def _begin_another(self) -> None:
        try:
            child, _ = await self._begin(reports_pieces=False)
        except PrimadError as exc:
            self._refuse_all(RingError(f"requests cannot be read: {exc}"))
            return
        self._starting = None
        self._free(child)

    async def _begin(self, *, reports_pieces: bool) -> tuple[_Child, TextReady]:
        """Start a process with the vocabulary; it is busy until it is freed. Raises ``EngineError`` or
        ``RingError``."""
        variables = {**os.environ, **NO_GPU, "GGML_NO_BACKTRACE": "1"}
        child = await _Child.start("primad.head.model.text_process", variables, "the text process")
        self._children.append(child)
        self._began(child.pid)
        load = LoadText(
            path=self._path,
            chat_template=self._chat_template,
            reports_pieces=reports_pieces,
            memory_bytes=self._limits.memory_bytes,
        )

        def look(own: OwnTime) -> None:
            if own.left_s(self._limits.load_s) <= 0:
                raise _TooMuchError("took too long")

        try:
            ready: TextReply = _decoder.decode(await child.ask(load, look, self._limits.look_s))
        except (EndedError, _TooMuchError) as exc:
            await self._bury(child)
            raise EngineError(f"{self._path}: the process that loads its vocabulary {exc}") from None
        except BaseException:
            await self._bury(child)
            raise
        if not isinstance(ready, TextReady):
            await self._bury(child)
            assert isinstance(ready, Failed)
            raise EngineError(ready.message)
        child.loaded_bytes = child.rss_bytes()
        return child, ready

    async def _run(self, child: _Child, turn: _Turn) -> None:
        try:
            came = await child.ask(turn.task, lambda own: self._look(child, turn, own), self._limits.look_s)
            reply: TextReply = _decoder.decode(came)
            if isinstance(reply, RequestRefused) and reply.spent:
                await self._bury(child)
            resolve(turn.reply, reply)
        except (_LaterError, EndedError, _TooMuchError) as exc:
            if not turn.is_slow:
                self._rest(turn.owner)
            await self._bury(child)
            turn.ends += isinstance(exc, EndedError)
            if isinstance(exc, _LaterError) or (isinstance(exc, EndedError) and turn.ends <= MAX_PROCESSES):
                turn.is_slow = True
                self._slow.add(turn.owner, turn)
            else:
                resolve(turn.reply, RequestRefused(message=_refusal(exc), status=400, code="unreadable_request"))
        except BaseException:  # cancelled, or a bug: no request may wait for ever
            _fail(turn, RingError("primad is stopping, or failed over this request"))
            raise
        finally:
            self._running.discard(turn)
            if child in self._children:
                self._free(child)
            else:
                self._pump()

    def _look(self, child: _Child, turn: _Turn, own: OwnTime) -> None:
        """Decide what to do with a request that takes a while: nothing, postpone it, or end its process."""
        limits = self._limits
        if child.rss_bytes() > child.loaded_bytes + limits.memory_bytes:
            raise _TooMuchError(f"took more than {show_bytes(limits.memory_bytes)} of memory")
        took_s = limits.max_s - own.left_s(limits.max_s)
        if turn.is_slow and turn.reply.done():
            raise _LaterError
        if took_s >= limits.max_s:
            raise _TooMuchError(f"took more than {limits.max_s:g} s")
        if took_s >= limits.quick_s and not turn.is_slow:
            if self._slow_runs or turn.reply.done():
                raise _LaterError  # or never, if its client left
            turn.is_slow = True
            self._pump()

    def _take(self, child: _Child) -> None:
        child.is_busy = True
        if child.ending is not None:
            child.ending.cancel()
            child.ending = None

    def _free(self, child: _Child) -> None:
        child.is_busy = False
        if child is not self._children[0]:
            child.ending = asyncio.get_running_loop().call_later(
                self._limits.idle_s, lambda: self._tasks.start(self._end_idle(child))
            )
        self._pump()

    async def _end_idle(self, child: _Child) -> None:
        if not child.is_busy and len(self._children) > 1:
            await self._bury(child)

    async def _bury(self, child: _Child) -> None:
        """End ``child``, and wait for its end."""
        if child not in self._children:
            return
        self._children.remove(child)
        self._dying.add(child)
        if child.ending is not None:
            child.ending.cancel()
        await child.end()
        self._dying.discard(child)


def _refusal(exc: Exception) -> str:
    match exc:
        case _TooMuchError():
            return f"reading the request {exc}; send a shorter one, or one with a simpler schema or grammar"
        case _:
            return f"the request cannot be read: the process that read it {exc}; send another one"


def _fail(turn: _Turn, error: PrimadError) -> None:
    if not turn.reply.done():
        turn.reply.set_exception(error)


@cache
def _kind(preparation: Preparation[Any]) -> Any:
    """Return the type that ``preparation`` returns."""
    return typing.get_type_hints(preparation)["return"]
