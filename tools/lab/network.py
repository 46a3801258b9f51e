"""The wires of a lab: a bridge in its own namespace, and a cable from it to every device.

    device i: eth0 ─veth─ x<i> [─relay─ y<i> ─veth─ p<i>] ─ bridge s0     (without a relay x<i> is the port)

Rate: a token bucket at both ends of the cable. Latency: netem at both ends if the kernel has it, otherwise the relay,
which also blocks multicast. The bridge learns and floods like a home switch. Faults need no packet filter: a partition
moves ports to another bridge, half-open removes a port from its bridge while the link stays up, a cut takes the link
down.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tools.lab.fleet import NETWORK, DeviceSpec
from tools.lab.names import LabError
from tools.lab.requirements import tool_path

SWITCH_SYSCTLS: Final = {
    "net/ipv6/conf/all/disable_ipv6": "1",  # the switch itself sends nothing
    "net/ipv6/conf/default/disable_ipv6": "1",
}
_BURST_S: Final = 0.004
"""Burst that a link passes after a pause, as time at its rate; less would split the kernel's large frames."""

_MIN_BURST_BYTES: Final = 3200
_QUEUE_S: Final = 0.1
_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Cable:
    """One device's cable: its number, the holder of its namespaces, its addresses and its specification."""

    number: int
    holder: int
    ip: str
    spec: DeviceSpec

    @property
    def mac(self) -> str:
        """The device's MAC address: fixed, so that a device keeps its identity in the next lab."""
        return f"02:77:00:00:00:{self.number + 1:02x}"

    @property
    def ip6(self) -> str | None:
        """The IPv6 address, if the device has one."""
        return f"fd77::{self.number + 1:x}" if self.spec.ipv6 else None

    def relayed(self, netem: bool) -> bool:
        """Whether the link needs the relay."""
        return not self.spec.multicast or (self.spec.latency_ms > 0 and not netem)

    def port(self, netem: bool) -> str:
        """The interface that is a port of the bridge."""
        return f"p{self.number}" if self.relayed(netem) else f"x{self.number}"


class Network:
    """The wires of one lab; ``switch`` is the process that holds the bridge's namespace."""

    def __init__(self, switch: int, cables: Sequence[Cable], netem: bool) -> None:
        self._switch = switch
        self._cables = {cable.spec.name: cable for cable in cables}
        self.netem = netem

    def build(self) -> None:
        """Build all links. Raises ``LabError`` with what the kernel refused."""
        lines = ["link set lo up", *_bridge("s0")]
        for cable in self._cables.values():
            lines += self._lay(cable)
        ip(self._switch, lines)
        for cable in self._cables.values():
            ip(cable.holder, _addresses(cable))
            for pid, interface in ((cable.holder, "eth0"), (self._switch, f"x{cable.number}")):
                if lines := _shape(interface, cable.spec, self.netem):
                    tool("tc", pid, lines)

    def _lay(self, cable: Cable) -> list[str]:
        outer, port = f"x{cable.number}", cable.port(self.netem)
        lines = [f"link add {outer} type veth peer name eth0 address {cable.mac} netns {cable.holder}"]
        if port != outer:
            inner = f"y{cable.number}"
            lines += [f"link add {inner} type veth peer name {port}", f"link set {inner} up", f"link set {port} up"]
        return [*lines, f"link set {port} master s0", f"link set {outer} up"]

    def relay(self) -> str | None:
        """Return the arguments of the relay; None if no link needs it."""
        links = [
            {
                "outer": f"x{cable.number}",
                "inner": f"y{cable.number}",
                "delay_s": 0.0 if self.netem else cable.spec.latency_ms / 2000,
                "multicast": cable.spec.multicast,
            }
            for cable in self._cables.values()
            if cable.relayed(self.netem)
        ]
        return json.dumps(links) if links else None

    def partition(self, groups: Sequence[Sequence[str]]) -> None:
        """Let each group reach only itself; devices that no group names stay together, separate from all groups."""
        lines: list[str] = []
        for number, group in enumerate(groups, start=1):
            if not self._exists(f"s{number}"):
                lines += _bridge(f"s{number}")
            lines += [f"link set {self._port(name)} master s{number}" for name in group]
        named = {name for group in groups for name in group}
        lines += [f"link set {self._port(name)} master s0" for name in self._cables if name not in named]
        ip(self._switch, lines)

    def isolate(self, names: Sequence[str]) -> None:
        """Let these devices reach all others, but not each other."""
        ip(self._switch, [f"link set {self._port(name)} type bridge_slave isolated on" for name in names])

    def heal(self) -> None:
        """Undo partitions, isolation and half-open links."""
        ports = [self._port(name) for name in self._cables]
        ip(self._switch, [f"link set {port} master s0" for port in ports])
        ip(self._switch, [f"link set {port} type bridge_slave isolated off" for port in ports])

    def cut(self, name: str) -> None:
        """Pull the cable: the device sees that it is gone."""
        ip(self._switch, [f"link set x{self._cables[name].number} down"])

    def plug(self, name: str) -> None:
        """Put the cable back, and end half-open."""
        lines = [f"link set x{self._cables[name].number} up"]
        if self.link(name) == "half-open":
            lines.append(f"link set {self._port(name)} master s0")
        ip(self._switch, lines)

    def half_open(self, name: str) -> None:
        """Lose every frame to and from the device, with the cable still in."""
        ip(self._switch, [f"link set {self._port(name)} nomaster"])

    def link(self, name: str) -> str:
        """Return ``cut``, ``half-open``, ``up``, or ``segment N`` of a partition."""
        links = {entry["ifname"]: entry for entry in json.loads(_output(self._switch, ["-j", "link", "show"]))}
        if "UP" not in links[f"x{self._cables[name].number}"]["flags"]:
            return "cut"
        master = links[self._port(name)].get("master")
        if master is None:
            return "half-open"
        return "up" if master == "s0" else f"segment {master[1:]}"

    def _exists(self, interface: str) -> bool:
        return interface in {entry["ifname"] for entry in json.loads(_output(self._switch, ["-j", "link", "show"]))}

    def _port(self, name: str) -> str:
        return self._cables[name].port(self.netem)


