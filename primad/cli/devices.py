"""``primad devices``: the devices in sight and the trusted ones, with their states."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from primad import __version__
from primad.cli.commands import CommandGroup
from primad.cli.options import Cluster, Home, OnInterface
from primad.cli.output import out, print_json
from primad.cli.sight import DaemonReport, newest_of, peers_in_sight, report
from primad.errors import ConfigError
from primad.settings.config import load_config

if TYPE_CHECKING:
    from primad.network.discovery import Peer
    from primad.trust.trust import TrustStore

_HALF = 19
"""Characters of half a fingerprint."""


devices_app = CommandGroup(invoke_without_command=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One device, in sight or only trusted (then it has no addresses, port 0 and empty texts).

    ``device`` is the name under which it is trusted here, or the announced name of a stranger; ``calls_itself`` is the
    new name of a renamed one, else empty. Devices that a head introduced to the daemon here are trusted while that head
    is connected. It listens at ``places`` (``host:port``): a worker for heads, a head for HTTP; a worker relays requests
    to its head that reach ``relays_at``. ``key`` is the public key in hexadecimal digits, ``fingerprint`` the same for
    people to compare; both are empty for a device too old to have one. ``state`` comes from the daemon that runs here, or
    from discovery.
    """

    device: str
    calls_itself: str
    role: str
    cluster: str
    places: tuple[str, ...]
    addresses: tuple[str, ...]
    port: int
    version: str
    protocol: int
    trusted: Literal["yes", "introduced", "no", "revoked"]
    key: str
    fingerprint: str
    state: str
    relays_at: tuple[str, ...] = ()


@devices_app.callback()
def devices(
    context: typer.Context,
    home: Home = None,
    cluster: Cluster = None,
    host: Annotated[
        str | None, typer.Option(help="Look from this address [default: all of this machine].", show_default=False)
    ] = None,
    interface: OnInterface = None,
    seconds: Annotated[float, typer.Option(help="How long to look.", min=0.1, max=600)] = 2.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List discovered and trusted devices, and this device's own key.

    Examples:

        primad devices

        primad devices --seconds 5 --json

        primad devices trust desk --key KEY

        primad devices revoke desk
    """
    if context.invoked_subcommand is not None:
        _nothing_before(context, context.invoked_subcommand)
        return
    from primad.trust.identity import fingerprint, key_hex, load_identity
    from primad.trust.trust import TrustStore

    config = load_config({"home": home, "cluster": cluster, "host": host, "interface": interface})
    identity = load_identity(config.home)
    peers = peers_in_sight(config, seconds)
    found = rows(peers, TrustStore(config.home, identity), report(config.home), config.name)
    if cluster is not None:
        found = [row for row in found if row.cluster == cluster]
    if json:
        print_json(found)
        return
    if found:
        out.print(_table(found, {key_hex(peer.key) for peer in peers if peer.is_hidden}))
    else:
        out.print("no device discovered; start 'primad join' on one")
    own = f"this device is {config.name}, {fingerprint(identity.public)}\nits key: {key_hex(identity.public)}"
    out.print(own)


def _nothing_before(context: typer.Context, command: str) -> None:
    """Reject an option before ``command``: it would belong to the listing and do nothing. Raises ``ConfigError``."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                f"--{name}: belongs after '{command}', if {command} has it: primad devices {command} --help"
            )


def rows(peers: Sequence[Peer], trust: TrustStore, report: DaemonReport, own: str) -> list[Row]:
    """The devices in sight, without ``own``, then trusted devices that are not in sight. A key has one row, even while
    an old announcement of its device is still cached."""
    from primad.trust.identity import fingerprint, key_hex
    from primad.trust.labels import Labels

    revoked, names = {each.key: each.device for each in trust.lost()}, {e.key: e.device for e in trust.entries()}
    labels = Labels(own).of(names)

    def trusted(key: str) -> Literal["yes", "introduced", "no", "revoked"]:
        if key in revoked:
            return "revoked"
        return "yes" if trust.trusts(key) else "introduced" if key in report.introduced else "no"

    def state(peer: Peer) -> str:
        is_namesake = peer.key not in labels and peer.device in labels.values()
        return _looks(peer) if is_namesake else report.states.get(labels.get(peer.key, peer.device), _looks(peer))

    def named(peer: Peer) -> str:
        return names.get(peer.key) or revoked.get(peer.key) or peer.device

    newest = newest_of(peers)
    found = [
        Row(
            device=named(peer),
            calls_itself="" if peer.device == named(peer) else peer.device,
            role=peer.role,
            cluster=peer.cluster,
            places=peer.listens_at,
            addresses=peer.addresses,
            port=peer.port,
            version=peer.version,
            protocol=peer.protocol,
            trusted=trusted(peer.key),
            key=key_hex(peer.key),
            fingerprint=fingerprint(peer.key),
            state=state(peer),
            relays_at=peer.relays_at,
        )
        for peer in peers
        if peer is newest[peer.key]
    ]
    return found + [
        Row(
            device=known.device,
            calls_itself="",
            role="",
            cluster="",
            places=(),
            addresses=(),
            port=0,
            version="",
            protocol=0,
            trusted="yes",
            key=key_hex(known.key),
            fingerprint=fingerprint(known.key),
            state=report.states.get(labels[known.key], "not discovered"),
        )
        for known in trust.entries()
        if known.key not in newest
    ]


def _looks(peer: Peer) -> str:
    """The state of a device according to discovery."""
    if peer.is_measuring:
        return "measuring"
    return "shows a code" if peer.pairing is not None else "discovered"


def _table(found: Sequence[Row], hidden: Collection[str]) -> Table:
    """Show all values in full, on several lines if needed: a truncated address is useless.

    The HTTP servers of ``hidden`` heads, by key, are only reachable from their own device.
    """
    from rich.box import SIMPLE_HEAD
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for column in ("device", "role", "cluster", "trusted", "fingerprint", "state", "address"):
        table.add_column(column, overflow="fold", no_wrap=column == "fingerprint")
    for row in found:
        name = f"{row.device} (calls itself {row.calls_itself})" if row.calls_itself else row.device
        address = "\n".join(row.places) + (" (that device only)" if row.key in hidden else "")
        address += "".join(f"\nAPI {place}" for place in row.relays_at)
        halves = f"{row.fingerprint[:_HALF]}\n{row.fingerprint[_HALF + 1 :]}".strip()
        state = row.state if row.version in ("", __version__) else f"{row.state}, has primad {row.version}"
        table.add_row(*map(Text, (name, row.role, row.cluster, row.trusted, halves, state, address)))
    return table
