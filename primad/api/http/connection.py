"""The client's connection: reads its body within limits, notices promptly that it left, and streams to it.

uvicorn reports that a client left only to a task waiting in ``receive``, so everything that takes time runs next to a
task that waits there. When the client leaves, the work is cancelled; the generators it holds are closed, and with them
the sequence in the ring.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from primad.api.http.access import caller
from primad.api.http.framing import Framing
from primad.errors import PrimadError, RequestError, RingError
from primad.settings.timings import ApiTimings
from primad.system.shares import Shares

MAX_BODY_BYTES: Final = 8 << 20
"""Several times the text of the longest context in use."""
MAX_SEEN_BODY_BYTES: Final = 32 << 20
"""Limit for models that take pictures or sound: some photographs as base64."""
MAX_BODIES_BYTES: Final = 128 << 20
"""Limit for all requests in progress. Data made of a body, such as a list of tokens, takes several times as much."""

SEND_BODY: Final = "primad.send_body"
"""The scope's key for a function that sends bodies, bypassing middleware that only looks at the start of a response."""
BROKEN: Final = "primad.broken"
"""The scope's key for a function that receives the bytes which end a stream if this server goes away."""
_GONE: Final = RingError("the head went away during this response; send the request again")

log = logging.getLogger(__name__)
T = TypeVar("T")


async def read_json(
    request: Request, timeout_s: float, *, only_json: bool = False, max_bytes: int = MAX_BODY_BYTES
) -> bytes:
    """Return the body of a request, which must arrive within ``timeout_s`` and have at most ``max_bytes``. It must be
    declared as JSON if ``only_json``, or if a web page may have sent it.

    That keeps web pages out: a browser sends a CORS preflight before it sends JSON to another origin, and this server
    never allows it. Other programs need no content type; many send none, or the one of a form.

    Raises ``RequestError`` (400, 408, 413) and ``ClientDisconnect``.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and (only_json or may_be_a_page(request.headers)):
        raise RequestError(
            f"the content type is {media_type[:80]!r}; web pages send the header Content-Type: application/json"
        )
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError as exc:
        raise RequestError(f"the body did not arrive within {timeout_s:.0f} s", status=408) from exc
    return bytes(body)


def decoded(body: bytes, kind: type[T]) -> T:
    """Decode ``body`` as ``kind``. Raises ``RequestError``."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RequestError(f"the body is invalid: {exc}") from exc


def may_be_a_page(headers: Headers) -> bool:
    """Whether a browser may have sent the request: browsers send ``Origin`` with every POST to another origin, even
    without a content type (a ``Blob``) or for a form; old ones at least send the referring page."""
    return any(name in ("origin", "referer", "cookie") or name.startswith("sec-fetch-") for name in headers)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(f"the body is larger than {max_bytes} bytes", status=413, code="request_too_large")


class BodyGuard:
    """Makes callers share ``max_bytes`` for the bodies of their requests, from a body's first byte to the end of its
    response."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._bodies = app, Shares(max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        who, held_bytes = caller(), 0

        async def counted() -> Message:
            nonlocal held_bytes
            message = await receive()
            size = len(message.get("body", b""))
            if size and not self._bodies.has_room(who, size):
                raise RequestError(
                    "the bodies of your requests together have too many bytes; try again later",
                    status=429,
                    code="too_many_bytes",
                )
            self._bodies.take(who, size)
            held_bytes += size
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._bodies.give_back(who, held_bytes)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, which is cancelled if the client leaves. The body must have been read.

    Raises ``ClientDisconnect`` if the client left, and whatever ``work`` raises.
    """
    return await unless(_wait_left(receive), work)


