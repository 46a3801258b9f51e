"""What is known of the links between the devices of this cluster; what is missing is measured before a plan is made.

The head measures its own links, each worker those to the workers behind it in the list, one device at a time, so that
measurements do not disturb each other.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address

import zmq.asyncio

from halda import LinkProfile
from primad.cluster.linkprobe import TIMEOUT_S, measure_links
from primad.cluster.messages import LinkTarget
from primad.daemon.reporter import Reporter
from primad.daemon.worker_link import Worker


class LinkBook:
    """The links measured so far, by (source, target). ``session`` is the head's, which workers know it by."""

    def __init__(self, context: zmq.asyncio.Context, head: str, session: int) -> None:
        self._context = context
        self._head = head
        self._session = session
        self._links: dict[tuple[str, str], LinkProfile] = {}

    async def measure(
        self, workers: Sequence[Worker], addresses: Mapping[str, Iterable[str]], reporter: Reporter
    ) -> list[LinkProfile]:
        """All links between the head and ``workers``. ``addresses`` are those that the devices announced.

        Raises ``ClusterError`` when a worker goes silent over it.
        """
        targets = {worker.name: await _target(worker, addresses.get(worker.name, ())) for worker in workers}
        names = [self._head, *targets]
        jobs = []
        for i, name in enumerate(names[:-1]):
            missing = [targets[other] for other in names[i + 1 :] if (name, other) not in self._links]
            if missing:
                jobs.append((name, missing))
        total, done = sum(len(missing) for _, missing in jobs), 0
        by_name = {worker.name: worker for worker in workers}
        for name, missing in jobs:
            reporter.progress(self._head, "measure links", done, total)
            if name == self._head:
                found = await measure_links(self._context, name, missing, self._session)
            else:
                most_s = 60.0 + sum(len(target.addresses) for target in missing) * 40 * TIMEOUT_S
                found = await by_name[name].measure_links(missing, most_s)
            for link in found:
                self._links[link.source, link.target] = link
            done += len(missing)
        if total:
            reporter.progress(self._head, "measure links", total, total)
            reporter.settle()
        return [link for pair, link in self._links.items() if set(pair) <= set(names)]

    def address(self, source: str, target: str) -> str | None:
        """The address by which ``source`` reaches ``target`` best, if it was measured."""
        link = self._links.get((source, target))
        return link.address if link is not None and link.address else None

    def forget(self, device: str) -> None:
        """A device came back, perhaps elsewhere: its links are measured anew."""
        self._links = {pair: link for pair, link in self._links.items() if device not in pair}


async def _target(worker: Worker, announced: Iterable[str]) -> LinkTarget:
    addresses = [*await _resolve(worker.end.host, worker.end.port), *announced]
    return LinkTarget(device=worker.name, addresses=list(dict.fromkeys(addresses)), port=worker.end.port)


async def _resolve(host: str, port: int) -> list[str]:
    try:
        return [str(ip_address(host.partition("%")[0]))]
    except ValueError:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [str(entry[4][0]) for entry in found]
