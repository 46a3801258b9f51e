"""Where a device is found, as one device tells another."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Final

import msgspec

from primad.errors import ProtocolError, printable
from primad.settings.config import NAME
from primad.trust.identity import is_key

MAX_ADDRESSES: Final = 64
_SCOPE: Final = re.compile(r"[\w.-]{1,32}", re.ASCII)


class Contact(msgspec.Struct, frozen=True, kw_only=True):
    """A device: its name, its public key (Z85), its addresses and the TCP port there."""

    device: str
    key: str
    addresses: list[str]
    port: int


def is_address(text: str) -> bool:
    """Whether ``text`` is the address of one machine (no name, no wildcard), perhaps with a scope."""
    bare, percent, scope = text.partition("%")
    try:
        return not ip_address(bare).is_unspecified and (not percent or _SCOPE.fullmatch(scope) is not None)
    except ValueError:
        return False


def check_contact(contact: Contact) -> None:
    """Judge what came from another device. Raises ``ProtocolError`` naming what is wrong."""
    if not NAME.fullmatch(contact.device):
        raise ProtocolError(f"contact {printable(contact.device, 70)!r}, which is no device name")
    if not is_key(contact.key):
        raise ProtocolError(f"{printable(contact.key, 50)!r} of {contact.device} is no public key")
    if len(contact.addresses) > MAX_ADDRESSES or not 0 < contact.port < 65_536:
        raise ProtocolError(f"{contact.device} at {len(contact.addresses)} addresses, port {contact.port}")
    for address in contact.addresses:
        if not is_address(address):
            raise ProtocolError(f"{contact.device} at {printable(address, 50)!r}, which is no address")
