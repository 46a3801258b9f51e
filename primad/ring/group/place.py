"""This ring process's place in a group: where others connect to, and the exchange once they have.

Windows are loaded before the ranks are connected, so that no rank waits for a device that still loads: until then this
class takes the place of the exchange.
"""

from __future__ import annotations

from typing import Final

from primad.engine.protocol import Hidden
from primad.errors import RingError
from primad.ring.group.connect import GroupListener, connect_group
from primad.ring.group.exchange import RankExchange
from primad.ring.messages import GroupRank, JoinGroup

CONNECT_S: Final = 20.0


class GroupPlace:
    """The exchange of ``group`` for a process that listens on ``host``. A part that takes longer than ``timeout_s`` is
    late.

    Raises ``RingError`` if it cannot listen there.
    """

    def __init__(self, group: GroupRank, host: str, *, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._listener = GroupListener(host)
        self._exchange: RankExchange | None = None
        self.endpoint = f"tcp://{host}:{self._listener.address[1]}"

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._group.rank

    @property
    def is_joined(self) -> bool:
        """Whether all ranks are connected."""
        return self._exchange is not None

    def join(self, join: JoinGroup) -> None:
        """Connect to all other ranks. Raises ``RankError`` if one of them is not there."""
        if self._exchange is not None or len(join.addresses) != self.rank:
            raise RingError(f"rank {self.rank} of a group was given {len(join.addresses)} addresses, or twice")
        self._exchange = connect_group(
            self.rank,
            self._group.devices,
            self._listener,
            {rank: (each.host, each.port) for rank, each in enumerate(join.addresses)},
            self._group.key,
            connect_timeout_s=CONNECT_S,
            timeout_s=self._timeout_s,
            halves=self._group.wire == "f16",
        )
        self._listener.close()

    @property
    def _joined(self) -> RankExchange:
        if self._exchange is None:
            raise RingError("a step came before the devices of this group were connected")
        return self._exchange

    def fileno(self) -> int:
        """The descriptor that becomes readable when the first rank may have sent something."""
        return self._joined.fileno()

    def follow(self) -> bytes | None:
        """As ``RankExchange.follow``."""
        return self._joined.follow()

    def lead(self, message: bytes) -> None:
        """As ``RankExchange.lead``."""
        self._joined.lead(message)

    def spread(self, values: Hidden) -> None:
        """As ``RankExchange.spread``."""
        self._joined.spread(values)

    def sum(self, values: Hidden) -> None:
        """As ``RankExchange.sum``."""
        self._joined.sum(values)

    def gather(self, values: Hidden) -> list[Hidden]:
        """As ``RankExchange.gather``."""
        return self._joined.gather(values)

    def close(self) -> None:
        """End the connections."""
        self._listener.close()
        if self._exchange is not None:
            self._exchange.close()
