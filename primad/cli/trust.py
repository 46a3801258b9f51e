"""``primad devices trust`` and ``revoke``: give and revoke trust by hand. A running daemon notices immediately."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from primad.cli.completion import trusted_names
from primad.cli.options import Home
from primad.cli.output import out
from primad.errors import ClusterError, ConfigError
from primad.settings.config import load_config

if TYPE_CHECKING:
    from primad.trust.trust import TrustedDevice, TrustStore


def trust(
    name: Annotated[str, typer.Argument(help="A name for the device.")],
    key: Annotated[str, typer.Option(help="Its key, from 'primad devices' there: 64 digits.")],
    head: Annotated[
        bool, typer.Option("--head", help="Trust it as a head: it may give this device work and introduce others.")
    ] = False,
    home: Home = None,
) -> None:
    """Trust a device by its key, without a code. Do the same there with this device's key.

    Examples:

        primad devices trust lap --key KEY

        primad devices trust desk --key KEY --head
    """
    from primad.trust.identity import fingerprint, key_hex, parse_key
    from primad.trust.trust import BY_HAND, HEAD, WORKER, trusted_now

    store, own = _store(home)
    device = store.add(trusted_now(name, parse_key(key), BY_HAND, HEAD if head else WORKER))
    out.print(f"{device.device} is trusted here as a {device.role}; its fingerprint is {fingerprint(device.key)}")
    there = f"primad devices trust {own.device} --key {key_hex(own.key)}{'' if head else ' --head'}"
    out.print(f"if you have not yet, type on {device.device}: {there}")


def revoke(
    device: Annotated[
        str, typer.Argument(help="Its name or key, from 'primad devices'.", autocompletion=trusted_names)
    ],
    home: Home = None,
) -> None:
    """Stop trusting a device, even if a head introduces it, until you pair with it again.

    Examples:

        primad devices revoke desk
    """
    from primad.trust.identity import fingerprint, parse_key

    store, _ = _store(home)
    with contextlib.suppress(ConfigError):  # a name, then
        device = parse_key(device)
    for each in store.revoke(device if store.is_known(device) else _key_of(device, store, home)):
        out.print(f"{each.device} is no longer trusted here ({fingerprint(each.key)})")
    out.print("a head notifies it and its other devices; devices that were paired with it directly still trust it")


def _key_of(name: str, store: TrustStore, home: Path | None) -> str:
    """The key of the only trusted device in sight that now announces ``name``; ``name`` if there is none, or several."""
    from primad.cli.sight import called

    with contextlib.suppress(ClusterError):  # no network: no device is in sight
        found = {peer.key for peer in called(load_config({"home": home}), name) if store.trusts(peer.key)}
        if len(found) == 1:
            return found.pop()
    return name


def _store(home: Path | None) -> tuple[TrustStore, TrustedDevice]:
    """The trust store of ``home``, and this device as others see it."""
    from primad.trust.identity import load_identity
    from primad.trust.trust import BY_HAND, TrustStore, trusted_now

    config = load_config({"home": home})
    identity = load_identity(config.home)
    return TrustStore(config.home, identity), trusted_now(config.name, identity.public, BY_HAND)
