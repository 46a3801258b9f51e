"""The ring process: receives steps, computes, sends. Started by the daemon (``ring/spawn.py``), one a device and epoch.

It is synchronous and has one thread of its own. It waits for two things at once, a command of the daemon and a step of
the ring, and for nothing longer than the next deadline. It ends when the daemon does.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final, Protocol

import psutil
import zmq

from primad.engine.llama import FirstWindow, MiddleWindow, TailWindow, TokenEmbedding, Vocabulary, WholeModel
from primad.engine.protocol import HiddenWindow, LogitsWindow
from primad.errors import PrimadError, ProtocolError, RingError
from primad.gguf.architectures import embedding_scale
from primad.gguf.model import open_model
from primad.gguf.windows import token_embedding
from primad.ring.channel import RingChannel
from primad.ring.head import Head, Send, Tell
from primad.ring.links import Links
from primad.ring.messages import (
    Cancel,
    Connect,
    Generate,
    Limits,
    Loading,
    Open,
    Opened,
    Report,
    RingBroken,
    RingCommand,
    Status,
)
from primad.ring.scheduler import Scheduler
from primad.ring.worker import Worker

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 60.0
"""A quiet ring process looks up from its sockets this often; every real event wakes it at once."""

HOPS_KEPT: Final = 4096


class _Meter:
    """What ``Status`` reports."""

    def __init__(self) -> None:
        self.steps = 0
        self.rows = 0
        self.compute_s = 0.0
        self.hop_s: deque[float] = deque(maxlen=HOPS_KEPT)

    def status(self, refused: int) -> Status:
        memory = psutil.Process().memory_info()
        return Status(
            steps=self.steps,
            rows=self.rows,
            compute_s=self.compute_s,
            hop_s=list(self.hop_s),
            rss_bytes=memory.rss,
            private_bytes=memory.rss - getattr(memory, "shared", 0),
            refused=refused,
        )


class _Part(Protocol):
    """One device's role in the ring."""

    def command(self, command: Generate | Cancel) -> None: ...

    def arrived(self, received_s: float) -> None: ...

    def turn(self) -> bool: ...

    def wait_s(self) -> float: ...


class _WorkerPart:
    """Computes what arrives."""

    def __init__(self, worker: Worker, links: Links, meter: _Meter) -> None:
        self._worker, self._links, self._meter = worker, links, meter
        self._received_s: float | None = None

    def command(self, command: Generate | Cancel) -> None:
        raise RingError(f"a worker was given {type(command).__name__}, which is the head's")

    def arrived(self, received_s: float) -> None:
        self._received_s = received_s

    def turn(self) -> bool:
        message = self._links.receive()
        if message is None:
            return False
        step, hidden = message
        start = time.perf_counter()
        received = self._received_s if self._received_s is not None else start
        self._received_s = None
        following, out = self._worker.receive(step, hidden)
        end = time.perf_counter()
        self._links.send(following, out)
        sent = time.perf_counter()
        self._meter.steps += 1
        self._meter.rows += step.rows
        self._meter.compute_s += end - start
        if step.rows == 1:
            self._meter.hop_s.append(start - received + sent - end)
        return True

    def wait_s(self) -> float:
        return math.inf


class _HeadPart:
    """Drives the step log and the tail; the whole model when there is no ring."""

    def __init__(self, head: Head, links: Links | None, meter: _Meter, channel: RingChannel) -> None:
        self._head, self._links, self._meter, self._channel = head, links, meter, channel

    def command(self, command: Generate | Cancel) -> None:
        match command:
            case Generate():
                self._head.submit(command)
            case Cancel():
                self._head.cancel(command)

    def arrived(self, received_s: float) -> None:
        pass

    def turn(self) -> bool:
        while self._links is not None and (message := self._links.receive()) is not None:
            try:
                self._head.receive(*message)
            except ProtocolError as exc:
                self._links.refuse(exc)
        start = time.perf_counter()
        outcome = self._head.turn()
        match outcome:
            case None:
                return False
            case Send(step, hidden):
                assert self._links is not None
                self._links.send(step, hidden)
            case Tell(events):
                for event in events:
                    self._channel.tell(event)
        self._meter.steps += 1
        self._meter.compute_s += time.perf_counter() - start
        return True

    def wait_s(self) -> float:
        return self._head.wait_s()


def _limits(opening: Open) -> Limits:
    return Limits(
        ring=opening.ring,
        epoch=opening.epoch,
        # The route's first window takes tokens, which no message carries.
        windows=frozenset(window.window for window in opening.windows) - {0},
        width=opening.width,
        rows=opening.options.rows,
        context=opening.options.context,
        sequences=opening.options.sequences,
    )


