"""The daemon as the HTTP API sees it: requests go to the head's ring process, tokens come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from itertools import count
from typing import Any, Final

from primad.api.backend import Health, ServedModel
from primad.errors import RequestError, RingError
from primad.ring.messages import Cancel, Finished, Generate, RingCommand, Sampled, Sampling

MAX_WAITING: Final = 64
"""Generations that may run or wait at one time."""

Send = Callable[[RingCommand], Awaitable[None]]
StatusOf = Callable[[], Awaitable[dict[str, Any]]]


class RingBackend:
    """Serves the API from a ring that comes and goes: ``attach`` it when it serves, ``detach`` it when it is gone."""

    def __init__(self) -> None:
        self._served: ServedModel | None = None
        self._send: Send | None = None
        self._status: StatusOf | None = None
        self._detail = "starting"
        self._requests = count(1)
        self._open: dict[int, asyncio.Queue[Sampled | Finished]] = {}
        self.created = int(time.time())

    def health(self) -> Health:
        return Health(serving=self._send is not None, detail=self._detail)

    def model(self) -> ServedModel | None:
        return self._served

    async def status(self) -> dict[str, Any]:
        """What the ring did and holds; an empty object while there is none."""
        return await self._status() if self._status is not None else {}

    def describe(self, detail: str) -> None:
        """What the health check says goes on."""
        self._detail = detail

    def attach(self, served: ServedModel, send: Send, status: StatusOf, detail: str) -> None:
        """The ring serves from now on."""
        self._served, self._send, self._status, self._detail = served, send, status, detail

    def detach(self, error: str) -> None:
        """The ring is gone: every open generation ends with ``error``."""
        self._send, self._status, self._detail = None, None, error
        for request, queue in self._open.items():
            queue.put_nowait(
                Finished(
                    request=request,
                    reason="error",
                    error=error,
                    prompt_tokens=0,
                    completion_tokens=0,
                    prompt_s=0,
                    decode_s=0,
                )
            )

    def deliver(self, event: Sampled | Finished) -> None:
        """Give an event of the ring to whoever asked; what nobody asks for any more is dropped."""
        queue = self._open.get(event.request)
        if queue is not None:
            queue.put_nowait(event)

    async def generate(
        self, prompt: list[int], *, max_tokens: int, sampling: Sampling, logprobs: int | None
    ) -> AsyncGenerator[Sampled | Finished, None]:
        send = self._send
        if send is None:
            raise RingError(f"the model cannot be served now: {self._detail}")
        if len(self._open) >= MAX_WAITING:
            raise RequestError(
                f"{MAX_WAITING} requests are waiting already; try again later", status=429, code="queue_full"
            )
        request = next(self._requests)
        # Bounded by nature: a generation has at most max_tokens tokens and one end.
        queue: asyncio.Queue[Sampled | Finished] = asyncio.Queue(max_tokens + 2)
        self._open[request] = queue
        finished = False
        try:
            await send(
                Generate(request=request, prompt=prompt, max_tokens=max_tokens, sampling=sampling, logprobs=logprobs)
            )
            while not finished:
                event = await queue.get()
                finished = isinstance(event, Finished)
                yield event
        finally:
            del self._open[request]
            if not finished and self._send is send:
                await send(Cancel(request))
