"""Judge the visible devices: whether their versions fit, and whether they are trusted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from primad.doctor.findings import Finding, finding
from primad.network.peer import Peer

_UPDATE: Final = "pip install --upgrade primad"


def judge_sight(peers: Sequence[Peer], cluster: str, own_key: str) -> list[Finding]:
    """Judge whether any other device is visible."""
    others = [peer for peer in peers if peer.cluster == cluster and not _is_own(peer, own_key)]
    foreign = sorted({peer.cluster for peer in peers if peer.cluster != cluster})
    found = []
    if others:
        names = ", ".join(f"{peer.device} ({peer.role}, {peer.addresses[0]})" for peer in others)
        found.append(finding("devices", "ok", f"discovered: {names}"))
    else:
        text = f"no other device of cluster '{cluster}' was discovered; where one runs, compare networks and firewalls"
        found.append(finding("devices", "note", text, "primad join    (on another device)"))
    if foreign:
        text = f"devices of other clusters were discovered: {', '.join(foreign)}"
        found.append(finding("devices", "note", text, f"primad devices --cluster {foreign[0]}"))
    return found


def judge_versions(peers: Sequence[Peer], cluster: str, version: str, *, protocol: int, oldest: int) -> list[Finding]:
    """Judge versions. We support protocols from ``oldest`` to ``protocol``. Devices with other protocols do not work
    with us, except perhaps with the next one, which may support ours too; another version may differ in bugs."""
    found = []
    for peer in peers:
        if peer.cluster != cluster:
            continue
        both = (
            f"{peer.device} has version {peer.version} (protocol {peer.protocol}), this device {version} ({protocol})"
        )
        older = peer.protocol < protocol or (peer.protocol == protocol and _numbers(peer.version) < _numbers(version))
        command = f"{_UPDATE}    ({'on ' + peer.device if older else 'here'})"
        if not oldest <= peer.protocol <= protocol + 1:
            found.append(finding("versions", "warning", f"{both}: they do not work together", command))
        elif peer.protocol != protocol or peer.version != version:
            found.append(finding("versions", "note", f"{both}: they work together", command))
    return found or [
        finding("versions", "ok", f"this device has version {version} (protocol {protocol}); no other differs")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTrust:
    """What is known here about trust, by key: which keys this device ``trusts`` and ``revoked``, and what the running
    daemon learnt from the other side: which devices its head ``introduced``, which heads it was ``revoked_by``, which
    heads ``refused`` it and why."""

    trusts: Callable[[str], bool]
    revoked: frozenset[str] = frozenset()
    introduced: frozenset[str] = frozenset()
    revoked_by: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)


def judge_trust(peers: Sequence[Peer], cluster: str, own_key: str, trust: KnownTrust) -> list[Finding]:
    """Judge trust: devices of our cluster that are not trusted stay outside until a code is typed."""
    found = []
    for peer in peers:
        if peer.cluster != cluster or _is_own(peer, own_key):
            continue
        if peer.key in trust.revoked:
            again = (
                "type there what 'primad pair' shows here"
                if peer.role == "worker"
                else "'primad pair' there shows a code"
            )
            text = f"{peer.device} was revoked here; to pair again {again}"
            found.append(finding("trust", "note", text, "primad pair" + " --code CODE" * (peer.role == "head")))
        elif peer.key in trust.revoked_by:
            text = f"{peer.device} is trusted here, but it revoked this device, and gives it no work; to pair again"
            found.append(
                finding("trust", "warning", f"{text} 'primad pair' there shows a code", "primad pair --code CODE")
            )
        elif peer.key in trust.refused:
            text = f"{peer.device} is trusted here, but does not work for this head: {trust.refused[peer.key]}"
            found.append(finding("trust", "warning", text, f"primad doctor    (on {peer.device})"))
        elif trust.trusts(peer.key):
            found.append(finding("trust", "ok", f"{peer.device} is trusted here"))
        elif peer.key in trust.introduced:
            found.append(finding("trust", "ok", f"{peer.device} was introduced by the head"))
        elif peer.role == "head" and peer.pairing is not None:
            text = f"{peer.device} is not trusted yet, and has a code open; it shows it"
            found.append(finding("trust", "warning", text, f"primad join --code {peer.pairing[0]}-WORD-WORD"))
        elif peer.role == "head":
            text = f"{peer.device} is not trusted yet; 'primad pair' there shows a code to type here"
            found.append(finding("trust", "warning", text, "primad join --code CODE"))
        else:
            text = f"{peer.device} is not trusted yet; show a code here and type it there"
            found.append(finding("trust", "warning", text, "primad pair"))
    return found


def _is_own(peer: Peer, own_key: str) -> bool:
    return peer.key == own_key


def _numbers(version: str) -> list[int]:
    return [int(part[:9]) for part in re.findall(r"[0-9]+", version)]
