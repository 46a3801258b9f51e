"""Run every check concurrently, each with a deadline; a failing check reports that and stops no other."""

from __future__ import annotations

import asyncio
import platform
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from primad import __version__
from primad.doctor import firewall, gpus, machine, network, peers, pictures, reach, storage
from primad.doctor.findings import Finding, finding, in_thread
from primad.errors import PrimadError, printable
from primad.network.addresses import read_interfaces
from primad.network.discovery import look
from primad.network.messages import OLDEST, PROTOCOL
from primad.settings.config import DEFAULT_CONTROL_PORT, any_host, is_loopback

LIMIT_S: Final = 8.0
LOOK_S: Final = 2.5
_REPORT_MORE: Final = "primad --verbose doctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The device to examine, as its owner set it up.

    ``host`` is the address on which its daemons listen, ``control_port`` None if the owner did not choose one.
    ``devices`` are those that the configuration names as host:port, ``threads`` the configured number, ``models`` its
    folders with models. ``own_key`` is its public key, "" before it has one; ``trust`` is what is known here about
    others' keys.
    """

    home: Path
    host: str
    interface: str | None
    cluster: str
    control_port: int | None
    http_port: int
    devices: tuple[str, ...]
    threads: int | None
    own_key: str
    trust: peers.KnownTrust
    models: tuple[Path, ...] = ()


Check = Callable[[Subject], Awaitable[list[Finding]]]


async def examine(subject: Subject, checks: dict[str, Check] | None = None, limit_s: float = LIMIT_S) -> list[Finding]:
    """Return all findings, in the order of the checks; by default of all ``CHECKS``."""
    chosen = CHECKS if checks is None else checks
    return [
        found
        for part in await asyncio.gather(*(_run(name, check, subject, limit_s) for name, check in chosen.items()))
        for found in part
    ]


async def _run(name: str, check: Check, subject: Subject, limit_s: float) -> list[Finding]:
    try:
        async with asyncio.timeout(limit_s):
            return await check(subject)
    except TimeoutError:
        return [finding(name, "warning", f"could not be checked within {limit_s:g} s", _REPORT_MORE)]
    except (OSError, PrimadError, psutil.Error, ValueError, RuntimeError) as exc:
        return [
            finding(name, "warning", f"could not be checked: {printable(str(exc) or type(exc).__name__)}", _REPORT_MORE)
        ]


async def _system(subject: Subject) -> list[Finding]:
    return machine.judge_platform(*machine.gather_platform()) + machine.judge_files(machine.gather_files())


async def _llama_cpp(subject: Subject) -> list[Finding]:
    facts = await in_thread(lambda: gpus.gather_engine(subject.home, subject.threads))
    return gpus.judge_engine(facts, platform.system(), sys.executable)


async def _pictures(subject: Subject) -> list[Finding]:
    facts = await in_thread(lambda: pictures.gather_pictures(subject.home, subject.models))
    return pictures.judge_pictures(facts, sys.executable)


async def _memory(subject: Subject) -> list[Finding]:
    return machine.judge_memory(await in_thread(machine.gather_memory), platform.system())


async def _disk(subject: Subject) -> list[Finding]:
    return storage.judge_disk(await in_thread(lambda: storage.gather_disk(subject.home)))


async def _identity(subject: Subject) -> list[Finding]:
    return storage.judge_identity(await in_thread(lambda: storage.gather_identity(subject.home)))


async def _battery(subject: Subject) -> list[Finding]:
    return machine.judge_battery(await in_thread(machine.gather_battery))


async def _clock(subject: Subject) -> list[Finding]:
    return machine.judge_clock(await in_thread(machine.gather_clock), platform.system())


async def _ports(subject: Subject) -> list[Finding]:
    number = subject.control_port or DEFAULT_CONTROL_PORT
    wanted = subject.control_port is not None
    return network.judge_ports(
        await in_thread(lambda: network.gather_ports(subject.host, number, wanted, subject.http_port))
    )


async def _multicast(subject: Subject) -> list[Finding]:
    found = network.judge_places(await network.gather_places(subject.host, subject.interface))
    if is_loopback(subject.host):
        text = f"daemons listen on {subject.host}: no other machine can reach this device or is looked for"
        found.append(finding("multicast", "note", text, f"primad doctor --host {any_host()}"))
    return found


async def _firewall(subject: Subject) -> list[Finding]:
    if is_loopback(subject.host):
        return [finding("firewall", "ok", "daemons listen on this machine only, where no firewall is in the way")]
    facts = await in_thread(firewall.gather_firewall)
    own = await in_thread(read_interfaces)
    return firewall.judge_firewall(facts, firewall.needed(subject.control_port or DEFAULT_CONTROL_PORT, own))


async def _devices(subject: Subject) -> list[Finding]:
    seen = await look(subject.host, LOOK_S, subject.interface)
    return [
        *peers.judge_sight(seen, subject.cluster, subject.own_key),
        *peers.judge_versions(seen, subject.cluster, __version__, protocol=PROTOCOL, oldest=OLDEST),
        *peers.judge_trust(seen, subject.cluster, subject.own_key, subject.trust),
        *reach.judge_reached(await reach.gather_reached(reach.targets(seen, subject.cluster, ()))),
    ]


async def _named(subject: Subject) -> list[Finding]:
    return reach.judge_reached(await reach.gather_reached(reach.targets((), subject.cluster, subject.devices)))


CHECKS: Final[dict[str, Check]] = {
    "system": _system,
    "llama.cpp": _llama_cpp,
    "pictures": _pictures,
    "memory": _memory,
    "disk": _disk,
    "identity": _identity,
    "battery": _battery,
    "clock": _clock,
    "ports": _ports,
    "firewall": _firewall,
    "multicast": _multicast,
    "reach": _named,
    "devices": _devices,
}
