"""What the owner of this device wants now: computing paused by hand or on battery.

The policy decides from its inputs and the time. The shell reads the battery and keeps a pause by hand in
``paused.json``, so that it outlives a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from primad.errors import ConfigError
from primad.system.files import write_private

logger = logging.getLogger(__name__)

BATTERY_EVERY_S: Final = 15.0
SETTLED_S: Final = 10.0
"""A change between mains and battery counts after it has lasted this long: contacts of plugs bounce."""
BY_HAND: Final = "paused by its owner; 'primad resume' ends that"
ON_BATTERY: Final = "runs on battery; it computes again when it is plugged in"


@dataclass(frozen=True, slots=True, kw_only=True)
class PausePolicy:
    """Whether this device computes. Every change is a new value.

    ``on_battery`` is what counts now; ``other_since_s`` is the time since which the battery has reported the opposite,
    None while it agrees.
    """

    pause_on_battery: bool
    by_hand: bool
    on_battery: bool = False
    other_since_s: float | None = None

    @property
    def paused(self) -> str | None:
        """Why this device computes nothing, as the end of "DEVICE ..."; None while it computes."""
        if self.by_hand:
            return BY_HAND
        return ON_BATTERY if self.pause_on_battery and self.on_battery else None

    def pause(self) -> PausePolicy:
        """Return the policy after the owner paused the device."""
        return replace(self, by_hand=True)

    def resume(self) -> PausePolicy:
        """Return the policy after the owner resumed the device; a battery may still keep it paused."""
        return replace(self, by_hand=False)

    def power(self, plugged: bool | None, now_s: float) -> PausePolicy:
        """Return the policy after the battery reports whether it is ``plugged`` in; None (no battery, or unknown)
        counts as mains."""
        on_battery = plugged is False
        if on_battery == self.on_battery:
            return replace(self, other_since_s=None)
        since_s = now_s if self.other_since_s is None else self.other_since_s
        if now_s - since_s < SETTLED_S:
            return replace(self, other_since_s=since_s)
        return replace(self, on_battery=on_battery, other_since_s=None)

    def next_look_s(self, now_s: float) -> float:
        """Return in how many seconds to read the battery again: sooner when a change is about to count."""
        if self.other_since_s is None:
            return BATTERY_EVERY_S
        return max(0.0, self.other_since_s + SETTLED_S - now_s)


class OwnerPause:
    """The pause of one daemon. ``changed`` gets each new reason, None for "computes again", in the event loop."""

    def __init__(self, home: Path, *, pause_on_battery: bool, changed: Callable[[str | None], None]) -> None:
        self._path = home / "paused.json"
        self._changed = changed
        self._policy = PausePolicy(pause_on_battery=pause_on_battery, by_hand=self._path.exists())

    @property
    def paused(self) -> str | None:
        """Why this device computes nothing; None while it computes."""
        return self._policy.paused

    def pause(self) -> str:
        """Pause by hand, also after a restart; return one line about it. Raises ``ConfigError`` if that cannot be
        stored."""
        if self._policy.by_hand:
            return "paused already; 'primad resume' ends that"
        write_private(self._path, b"{}\n")  # only its existence matters
        self._become(self._policy.pause())
        return "paused until 'primad resume', also after a restart"

    def resume(self) -> str:
        """End the pause by hand; return one line about it. Raises ``ConfigError`` if that cannot be stored."""
        if not self._policy.by_hand:
            return "was not paused" if self.paused is None else f"was not paused by hand, but {self.paused}"
        try:
            self._path.unlink(missing_ok=True)
        except OSError as exc:
            raise ConfigError(f"{self._path}: cannot be removed: {exc.strerror or exc}; remove it yourself") from exc
        self._become(self._policy.resume())
        return "computes again" if self.paused is None else f"not paused by hand any more, but {self.paused}"

    async def watch_battery(
        self, read: Callable[[], bool | None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Follow the battery until cancelled; return immediately if it does not matter or there is none.

        No notification of a pulled plug works on every system, so the battery is polled.
        """
        read = is_plugged if read is None else read
        if not self._policy.pause_on_battery:
            return
        if await asyncio.to_thread(read) is None:
            logger.debug("pause_on_battery: no battery here")
            return
        while True:
            plugged = await asyncio.to_thread(read)
            self._become(self._policy.power(plugged, clock()))
            await asyncio.sleep(self._policy.next_look_s(clock()))

    def _become(self, policy: PausePolicy) -> None:
        before, self._policy = self.paused, policy
        if self.paused != before:
            self._changed(self.paused)


def is_plugged() -> bool | None:
    """Return whether this device runs on mains; None if it has no battery or the state is unknown."""
    sensors: Callable[[], object] | None = getattr(psutil, "sensors_battery", None)  # missing on some systems
    if sensors is None:
        return None
    try:
        battery = sensors()
    except (OSError, RuntimeError, ValueError, NotImplementedError) as exc:
        logger.debug("the battery cannot be read: %s", exc)
        return None
    plugged = getattr(battery, "power_plugged", None)
    return None if plugged is None else bool(plugged)
