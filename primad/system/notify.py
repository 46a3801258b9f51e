"""Notifications of a daemon to systemd: ready, status, alive, stopping.

The protocol is ``sd_notify(3)``: one datagram of lines ``KEY=VALUE`` to the socket that ``NOTIFY_SOCKET`` names. If
that variable is not set, nothing is sent. The watchdog is fed by the daemon's own loop, so that a daemon that hangs is
restarted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Final

logger = logging.getLogger(__name__)

STATUS_EVERY_S: Final = 5.0
"""Minimum time between two status notifications, and maximum time between two to the watchdog, where its limit allows.
"""
MAX_STATUS_CHARS: Final = 300
_SEND_S: Final = 1.0


def is_awaited(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a service manager wants notifications."""
    return bool(environ.get("NOTIFY_SOCKET")) and sys.platform != "win32"


def notify(*lines: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send ``lines`` to the service manager, if there is one; return whether there is."""
    if sys.platform == "win32" or not is_awaited(environ):
        return False
    address = environ["NOTIFY_SOCKET"]
    if address.startswith("@"):  # an abstract socket name
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.settimeout(_SEND_S)
            link.sendto("\n".join(lines).encode(), address)
    except (OSError, ValueError) as exc:
        logger.debug("NOTIFY_SOCKET: %s", exc)
        return False
    return True


def watchdog_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """The time within which the watchdog must hear from this process; None if there is no watchdog."""
    try:
        timeout_us = int(environ.get("WATCHDOG_USEC", ""))
        watched = int(environ.get("WATCHDOG_PID", "") or os.getpid())
    except ValueError:
        return None
    return timeout_us / 1e6 if timeout_us > 0 and watched == os.getpid() else None


async def report(status: Callable[[], str], environ: Mapping[str, str] = os.environ) -> None:
    """Report that this daemon is ready, and from then on its ``status`` and that it is alive, until cancelled.

    Returns immediately if there is no service manager.
    """
    if not is_awaited(environ):
        return
    timeout_s = watchdog_s(environ)
    every_s = STATUS_EVERY_S if timeout_s is None else min(STATUS_EVERY_S, timeout_s / 2)
    sent = _line(status())
    notify("READY=1", sent, environ=environ)
    try:
        while True:
            await asyncio.sleep(every_s)
            status_line = _line(status())
            lines = [] if status_line == sent else [status_line]
            if timeout_s is not None:
                lines.append("WATCHDOG=1")
            if lines and notify(*lines, environ=environ):
                sent = status_line
    finally:
        notify("STOPPING=1", environ=environ)


def _line(status: str) -> str:
    return f"STATUS={' '.join(status.split())[:MAX_STATUS_CHARS]}"
