"""The additions of ``primad status --watch``: the ring's speed, hops and events, like the page."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from primad.errors import printable
from primad.settings.quantities import show_bytes, show_ms, show_speed

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from primad.api.http.status import DeviceStatus, StatusBody

MAX_EVENTS: Final = 8
_UNKNOWN: Final = "?"


@dataclass(frozen=True, slots=True)
class Look:
    """A status and its time, in seconds of a monotonic clock."""

    status: StatusBody
    at_s: float


def watched(now: Look, before: Look | None) -> list[RenderableType]:
    """The change between two statuses."""
    from rich.text import Text

    parts: list[RenderableType] = [Text(_speeds(now, before), style="bold")]
    if now.status.devices:
        parts.append(_ring(now, before))
    parts += [Text(line) for line in _events(now.status)]
    return parts


def _speeds(now: Look, before: Look | None) -> str:
    status, words = now.status, list[str]()
    written = _rate(now, before, _written)
    words.append("? tokens/s now" if written is None else f"{show_speed(written)} now")
    if status.tokens is not None:
        words.append(f"{status.tokens.answers_open} open requests, {status.tokens.completion} tokens generated")
    if status.measured is not None:
        took, planned = status.measured.tpot_ms, status.measured.predicted_tpot_ms
        words.append(f"{show_ms(took)} per token, {show_ms(planned)} planned")
    return "; ".join(words)


def _ring(now: Look, before: Look | None) -> Table:
    """A row per device, in ring order: its layers, its time per token, and the hop to the next one."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
    table.add_column("ring", overflow="fold")
    for column in (
        "layers",
        "compute\nper token",
        "planned\n",
        "hop,\nsoftware",
        "round trip\nto next",
        "read\nnow",
    ):
        table.add_column(column, justify="right", overflow="fold")
    devices = now.status.devices
    for place, device in enumerate(devices):
        table.add_row(*map(Text, _row(device, devices[(place + 1) % len(devices)].name, now, before)))
    return table


def _row(device: DeviceStatus, following: str, now: Look, before: Look | None) -> list[str]:
    ring, planned = device.ring, device.predicted.compute_ms_per_token
    compute = None if ring is None else ring.compute_ms_per_token
    hop_s = None if ring is None else ring.hop_median_s
    link = next((each for each in now.status.links if (each.source, each.target) == (device.name, following)), None)
    read = _rate(now, before, lambda each: _find(each, device.name))
    return [
        printable(device.name),
        ", ".join(f"{first}-{last - 1}" if last - first > 1 else str(first) for first, last in device.windows),
        _UNKNOWN if compute is None else show_ms(compute),
        _UNKNOWN if planned is None else show_ms(planned),
        _UNKNOWN if hop_s is None else show_ms(hop_s * 1e3),
        "-" if following == device.name else _UNKNOWN if link is None else show_ms(link.round_trip_ms),
        _UNKNOWN if read is None else f"{show_bytes(round(read))}/s" if read else "-",
    ]


def _written(status: StatusBody) -> int | None:
    return None if status.tokens is None else status.tokens.completion


def _find(status: StatusBody, name: str) -> int | None:
    """Bytes that the device ``name`` read."""
    return next((each.memory.read_bytes for each in status.devices if each.name == name), None)


def _rate(now: Look, before: Look | None, read: Callable[[StatusBody], int | None]) -> float | None:
    """The rate of a counter per second; None if unknown."""
    if before is None or now.at_s <= before.at_s:
        return None
    later, earlier = read(now.status), read(before.status)
    if later is None or earlier is None or later < earlier:
        return None
    return (later - earlier) / (now.at_s - before.at_s)


def _events(status: StatusBody) -> list[str]:
    latest = status.events[-MAX_EVENTS:]
    return [f"{time.strftime('%H:%M:%S', time.localtime(each.at_s))}  {printable(each.text)}" for each in latest]
