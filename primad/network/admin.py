"""The local admin channel: the command line sends requests to the daemon of this home folder.

The daemon listens on a loopback port that it writes to ``run/admin.json``. It admits only the key of its own identity:
a client that proves this key can read ``identity.json``, which only the owner can. The channel has its own ZeroMQ
context, since a context has one gate, and the daemon's other servers admit more keys than this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from primad import __version__
from primad.errors import ClusterError, ConfigError, PrimadError, ProtocolError
from primad.network.gate import Gate
from primad.network.sockets import endpoint, listen, open_socket
from primad.settings.config import LOOPBACK
from primad.system.files import read_private, write_private
from primad.system.process_start import start_of, still_runs
from primad.trust.identity import Identity, load_identity

logger = logging.getLogger(__name__)

ASK_S: Final = 5.0
"""Seconds that the command line waits for a daemon's reply."""
HANDLE_S: Final = 60.0
"""The longest time a daemon may take for one request."""
LAST_WORD_MS: Final = 300
"""How long a daemon that ends tries to send its last reply."""


class OpenPairing(msgspec.Struct, tag=True, frozen=True):
    """Show a code for another device to pair; returns the open code if there is one."""


class BringCode(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Pair with the device that shows ``code``, at ``at`` (host:port), or found by mDNS."""

    code: str
    at: str | None


class Leave(msgspec.Struct, tag=True, frozen=True):
    """Hand over this device's layers, then end the daemon."""


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Compute nothing until ``Resume``, even after a restart."""


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Compute again."""


class Describe(msgspec.Struct, tag=True, frozen=True):
    """Report the state."""


class Done(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The request succeeded; ``text`` is one line about it."""

    text: str


class Refusal(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The request failed; ``reason`` is one line."""

    reason: str


class Described(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The state, as JSON-like data."""

    status: dict[str, Any]


class PairingCode(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """An open pairing code: its remaining seconds, the port for pairing without multicast, and this device's addresses,
    as ``host:port``."""

    code: str
    expires_s: float
    port: int
    addresses: list[str] = []


AdminRequest = OpenPairing | BringCode | Leave | Pause | Resume | Describe
AdminReply = Done | Refusal | Described | PairingCode
Handler = Callable[[AdminRequest], Awaitable[AdminReply]]
"""Handles a request. A ``PrimadError`` becomes a ``Refusal``."""

_requests: Final[msgspec.msgpack.Decoder[AdminRequest]] = msgspec.msgpack.Decoder(AdminRequest)
_answers: Final[msgspec.msgpack.Decoder[AdminReply]] = msgspec.msgpack.Decoder(AdminReply)


class _Note(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``admin.json``: the daemon's port, its process, and when that process started (``start_of``)."""

    port: int
    pid: int
    started: float
    since_boot: float


class AdminServer:
    """The daemon's side of the channel. It handles one request at a time; a caller that does not wait for its reply
    costs nothing.

    A reply is sent when ``handler`` returns, so a handler that ends the daemon schedules the end and returns first.
    """

    def __init__(self, identity: Identity, home: Path, handler: Handler, *, timeout_s: float = HANDLE_S) -> None:
        self._timeout_s = timeout_s
        self._identity = identity
        self._path = note_path(home)
        self._handler = handler

    async def run(self) -> None:
        """Reply until cancelled. Raises ``ClusterError`` or ``ConfigError`` if it cannot listen or write its note."""
        context = zmq.asyncio.Context()
        try:
            async with Gate(context, self._is_own):
                socket, port = listen(context, zmq.ROUTER, LOOPBACK, None, identity=self._identity)
                socket.setsockopt(zmq.LINGER, LAST_WORD_MS)
                with socket, self._noted(port):
                    while True:
                        peer, *frames = await socket.recv_multipart()
                        answer = await self._answer(frames)
                        await socket.send_multipart([peer, msgspec.msgpack.encode(answer)])
        finally:
            context.term()

    def _is_own(self, key: str) -> bool:
        return key == self._identity.public

    async def _answer(self, frames: list[bytes]) -> AdminReply:
        try:
            request = _decode_request(frames)
            async with asyncio.timeout(self._timeout_s):
                return await self._handler(request)
        except TimeoutError:
            return Refusal(reason=f"timed out after {self._timeout_s:g} s; look at the daemon's terminal")
        except PrimadError as exc:
            return Refusal(reason=str(exc))

    @contextlib.contextmanager
    def _noted(self, port: int) -> Iterator[None]:
        """Keep the note about this port while the server replies."""
        started, since_boot = start_of(os.getpid())
        note = _Note(port=port, pid=os.getpid(), started=started, since_boot=since_boot)
        write_private(self._path, msgspec.json.encode(note))
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)


def note_path(home: Path) -> Path:
    """Return the path of the note of the daemon of ``home``."""
    return home / "run" / "admin.json"


def ask(home: Path, request: AdminRequest, timeout_s: float = ASK_S) -> AdminReply:
    """Send ``request`` to the daemon of ``home`` and return its reply.

    Raises ``ClusterError`` if no daemon runs with that folder or none replies in ``timeout_s``, ``ConfigError`` for a
    damaged file in it.
    """
    port = _running(home)
    if port is None:
        raise ClusterError(
            f"--home {home}: no primad runs with this folder; start 'primad join' or 'primad serve' with it first"
        )
    loop_factory = asyncio.SelectorEventLoop if os.name == "nt" else None  # ZeroMQ needs a selector loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_ask(load_identity(home), port, request, timeout_s, home))


def is_running(home: Path) -> bool:
    """Whether a daemon runs with ``home`` and accepts requests."""
    return _running(home) is not None


async def _ask(identity: Identity, port: int, request: AdminRequest, timeout_s: float, home: Path) -> AdminReply:
    context = zmq.asyncio.Context()
    try:
        with open_socket(context, zmq.DEALER, identity=identity, server=identity.public) as socket:
            socket.connect(endpoint(LOOPBACK, port))
            async with asyncio.timeout(timeout_s):
                await socket.send(msgspec.msgpack.encode(request))
                frames = await socket.recv_multipart()
            return _answers.decode(frames[0])
    except TimeoutError as exc:
        raise ClusterError(
            f"--home {home}: the primad that runs with this folder has not responded for {timeout_s:g} s; "
            "look at its terminal, or restart it"
        ) from exc
    except msgspec.MsgspecError as exc:
        raise ClusterError(
            f"--home {home}: the primad that runs with this folder is of another version; restart it"
        ) from exc
    finally:
        context.destroy(linger=0)


def _decode_request(frames: list[bytes]) -> AdminRequest:
    try:
        if len(frames) != 1:
            raise ProtocolError(f"request of {len(frames)} frames; one has 1")
        return _requests.decode(frames[0])
    except msgspec.MsgspecError as exc:
        raise ProtocolError(
            f"the daemon is primad {__version__} and does not know this request; restart it with your version"
        ) from exc


def _running(home: Path) -> int | None:
    """Return the port of the daemon of ``home``; None if its note is missing, damaged or left by a process that has
    ended."""
    try:
        data = read_private(note_path(home))
        note = None if data is None else msgspec.json.decode(data, type=_Note)
    except (msgspec.MsgspecError, ConfigError) as exc:
        logger.debug("no daemon to ask: %s", exc)
        return None
    if note is None or not 0 < note.port < 65_536 or note.pid < 1:
        return None
    return note.port if still_runs(note.pid, note.started, note.since_boot) else None
