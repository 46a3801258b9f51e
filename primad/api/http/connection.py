"""The client's connection: its body within limits, prompt detection of its leaving, and streams to it.

uvicorn reports that a client left only to a task waiting in ``receive``, so everything that takes time runs next to a
task that waits there. Leaving cancels the work; the generators it holds are closed on the way out, and with them the
sequence in the ring.
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
"""Where a model sees: some photographs as base64."""
MAX_BODIES_BYTES: Final = 128 << 20
"""For all requests in progress. Data made of a body, such as a list of tokens, takes several times as much."""

SEND_BODY: Final = "primad.send_body"
"""The scope's key for a function that sends bodies, bypassing middleware that only looks at the start of a response."""
BROKEN: Final = "primad.broken"
"""The scope's key for a function that gets the bytes which end a stream if this server goes away."""
_GONE: Final = RingError("the head went away during this response; send the request again")

log = logging.getLogger(__name__)
T = TypeVar("T")


async def read_json(
    request: Request, timeout_s: float, *, only_json: bool = False, max_bytes: int = MAX_BODY_BYTES
) -> bytes:
    """The body of a request, which has to arrive within ``timeout_s`` and has at most ``max_bytes``. It must be
    declared as JSON if ``only_json``, or if a web page may have sent it.

    That keeps web pages out: a browser sends a CORS preflight before it sends JSON to another origin, and this server
    never allows it. Other programs need no content type; many send none, or that of a form.

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
    """``body`` as ``kind``. Raises ``RequestError``."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RequestError(f"the body is invalid: {exc}") from exc


def may_be_a_page(headers: Headers) -> bool:
    """Whether a browser may have sent it: browsers send ``Origin`` with every POST to another origin, even without a
    content type (a ``Blob``) or for a form; old ones at least the referring page."""
    return any(name in ("origin", "referer", "cookie") or name.startswith("sec-fetch-") for name in headers)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(f"the body is larger than {max_bytes} bytes", status=413, code="request_too_large")


class BodyGuard:
    """Callers share ``max_bytes`` for the bodies of their requests, from a body's first byte to the end of its
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
                    "the bodies of your requests have too many bytes together; try again later",
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
    """The result of ``work``, which is cancelled if the client leaves. The body must have been read.

    Raises ``ClientDisconnect`` if it left, and whatever ``work`` raises.
    """
    return await unless(_wait_left(receive), work)


async def unless(leaves: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled if ``leaves`` raises, and cancels it. Raises whatever either raises."""
    try:
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(leaves)
            result = await work
            leaving.cancel()
    except BaseExceptionGroup as failures:
        failed = [first_of(failures)]
        del leaving  # it has what it failed with, whose traceback has this frame
    else:
        return result
    raise failed.pop()


def first_of(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first of ``failures``, which is the reason for the others. They are freed without the collector: frames
    of task groups hold them. Raise it where they are no longer handled, or it has them, and from where no name is
    left of it."""
    freed: BaseException | None = failures
    while freed is not None:  # behind it is what the work was cancelled with
        freed.__traceback__, freed = None, freed.__context__
    return failures.exceptions[0]


async def _wait_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


class StreamNews:
    """What a stream's client hears before the first message: the latest of what was told, until the ``end``.

    ``headers`` are those of the response, as far as they are known when it begins.
    """

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.is_over = False
        self._latest, self._is_new = b"", asyncio.Event()

    def tell(self, data: bytes) -> None:
        """Send ``data`` next, in place of what was told before."""
        self._latest = data
        self._is_new.set()

    def end(self) -> None:
        """There is no more."""
        self.is_over = True

    async def next(self) -> bytes:
        """The latest, when something was told since the last."""
        await self._is_new.wait()
        self._is_new.clear()
        return self._latest


class MessageStream(Response):
    """The messages of a generator as bytes, in the given ``framing``.

    A ``PrimadError`` before the first byte propagates, so that it becomes an ordinary response with its status.
    Refusals come at once; so if nothing comes for a moment the headers are sent, followed by keep-alives. A later error
    is sent in the framing's shape, and nothing after it. The generator is closed in any case. ``news`` is sent meanwhile.
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
        """Raises ``ClientDisconnect`` if the client does not take a message in time; messages cost nothing here."""
        while True:
            now_s = asyncio.get_running_loop().time()
            due_s = (self._reported_s if self._sending else now_s) + self._timings.send_timeout_s
            if due_s <= now_s:
                raise ClientDisconnect
            await asyncio.sleep(due_s - now_s)

    async def _report_that_it_waits(self, send: Send) -> None:
        """Start the stream if nothing comes for a moment, and then send keep-alives.

        It measures time itself, so that a message costs nothing here.
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
        """Send the ``news`` one by one, the latest after each pause."""
        while not news.is_over:
            await asyncio.sleep(self._timings.admitted_s)
            data = await news.next()
            async with self._turn:
                if not news.is_over:
                    await self._begin(send)
                    await self._send_bytes(send, data)

    async def _begin(self, send: Send) -> None:
        """Send the headers, once: from now on the status is 200."""
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
