"""Check whether visible or configured devices can be reached.

This shows what a firewall on the other device blocks.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from primad.doctor.findings import Finding, finding, in_thread
from primad.network.peer import Peer
from primad.settings.config import split_address

TIMEOUT_S: Final = 2.0
MAX_TARGETS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An address of a device. ``named`` says that the configuration has it."""

    device: str
    address: str
    port: int
    named: bool


def targets(peers: Sequence[Peer], cluster: str, named: Sequence[str]) -> list[Target]:
    """Return the control ports of visible workers of ``cluster``, then the devices named as host:port.

    A head has no control port; its HTTP port stays on its own machine unless its owner says otherwise.
    """
    seen = [
        Target(device=peer.device, address=address, port=peer.port, named=False)
        for peer in peers
        if peer.is_worker_of(cluster)
        for address in peer.addresses
    ]
    given = [
        Target(device=text, address=host, port=port, named=True)
        for text, (host, port) in zip(named, map(split_address, named), strict=True)
    ]
    return [*given, *seen][:MAX_TARGETS]


async def gather_reached(wanted: Sequence[Target], timeout_s: float = TIMEOUT_S) -> dict[Target, str]:
    """Try all targets concurrently; return "" or a short reason why each cannot be reached."""
    problems = await asyncio.gather(*(_connect(target, timeout_s) for target in wanted))
    return dict(zip(wanted, problems, strict=True))


def judge_reached(reached: dict[Target, str]) -> list[Finding]:
    """Judge reachability: one responding address per device suffices, as others often do not respond (bridges,
    VPNs)."""
    found = []
    for device in dict.fromkeys(target.device for target in reached):
        own = {target: problem for target, problem in reached.items() if target.device == device}
        works = [f"{target.address} port {target.port}" for target, problem in own.items() if not problem]
        if works:
            found.append(finding("reach", "ok", f"{device} responds on {_some(works)}"))
            continue
        tried = _some(f"{target.address} port {target.port}: {problem}" for target, problem in own.items())
        if next(iter(own)).named:
            text = f"{device} is named as a device, but does not respond ({tried})"
            found.append(
                finding("reach", "warning", text, f"primad join --port {next(iter(own)).port}    (over there)")
            )
        else:
            text = f"{device} was discovered, but does not respond ({tried}); a firewall there?"
            found.append(finding("reach", "warning", text, f"primad doctor    (on {device})"))
    return found


async def _connect(target: Target, timeout_s: float) -> str:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            found = await in_thread(lambda: socket.getaddrinfo(target.address, target.port, type=socket.SOCK_STREAM))
            family, _, _, _, address = found[0]
            with socket.socket(family, socket.SOCK_STREAM) as link:
                link.setblocking(False)
                await loop.sock_connect(link, address)
    except TimeoutError:
        return f"no response within {timeout_s:g} s"
    except (OSError, UnicodeError) as exc:
        return getattr(exc, "strerror", None) or str(exc)
    return ""


def _some(texts: Iterable[str]) -> str:
    """Return the first three, and the number of the others."""
    listed = list(texts)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more
