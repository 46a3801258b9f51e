"""The ring process: receives steps, computes, sends. The daemon starts it (``system/children/spawn.py``), one a device.

It is synchronous and has one thread of its own. It waits for everything together, the daemon's commands, the steps of
the ring and a next device that is slow to take one, and never longer than until the next deadline. It ends when the
daemon does.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import sys
import time
from typing import Final

import zmq

from primad.errors import PrimadError, RingError
from primad.ring.gpu_room import GpuWatch, watch_gpus
from primad.ring.messages import Open, RingBroken, RingCommand, broken_by, command_decoder
from primad.ring.roles import Role, open_role
from primad.settings.timings import RingTimings, Timings
from primad.system.allocator import keep_what_is_loaded
from primad.system.children.channel import RingChannel
from primad.system.children.child import inherited
from primad.system.terminal import start_logging

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 5.0
"""Interval at which an idle ring process wakes up; every real event wakes it immediately."""


def _await_open(channel: RingChannel[RingCommand]) -> tuple[Open, list[RingCommand]] | None:
    """Return the first command, and those that came right after it; None if the daemon went away instead."""
    while channel.is_open:
        commands = channel.commands()
        if commands:
            if not isinstance(commands[0], Open):
                raise RingError(f"the first command was {type(commands[0]).__name__}, not Open")
            return commands[0], commands[1:]
    return None


def _serve(channel: RingChannel[RingCommand], timings: RingTimings) -> None:
    opened = _await_open(channel)
    if opened is None:
        return
    opening, commands = opened
    role = open_role(opening, channel, timings)
    try:
        channel.notify(role.opened())
        keep_what_is_loaded()
        _attend(role, channel, commands, watch_gpus(opening))
    finally:
        role.close()


def _attend(role: Role, channel: RingChannel[RingCommand], commands: list[RingCommand], gpus: list[GpuWatch]) -> None:
    """Drive ``role`` until the daemon closes the connection; ``commands`` have arrived already."""
    daemon = channel.connection.fileno()
    while channel.is_open:
        for gpu in gpus:
            if (low := gpu.look(time.monotonic())) is not None:
                channel.notify(low)
        for command in commands:
            if isinstance(command, Open):
                raise RingError("a ring process is opened once; Reopen gives it another epoch")
            role.command(command)
        wait_s = 0.0 if role.turn() else min(role.wait_s(), LOOK_INTERVAL_S)
        ready = zmq.zmq_poll([(daemon, zmq.POLLIN), *role.watched()], math.ceil(wait_s * 1000))
        sockets = [found for found, _ in ready]
        if sockets and sockets != [daemon]:
            role.arrived(sockets, time.perf_counter())
        commands = channel.commands() if daemon in sockets else []


def main() -> None:
    """Entry point of ``python -m primad.ring.process FD``; everything it needs comes through that socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start_logging(os.environ.get("PRIMAD_LOG", "WARNING"), "%(levelname)s ring process %(process)d: %(message)s")
    faulthandler.enable()  # weights are memory-mapped: a file that is cut short is a SIGBUS
    channel: RingChannel[RingCommand] = RingChannel(inherited(sys.argv[1]), command_decoder)
    try:
        _serve(channel, Timings().ring)
    except PrimadError as exc:
        channel.notify(broken_by(exc))
    except Exception as exc:  # the top of the process: the daemon must hear of any error
        logger.exception("the ring process failed")
        channel.notify(RingBroken(f"internal error in the ring process: {type(exc).__name__}: {exc}", None))


if __name__ == "__main__":
    main()
