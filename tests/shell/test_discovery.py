"""Devices find each other by mDNS, here on loopback."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace

import pytest
from zeroconf import DNSIncoming, DNSQuestion, IPVersion, NonUniqueNameException, NotRunningException, Zeroconf
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from primad.errors import ClusterError
from primad.network import discovery as discovery_module
from primad.network.discovery import Discovery, MulticastError, Peer, look
from primad.network.messages import PROTOCOL
from primad.network.peer import SERVICE
from primad.settings.timings import DiscoveryTimings
from primad.trust.identity import new_identity

HOST = "127.0.0.1"
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
PATIENCE_S = 180


def _mdns_works() -> bool:
    try:
        Zeroconf(interfaces=[HOST], ip_version=IPVersion.V4Only).close()
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _mdns_works(), reason="this machine has no multicast on loopback")


class Sight:
    """What one device sees, and a way to wait for it."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}
        self._changed = asyncio.Event()

    def changed(self, peers: dict[str, Peer]) -> None:
        self.peers = peers
        self._changed.set()

    def of(self, cluster: str) -> dict[str, Peer]:
        """The devices of ``cluster`` by name; other tests' devices may be in sight too."""
        return {peer.device: peer for peer in self.peers.values() if peer.cluster == cluster}

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def device(timings: DiscoveryTimings = DiscoveryTimings(), service: str = SERVICE) -> AsyncIterator[Discovery]:
    discovery = Discovery(HOST, timings=timings, service=service)
    try:
        yield discovery
    finally:
        await discovery.close()


async def announce(discovery: Discovery, name: str, cluster: str, *, role: str = "worker", port: int = 7770) -> str:
    return await discovery.announce(name, cluster=cluster, role=role, version="1.2", port=port, key=KEY)


async def test_a_device_is_seen_as_it_announces_itself_and_until_it_leaves(cluster):
    sight = Sight()
    async with device() as viewer:
        await viewer.browse(sight.changed)
        async with device() as desk:
            assert await announce(desk, cluster, cluster, port=4321) == cluster
            await sight.wait(lambda: bool(sight.of(cluster)))
            assert replace(sight.of(cluster)[cluster], revision=0) == Peer(
                device=cluster,
                cluster=cluster,
                role="worker",
                version="1.2",
                protocol=PROTOCOL,
                addresses=(HOST,),
                port=4321,
                key=KEY,
                pairing=None,
            )
        await sight.wait(lambda: not sight.of(cluster))


async def test_a_host_name_is_local_if_mdns_resolves_it_to_addresses_of_this_machine(cluster):
    zeroconf, printed = AsyncZeroconf(interfaces=[HOST]), list[Awaitable[None]]()
    try:
        for name, address in (("here", HOST), ("there", "192.0.2.7")):
            host, packed = f"{cluster}-{name}.local.", socket.inet_aton(address)
            info = AsyncServiceInfo(SERVICE, f"{name}{cluster}.{SERVICE}", 9, addresses=[packed], server=host)
            printed.append(await zeroconf.async_register_service(info, cooperating_responders=True))
        async with device(DiscoveryTimings(own_name_s=float(PATIENCE_S))) as desk:
            await desk._started()
            assert await desk.leads_here(f"{cluster}-here.local")
            assert not await desk.leads_here(f"{cluster}-there.local")
        async with device(DiscoveryTimings(own_name_s=0.1)) as desk:
            await desk._started()
            assert not await desk.leads_here(f"{cluster}-nobody.local")
        await asyncio.gather(*printed)
    finally:
        await zeroconf.async_close()


async def test_a_device_that_was_there_first_is_seen_too(cluster):
    sight = Sight()
    async with device() as desk, device() as viewer:
        await announce(desk, cluster, cluster)
        await viewer.browse(sight.changed)
        await sight.wait(lambda: bool(sight.of(cluster)))


@pytest.mark.slow
async def test_devices_of_one_name_get_numbers(cluster):
    sight = Sight()
    async with device() as first, device() as second, device() as third, device() as viewer:
        await viewer.browse(sight.changed)
        got = [
            await announce(found, cluster, cluster, port=port)
            for found, port in zip((first, second, third), (1, 2, 3), strict=True)
        ]
        assert got == [cluster, f"{cluster}-2", f"{cluster}-3"]
        await sight.wait(lambda: len(sight.of(cluster)) == 3)
        assert {peer.device: peer.port for peer in sight.of(cluster).values()} == dict(zip(got, (1, 2, 3), strict=True))


