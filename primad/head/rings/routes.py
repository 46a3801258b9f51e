"""The addresses at which a ring's devices reach each other, and the sources of layers."""

from __future__ import annotations

from collections.abc import Sequence

from primad.head.members.core import UNREACHED, StageError
from primad.head.members.worker_link import WorkerLink
from primad.head.rings.ring_inputs import RingInputs
from primad.network.contacts import Contact, is_address
from primad.network.messages import MAX_CONTACTS
from primad.network.scopes import bare, own_address
from primad.settings.config import LOOPBACK, is_loopback


class RingAddresses:
    """The addresses by which the devices of one ring reach each other, according to measured links."""

    def __init__(self, inputs: RingInputs) -> None:
        self._inputs = inputs

    async def sources(self, worker: WorkerLink) -> list[Contact]:
        """Return sources of layers for ``worker``: this head, and every worker that it reaches."""
        sources = [
            Contact(
                device=self._inputs.forecast.plan.head,
                key=self._inputs.node.identity.public,
                addresses=[await self.to_head(worker)],
                port=self._inputs.layer_port,
            )
        ]
        for name, other in self._inputs.devices.holders.items():
            if name == worker.name:
                continue
            host = self.host_for(worker.name, name)
            if is_address(host):  # host names are meaningful only here
                sources.append(Contact(device=name, key=other.key, addresses=[host], port=other.layer_port))
        return sources[:MAX_CONTACTS]

    def own_sources(self) -> list[Contact]:
        """Return sources of layers for this head: every worker."""
        head = self._inputs.forecast.plan.head
        return [
            Contact(device=name, key=worker.key, addresses=[self.host_for(head, name)], port=worker.layer_port)
            for name, worker in self._inputs.devices.holders.items()
        ]

    async def to_head(self, worker: WorkerLink) -> str:
        """Return the address of this head that ``worker`` can reach: the local address of packets to the worker.

        Raises ``StageError`` if no address of the worker is routable.
        """
        if is_loopback(self._inputs.node.config.host) or is_loopback(worker.end.host):
            return LOOPBACK
        measured = self._inputs.devices.links.address(self._inputs.forecast.plan.head, worker.name)
        return await self._leaving_for(worker, [worker.end.host, *([measured] if measured else [])])

    async def to_first(self, worker: WorkerLink) -> str:
        """Return the address at which the head reaches ``worker``, to which it sends its steps.

        Raises ``StageError`` like ``to_head``: a ring process with an unroutable address would end.
        """
        host = self.host_for(self._inputs.forecast.plan.head, worker.name)
        await self._leaving_for(worker, [host])
        return host

    async def _leaving_for(self, worker: WorkerLink, hosts: Sequence[str]) -> str:
        """Return the local address of packets to ``worker`` for the first routable one of ``hosts``."""
        reasons = []
        for host in dict.fromkeys(hosts):
            try:
                return await own_address(host, worker.end.port)
            except OSError as exc:
                reasons.append(f"no route to {worker.name} at {host}:{worker.end.port}: {exc.strerror or exc}")
        raise StageError("; ".join(reasons), worker.name, UNREACHED)

    def host_for(self, source: str, target: str) -> str:
        """Return the address at which ``source`` reaches the worker ``target``; only the head gets one with a scope."""
        host = self._inputs.devices.links.address(source, target) or self._inputs.devices.holders[target].end.host
        return host if source == self._inputs.forecast.plan.head else bare(host)
