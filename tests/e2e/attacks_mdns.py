"""mDNS attacks on loopback: malformed packets, and announcements of other devices' names."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partialmethod
from unittest.mock import patch

from zeroconf.asyncio import AsyncZeroconf

from primad.network.discovery import Discovery
from primad.trust.identity import new_identity

HOST = "127.0.0.1"
_UNASKED = partialmethod(AsyncZeroconf.async_register_service, cooperating_responders=True)
"""Registers a name without checking whether it is free."""


def datagrams() -> list[bytes]:
    """Return malformed packets of all sizes, and questions whose names point to themselves."""
    header = b"\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00"
    answer = b"\x00\x00\x84\x00\x00\x00\xff\xff\x00\x00\x00\x00"
    loop = header + b"\xc0\x0c\x00\x0c\x00\x01"
    noise = [os.urandom(size) for size in (1, 11, 12, 13, 100, 1400, 8900) for _ in range(10)]
    return [b"", header, loop, answer, answer + os.urandom(500), *noise] * 3


@asynccontextmanager
async def impostors(cluster: str, name: str, count: int) -> AsyncIterator[None]:
    """Announce ``count`` workers, the first under ``name``, with other keys and nothing listening."""
    announced = [Discovery(HOST, None) for _ in range(count)]
    try:
        names = [name, *(f"fake-{number}" for number in range(1, count))]
        with patch.object(AsyncZeroconf, "async_register_service", _UNASKED):
            await asyncio.gather(
                *(
                    each.announce(
                        called, cluster=cluster, role="worker", version="9", port=9, key=new_identity().public
                    )
                    for called, each in zip(names, announced, strict=True)
                )
            )
        yield
    finally:
        await asyncio.gather(*(each.close() for each in announced))