@pytest.mark.slow
async def test_the_longest_name_gets_a_number_too(cluster):
    name = (cluster + "x" * 62)[:62]
    sight = Sight()
    async with device() as first, device() as second, device() as viewer:
        await viewer.browse(sight.changed)
        assert await announce(first, name, cluster, port=1) == name
        assert await announce(second, name, cluster, port=2) == f"{name[:59]}-2"
        await sight.wait(lambda: len(sight.of(cluster)) == 2)


async def test_a_host_that_claims_every_name_keeps_no_device_from_announcing_itself(cluster, monkeypatch):
    """A host can claim every name that is probed, so names are not probed."""
    register, requested = AsyncZeroconf.async_register_service, list[str]()

    async def name_taken(self: AsyncZeroconf, info: AsyncServiceInfo, cooperating_responders: bool = False) -> object:
        if not cooperating_responders:
            requested.append(info.name)
            raise NonUniqueNameException
        return await register(self, info, cooperating_responders=True)

    monkeypatch.setattr(AsyncZeroconf, "async_register_service", name_taken)
    sight = Sight()
    async with device() as desk, device() as viewer:
        name = await announce(desk, cluster, cluster)
        assert name.startswith(f"{cluster}-")
        assert len(requested) == discovery_module.TRIES
        await viewer.browse(sight.changed)
        await sight.wait(lambda: set(sight.of(cluster)) == {name})


async def test_endless_strangers_leave_room_for_a_trusted_device(cluster, monkeypatch):
    monkeypatch.setattr(discovery_module, "MAX_PEERS", 1)
    service, ours = "_primad-room._tcp.local.", new_identity().public
    sight = Sight()
    async with AsyncExitStack() as stack:
        viewer = Discovery(HOST, service=service, trusts=ours.__eq__)
        stack.push_async_callback(viewer.close)
        await viewer.browse(sight.changed)
        for number, key in enumerate((KEY, ours)):
            made = await stack.enter_async_context(device(service=service))
            name = f"{cluster}-{number}"
            await made.announce(name, cluster=cluster, role="worker", version="1", port=7770, key=key)
            await sight.wait(lambda key=key: [peer.key for peer in sight.peers.values()] == [key])


async def test_every_device_announces_its_cluster_and_role(cluster):
    foreign = f"{cluster}-foreign"
    sight = Sight()
    async with device() as ours, device() as theirs, device() as viewer:
        await viewer.browse(sight.changed)
        await announce(ours, f"{cluster}-a", cluster)
        await announce(theirs, f"{cluster}-b", foreign, role="head", port=8080)
        await sight.wait(lambda: bool(sight.of(cluster)) and bool(sight.of(foreign)))
        assert [(peer.device, peer.role) for peer in sight.of(cluster).values()] == [(f"{cluster}-a", "worker")]
        assert [(peer.device, peer.role) for peer in sight.of(foreign).values()] == [(f"{cluster}-b", "head")]


@pytest.mark.slow
async def test_looking_around_gives_devices_in_order(cluster):
    sight = Sight()
    async with device() as second, device() as first, device() as viewer:
        await viewer.browse(sight.changed)
        await announce(second, f"{cluster}-b", cluster, port=2)
        await announce(first, f"{cluster}-a", cluster, port=1)
        await sight.wait(lambda: len(sight.of(cluster)) == 2)
        seen: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(seen) < 2:  # on a busy machine a reply may be late
                seen = [peer.device for peer in await look(HOST, 2.0) if peer.cluster == cluster]
        assert seen == [f"{cluster}-a", f"{cluster}-b"]


async def test_an_open_code_is_announced_while_it_is_open(cluster):
    sight = Sight()

    def pairing() -> list[tuple[int, int] | None]:
        return [peer.pairing for peer in sight.of(cluster).values()]

    async with device() as desk, device() as viewer:
        await viewer.browse(sight.changed)
        await announce(desk, cluster, cluster)
        await sight.wait(lambda: pairing() == [None])
        await desk.set_pairing(7, 49152)
        await sight.wait(lambda: pairing() == [(7, 49152)])
        await desk.set_pairing(7, None)
        await sight.wait(lambda: pairing() == [None])


