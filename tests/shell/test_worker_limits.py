"""Limits on what a head, or a device that claims to be one, can make a worker do."""

from __future__ import annotations

from primad.network import linkprobe
from primad.network.messages import (
    ECHO_BYTES,
    MAX_DEVICES,
    OLDEST,
    PROTOCOL,
    Echo,
    Echoed,
    Introduce,
    Introduction,
    Ping,
    Pong,
    Probe,
    Probed,
    Release,
)
from primad.settings.timings import Timings, WorkerTimings
from primad.trust.identity import new_identity
from primad.worker import stages as parts
from primad.worker.stages import MAX_LOADED_STAGES
from tests.fakes.load import a_load
from tests.shell.test_worker_daemon import lab

__all__ = ["lab"]

SELDOM = Timings(worker=WorkerTimings(report_every_s=1000.0))


async def test_endless_lists_of_devices_leave_room_for_the_owner(lab):
    async with lab() as lap:
        head = lap.head()
        await head.takes()
        keys = [new_identity().public for _ in range(MAX_DEVICES)]
        for _ in range(5):
            many = [Introduction("d", key) for key in keys]
            await head.report_line(Introduce(devices=many, revoked=keys))
            await head.report_line(Introduce(devices=many, revoked=[]))
        await head.report_line(Ping(status=False))
        await head.hear(Pong)
        assert lap.daemon._lease.introduced == set(keys)
        assert (len(lap.trust.entries()), lap.trust.lost()) == (2, [])


async def test_a_worker_joins_a_limited_number_of_rings(lab, monkeypatch):
    async def nothing_changed(*_: object) -> None:
        return None

    monkeypatch.setattr(parts, "check_layers", nothing_changed)
    async with lab() as lap:
        head = lap.head()
        await head.takes()
        for epoch in range(1, MAX_LOADED_STAGES + 1):
            await head.loads(a_load(epoch))
        await head.report_line(a_load(MAX_LOADED_STAGES + 1))
        broken = await head.breaks(MAX_LOADED_STAGES + 1)
        assert broken.fault == "load"
        await head.report_line(a_load(1))  # a repetition of a load that it has
        await head.report_line(Release(epoch=1))
        await head.loads(a_load(MAX_LOADED_STAGES + 2))  # in the place of the released one


async def test_devices_of_another_version_do_not_flood_the_terminal(lab):
    async with lab(timings=SELDOM) as lap:
        head = lap.head()
        for _ in range(50):
            await head.report_line(Probe(protocol=1, oldest=1, version="0\n1", device="old"))
            await head.hear(Probed)
        assert sum(line.startswith("refused: ") for line in lap.printed) == 1
        assert all(line.isprintable() for line in lap.printed)
        await head.report_line(Probe(protocol=PROTOCOL, oldest=OLDEST, version="1", device="new"))
        await head.hear(Probed)


async def test_endless_hellos_of_a_head_do_not_flood_the_terminal(lab):
    async with lab(timings=SELDOM) as lap:
        head = lap.head()
        for session in range(50):
            await head.takes(session)
        assert sum(line == "head desk is here" for line in lap.printed) == 1


async def test_echoes_have_the_requested_size(lab):
    async with lab() as lap:
        head = lap.head()
        for size in ECHO_BYTES:
            await head.report_line(Echo(payload=b"", answer_bytes=size))
            assert (await head.hear(Echoed)).payload == bytes(size)


def test_links_are_measured_with_supported_echo_sizes():
    assert {linkprobe._ROW_BYTES, linkprobe._WIDE_ROW_BYTES, linkprobe._LARGE_BYTES, linkprobe.MAX_ECHO_BYTES} < set(
        ECHO_BYTES
    )
