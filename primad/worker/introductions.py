"""Keep whom a head vouches for, and whom it does not any more, in the order in which it said so.

Each change of the trust file waits for the disk, seconds where that is busy; so it is made in a thread, or a head would take
this device for gone meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from primad.errors import ConfigError
from primad.layers.fetch import in_thread
from primad.network.messages import Introduce
from primad.trust.trust import TrustStore

MOST_WAITING: Final = 8


class Introductions:
    """What heads said of other devices and is not kept yet.

    ``say`` tells the owner one line, ``may_say`` whether one about a topic is said now.
    """

    def __init__(self, trust: TrustStore, say: Callable[[str], None], may_say: Callable[[str], bool]) -> None:
        self._trust, self._say, self._may_say = trust, say, may_say
        self._waiting: asyncio.Queue[tuple[Introduce, str]] = asyncio.Queue(MOST_WAITING)

    def add(self, introduce: Introduce, by: str) -> None:
        """Believe the head ``by``, soon. What waits longest is dropped for want of room: the latest list holds it too."""
        if self._waiting.full():
            self._waiting.get_nowait()
        self._waiting.put_nowait((introduce, by))

    async def run(self) -> None:
        """Keep what is added, without end; a list that cannot be kept, as on a full disk, costs a line and no more."""
        while True:
            introduce, by = await self._waiting.get()
            try:
                await in_thread(self._trust.introduce, [(each.device, each.key) for each in introduce.devices], by)
                for device in await in_thread(self._trust.withdraw, introduce.revoked, by):
                    self._say(f"{by} does not trust {device.device} any more; neither does this device")
            except ConfigError as exc:
                if self._may_say("trust"):
                    self._say(f"whom {by} trusts, and whom not any more, is not kept: {exc}")
