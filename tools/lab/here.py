"""This machine as a device of a plan, or as several: what it computes, and the links between its processes.

Run as a program it answers echoes, so that a link is measured as daemons measure theirs.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import zmq.asyncio

from halda import CpuProfile, DeviceProfile, DiskProfile, LinkProfile, ModelProfile
from primad.network.contacts import Contact
from primad.network.control import WorkerEnd
from primad.network.gate import Gate
from primad.network.linkprobe import measure_links
from primad.network.messages import Echo
from primad.profiler.device import profile_device
from primad.profiler.effort import Effort
from primad.profiler.measure import ram_read_bytes_per_s
from primad.profiler.processors import measure_cpu
from primad.trust.identity import new_identity
from tools.lab.figures import ROOT, out
from tools.lab.local_ring import types_of

GIB: Final = 1 << 30
NO_DISK: Final = DiskProfile(
    prefetch_bytes_per_s=1e9, fault_bytes_per_s=1e9, random_bytes_per_s=1e8, free_bytes=64 * GIB
)
"""Of devices that read nothing."""
HOP: Final = LinkProfile(source="", target="", address="", round_trip_s=0.0004, bytes_per_s=2e9)
"""Between two processes of this machine."""
LOOPBACK: Final = replace(HOP, round_trip_s=2e-4, bytes_per_s=1e9)
"""What loopback is taken for as the network of devices that are made of this machine."""


def measured_cpu(folder: Path, threads: int, model: ModelProfile) -> CpuProfile:
    """What so many threads compute, of the types of ``model``."""
    return measure_cpu(folder, threads, lambda _: None, Effort(types=types_of(model)))


def measured_profile(folder: Path, threads: int) -> DeviceProfile:
    """This machine as ``primad profile`` measures it (a minute the first time)."""
    return profile_device("here", folder, threads, lambda what: out.print(f"measuring {what}"))


def device_here(name: str, cpu: CpuProfile, rate: float, disk: DiskProfile = NO_DISK) -> DeviceProfile:
    """A process of this machine as a device, with more memory than any model of a bench needs."""
    return DeviceProfile(
        device=name,
        host="here",
        system="Linux",
        machine="",
        cpu=cpu,
        ram_total_bytes=64 * GIB,
        ram_available_bytes=64 * GIB,
        ram_read_bytes_per_s=rate,
        disk=disk,
        gpu=None,
    )


def machines_here(names: Sequence[str], cpu: CpuProfile) -> list[DeviceProfile]:
    """As many machines, with a core each."""
    rate = ram_read_bytes_per_s(1)
    return [replace(device_here(name, cpu, rate), host=name) for name in names]


def links_between(names: Sequence[str], links: Sequence[LinkProfile] = (HOP,)) -> list[LinkProfile]:
    """The middle one of ``links`` between any two devices."""
    link = sorted(links, key=lambda link: link.round_trip_s)[len(links) // 2]
    return [replace(link, source=a, target=b, address="") for a in names for b in names if a != b]


async def loopback() -> LinkProfile:
    """The link between two processes here, as daemons measure it."""
    with _echo_process() as (port, key):
        context = zmq.asyncio.Context()
        target = Contact(device="there", key=key, addresses=["127.0.0.1"], port=port)
        try:
            found = await measure_links(context, new_identity(), "here", [target])
        finally:
            context.term()
        return found.links[0]


@contextmanager
def _echo_process() -> Iterator[tuple[int, str]]:
    """A process that answers echoes: its port and its public key."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "solver")))}
    command = [sys.executable, "-m", "tools.lab.here"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT) as child:
        try:
            assert child.stdout is not None
            port, key = child.stdout.readline().rstrip("\n").split(" ", 1)
            yield int(port), key
        finally:
            child.kill()


async def _echo() -> None:
    context, identity = zmq.asyncio.Context(), new_identity()
    async with Gate(context, lambda _: True):
        end = WorkerEnd(context, "127.0.0.1", None, 0, identity=identity)
        print(end.port, identity.public, flush=True)
        while True:
            peer, _, message = await end.receive()
            assert isinstance(message, Echo)
            await end.echo(peer, message.answer_bytes)


if __name__ == "__main__":
    asyncio.run(_echo())
