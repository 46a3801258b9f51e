"""Build a lab and take it down, whatever happened in between.

The only parts of a lab in this machine's own namespaces are cgroups, a folder and processes: interfaces, mounts and
loop devices live in namespaces that processes hold, and vanish with them. So taking down is: kill everything in the
lab's cgroups, remove these, remove the folder. That also works half-way through building, after a crash, and when
already done.
"""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tools.lab import disk, record
from tools.lab.cgroups import Cgroups, Hierarchies, here
from tools.lab.device import Device, inside, role
from tools.lab.fleet import Fleet
from tools.lab.furnish import furnish
from tools.lab.names import LabError, new_id, root
from tools.lab.network import SWITCH_SYSCTLS, Cable, Network, has_netem
from tools.lab.record import Owner, Record
from tools.lab.removal import remove, remove_abandoned
from tools.lab.requirements import require

_READY_S: Final = 60.0
_OWN: Final = "lab"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatus:
    """State of a device; ``link`` is ``up``, ``cut``, ``half-open`` or the segment of a partition."""

    name: str
    ip: str
    link: str
    frozen: bool
    memory_bytes: int | None
    processes: dict[int, str]


class Homelab:
    """A lab. As a context manager it is up inside the block and gone after it; the next lab removes a crashed one's
    remains."""

    def __init__(self, fleet: Fleet) -> None:
        if any(spec.name == _OWN for spec in fleet.devices):
            raise LabError(f"device {_OWN!r}: the lab itself is called so; choose another name")
        self.id = new_id()
        self._fleet = fleet
        self._children: list[subprocess.Popen[str]] = []
        self._hierarchies: Hierarchies
        self._cgroups: Cgroups
        self._devices: dict[str, Device] = {}
        self._network: Network

    @classmethod
    def open(cls, lab: str) -> Self:
        """Open a lab that is already up. Raises ``LabError``."""
        require()
        known = record.read(lab)
        if not known.ready or known.switch is None:
            raise LabError(f"lab {lab}: was never finished; remove it with homelab down {lab}")
        opened = cls(Fleet(known.devices))
        opened.id = lab
        opened._prepare()
        opened._know(known.switch, known.holders, known.netem)
        return opened

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def root(self) -> Path:
        """The lab's folder: its logs and the devices' disks."""
        return root(self.id)

    def up(self, *, stay: bool = False) -> None:
        """Build the lab. If it raises ``LabError`` nothing is left of the lab. With ``stay`` the lab outlives this
        process."""
        require()
        self._prepare()
        remove_abandoned(self._hierarchies)
        owner = Owner.this()
        try:
            known = Record(lab=self.id, owner=owner, devices=self._fleet.devices)
            known.create()
            switch, holders = self._hold()
            netem = has_netem(switch)
            self._know(switch, holders, netem)
            self._network.build()
            relay = self._start_relay(switch)
            self._limit()
            known = replace(known, switch=switch, holders=holders, relay=relay, netem=netem)
            replace(known, ready=True, owner=None if stay else owner).save()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Take the lab down; it may be half built or already gone."""
        remove(self.id, self._hierarchies)
        for child in self._children:
            assert child.stdout is not None
            child.stdout.close()
            child.wait()
        self._children.clear()

    def _prepare(self) -> None:
        self._hierarchies = here()
        self._cgroups = Cgroups(self.id, self._hierarchies)

    def _know(self, switch: int, holders: Sequence[int], netem: bool) -> None:
        rows = enumerate(zip(self._fleet.devices, self._fleet.addresses(), holders, strict=True))
        cables = [Cable(number, holder, ip, spec) for number, (spec, ip, holder) in rows]
        self._network = Network(switch, cables, netem)
        self._devices = {cable.spec.name: Device(self.id, cable, self._cgroups) for cable in cables}

    def _hold(self) -> tuple[int, tuple[int, ...]]:
        """Create the namespaces of the bridge and of every device, all concurrently."""
        self._cgroups.create(_OWN)
        groups = [str(path) for path in self._cgroups.procs(_OWN)]
        plain: dict[str, Any] = {"namespaces": ["net"], "sysctls": SWITCH_SYSCTLS, "commands": [], "folders": []}
        switch = self._start(inside("hold", {"groups": groups, **plain}))
        starting = [("the bridge", switch)]
        every = zip(self._fleet.devices, self._fleet.addresses(), strict=True)
        addresses = {spec.name: ip for spec, ip in every if spec.ipv4}
        for spec in self._fleet.devices:
            self._cgroups.create(spec.name)
            settings = {"groups": groups, **furnish(self.id, spec, addresses)}
            starting.append((f"device {spec.name}", self._start(inside("hold", settings))))
        for what, child in starting:
            _wait_ready(what, child)
        return switch.pid, tuple(child.pid for _, child in starting[1:])

    def _start_relay(self, switch: int) -> int | None:
        wanted = self._network.relay()
        if wanted is None:
            return None
        groups = [str(path) for path in self._cgroups.procs(_OWN)]
        settings = {"groups": groups, "holder": switch, "namespaces": ["net"], "folder": None}
        script = str(Path(__file__).with_name("relay.py"))
        child = self._start(inside("enter", settings, [sys.executable, "-I", "-S", script, wanted]))
        _wait_ready("the relay", child)
        return child.pid

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        """Start a process of the lab itself; Ctrl-C on the terminal does not reach it."""
        with (self.root / "lab.log").open("a", encoding="utf-8") as log:
            # An interrupt inside Popen would lose the child that it just started.
            held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
                self._children.append(child)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return child

    def _limit(self) -> None:
        for spec in self._fleet.devices:
            if spec.memory_bytes is not None:
                self._cgroups.limit_memory(spec.name, spec.memory_bytes)
            if spec.cpus is not None:
                self._cgroups.limit_cpu(spec.name, spec.cpus)
            if spec.disk_read_bytes_per_s is None and spec.disk_write_bytes_per_s is None:
                continue
            disks = {disk.block_device(self.root), disk.block_device(self._devices[spec.name].outside)} - {None}
            if not disks:
                raise LabError(
                    f"device {spec.name}: {self.root} lies on no disk of its own; give the device disk_bytes"
                )
            for name in disks:
                assert name is not None
                self._cgroups.limit_disk(spec.name, name, spec.disk_read_bytes_per_s, spec.disk_write_bytes_per_s)

    def device(self, name: str) -> Device:
        """Return a device by name. Raises ``LabError`` for one that the lab does not have."""
        if name not in self._devices:
            raise LabError(f"device {name!r}: not in lab {self.id}; it has {', '.join(self._devices)}")
        return self._devices[name]

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, in the fleet's order."""
        return tuple(self._devices.values())

    def partition(self, *groups: Sequence[str]) -> None:
        """Drop every frame between these groups; unnamed devices form one more. Replaces an earlier partition."""
        named = [self.device(name).name for group in groups for name in group]
        if not groups or not all(groups) or len(set(named)) < len(named):
            raise LabError("partition: name at least one group, none empty and no device twice, as in 'a,b | c'")
        self._network.partition(groups)

    def isolate(self, *names: str) -> None:
        """Drop every frame between these devices, which still reach all others."""
        if len({self.device(name).name for name in names}) < 2:
            raise LabError("isolate: name at least two devices, as in 'isolate a b'")
        self._network.isolate(names)

    def heal(self) -> None:
        """Undo partitions, isolation and half-open links."""
        self._network.heal()

    def cut(self, name: str) -> None:
        """Pull a device's cable; the device sees that it is gone."""
        self._network.cut(self.device(name).name)

    def plug(self, name: str) -> None:
        """Put a device's cable back; also ends half-open."""
        self._network.plug(self.device(name).name)

    def half_open(self, name: str) -> None:
        """Lose every frame to and from a device while its cable stays in: connections hang, nothing is refused."""
        self._network.half_open(self.device(name).name)

    def power_off(self, name: str) -> None:
        """Kill everything on a device without notice, as in a power failure; ``power_on`` ends that."""
        self.half_open(name)
        self.device(name).kill()

    def power_on(self, name: str) -> None:
        """Restore a device without power: its disk as it was, no process running."""
        self.plug(name)

    def status(self) -> list[DeviceStatus]:
        """Return the state of every device."""
        return [
            DeviceStatus(
                name=device.name,
                ip=device.ip,
                link=self._network.link(device.name),
                frozen=device.frozen(),
                memory_bytes=device.memory_bytes(),
                processes={pid: role(pid) for pid in sorted(device.pids())},
            )
            for device in self.devices
        ]


def _wait_ready(what: str, child: subprocess.Popen[str]) -> None:
    """Wait until the process reports ready. Raises ``LabError`` with what it prints instead."""
    assert child.stdout is not None
    with child.stdout as output:
        printed = select.select([output], [], [], _READY_S)[0]
        line = output.readline().strip() if printed else f"nothing within {_READY_S:g} s"
    if line != "ready":
        raise LabError(f"{what}: could not be set up: {line or 'it ended'}")