def has_netem(pid: int) -> bool:
    """Whether the kernel can delay packets by itself; tried on the loopback of the namespace of ``pid``."""
    try:
        tool("tc", pid, ["qdisc add dev lo root netem delay 1ms"])
    except LabError:
        return False
    tool("tc", pid, ["qdisc del dev lo root"])
    return True


def _bridge(name: str) -> list[str]:
    # Snooping would withhold multicast from ports that have not requested it, and there is no querier here.
    return [f"link add {name} type bridge forward_delay 0 stp_state 0 mcast_snooping 0", f"link set {name} up"]


def _addresses(cable: Cable) -> list[str]:
    lines = ["link set lo up", "link set eth0 up"]
    if cable.ip6 is not None:
        lines.append(f"addr add {cable.ip6}/64 dev eth0 nodad")
    if cable.spec.ipv4:
        lines.append(f"addr add {cable.ip}/{NETWORK.prefixlen} brd + dev eth0")
        lines.append("route add default dev eth0")  # a device at home has a way out; here it ends at the bridge
    return lines


def _shape(interface: str, spec: DeviceSpec, netem: bool) -> list[str]:
    lines, parent = [], "root"
    if netem and spec.latency_ms > 0:
        lines.append(f"qdisc add dev {interface} root handle 1: netem delay {spec.latency_ms * 500:.0f}us limit 20000")
        parent = "parent 1:1"
    if spec.mbit_per_s is not None:
        bytes_per_s = spec.mbit_per_s * 1e6 / 8
        burst = max(_MIN_BURST_BYTES, round(bytes_per_s * _BURST_S))
        limit = burst + max(20_000, round(bytes_per_s * _QUEUE_S))
        rate = round(spec.mbit_per_s * 1e6)
        lines.append(f"qdisc add dev {interface} {parent} handle 10: tbf rate {rate}bit burst {burst}b limit {limit}b")
    return lines


def ip(pid: int, lines: Sequence[str]) -> None:
    """Run lines of ``ip`` in the network namespace of ``pid``. Raises ``LabError``."""
    tool("ip", pid, lines)


def tool(name: str, pid: int, lines: Sequence[str]) -> None:
    """Run lines of ``ip`` or ``tc`` in the network namespace of ``pid``. Raises ``LabError`` with what was refused."""
    _run(pid, [str(tool_path(name)), "-batch", "-"], "".join(f"{line}\n" for line in lines))


def _output(pid: int, arguments: Sequence[str]) -> str:
    return _run(pid, [str(tool_path("ip")), *arguments], "")


def _run(pid: int, command: Sequence[str], text: str) -> str:
    enter = [str(tool_path("nsenter")), f"--net=/proc/{pid}/ns/net", "--", *command]
    try:
        done = subprocess.run(enter, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as exc:
        raise LabError(f"{command[0]}: no answer within {_TIMEOUT_S:g} s; the lab is broken, take it down") from exc
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LabError(f"{command[0]}: {reason}; is the lab still up? (homelab status)")
    return done.stdout
