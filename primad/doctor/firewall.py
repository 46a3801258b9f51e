"""Check whether a firewall of this machine blocks other devices. Asked without root, so sometimes the result is
unknown."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from primad.doctor.findings import Finding, finding, output_of
from primad.network.addresses import Interface

_UFW_ENABLED: Final = re.compile(r"^\s*ENABLED\s*=\s*yes\b", re.MULTILINE | re.IGNORECASE)
_MAC_FIREWALL: Final = "/usr/libexec/ApplicationFirewall/socketfilterfw"
_EPHEMERAL: Final = (32_768, 60_999)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirewallFacts:
    """Facts about the system's firewalls; None is what could not be read.

    ``ufw`` is whether it is on, ``ufw_rules`` its report; ``firewalld_open`` the ports and services that firewalld lets
    in (None when it does not run); ``nft`` and ``iptables`` their rules; ``present`` the installed programs;
    ``profile`` the report of Windows or macOS.
    """

    system: str
    root: bool
    ufw: bool | None
    ufw_rules: str | None
    firewalld_open: tuple[str, ...] | None
    nft: str | None
    iptables: str | None
    present: tuple[str, ...]
    profile: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """Required inbound traffic: TCP to ``control`` and ``others`` (from, to; links and transfer), UDP 5353; from
    ``subnets``."""

    control: int
    others: tuple[int, int]
    subnets: tuple[str, ...]


def gather_firewall() -> FirewallFacts:
    """Read world-readable files and run commands that may fail."""
    system = platform.system()
    profile = None
    if system == "Windows":
        profile = output_of("netsh", "advfirewall", "show", "currentprofile", "state")
    elif system == "Darwin":
        profile = output_of(_MAC_FIREWALL, "--getglobalstate")
    linux = system == "Linux"
    return FirewallFacts(
        system=system,
        root=hasattr(os, "geteuid") and os.geteuid() == 0,
        ufw=_ufw_enabled() if linux else None,
        ufw_rules=output_of("ufw", "status") if linux else None,
        firewalld_open=_firewalld() if linux else None,
        nft=output_of("nft", "list", "ruleset") if linux else None,
        iptables=output_of("iptables", "-S", "INPUT") if linux else None,
        present=tuple(name for name in ("nft", "iptables") if linux and _is_there(name)),
        profile=profile,
    )


def needed(control: int, own: Sequence[Interface]) -> Needed:
    """Return the required inbound traffic of this machine."""
    subnets = [
        str(address.network)
        for found in own
        if found.up and found.rank == 0
        for address in found.addresses
        if address.version == 4 and not address.ip.is_loopback
    ]
    return Needed(control=control, others=_ephemeral(), subnets=tuple(subnets))


def judge_firewall(facts: FirewallFacts, need: Needed) -> list[Finding]:
    """Return one finding per active firewall, or one that says that none drops anything."""
    found: list[Finding] = []
    if facts.system == "Windows":
        return _judge_windows(facts, need)
    if facts.system == "Darwin":
        return _judge_mac(facts)
    if facts.ufw:
        found.append(_judge_ufw(facts, need))
    if facts.firewalld_open is not None:
        found.append(_judge_firewalld(facts.firewalld_open, need))
    if not found:
        found += _judge_rules(facts, need)
    return found or [finding("firewall", "ok", "no firewall on this machine drops incoming traffic")]


def _judge_ufw(facts: FirewallFacts, need: Needed) -> Finding:
    command = " && ".join(
        f"sudo ufw allow from {subnet} to any port {ports} proto {kind}"
        for subnet in need.subnets or ("any",)
        for ports, kind in ((f"{need.control},{need.others[0]}:{need.others[1]}", "tcp"), ("5353", "udp"))
    )
    if facts.ufw_rules is None:
        text = "ufw is on; its rules cannot be read without root. If devices do not find each other:"
        return finding("firewall", "note", text, command)
    rules = [line for line in facts.ufw_rules.splitlines() if "ALLOW" in line]
    if any(str(need.control) in line for line in rules) or any(line.split()[:1] == ["Anywhere"] for line in rules):
        return finding("firewall", "ok", f"ufw is on and allows port {need.control}")
    return finding("firewall", "warning", f"ufw is on and blocks port {need.control}", command)


def _judge_firewalld(opened: tuple[str, ...], need: Needed) -> Finding:
    ports = [tuple(int(it) for it in match.groups(default=match[1])) for it in opened if (match := _range(it))]
    control = any(low <= need.control <= high for low, high in ports)
    others = any(low <= need.others[0] and need.others[1] <= high for low, high in ports)
    command = (
        f"sudo firewall-cmd --permanent --add-port={need.control}/tcp --add-port={need.others[0]}-{need.others[1]}/tcp "
        "--add-service=mdns && sudo firewall-cmd --reload"
    )
    missing = [
        what
        for what, there in (
            (f"TCP port {need.control}", control),
            ("the links' TCP ports", others),
            ("mDNS", "mdns" in opened),
        )
        if not there
    ]
    if missing:
        return finding("firewall", "warning", f"firewalld is on and blocks: {', '.join(missing)}", command)
    return finding("firewall", "ok", "firewalld is on and allows primad")


def _judge_rules(facts: FirewallFacts, need: Needed) -> list[Finding]:
    """Judge rules of nftables and iptables that drop inbound traffic, written by hand or by another program."""
    drops = []
    if facts.nft and re.search(r"hook input[^}]*policy (drop|reject)", facts.nft):
        drops.append("nftables")
    if facts.iptables and re.search(r"^-P INPUT (DROP|REJECT)", facts.iptables, re.MULTILINE):
        drops.append("iptables")
    ports = f"{need.control},{need.others[0]}"
    command = (
        f"sudo iptables -I INPUT -p tcp -m multiport --dports {ports}:{need.others[1]} -j ACCEPT && "
        "sudo iptables -I INPUT -p udp --dport 5353 -j ACCEPT"
    )
    if drops:
        text = f"{' and '.join(drops)} drop traffic that no rule allows; if devices do not find each other:"
        return [finding("firewall", "warning", text, command)]
    asked = {"nft": facts.nft, "iptables": facts.iptables}
    if not facts.root and any(asked[name] is None for name in facts.present):
        text = f"rules of {' and '.join(facts.present)} cannot be read without root"
        return [
            finding("firewall", "note", text, "sudo nft list ruleset" if "nft" in facts.present else "sudo iptables -S")
        ]
    return []


def _judge_windows(facts: FirewallFacts, need: Needed) -> list[Finding]:
    rule = "New-NetFirewallRule -DisplayName primad -Direction Inbound -Action Allow -Profile Private"
    command = f"{rule} -Program '{sys.executable}'"
    if facts.profile is None:
        return [
            finding(
                "firewall",
                "note",
                "the Windows firewall cannot be queried; if devices do not find each other:",
                command,
            )
        ]
    if re.search(r"\bOFF\b", facts.profile):
        return [finding("firewall", "ok", "the Windows firewall is off")]
    text = f"the Windows firewall is on; it must allow this Python (TCP {need.control} and links, UDP 5353)"
    return [finding("firewall", "note", text, command)]


def _judge_mac(facts: FirewallFacts) -> list[Finding]:
    if facts.profile is None:
        return [finding("firewall", "note", "the macOS firewall cannot be queried")]
    if "disabled" in facts.profile.lower() or "state = 0" in facts.profile.lower():
        return [finding("firewall", "ok", "the macOS firewall is off")]
    command = f"sudo {_MAC_FIREWALL} --add '{sys.executable}' && sudo {_MAC_FIREWALL} --unblockapp '{sys.executable}'"
    return [finding("firewall", "note", "the macOS firewall is on; it must allow this Python", command)]


def _range(text: str) -> re.Match[str] | None:
    """Match firewalld's 7770/tcp or 1025-65535/tcp."""
    return re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?/tcp", text)


def _ufw_enabled(path: Path = Path("/etc/ufw/ufw.conf")) -> bool | None:
    try:
        return bool(_UFW_ENABLED.search(path.read_text(errors="replace")))
    except OSError:
        return None


def _firewalld() -> tuple[str, ...] | None:
    if (output_of("firewall-cmd", "--state") or "").strip() != "running":
        return None
    ports = output_of("firewall-cmd", "--list-ports") or ""
    services = output_of("firewall-cmd", "--list-services") or ""
    return tuple((ports + " " + services).split())


def _ephemeral(path: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> tuple[int, int]:
    """Return the range from which the system assigns free ports, as the links use them."""
    try:
        low, high = (int(part) for part in path.read_text().split())
    except (OSError, ValueError):
        return _EPHEMERAL if platform.system() == "Linux" else (49_152, 65_535)
    return low, high


def _is_there(program: str) -> bool:
    return any((Path(folder) / program).exists() for folder in ("/usr/sbin", "/sbin", "/usr/bin"))