async def test_new_addresses_are_announced_and_those_withdrawn_are_forgotten(cluster, monkeypatch):
    sight = Sight()

    def addresses() -> list[set[str]]:
        return [set(peer.addresses) for peer in sight.of(cluster).values()]

    async with device() as desk, device() as viewer:
        await viewer.browse(sight.changed)
        await announce(desk, cluster, cluster)
        await sight.wait(lambda: addresses() == [{HOST}])
        monkeypatch.setattr(discovery_module, "usable_addresses", lambda *_: ["10.0.0.7", "fd00::7"])
        await desk.refresh()
        await sight.wait(lambda: addresses() == [{"10.0.0.7", "fd00::7"}])
        monkeypatch.setattr(discovery_module, "usable_addresses", lambda *_: ["10.0.0.7"])
        await desk.refresh()
        await sight.wait(lambda: addresses() == [{"10.0.0.7"}])


async def test_a_device_with_an_expired_announcement_is_queried_again_and_forgotten_if_silent(cluster):
    short = DiscoveryTimings(time_to_live_s=1, resolve_timeout_s=0.2)
    sight = Sight()
    async with device(short) as viewer:
        await viewer.browse(sight.changed)
        async with device(short) as desk:
            await announce(desk, cluster, cluster)
            await sight.wait(lambda: bool(sight.of(cluster)))
            desk._info = None  # it dies without a goodbye
        async with asyncio.timeout(PATIENCE_S):
            while sight.of(cluster):
                await asyncio.sleep(0.2)
                await viewer.refresh()


async def test_a_device_with_a_missed_announcement_is_still_found(cluster, monkeypatch):
    often = DiscoveryTimings(look_every_s=0.1, ask_every_s=0.5)
    missed = 0
    real = Discovery._resolve_soon

    def resolve_soon(self: Discovery, name: str) -> None:
        nonlocal missed
        if name.startswith(cluster) and not missed:
            missed += 1
        else:
            real(self, name)

    monkeypatch.setattr(Discovery, "_resolve_soon", resolve_soon)
    sight = Sight()
    async with device() as desk, device(often) as viewer:
        await viewer.browse(sight.changed)
        await announce(desk, cluster, cluster)
        await sight.wait(lambda: bool(sight.of(cluster)))
    assert missed == 1


async def test_mdns_replies_are_requested_by_multicast_for_all_programs_of_a_machine(cluster):
    """Several programs share the mDNS port, and a unicast reply reaches only one of them.

    Other tests announce and look at the same time, so both devices here use a service type of their own.
    """
    service = f"_t-{cluster[-12:]}._tcp.local."
    requested: list[DNSQuestion] = []
    sight = Sight()
    async with device(service=service) as desk, device(service=service) as viewer:
        await announce(desk, cluster, cluster)
        with overheard() as packets:
            await viewer.browse(sight.changed)
            async with asyncio.timeout(PATIENCE_S):
                while not requested or not sight.of(cluster):
                    await asyncio.sleep(0.1)
                    questions = [question for packet in packets() for question in packet.questions]
                    requested.extend(question for question in questions if service in question.name)
    assert [question for question in requested if question.unicast] == []


async def test_a_device_is_not_announced_again_after_its_goodbye(cluster):
    """Announcements repeat for half a second; one sent after the goodbye would keep the device in sight."""
    with overheard() as packets:
        async with device(service=f"_t-{cluster[-12:]}._tcp.local.") as desk:
            await announce(desk, cluster, cluster)
            await asyncio.sleep(0.05)
        lives_s = [record.ttl for packet in packets() for record in packet.answers() if cluster in record.name]
    assert 0 in lives_s
    assert set(lives_s[: lives_s.index(0)]) == {120}
    assert set(lives_s[lives_s.index(0) :]) == {0}


