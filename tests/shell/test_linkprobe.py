"""Links are measured over real sockets; addresses that do not answer, or lead to another device, are skipped."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import zmq.asyncio

from halda import LinkProfile
from primad.head.members import link_book as links_module
from primad.head.members.core import DeviceLostError
from primad.head.members.link_book import REPLY_S, LinkBook
from primad.head.members.worker_link import Caller, WorkerLink, greet
from primad.membership import types
from primad.network import linkprobe
from primad.network.contacts import MAX_ADDRESSES, Contact
from primad.network.linkprobe import MAX_S, UNREACHABLE_S, MeasuredLinks, measure_links
from primad.network.messages import MAX_ECHO_BYTES, LinksMeasured, decode_from_worker
from primad.network.unreached import unreached_line
from primad.settings.timings import NetworkTimings
from primad.system.wire import encode
from primad.trust.identity import Identity, new_identity
from tests.fakes.control import HEAD, HOST, FakeDevice, gated, head_end

PATIENCE_S = 180


class Lines:
    """A reporter that keeps its lines."""

    def __init__(self) -> None:
        self.printed: list[str] = []
        self.measured = 0

    def report_line(self, line: str) -> None:
        self.printed.append(line)

    def progress(self, device: str, phase: str, done: int, total: int) -> None:
        assert (device, phase) == ("desk", "links")
        if done == total:
            self.measured += total

    def wait(self, words: str) -> None:
        """Nothing is displayed."""

    def resolve(self) -> None:
        pass


@asynccontextmanager
async def devices(*names: str) -> AsyncIterator[tuple[zmq.asyncio.Context, list[FakeDevice]]]:
    async with gated(patience_s=PATIENCE_S) as context:
        made = [FakeDevice(context, name) for name in names]
        yield context, made
        for device in made:
            await device.leave()


def alive(event: types.Event) -> None:
    """Assert that the event is only a sign of life or a lost link."""
    assert isinstance(event, types.Heard | types.Lost), event


def caller_of(context: zmq.asyncio.Context, **timings: float) -> Caller:
    return Caller(
        context=context,
        identity=HEAD,
        device="desk",
        session=7,
        build="b",
        gone_after_s=4.0,
        ping_interval_s=0.05,
        timings=NetworkTimings(**timings),
    )


async def greeted(context: zmq.asyncio.Context, *made: FakeDevice, host: str = HOST) -> list[WorkerLink]:
    caller = caller_of(context)
    ends = [head_end(context, device.end, device.key) for device in made]
    for end in ends:
        end.host = host
    return [await greet(caller, end, alive, device.name) for end, device in zip(ends, made, strict=True)]


def book_of(context: zmq.asyncio.Context, **timings: float) -> LinkBook:
    return LinkBook(caller_of(context, **timings))


@pytest.fixture(autouse=True)
def dead(monkeypatch) -> set[str]:
    """Hosts, keys and devices that do not answer; they get a short timeout.

    All others get enough time for a busy machine.
    """
    found: set[str] = set()
    measure, send = linkprobe._measure, WorkerLink.measure_links

    async def measure_link(
        context: zmq.asyncio.Context, identity: Identity, host: str, target: Contact, timeout_s: float
    ) -> linkprobe._Measured:
        is_dead = found & {host, target.key, target.device}
        return await measure(context, identity, host, target, 0.3 if is_dead else PATIENCE_S)

    async def request_one(worker: WorkerLink, targets: Sequence[Contact], timeout_s: float) -> MeasuredLinks:
        return await send(worker, targets, 0.4 if worker.name in found else max(timeout_s, PATIENCE_S))

    monkeypatch.setattr(linkprobe, "_measure", measure_link)
    monkeypatch.setattr(WorkerLink, "measure_links", request_one)
    return found


def plausible(link: LinkProfile) -> bool:
    """Whether the figures fit into a message and have the sizes that a ring sends."""
    decode_from_worker(encode(LinksMeasured(links=[link])))
    sizes = [message.size_bytes for message in link.messages]
    assert link.network_s is not None
    assert 0 < link.network_s <= link.round_trip_s
    return sizes == [8 << 10, 32 << 10, 256 << 10] and MAX_ECHO_BYTES / PATIENCE_S < link.bytes_per_s < math.inf


async def test_links_are_measured_in_both_directions():
    async with devices("a", "b") as (context, (a, b)):
        links = (await measure_links(context, HEAD, "desk", [a.target(), b.target()])).links
        ends = [(link.source, link.target, link.address) for link in links]
        assert ends == [
            ("desk", "a", "127.0.0.1"),
            ("a", "desk", ""),
            ("desk", "b", "127.0.0.1"),
            ("b", "desk", ""),
        ]
        assert all(map(plausible, links))


@pytest.mark.parametrize(("mbit_per_s", "at_once"), [(1, 1), (100, 4)])
async def test_a_slow_link_is_measured_and_not_filled(mbit_per_s, at_once):
    """Four large messages at once would take longer than a device may be silent."""
    lots = []

    async def exchange(count: int, send_bytes: int, answer_bytes: int) -> float:
        lots.append(count)
        return 0.01 + count * (send_bytes + answer_bytes) / (mbit_per_s * 125_000)

    way = await linkprobe._way(exchange, 0.01, there=True)
    assert way.bytes_per_s == pytest.approx(mbit_per_s * 125_000, rel=0.05)
    assert max(lots) == at_once


@pytest.mark.parametrize("bad", ["127.0.0.9", "fe80::1%nowhere0"])
async def test_an_address_that_does_not_work_is_passed_over(dead, bad):
    dead.add(bad)
    async with devices("a") as (context, (a,)):
        there, back = (await measure_links(context, HEAD, "desk", [a.target(bad, "127.0.0.1")])).links
        assert there.address == "127.0.0.1"
        assert plausible(there)
        assert plausible(back)


@pytest.mark.parametrize("addresses", [["127.0.0.9", "127.0.0.8"], ["fe80::1%nowhere0"], []])
async def test_an_unreachable_device_has_a_link_that_no_plan_uses(dead, addresses):
    dead.update(addresses)
    async with devices("a") as (context, (a,)):
        target = Contact(device="a", key=a.key, addresses=addresses, port=a.port)
        there, back = (await measure_links(context, HEAD, "desk", [target])).links
        assert (there.address, there.round_trip_s, back.round_trip_s) == ("", UNREACHABLE_S, UNREACHABLE_S)


async def test_an_address_that_leads_to_another_device_is_passed_over(dead):
    """Loopback addresses do: where the head reaches a worker on its own machine, another machine reaches itself."""
    dead.add("b")
    async with devices("a", "b") as (context, (a, b)):
        wrong = Contact(device="b", key=b.key, addresses=[HOST], port=a.port)
        there, _back = (await measure_links(context, HEAD, "desk", [wrong])).links
        assert there.round_trip_s == UNREACHABLE_S


async def test_a_device_that_is_not_trusted_measures_nothing(dead):
    async with gated(lambda key: key != HEAD.public, patience_s=PATIENCE_S) as context:
        a = FakeDevice(context, "a")
        dead.add("a")
        found = await measure_links(context, HEAD, "desk", [a.target()])
        assert not any(link.works for link in found.links)
        (why,) = found.unreached
        assert (why.device, why.why) == ("a", "untrusted")
        assert "a does not let it in" in unreached_line("desk", why)
        dead.clear()
        there, _ = (await measure_links(context, new_identity(), "desk", [a.target()])).links
        assert plausible(there)
        await a.leave()


# ---- the book -------------------------------------------------------------------------------------------------------


def pairs(links: list[LinkProfile]) -> set[tuple[str, str]]:
    return {(link.source, link.target) for link in links}


def every(*names: str) -> set[tuple[str, str]]:
    return {(a, b) for a in names for b in names if a != b}


async def test_a_link_in_doubt_is_measured_again_and_no_other():
    async with devices("a", "b") as (context, (a, b)):
        book, lines = book_of(context), Lines()
        workers = await greeted(context, a, b)
        await book.measure(workers, {}, lines)
        book.doubt(("b", "a"))
        assert pairs(book.all_between(["desk", "a", "b"])) == every("desk", "a", "b") - every("a", "b")
        assert pairs(await book.measure(workers, {}, lines)) == every("desk", "a", "b")
        assert (a.asked, b.asked, lines.measured) == ([["b"], ["b"]], [], 4)


async def test_only_what_is_missing_is_measured():
    async with devices("a", "b", "c") as (context, (a, b, c)):
        book, lines = book_of(context), Lines()
        workers = await greeted(context, a, b)
        first = await book.measure(workers, {}, lines)
        assert pairs(first) == every("desk", "a", "b")
        assert all(map(plausible, first))
        assert (a.asked, b.asked, lines.measured) == ([["b"]], [], 3)

        assert await book.measure(workers, {}, lines) == first
        assert lines.measured == 3

        workers += await greeted(context, c)
        third = await book.measure(workers, {}, lines)
        assert pairs(third) == every("desk", "a", "b", "c")
        assert set(first) < set(third)
        assert (a.asked, b.asked, lines.measured) == ([["b"], ["c"]], [["c"]], 6)
        assert book.address("a", "b") == "127.0.0.1"
        assert book.address("b", "a") is None
        assert pairs(book.between(["a", "desk"])) == every("a", "desk")
        assert not lines.printed
        for worker in workers:
            worker.close()


async def test_a_worker_gets_no_ipv6_scope_of_the_head(monkeypatch):
    async with devices("a", "b") as (context, (a, b)):
        reported: list[list[str]] = []

        async def send(worker: WorkerLink, targets: Sequence[Contact], timeout_s: float) -> MeasuredLinks:
            reported.extend(target.addresses for target in targets)
            return MeasuredLinks(links=[], unreached=[])

        own: list[list[str]] = []

        async def measure(*asked: object, timeout_s: float) -> MeasuredLinks:
            own.extend(target.addresses for target in asked[-1])
            return MeasuredLinks(links=[], unreached=[])

        monkeypatch.setattr(WorkerLink, "measure_links", send)
        monkeypatch.setattr(links_module, "measure_links", measure)
        workers = await greeted(context, a, b)
        addresses = {"b": ["fe80::9%4", "fe80::9%5", "192.0.2.1"]}
        await book_of(context, link_again_s=0.0).measure(workers, addresses, Lines())
        assert reported[0] == ["127.0.0.1", "fe80::9", "192.0.2.1"]
        assert own[1] == ["127.0.0.1", "fe80::9%4", "fe80::9%5", "192.0.2.1"]
        for worker in workers:
            worker.close()


async def test_a_forgotten_or_moved_device_is_measured_again():
    async with devices("a", "b") as (context, (a, b)):
        book, lines = book_of(context), Lines()
        workers = await greeted(context, a, b)
        await book.measure(workers, {}, lines)
        book.forget("b")
        assert pairs(book.between(["desk", "a", "b"])) == every("desk", "a")
        await book.measure(workers, {}, lines)
        assert (a.asked, lines.measured) == ([["b"], ["b"]], 5)

        assert pairs(await book.measure(workers[:1], {}, lines)) == every("desk", "a")
        assert lines.measured == 5
        await book.measure(workers, {}, lines)
        assert lines.measured == 5, "b was left out, but not forgotten"

        await book.measure(workers, {"b": ["127.0.0.1", "127.0.0.1"]}, lines)
        assert lines.measured == 5
        workers[1].close()
        await b.leave()
        moved = FakeDevice(context, "b")
        workers[1:] = await greeted(context, moved)
        assert pairs(await book.measure(workers, {}, lines)) == every("desk", "a", "b")
        assert lines.measured == 7
        await moved.leave()
        for worker in workers:
            worker.close()


async def test_a_device_that_was_named_by_its_host_is_found_by_the_others(monkeypatch):
    async with devices("a") as (context, (a,)):
        (worker,) = await greeted(context, a, host="localhost")
        target = await links_module._target(worker, ["127.0.0.1", "192.0.2.1"])
        assert target.addresses[-1] == "192.0.2.1"
        assert "127.0.0.1" in target.addresses
        assert "localhost" not in target.addresses
        assert len(set(target.addresses)) == len(target.addresses)
        many = await links_module._target(worker, [f"10.0.0.{i}" for i in range(200)])
        assert len(many.addresses) == MAX_ADDRESSES

        async def nobody(*_: object, **__: object) -> list[object]:
            raise OSError("no such host")

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", nobody, raising=False)
        assert (await links_module._target(worker, ["192.0.2.1"])).addresses == ["192.0.2.1"]
        worker.close()


async def test_a_vanished_device_is_lost_and_other_measurements_are_kept(dead):
    async with devices("a", "b") as (context, (a, b)):
        book, lines = book_of(context), Lines()
        workers = await greeted(context, a, b)
        await b.leave()
        dead.add("b")
        with pytest.raises(DeviceLostError, match=r"^b ") as lost:
            await book.measure(workers, {}, lines)
        assert lost.value.device == "b"
        assert pairs(book.between(["desk", "a", "b"])) == every("desk", "a")
        assert pairs(await book.measure(workers[:1], {}, lines)) == every("desk", "a")
        for worker in workers:
            worker.close()


async def test_a_device_that_others_cannot_reach_stays_and_is_named(dead, monkeypatch):
    dead.add("127.0.0.9")
    async with devices("a", "b") as (context, (a, b)):
        book, lines = book_of(context), Lines()
        workers = await greeted(context, a, b)
        targets = {"a": a.target(), "b": b.target("127.0.0.9")}

        async def target(worker: WorkerLink, _: object) -> Contact:
            return targets[worker.name]

        monkeypatch.setattr(links_module, "_target", target)
        links = {(link.source, link.target): link for link in await book.measure(workers, {}, lines)}
        assert plausible(links["desk", "a"])
        assert [link for link, found in links.items() if found.works] == [("desk", "a"), ("a", "desk")]
        assert pairs(book.between(["desk", "a", "b"])) == every("desk", "a"), "a penalty is no measurement"
        why = f"(127.0.0.9:{b.port} accepts no connection); let the port through the firewall there"
        assert [line.partition("; 'primad doctor'")[0] for line in lines.printed] == [
            f"{one} does not reach b {why}" for one in ("desk", "a")
        ]
        assert book.why_cut("b", ["a", "desk"]) in lines.printed
        assert book.why_cut("a", ["desk"]) is None
        for worker in workers:
            worker.close()


async def test_a_device_that_was_too_busy_to_reply_is_measured_again_on_request(dead):
    async with devices("a", "b") as (context, (a, b)):
        book, lines = book_of(context), Lines()
        workers = await greeted(context, a, b)
        b.echoes = False
        dead.add(b.key)
        await book.measure(workers, {}, lines)
        printed = list(lines.printed)
        where = f"(it replies too late at 127.0.0.1:{b.port})"
        assert [line.partition(";")[0] for line in printed] == [f"{o} does not reach b {where}" for o in ("desk", "a")]
        assert lines.measured == 3
        assert book.unreached(["a", "b"]) == every("desk", "a", "b") - every("desk", "a")
        assert book.unreached(["a"]) == set()

        await book.measure(workers, {}, lines)
        assert lines.measured == 3, "not before each plan"
        await book.measure(workers, {}, lines, again=True)
        assert (lines.printed, lines.measured) == (printed, 5), "it is reported once"

        b.echoes = True
        dead.clear()
        links = await book.measure(workers, {}, lines, again=True)
        assert pairs(links) == every("desk", "a", "b")
        assert all(map(plausible, links))
        assert lines.printed[2:] == ["desk reaches b now", "a reaches b now"]
        assert book.unreached(["a", "b"]) == set()
        assert await book.measure(workers, {}, lines, again=True) == links, "what works is left as it is"
        for worker in workers:
            worker.close()


async def test_a_device_that_delays_echoes_is_measured_for_a_bounded_time():
    """All others wait for it, however many echoes there are and however long each may take."""
    async with devices("a") as (context, (a,)):
        a.echoes = False
        links = (await measure_links(context, HEAD, "desk", [a.target()], timeout_s=PATIENCE_S, max_s=0.2)).links
        assert [link.round_trip_s for link in links] == [UNREACHABLE_S] * 2


async def test_a_worker_is_asked_for_one_link_at_a_time(monkeypatch):
    """The time to report a measurement does not grow with the number of devices or of their addresses."""
    async with devices("a", "b", "c") as (context, made):
        workers, waited = await greeted(context, *made), list[float]()
        send = WorkerLink.measure_links

        async def noted(worker: WorkerLink, targets: Sequence[Contact], timeout_s: float) -> MeasuredLinks:
            waited.append(timeout_s)
            return await send(worker, targets, timeout_s)

        monkeypatch.setattr(WorkerLink, "measure_links", noted)
        await book_of(context).measure(workers, {"c": [f"192.0.2.{at}" for at in range(60)]}, Lines())
        assert made[0].asked == [["b"], ["c"]]
        assert set(waited) == {MAX_S + REPLY_S}
        for worker in workers:
            worker.close()