async def unless(leaves: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; cancel ``work`` if ``leaves`` raises, and ``leaves`` when ``work`` ends. Raises
    whatever either raises."""
    try:
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(leaves)
            result = await work
            leaving.cancel()
    except BaseExceptionGroup as failures:
        failed = [first_of(failures)]
        del leaving  # the task refers to its exception, whose traceback refers to this frame
    else:
        return result
    raise failed.pop()


def first_of(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first of ``failures``, which caused the others, and free the others without the garbage collector:
    frames of task groups refer to them.

    Raise the result outside the handler of ``failures``, or it refers to them as its context, and where no local name
    refers to it any more.
    """
    freed: BaseException | None = failures
    while freed is not None:  # its context is the exception that cancelled the work
        freed.__traceback__, freed = None, freed.__context__
    return failures.exceptions[0]


async def _wait_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


class StreamNews:
    """News for a stream's client before the first message: only the latest is sent, until ``end`` is called.

    ``headers`` are the response's, as far as they are known when it begins.
    """

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.is_over = False
        self._latest, self._is_new = b"", asyncio.Event()

    def tell(self, data: bytes) -> None:
        """Send ``data`` next, in place of earlier news that was not sent yet."""
        self._latest = data
        self._is_new.set()

    def end(self) -> None:
        """Mark the news as complete."""
        self.is_over = True

    async def next(self) -> bytes:
        """Wait for news since the last call and return the latest."""
        await self._is_new.wait()
        self._is_new.clear()
        return self._latest


class MessageStream(Response):
    """Sends the messages of a generator as bytes, in the given ``framing``.

    A ``PrimadError`` before the first byte propagates, so that it becomes an ordinary response with its status.
    Refusals come immediately, so if nothing comes for a moment the headers are sent, followed by keep-alives and
    ``news``. A later error is sent in the framing's shape and ends the stream. The generator is closed in any case.
    """

    def __init__(
        self,
        messages: AsyncGenerator[msgspec.Struct, None],
        framing: Framing,
        timings: ApiTimings = ApiTimings(),
        news: StreamNews | None = None,
    ) -> None:
        self.media_type = framing.media_type
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.messages, self._framing, self._timings, self._news = messages, framing, timings, news
        self._begun = False
        self._reported_s = 0.0
        self._sending = False
        """Whether the client has not yet taken the last message."""
        self._turn = asyncio.Lock()
        """Lock for starting the stream and for keep-alives. A message waits for it; no keep-alive is sent during a
        message."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (note_broken := scope.get(BROKEN)) is not None:
            note_broken(self._framing.error(_GONE))
        try:
            await self._send_all(receive, send, scope.get(SEND_BODY, send))
        except ClientDisconnect:
            log.info("the client left before the end of its stream")

    async def _send_all(self, receive: Receive, send: Send, send_body: Send) -> None:
        try:
            await while_connected(receive, self._send_messages(send, send_body))
        except PrimadError as exc:
            if not self._begun:
                raise
            log.warning("a stream ends with an error: %s", exc)
            last = self._framing.error(exc)
        else:
            last = self._framing.end
        if last:
            await self._deliver(send, {"type": "http.response.body", "body": last, "more_body": True})
        await self._deliver(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_messages(self, send: Send, send_body: Send) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(self._report_that_it_waits(send)), group.create_task(self._lose_patience())]
                if self._news is not None:
                    beside.append(group.create_task(self._tell(send, self._news)))
                async with aclosing(self.messages) as messages:
                    async for message in messages:
                        if not self._begun or self._turn.locked():
                            async with self._turn:
                                await self._begin(send)
                        await self._send_bytes(send_body, self._framing.message(message))
                for task in beside:
                    task.cancel()
        except BaseExceptionGroup as failures:
            failed = [first_of(failures)]
        else:
            return
        raise failed.pop()

    async def _lose_patience(self) -> None:
        """Raise ``ClientDisconnect`` if the client does not take a message in time. A timer here adds no cost to each
        message."""
        while True:
            now_s = asyncio.get_running_loop().time()
            due_s = (self._reported_s if self._sending else now_s) + self._timings.send_timeout_s
            if due_s <= now_s:
                raise ClientDisconnect
            await asyncio.sleep(due_s - now_s)

    async def _report_that_it_waits(self, send: Send) -> None:
        """Start the stream if nothing comes for a moment, and then send keep-alives.

        This task measures time itself, so that sending a message costs nothing extra.
        """
        await asyncio.sleep(self._timings.admitted_s)
        async with self._turn:
            await self._begin(send)
        while True:
            quiet_s = asyncio.get_running_loop().time() - self._reported_s
            if quiet_s < self._timings.keepalive_s:
                await asyncio.sleep(self._timings.keepalive_s - quiet_s)
            elif not self._framing.waiting:
                return
            elif self._sending:  # others are waiting for the client
                await asyncio.sleep(self._timings.keepalive_s)
            else:
                async with self._turn:
                    await self._send_bytes(send, self._framing.waiting)

    async def _tell(self, send: Send, news: StreamNews) -> None:
        """Send the ``news`` as they come, only the latest after each pause."""
        while not news.is_over:
            await asyncio.sleep(self._timings.admitted_s)
            data = await news.next()
            async with self._turn:
                if not news.is_over:
                    await self._begin(send)
                    await self._send_bytes(send, data)

    async def _begin(self, send: Send) -> None:
        """Send the headers, once; the status is 200 from then on."""
        if not self._begun:
            self._begun = True
            self.headers.update({} if self._news is None else self._news.headers)
            await self._deliver(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._reported_s = asyncio.get_running_loop().time()

    async def _send_bytes(self, send: Send, data: bytes) -> None:
        """Send a message; ``_lose_patience`` enforces its deadline. Raises ``ClientDisconnect`` if the client is
        gone."""
        self._reported_s, self._sending = asyncio.get_running_loop().time(), True
        try:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        except OSError as exc:  # as newer ASGI servers raise
            raise ClientDisconnect from exc
        self._sending = False

    async def _deliver(self, send: Send, message: Message) -> None:
        """Send a single message. Raises ``ClientDisconnect`` if the client does not take it."""
        try:
            async with asyncio.timeout(self._timings.send_timeout_s):
                await send(message)
        except OSError as exc:  # TimeoutError is one
            raise ClientDisconnect from exc