@contextmanager
def overheard() -> Iterator[Callable[[], list[DNSIncoming]]]:
    """The multicast packets on loopback from now on, read on demand."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.setblocking(False)
        for option in ("SO_REUSEADDR", "SO_REUSEPORT"):
            if hasattr(socket, option):
                ear.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
        ear.bind(("", 5353))
        group = socket.inet_aton("224.0.0.251") + socket.inet_aton(HOST)
        ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)

        def packets() -> list[DNSIncoming]:
            received = []
            with suppress(BlockingIOError):
                while True:
                    received.append(DNSIncoming(ear.recv(9000)))
            return received

        yield packets


async def test_a_failed_look_is_repeated(cluster, monkeypatch):
    looks = 0

    async def refresh(self: Discovery) -> None:
        nonlocal looks
        looks += 1
        looked.set()
        raise RuntimeError("no code of ours means to")

    looked = asyncio.Event()
    monkeypatch.setattr(Discovery, "refresh", refresh)
    async with device(DiscoveryTimings(look_every_s=0.1)) as viewer, asyncio.timeout(PATIENCE_S):
        await viewer.browse(lambda _: None)
        while looks < 2:
            looked.clear()
            await looked.wait()


async def test_an_interface_that_appears_later_is_used(cluster, monkeypatch):
    there = False
    real = discovery_module.multicast_addresses
    monkeypatch.setattr(discovery_module, "multicast_addresses", lambda *args: real(*args) if there else ["127.0.0.2"])
    sight = Sight()
    async with device(DiscoveryTimings(look_every_s=0.1)) as viewer:
        await viewer.browse(sight.changed)
        there = True
        async with device() as desk:
            await announce(desk, cluster, cluster)
            await sight.wait(lambda: bool(sight.of(cluster)))
        await sight.wait(lambda: not sight.of(cluster))


async def test_an_interface_that_is_not_there_is_one_clear_error():
    with pytest.raises(ClusterError, match=r"^--interface eth-none: this machine has no such interface or address"):
        Discovery("0.0.0.0", "eth-none")


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_a_host_that_is_no_address_is_one_clear_error(host):
    with pytest.raises(ClusterError, match=r"^--host .*: this address cannot be announced"):
        Discovery(host)


async def test_an_unused_discovery_can_be_closed():
    async with device():
        pass


def test_a_machine_without_multicast_is_one_clear_error(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(discovery_module, "AsyncZeroconf", refuse)
    with pytest.raises(ClusterError, match=r"mDNS cannot be used on 127\.0\.0\.1: No such device; name devices with"):
        Discovery(HOST)


class Starts:
    """Whether mDNS has started, as zeroconf reports it: not before the check has run ``late`` times."""

    def __init__(self, late: float) -> None:
        self._late = late
        self.looks = 0

    def __call__(self, zeroconf: Zeroconf) -> bool:
        self.looks += 1
        return self.looks > self._late


async def test_a_start_that_takes_long_is_waited_for(cluster, monkeypatch):
    starts = Starts(3)
    monkeypatch.setattr(Zeroconf, "started", property(starts))
    async with device() as desk:
        assert await announce(desk, cluster, cluster) == cluster
    assert starts.looks > 3


async def test_a_start_that_never_comes_is_one_clear_error(cluster, monkeypatch):
    monkeypatch.setattr(Zeroconf, "started", property(Starts(math.inf)))
    async with device(DiscoveryTimings(looks_for_start=2)) as desk:
        with pytest.raises(MulticastError, match=r"mDNS did not start on 127\.0\.0\.1; name devices with --device"):
            await announce(desk, cluster, cluster)
        with pytest.raises(MulticastError, match="mDNS did not start"):
            await desk.browse(lambda _: None)


@pytest.mark.parametrize("failure", [NotRunningException(), OSError(19, "No such device"), RuntimeError("closed")])
async def test_no_exception_of_zeroconf_reaches_callers(failure, cluster, monkeypatch):
    async def fail(*_: object, **__: object) -> None:
        raise failure

    def fail_at_once(*_: object, **__: object) -> None:
        raise failure

    async with device() as desk, device() as viewer:
        with monkeypatch.context() as patch:
            patch.setattr(AsyncZeroconf, "async_register_service", fail)
            with pytest.raises(MulticastError, match=r"mDNS cannot announce this device: .+"):
                await announce(desk, cluster, cluster)
            patch.setattr(discovery_module, "AsyncServiceBrowser", fail_at_once)
            with pytest.raises(MulticastError, match=r"mDNS cannot look for devices: .+"):
                await viewer.browse(lambda _: None)
        await announce(desk, cluster, cluster)
        await viewer.browse(lambda _: None)
        monkeypatch.setattr(AsyncServiceInfo, "async_request", fail)
        await viewer._resolve(f"nobody.{SERVICE}")
        await viewer._resolve("no name of a service")
        for name in ("async_update_interfaces", "async_update_service", "async_unregister_service", "async_close"):
            real = getattr(AsyncZeroconf, name)
            monkeypatch.setattr(AsyncZeroconf, name, fail)
            await desk.refresh()
            await desk.set_pairing(1, 4711)
            if name == "async_close":
                await desk.close()
            monkeypatch.setattr(AsyncZeroconf, name, real)