def _open_worker(opening: Open, channel: RingChannel) -> Worker:
    windows: dict[int, HiddenWindow] = {}
    for window in opening.windows:
        windows[window.window] = MiddleWindow(
            window.files, opening.options, width=opening.width, extra_buffers=window.extra_buffers
        )
        channel.tell(Loading(len(windows)))
    return Worker(windows)


def _open_head(opening: Open, channel: RingChannel) -> Head:
    assert opening.model is not None
    header = open_model(Path(opening.model))
    vocabulary = Vocabulary(Path(opening.model))
    ends, size = vocabulary.ends, vocabulary.size
    vocabulary.release()
    windows: dict[int, HiddenWindow] = {}
    tail: LogitsWindow | None = None
    for window in opening.windows:
        if opening.route == 1:
            tail = WholeModel(window.files, opening.options, ends, vocabulary=size, extra_buffers=window.extra_buffers)
        elif window.window == 0:
            embedding = TokenEmbedding(token_embedding(header), embedding_scale(header))
            windows[0] = FirstWindow(window.files, opening.options, embedding, extra_buffers=window.extra_buffers)
        elif window.window == opening.route - 1:
            tail = TailWindow(window.files, opening.options, ends, vocabulary=size, extra_buffers=window.extra_buffers)
        else:
            windows[window.window] = MiddleWindow(
                window.files, opening.options, width=opening.width, extra_buffers=window.extra_buffers
            )
        channel.tell(Loading(len(windows) + (tail is not None)))
    assert tail is not None
    return Head(
        windows=windows,
        tail=tail,
        route=opening.route,
        limits=_limits(opening),
        scheduler=Scheduler(context=opening.options.context, rows=opening.options.rows, depth=opening.depth),
        step_timeout_s=opening.step_timeout_s,
        clock=time.monotonic,
    )


def _await_open(channel: RingChannel) -> tuple[Open, list[RingCommand]] | None:
    """The first command, and what came right behind it; None when the daemon went away instead."""
    while channel.is_open:
        commands = channel.commands()
        if commands:
            if not isinstance(commands[0], Open):
                raise RingError(f"the first command was {type(commands[0]).__name__}, not Open")
            return commands[0], commands[1:]
    return None


def _serve(channel: RingChannel) -> None:
    opened = _await_open(channel)
    if opened is None:
        return
    opening, commands = opened
    is_head = opening.model is not None
    meter = _Meter()
    links = Links(opening.host, _limits(opening)) if opening.route > 1 else None
    part: _Part
    if is_head:
        head = _open_head(opening, channel)
        part = _HeadPart(head, links, meter, channel)
        head.warm_up()
    else:
        assert links is not None
        part = _WorkerPart(_open_worker(opening, channel), links, meter)
    channel.tell(Opened(links.endpoint if links else ""))
    connected = links is None
    poller = zmq.Poller()
    poller.register(channel.connection, zmq.POLLIN)
    if links is not None:
        poller.register(links.pull, zmq.POLLIN)
    while channel.is_open:
        for command in commands:
            match command:
                case Connect(address):
                    assert links is not None
                    links.connect(address)
                    connected = True
                case Report():
                    channel.tell(meter.status(links.refused if links else 0))
                case Generate() | Cancel():
                    part.command(command)
                case Open():
                    raise RingError("a ring process is opened once")
        busy = connected and part.turn()
        wait_s = 0.0 if busy else min(part.wait_s() if connected else LOOK_INTERVAL_S, LOOK_INTERVAL_S)
        ready = dict(poller.poll(math.ceil(wait_s * 1000)))
        if links is not None and links.pull in ready:
            part.arrived(time.perf_counter())
        commands = channel.commands() if channel.connection.fileno() in ready else []


def _connection(argument: str) -> socket.socket:
    """The daemon's socket: an inherited descriptor, or on Windows a shared handle read from standard input."""
    if sys.platform == "win32":
        return socket.fromshare(sys.stdin.buffer.read(int(argument)))
    return socket.socket(fileno=int(argument))


def main() -> None:
    """Entry point of ``python -m primad.ring.process FD``; everything it needs comes through that socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(
        level=os.environ.get("PRIMAD_LOG", "WARNING"), format="%(levelname)s ring process %(process)d: %(message)s"
    )
    channel = RingChannel(_connection(sys.argv[1]))
    try:
        _serve(channel)
    except PrimadError as exc:
        channel.tell(RingBroken(str(exc)))
    except Exception as exc:  # the top of the process: whatever it is, the daemon must hear of it
        logger.exception("the ring process failed")
        channel.tell(RingBroken(f"internal error in the ring process: {type(exc).__name__}: {exc}"))


if __name__ == "__main__":
    main()
