"""The head's side of its embedding process: start it, ask it, start it again after a crash, end it.

One task speaks with the process, a text at a time. Requests take turns, and a client that leaves costs the others no more
than the text that is being computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import psutil

from primad.embedding.messages import (
    CheckTexts,
    EmbeddedText,
    EmbedderFailed,
    EmbedderReady,
    EmbeddingAnswer,
    EmbeddingTask,
    EmbedText,
    LoadEmbedder,
    TextRefused,
    TextsChecked,
)
from primad.errors import EngineError, PrimadError, RequestError, RingError
from primad.ring.spawn import environment, how_it_ended
from primad.system.memory import staying
from primad.system.tasks import settle

MAX_WAITING: Final = 64
"""Requests that may wait or be computed at one time."""
TIMEOUT_S: Final = 300.0
"""The process is taken to hang when an answer takes longer."""
GRACE_S: Final = 60.0
"""A process that says no more ends before."""
_LINE_BYTES: Final = 1 << 20

_decoder = msgspec.json.Decoder(EmbeddingAnswer)
_Answer = TypeVar("_Answer", TextsChecked, EmbeddedText)
_Turn = tuple[EmbeddingTask, "asyncio.Future[EmbeddingAnswer]"]


class EmbeddingService:
    """Embeds with the model file ``path``, which clients call ``name``. ``began`` hears of each process."""

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
        self.most_tokens = self.width = 0
        self._path, self._threads, self._began, self._timeout_s = path, threads, began, timeout_s
        self._child: asyncio.subprocess.Process | None = None
        self._turns: asyncio.Queue[_Turn] = asyncio.Queue(MAX_WAITING)
        self._working: asyncio.Task[None] | None = None
        self._waiting = self._requests = self._errors = self._tokens = self._starts = 0
        self._computed_s = 0.0

    @property
    def pid(self) -> int | None:
        """The process that embeds, if there is one."""
        return None if self._child is None else self._child.pid

    def status(self) -> dict[str, Any]:
        """What it did and holds, for ``/status``; seconds are those that the process took for its answers."""
        child, rss = self._child, None
        if child is not None and child.returncode is None:
            with contextlib.suppress(psutil.Error):
                rss = psutil.Process(child.pid).memory_info().rss
        return {
            "model": self.name,
            "alive": rss is not None,
            "rss_bytes": rss,
            "starts": self._starts,
            "requests": self._requests,
            "errors": self._errors,
            "tokens": self._tokens,
            "waiting": self._waiting,
            "compute_s": self._computed_s,
        }

    async def start(self) -> EmbedderReady:
        """Load the model. Raises ``EngineError`` when llama.cpp cannot."""
        try:
            ready = await self._load()
        except RingError as exc:
            raise EngineError(f"{self._path}: cannot be loaded for embeddings: {exc}") from exc
        self._working = asyncio.create_task(self._work())
        return ready

    async def embed(
        self, texts: Sequence[str | list[int]], called: Callable[[int], str], *, cuts: bool = False
    ) -> tuple[list[bytes], int]:
        """A vector of length 1 for each of ``texts``, which a request has ``called`` so, and the tokens of all.

        Raises ``RequestError`` for texts that cannot be embedded or where too many requests wait, ``RingError`` when the
        process ended or hung; the next request starts it again.
        """
        self._requests += 1
        try:
            vectors, tokens = await self._embed(texts, called, cuts=cuts)
        except PrimadError:
            self._errors += 1
            raise
        self._tokens += tokens
        return vectors, tokens

    async def _embed(
        self, texts: Sequence[str | list[int]], called: Callable[[int], str], *, cuts: bool
    ) -> tuple[list[bytes], int]:
        if self._working is None:
            raise RingError(f"the embedding model {self.name} is being loaded; try again in a moment")
        if self._waiting >= MAX_WAITING:
            raise RequestError(
                f"{MAX_WAITING} requests for embeddings are waiting already; try again later",
                status=429,
                code="queue_full",
            )
        self._waiting += 1
        try:
            checked = await self._turn(CheckTexts(texts=list(texts), cuts=cuts), TextsChecked, called)
            vectors = [
                (await self._turn(EmbedText(text=text, cuts=cuts), EmbeddedText, called)).vector for text in texts
            ]
            return vectors, checked.tokens
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """End the process, whatever it does; what waits for it fails."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])
        while not self._turns.empty():
            _fail(self._turns.get_nowait()[1], RingError("primad is stopping"))
        await self._end()

    async def _turn(self, task: EmbeddingTask, kind: type[_Answer], called: Callable[[int], str]) -> _Answer:
        future: asyncio.Future[EmbeddingAnswer] = asyncio.get_running_loop().create_future()
        await self._turns.put((task, future))
        answer = await future
        if isinstance(answer, TextRefused):
            raise RequestError(f"{called(answer.index)}: {answer.error}", param=called(answer.index))
        assert isinstance(answer, kind)
        return answer

    async def _work(self) -> None:
        while True:
            task, future = await self._turns.get()
            if future.cancelled():
                continue
            try:
                if self._child is None or self._child.returncode is not None:
                    await self._load()
                begin_s = time.perf_counter()
                try:
                    settle(future, await self._ask(task))
                finally:
                    self._computed_s += time.perf_counter() - begin_s
            except PrimadError as exc:
                _fail(future, RingError(f"{exc}; the next request starts it again"))
            except asyncio.CancelledError:
                _fail(future, RingError("primad is stopping"))
                raise

    async def _load(self) -> EmbedderReady:
        await self._end()
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "primad.embedding.process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment({"OMP_PROC_BIND": "false"} | os.environ, self._threads, 0),  # the ring has the cores
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        staying.add(self._child.pid)
        self._starts += 1
        self._began(self._child.pid)
        ready = await self._ask(LoadEmbedder(path=str(self._path), threads=self._threads))
        assert isinstance(ready, EmbedderReady)
        self.most_tokens, self.width = ready.most_tokens, ready.width
        return ready

    async def _ask(self, task: EmbeddingTask) -> EmbeddingAnswer:
        """Whoever leaves before the answer is there ends the process too: the answer would be taken for another's."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        line = None
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.suppress(ConnectionError):  # it may be gone: then there is no answer
                    child.stdin.write(msgspec.json.encode(task) + b"\n")
                    await child.stdin.drain()
                line = await child.stdout.readline()
        except TimeoutError:
            raise RingError(f"the embedding process gave no answer in {self._timeout_s:g} s") from None
        finally:
            if line is None or not line.endswith(b"\n"):
                await self._end(grace_s=0.0 if line is None else GRACE_S)
        if not line.endswith(b"\n"):
            assert child.returncode is not None, "its end was awaited"
            raise RingError(f"the embedding process {how_it_ended(child.returncode)}")
        answer: EmbeddingAnswer = _decoder.decode(line)
        if isinstance(answer, EmbedderFailed):
            raise EngineError(answer.error)
        return answer

    async def _end(self, *, grace_s: float = 0.0) -> None:
        """End the process, unless it does so itself within ``grace_s``: to kill one that ends hides how it ended."""
        child, self._child = self._child, None
        if child is None:
            return
        try:
            if grace_s:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.wait(), grace_s)
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
            await child.wait()
            staying.discard(child.pid)


def _fail(future: asyncio.Future[EmbeddingAnswer], error: PrimadError) -> None:
    if not future.done():
        future.set_exception(error)
