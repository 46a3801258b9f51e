"""The head that a device relays requests to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlace:
    """A head: its ``name`` and public ``key``, where it accepts relayed requests (``port`` 0: it does not), and the
    silence after which it is gone. ``session`` tells its restarts apart."""

    name: str
    key: str
    address: str
    port: int
    session: int
    gone_after_s: float
