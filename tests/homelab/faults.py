"""Faults of devices at home: each can be injected into one device of a cluster, and some can be undone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.homelab.cluster import Cluster, home
from tools.lab.device import Device, role

SLOW_CPUS: Final = 0.05
_MIN_BYTES: Final = 4096

Act = Callable[[Cluster, str], object]
"""Acts on the device of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. ``undo`` ends it but restarts no daemon; None if there is nothing to undo."""

    do: Act
    undo: Act | None = None


def layer_files(device: Device) -> list[Path]:
    """Return the files in a device's layer cache, largest first, as this process sees them."""
    files = [path for path in (home(device) / "cache").rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: -path.stat().st_size)


def corrupt_layer(device: Device) -> Path:
    """Invert one byte in the middle of a device's largest layer file; return the file."""
    largest = next((path for path in layer_files(device) if path.stat().st_size >= _MIN_BYTES), None)
    assert largest is not None, f"{device.name} holds no layer"
    with largest.open("r+b") as file:
        middle = largest.stat().st_size // 2
        file.seek(middle)
        byte = file.read(1)
        file.seek(middle)
        file.write(bytes([byte[0] ^ 0xFF]))
    return largest


def stop_ring(device: Device) -> None:
    """Stop the ring processes of a device but not its daemon."""
    for pid in device.pids():
        if role(pid) == "ring":
            os.kill(pid, signal.SIGSTOP)


FAULTS: Final[dict[str, Fault]] = {
    "killed": Fault(do=lambda cluster, name: cluster.lab.device(name).kill()),
    "power lost": Fault(
        do=lambda cluster, name: cluster.lab.power_off(name), undo=lambda cluster, name: cluster.lab.power_on(name)
    ),
    "stopped": Fault(
        do=lambda cluster, name: cluster.lab.device(name).freeze(),
        undo=lambda cluster, name: cluster.lab.device(name).thaw(),
    ),
    "ring aborted": Fault(do=lambda cluster, name: cluster.lab.device(name).kill("ring", signal.SIGABRT)),
    "ring stopped": Fault(do=lambda cluster, name: stop_ring(cluster.lab.device(name))),
    "cable cut": Fault(
        do=lambda cluster, name: cluster.lab.cut(name), undo=lambda cluster, name: cluster.lab.power_on(name)
    ),
    "half-open": Fault(
        do=lambda cluster, name: cluster.lab.half_open(name), undo=lambda cluster, name: cluster.lab.power_on(name)
    ),
    "paused": Fault(
        do=lambda cluster, name: cluster.run_command(name, "pause"),
        undo=lambda cluster, name: cluster.run_command(name, "resume"),
    ),
    "disk full": Fault(
        do=lambda cluster, name: cluster.lab.device(name).fill_disk(),
        undo=lambda cluster, name: cluster.lab.device(name).free_disk(),
    ),
    "layer corrupted": Fault(do=lambda cluster, name: corrupt_layer(cluster.lab.device(name))),
    "slow": Fault(
        do=lambda cluster, name: cluster.lab.device(name).slow(SLOW_CPUS),
        undo=lambda cluster, name: cluster.lab.device(name).slow(1.0),
    ),
}
