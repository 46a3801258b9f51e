"""A device's address, as one device describes it to another."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated, Final

import msgspec

from primad.errors import ProtocolError, printable
from primad.settings.config import NAME
from primad.trust.identity import is_key

MAX_ADDRESSES: Final = 64
_SCOPE: Final = re.compile(r"[\w.-]{1,32}", re.ASCII)


DeviceName = Annotated[str, msgspec.Meta(pattern=rf"\A{NAME.pattern}\Z")]
TcpPort = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class Contact(msgspec.Struct, frozen=True, kw_only=True):
    """A device: its name, its public key (Z85), its addresses and the TCP port there."""

    device: DeviceName
    key: str
    addresses: Annotated[list[str], msgspec.Meta(max_length=MAX_ADDRESSES)]
    port: TcpPort


def is_address(text: str) -> bool:
    """Whether ``text`` is the address of one machine (no name, no wildcard), perhaps with a scope."""
    bare, percent, scope = text.partition("%")
    try:
        return not ip_address(bare).is_unspecified and (not percent or _SCOPE.fullmatch(scope) is not None)
    except ValueError:
        return False


def check_contact(contact: Contact) -> None:
    """Check another device's data beyond its shape. Raises ``ProtocolError`` naming the error."""
    if not is_key(contact.key):
        raise ProtocolError(f"{printable(contact.key, 50)!r} of {contact.device} is not a public key")
    for address in contact.addresses:
        if not is_address(address):
            raise ProtocolError(f"{contact.device} at {printable(address, 50)!r}, which is not an address")
