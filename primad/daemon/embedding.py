"""The head's side of its embedding process: starts it, sends it texts, starts it again after a crash, ends it.

One task talks to the process, sending one text at a time, or several that are only counted. Callers take turns, and so
do the requests of each caller; a client that leaves costs the others no more than what is being computed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from primad.engine.embedding_messages import (
    CheckTexts,
    EmbeddedText,
    EmbedderFailed,
    EmbedderReady,
    EmbeddingReply,
    EmbeddingTask,
    EmbedText,
    LoadEmbedder,
    TextRefused,
    TextsChecked,
)
from primad.errors import EngineError, PrimadError, RequestError, RingError
from primad.system.children.asked_child import AskedChild, twice
from primad.system.children.spawn import environment
from primad.system.shares import Shares, Turns
from primad.system.tasks import resolve

MAX_WAITING: Final = 64
"""Number of requests of one caller that may wait or run concurrently; callers share twice that number."""
CHECKED_CHARS: Final = 1 << 16
"""Characters of the texts that are counted in one turn, unless a single text is longer."""
TIMEOUT_S: Final = 300.0
"""The process counts as hanging when a reply takes longer."""

_PROCESS: Final = "the embedding process"
_decoder = msgspec.msgpack.Decoder(EmbeddingReply)
_Answer = TypeVar("_Answer", TextsChecked, EmbeddedText)
_Text = str | list[int]
_Turn = tuple[EmbeddingTask, "asyncio.Future[EmbeddingReply]"]


class EmbeddingService:
    """Embeds with the model file ``path``, which clients call ``name``. ``began`` gets the id of each process."""

    def __init__(
        self,
        path: Path,
        name: str,
        *,
        threads: int,
        began: Callable[[int], None] = lambda _: None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.name, self.created = name, int(time.time())
        self.max_text_tokens = self.width = 0
        self._path, self._threads, self._began, self._timeout_s = path, threads, began, timeout_s
        self._child: AskedChild | None = None
        self._places = Shares(2 * MAX_WAITING, minimum=1)
        self._turns = Turns[_Turn]()
        self._asked = asyncio.Event()
        self._working: asyncio.Task[None] | None = None
        self._waiting = self._requests = self._errors = self._tokens = self._starts = 0
        self._computed_s = 0.0

    @property
    def pid(self) -> int | None:
        """The id of the process that embeds, if there is one."""
        return None if self._child is None else self._child.pid

    def status(self) -> dict[str, Any]:
        """Return its counters and state, for ``/status``; seconds are the time that the process took for its
        replies."""
        rss = 0 if self._child is None else self._child.rss_bytes()
        return {
            "model": self.name,
            "alive": rss > 0,
            "rss_bytes": rss or None,
            "starts": self._starts,
            "requests": self._requests,
            "errors": self._errors,
            "tokens": self._tokens,
            "waiting": self._waiting,
            "compute_s": self._computed_s,
        }

    async def start(self) -> EmbedderReady:
        """Load the model. Raises ``EngineError`` if llama.cpp cannot."""
        try:
            ready = await self._load()
        except RingError as exc:
            raise EngineError(f"{self._path}: cannot be loaded for embeddings: {exc}") from exc
        self._working = asyncio.create_task(self._work())
        return ready

    async def embed(
        self, texts: Sequence[_Text], called: Callable[[int], str], *, cuts: bool = False, owner: str = ""
    ) -> tuple[list[bytes], int]:
        """Return a vector of length 1 for each of ``texts``, which a request of ``owner`` calls ``called``, and the
        number of tokens.

        Raises ``RequestError`` if texts cannot be embedded or too many requests wait, ``RingError`` if the process
        ended twice or hung; the next request starts it again.
        """
        self._requests += 1
        try:
            vectors, tokens = await self._embed(texts, called, cuts, owner)
        except PrimadError:
            self._errors += 1
            raise
        self._tokens += tokens
        return vectors, tokens

    async def _embed(
        self, texts: Sequence[_Text], called: Callable[[int], str], cuts: bool, owner: str
    ) -> tuple[list[bytes], int]:
        if self._working is None:
            raise RingError(f"the embedding model {self.name} is being loaded; try again in a moment")
        if not self._places.has_room(owner):
            raise RequestError(
                "too many of your requests for embeddings are waiting already; try again later",
                status=429,
                code="queue_full",
            )
        self._waiting += 1
        try:
            with self._places.held(owner):
                tokens, vectors = 0, []
                for first, some in _parts(texts):
                    named = partial(_called_from, called, first)
                    checked = await self._turn(owner, CheckTexts(texts=some, cuts=cuts), TextsChecked, named)
                    tokens += checked.tokens
                for text in texts:
                    embedded = await self._turn(owner, EmbedText(text=text, cuts=cuts), EmbeddedText, called)
                    vectors.append(embedded.vector)
                return vectors, tokens
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """End the process, whatever it is doing; waiting requests fail."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])
        while self._turns:
            _fail(self._turns.next()[1], RingError("primad is stopping"))
        await self._end()

    async def _turn(
        self, owner: str, task: EmbeddingTask, kind: type[_Answer], called: Callable[[int], str]
    ) -> _Answer:
        future: asyncio.Future[EmbeddingReply] = asyncio.get_running_loop().create_future()
        self._turns.add(owner, (task, future))
        self._asked.set()
        answer = await future
        if isinstance(answer, TextRefused):
            raise RequestError(f"{called(answer.index)}: {answer.error}", param=called(answer.index))
        assert isinstance(answer, kind)
        return answer

    async def _work(self) -> None:
        while True:
            while not self._turns:
                self._asked.clear()
                await self._asked.wait()
            task, future = self._turns.next()
            if future.cancelled():
                continue
            try:
                resolve(future, await twice(partial(self._compute, task)))
            except PrimadError as exc:
                _fail(future, RingError(f"{exc}; the next request starts it again"))
            except asyncio.CancelledError:
                _fail(future, RingError("primad is stopping"))
                raise

    async def _compute(self, task: EmbeddingTask) -> EmbeddingReply:
        if self._child is None or not self._child.is_alive:
            await self._load()
        begin_s = time.perf_counter()
        try:
            return await self._ask(task)
        finally:
            self._computed_s += time.perf_counter() - begin_s

    async def _load(self) -> EmbedderReady:
        await self._end()
        variables = environment({"OMP_PROC_BIND": "false"} | os.environ, self._threads, 0)  # the ring has the cores
        self._child = await AskedChild.start("primad.engine.embedding_process", variables, _PROCESS)
        self._starts += 1
        self._began(self._child.pid)
        ready = await self._ask(LoadEmbedder(path=str(self._path), threads=self._threads))
        assert isinstance(ready, EmbedderReady)
        self.max_text_tokens, self.width = ready.max_text_tokens, ready.width
        return ready

    async def _ask(self, task: EmbeddingTask) -> EmbeddingReply:
        """Ask the process. If this ends before the reply arrives, end the process: the reply would be taken for
        another's."""
        assert self._child is not None
        try:
            answer: EmbeddingReply = _decoder.decode(await self._child.answer(task, _PROCESS, self._timeout_s))
        except BaseException:
            await self._end()
            raise
        if isinstance(answer, EmbedderFailed):
            raise EngineError(answer.error)
        return answer

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end()


def _parts(texts: Sequence[_Text]) -> Iterator[tuple[int, list[_Text]]]:
    """Yield runs of ``texts`` that are counted in one turn each, with the index of the first."""
    first = size = 0
    for index, text in enumerate(texts):
        if index > first and size + len(text) > CHECKED_CHARS:
            yield first, list(texts[first:index])
            first, size = index, 0
        size += len(text)
    yield first, list(texts[first:])


def _called_from(called: Callable[[int], str], first: int, index: int) -> str:
    return called(first + index)


def _fail(future: asyncio.Future[EmbeddingReply], error: PrimadError) -> None:
    if not future.done():
        future.set_exception(error)
