"""A worker's owner chooses the heads that lead it; devices that they introduce may do what a ring needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, get_args

from primad.network.admin import Describe
from primad.network.messages import (
    PROTOCOL,
    Dismiss,
    DraftInput,
    Echo,
    Echoed,
    EncodedWanted,
    HeadMessage,
    Hello,
    Introduce,
    Introduction,
    KvForget,
    KvHold,
    Link,
    LinkGroup,
    LoadDraft,
    LoadMmproj,
    MeasureLinks,
    PictureChunk,
    Ping,
    Pong,
    Probe,
    Probed,
    Refused,
    Release,
    ReleaseDraft,
    ReleaseMmproj,
    Revoked,
)
from primad.ring.speculation.messages import DraftText
from primad.settings.timings import Timings, WorkerTimings
from primad.trust.identity import Identity, new_identity
from primad.trust.trust import BY_HAND, HEAD, WORKER, trusted_now
from tests.fakes.load import LAYER, a_load
from tests.shell.test_worker_daemon import DESK, SILENCE_S, STRANGER, TOWER, FakeHead, lab

__all__ = ["lab"]

WORDS_OF_A_HEAD: Final[Sequence[HeadMessage]] = (
    Hello(protocol=PROTOCOL, version="0", device="desk", session=1, build="a build", gone_after_s=4.0),
    Introduce(devices=[Introduction("x", STRANGER.public)], revoked=[DESK.public]),
    Revoked(),
    a_load(1),
    Link(epoch=1, address="tcp://127.0.0.1:1", key=STRANGER.public, sender=STRANGER.public),
    LinkGroup(epoch=1, addresses=[]),
    Release(epoch=1),
    Ping(status=True),
    MeasureLinks(targets=[]),
    Dismiss(),
    KvHold(number=1, blocks=[], layers=[], sources=[], timeout_s=0.0, verify=False),
    KvForget(keys=[], lasting=False),
    LoadDraft(
        epoch=1,
        window=a_load(1, first=0, layers=(LAYER,) * 5).windows[0].spec,
        vocabulary=8,
        context=8,
        maximum=1,
        first=1,
        sources=[],
    ),
    DraftInput(epoch=1, task=DraftText(number=1, tokens=[1])),
    ReleaseDraft(epoch=1),
    LoadMmproj(number=1, file=LAYER, metadata=b"", hole_bytes=0, gpu="", memory_bytes=0, sources=[]),
    PictureChunk(number=1, picture=1, size=1, offset=0, data=b"."),
    EncodedWanted(number=1, picture=1, offset=0),
    ReleaseMmproj(number=1),
)


def test_all_messages_but_two_are_only_for_heads():
    assert {type(message) for message in WORDS_OF_A_HEAD} | {Probe, Echo} == set(get_args(HeadMessage))


def introduces(*identities: Identity, revoked: Sequence[Identity] = ()) -> Introduce:
    devices = [Introduction(f"d{at}", each.public) for at, each in enumerate(identities)]
    return Introduce(devices=devices, revoked=[each.public for each in revoked])


async def is_let_in(device: FakeHead) -> bool:
    """Whether a device that was connected before may still send ``Probe``."""
    await device.report_line(Probe(protocol=PROTOCOL, oldest=PROTOCOL, version="0", device=device.name))
    return isinstance(await device.next(), Probed)


async def test_introduced_devices_have_the_rights_of_a_ring_as_long_as_their_head_is_trusted(lab):
    async with lab() as lap:
        desk, tower = lap.head(), lap.head("tower", TOWER)
        nas, pc = new_identity(), new_identity()
        lap.trust.add(trusted_now("pc", pc.public, BY_HAND))
        written = (lap.home / "trust.json").stat().st_ino
        await desk.takes()
        await desk.report_line(introduces(nas, pc, lap.identity, TOWER))
        await desk.report_line(Ping(status=False))
        await desk.hear(Pong)
        neighbour, friend = lap.head("nas", nas), lap.head("pc", pc)
        assert await is_let_in(neighbour)
        assert lap.daemon._layers._allows(nas.public)
        described = await lap.admin(Describe())
        assert nas.public in described.status["introduced"]
        # Each list replaces all before; it cannot exclude devices that the owner trusts, nor the leading head.
        for message in (introduces(revoked=[nas, pc, TOWER, DESK]), introduces(nas, revoked=[nas])):
            await desk.report_line(message)
            await desk.report_line(Ping(status=False))
            await desk.hear(Pong)
            assert not await is_let_in(neighbour)
            assert not lap.daemon._layers._allows(nas.public)
            assert await is_let_in(friend)
            assert await is_let_in(tower)
        await desk.report_line(introduces(nas))
        await desk.takes(session=2)  # a new session
        assert await is_let_in(neighbour)
        assert (lap.home / "trust.json").stat().st_ino == written, "nobody but the owner writes there"
        lap.trust.revoke("desk")
        assert not await is_let_in(neighbour)
        await lap.emits("head desk is no longer trusted as a head; waiting for a head")
        await tower.takes()
        assert not await is_let_in(neighbour)
        await tower.report_line(introduces(nas, DESK))
        await tower.report_line(Ping(status=False))
        await tower.hear(Pong)
        assert await is_let_in(neighbour)
        assert not await is_let_in(desk), "what the owner revoked nobody introduces"


async def test_a_revoked_worker_reports_it_and_works_for_nobody_until_its_head_returns(lab):
    async with lab() as lap:
        desk, other = lap.head(), lap.head()
        neighbour = new_identity()
        await desk.takes()
        await desk.report_line(introduces(neighbour))
        await desk.report_line(Ping(status=False))
        await desk.hear(Pong)  # messages of two connections have no order
        await other.report_line(Revoked())
        line = await lap.emits("desk revoked this device")
        assert "'primad pair --code CODE' here" in line
        assert not lap.daemon._admits(neighbour.public)
        status = (await lap.admin(Describe())).status
        assert (status["revoked_by"], status["head"]) == ([DESK.public], None)
        assert status["devices"] == {"desk": "revoked this device", "lap": "waiting for a head; revoked by desk"}
        await desk.takes(session=2)
        assert (await lap.admin(Describe())).status["revoked_by"] == []


async def test_a_head_revoked_or_demoted_by_the_owner_loses_its_rings_at_once_whatever_silence_it_may_keep(
    lab,
):
    """The head stays silent, so no message of it reveals that it may no longer lead."""
    timings = Timings(worker=WorkerTimings(trust_look_every_s=0.05))
    async with lab(timings=timings) as lap:
        for number, end in enumerate((lap.trust.revoke, lambda key: lap.trust.add(trusted_now("desk", key, BY_HAND)))):
            lap.trust.add(trusted_now("desk", DESK.public, BY_HAND, HEAD))
            lap.printed.clear()
            desk = lap.head()
            await desk.takes(session=number, gone_after_s=3600.0)
            await desk.loads(a_load(number + 1))
            end(DESK.public)
            await lap.emits("head desk is no longer trusted as a head")
            described = await lap.admin(Describe())
            assert not described.status["serving"]
            await lap.head("tower", TOWER).takes(session=number, gone_after_s=SILENCE_S)
            await lap.emits("head tower went away")


async def test_a_device_that_is_no_head_may_only_probe_and_measure_links(lab):
    async with lab() as lap:
        desk, paired, introduced, friend = lap.head(), new_identity(), new_identity(), new_identity()
        lap.trust.add(trusted_now("pc", paired.public, BY_HAND, WORKER))
        before = lap.trust.revoked(), lap.trust.entries()
        for lead in (False, True):
            if lead:
                await desk.takes()
                await desk.report_line(introduces(introduced, paired))
                await desk.report_line(Ping(status=False))
                await desk.hear(Pong)
            for other in (lap.head("desk", paired), *([lap.head("desk", introduced)] if lead else [])):
                assert await is_let_in(other)
                await other.report_line(Echo(payload=b"", answer_bytes=0))
                await other.hear(Echoed)
                for message in WORDS_OF_A_HEAD:
                    await other.report_line(message)
                    refused = await other.next()
                    assert isinstance(refused, Refused), f"{message} was answered by {refused}"
                    assert refused.reason.startswith("lap does not take this device as a head; type 'primad pair'")
                await other.report_line(introduces(friend, revoked=[DESK]))
                await other.hear(Refused)
                assert not lap.daemon._admits(friend.public)
        await desk.report_line(Ping(status=False))
        await desk.hear(Pong)
        assert (lap.trust.revoked(), lap.trust.entries()) == before
