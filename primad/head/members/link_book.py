"""The known links between the devices of this cluster; missing ones are measured before a plan is made.

The head measures its own links, and each worker measures its links to later workers in the list. One device measures at
a time, so that measurements do not disturb each other.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import Final

import msgspec

from halda import LinkProfile
from primad.daemon.reporter import Reporter
from primad.head.members.core import DeviceLostError
from primad.head.members.worker_link import Caller, WorkerLink
from primad.network.contacts import MAX_ADDRESSES, Contact
from primad.network.linkprobe import MAX_S, UNREACHABLE_S, MeasuredLinks, cut_link, measure_links
from primad.network.scopes import bare
from primad.network.unreached import SILENT, Unreached, unreached_line

logger = logging.getLogger(__name__)

REPLY_S: Final = 15.0
"""How much longer a busy worker may take to report its measurements."""


class LinkBook:
    """The links that the head ``caller`` has measured so far, by (source, target)."""

    def __init__(self, caller: Caller) -> None:
        self._caller, self._timings, self._head = caller, caller.timings, caller.device
        self._targets: dict[str, Contact] = {}
        self._links: dict[tuple[str, str], LinkProfile] = {}
        """Links by (source, target), including failed ones."""
        self._why: dict[tuple[str, str], Unreached] = {}
        """Why a link does not work, from the device that measured it."""
        self._reported: set[tuple[str, str]] = set()

    async def measure(
        self,
        workers: Sequence[WorkerLink],
        addresses: Mapping[str, Iterable[str]],
        reporter: Reporter,
        *,
        again: bool = False,
    ) -> list[LinkProfile]:
        """Return all links between the head and ``workers``; ``addresses`` are the announced ones.

        Links of devices that moved are forgotten; with ``again`` failed links are measured again. Raises
        ``DeviceLostError`` if a worker goes away meanwhile; then it is forgotten, and the other measurements are kept.
        """
        targets = {worker.name: await _target(worker, addresses.get(worker.name, ())) for worker in workers}
        for name, target in targets.items():
            if self._targets.get(name, target) != target:
                self.forget(name)
        self._targets |= targets
        names = [self._head, *targets]
        known = self._links.keys() - (self.unreached(names) if again else set())
        jobs = []
        for i, name in enumerate(names[:-1]):
            missing = [targets[other] for other in names[i + 1 :] if (name, other) not in known]
            if missing:
                jobs.append((name, missing))
        by_name = {worker.name: worker for worker in workers}
        total, done = sum(len(missing) for _, missing in jobs), 0
        try:
            for name, missing in jobs:
                reporter.progress(self._head, "links", done, total)
                await self._measure(name, missing, by_name, reporter)
                done += len(missing)
        except DeviceLostError as exc:
            self.forget(exc.device)
            raise
        finally:
            if total:
                reporter.progress(self._head, "links", done, total)
                reporter.resolve()
        return self.all_between(names)

    def between(self, devices: Iterable[str]) -> list[LinkProfile]:
        """Return the measured working links between ``devices``."""
        return [link for link in self.all_between(devices) if link.works]

    def rates(self, devices: Iterable[str]) -> dict[tuple[str, str], float]:
        """Return the bytes/s of working links from one of ``devices`` to another."""
        return {(link.source, link.target): link.bytes_per_s for link in self.between(devices)}

    def all_between(self, devices: Iterable[str]) -> list[LinkProfile]:
        """Return the links between ``devices``, for a plan, including failed ones."""
        names = set(devices)
        return [link for pair, link in self._links.items() if names.issuperset(pair)]

    def why_cut(self, device: str, others: Iterable[str]) -> str | None:
        """Return why ``device`` and one of ``others`` do not reach each other, with the cure; None if it reaches
        all."""
        for other in others:
            for pair in ((device, other), (other, device)):
                if pair in self._links and not self._links[pair].works and pair in self._why:
                    return unreached_line(pair[0], self._why[pair])
        return None

    def unreached(self, devices: Iterable[str]) -> set[tuple[str, str]]:
        """Return the failed links between the head and ``devices``."""
        found = self.all_between([self._head, *devices])
        return {(link.source, link.target) for link in found if not link.works}

    def address(self, source: str, target: str) -> str | None:
        """Return the best address at which ``source`` reaches ``target``, if it was measured."""
        link = self._links.get((source, target))
        return link.address if link is not None and link.address else None

    def forget(self, device: str) -> None:
        """Forget the links of a device that went away: it may come back at another address, and is measured again
        then."""
        self._targets.pop(device, None)
        self._links = {pair: link for pair, link in self._links.items() if device not in pair}
        self._why = {pair: why for pair, why in self._why.items() if device not in pair}
        self._reported = {pair for pair in self._reported if device not in pair}

    def doubt(self, devices: Iterable[str]) -> None:
        """Forget the links between ``devices``, which may not work any more, so that they are measured again."""
        names = set(devices)
        self._links = {pair: link for pair, link in self._links.items() if not names.issuperset(pair)}

    async def _measure(
        self, source: str, targets: Sequence[Contact], workers: Mapping[str, WorkerLink], reporter: Reporter
    ) -> None:
        await self._ask(source, targets, workers)
        unreached = [target for target in targets if self.address(source, target.device) is None]
        if unreached:  # it may have been introduced to the target a moment too late
            await asyncio.sleep(self._timings.link_again_s)
            await self._ask(source, unreached, workers)
        for target in targets:
            pair = (source, target.device)
            if self.address(*pair) is None:
                await workers[target.device].measure_links(
                    [], 2 * self._timings.answer_timeout_s
                )  # checks whether it is there at all
                if pair not in self._reported:
                    self._reported.add(pair)
                    reporter.report_line(
                        self.why_cut(source, [target.device]) or f"{source} does not reach {target.device}"
                    )
            elif pair in self._reported:
                self._reported.discard(pair)
                reporter.report_line(f"{source} reaches {target.device} now")

    async def _ask(self, source: str, targets: Sequence[Contact], workers: Mapping[str, WorkerLink]) -> None:
        if source == self._head:
            caller, timeout_s = self._caller, self._timings.link_timeout_s
            found = await measure_links(caller.context, caller.identity, source, targets, timeout_s=timeout_s)
        else:
            found = MeasuredLinks(links=[], unreached=[])
            for target in targets:  # one by one, so that its allowed silence does not grow with their number
                one = await workers[source].measure_links([_for_others(target)], MAX_S + REPLY_S)
                found.links.extend(one.links)
                found.unreached.extend(one.unreached)
        cut = {(link.source, link.target) for link in found.links if link.round_trip_s >= UNREACHABLE_S}
        self._links |= {(link.source, link.target): link for link in found.links}
        self._links |= {pair: cut_link(*pair) for pair in cut}  # an older device returns figures only
        by_device = {each.device: each for each in found.unreached}
        for target in targets:
            if (source, target.device) in cut:
                unsaid = Unreached(device=target.device, place="any address", why=SILENT)
                self._why[source, target.device] = by_device.get(target.device, unsaid)


async def _target(worker: WorkerLink, announced: Iterable[str]) -> Contact:
    """Return the address of ``worker`` for others. Names are resolved here: elsewhere a name may mean another device,
    or none."""
    addresses = dict.fromkeys([*await _resolve(worker.end.host, worker.end.port), *announced])
    return Contact(device=worker.name, key=worker.key, addresses=list(addresses)[:MAX_ADDRESSES], port=worker.end.port)


def _for_others(target: Contact) -> Contact:
    """Return ``target`` as described to another device."""
    addresses = list(dict.fromkeys(bare(address) for address in target.addresses))
    return msgspec.structs.replace(target, addresses=addresses)


async def _resolve(host: str, port: int) -> list[str]:
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as exc:
            logger.warning("%s: %s", host, exc)
            return []
        return [str(entry[4][0]) for entry in found]
    return [host]
