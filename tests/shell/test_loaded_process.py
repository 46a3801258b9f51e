"""A ring process as head and worker hold it: all its events arrive, and any end of it is reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from halda.assignment import in_memory
from primad.daemon import loaded_process, loading
from primad.daemon.gpu_care import GpuCare
from primad.daemon.layer_files import Workspace
from primad.daemon.loaded_process import LoadedProcess
from primad.daemon.loading import WindowLoad
from primad.engine.rope import AS_IN_THE_MODEL, Rope
from primad.errors import LoadAgainError, RingError
from primad.gguf.adapter import AdapterSpec
from primad.gguf.layers import LayerRef, LayerTensor
from primad.kv.store import KvStore
from primad.layers.cache import LayerCache
from primad.ring.messages import Loading, Open, RingCommand, RingEvent
from primad.settings.config import load_config, open_home
from primad.settings.limits import NO_LIMITS
from tests.fakes.load import a_load
from tests.fakes.process import FakeProcesses, FakeRingProcess
from tests.fakes.profile import PROFILE

PATIENCE_S = 60


@pytest.fixture
def place(tmp_path: Path) -> Workspace:
    (tmp_path / "run").mkdir()
    return Workspace(
        cache=LayerCache(tmp_path / "layers"),
        kv=KvStore(tmp_path / "cells"),
        run=tmp_path / "run",
        usage=tmp_path / "v",
        build="b",
    )


def loaded(place: Workspace, ring: FakeRingProcess) -> LoadedProcess:
    return LoadedProcess(ring, place, 1, None)


async def received(process: LoadedProcess) -> tuple[list[RingEvent], RingError]:
    """All its events, and the error that ended it."""
    events = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for event in process.events():
                events.append(event)
    except RingError as exc:
        return events, exc
    raise AssertionError("it ended without a word")


async def test_events_before_the_end_are_delivered_before_it(place):
    ring = FakeRingProcess(0, holds_back=True)
    process = loaded(place, ring)
    for windows in range(200):  # more than are buffered for a late listener
        ring.report_line(Loading(windows))
    ring.die("no memory")
    events, error = await received(process)
    assert events == [Loading(windows) for windows in range(200)]
    assert (str(error), process.ended) == ("no memory", True)
    assert str((await received(process))[1]) == "no memory", "a second listener gets the reason too"
    await process.close()


async def test_a_listener_gets_past_and_future_events_in_order_and_then_the_end(place):
    ring = FakeRingProcess(0, holds_back=True)
    process = loaded(place, ring)
    received: list[RingEvent] = []
    two_hundred, three_hundred = asyncio.Event(), asyncio.Event()

    def handle(event: RingEvent) -> None:
        received.append(event)
        if len(received) == 200:
            two_hundred.set()
        if len(received) == 300:
            three_hundred.set()

    for windows in range(200):  # more than are buffered for a late listener
        ring.report_line(Loading(windows))
    async with asyncio.timeout(PATIENCE_S):
        listening = asyncio.create_task(process.listen(handle))
        await two_hundred.wait()
        for windows in range(200, 300):
            ring.report_line(Loading(windows))
        await three_hundred.wait()
        ring.die("no memory")
        with pytest.raises(RingError, match="no memory"):
            await listening
    assert received == [Loading(windows) for windows in range(300)]
    await process.close()


async def test_an_event_that_a_listener_cannot_handle_ends_its_listening(place):
    ring = FakeRingProcess(0, holds_back=True)
    process = loaded(place, ring)

    def handle(event: RingEvent) -> None:
        if event == Loading(1):
            raise RingError("nothing for a head")

    async with asyncio.timeout(PATIENCE_S):
        listening = asyncio.create_task(process.listen(handle))
        ring.report_line(Loading(0))
        ring.report_line(Loading(1))
        with pytest.raises(RingError, match="nothing for a head"):
            await listening
    await process.close()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda ring, stopped: stopped.set(), "the ring process was stopped"),
        (lambda ring, stopped: ring.die(ZeroDivisionError("ours")), "internal error: ZeroDivisionError: ours"),
    ],
    ids=["stopped", "a mistake of ours"],
)
async def test_the_reason_of_any_end_is_reported(
    place, monkeypatch, end: Callable[[FakeRingProcess, asyncio.Event], None], reason: str
):
    class Mistaken(FakeRingProcess):
        async def events(self) -> AsyncIterator[RingEvent]:
            async for event in super().events():
                if isinstance(event, ZeroDivisionError):
                    raise event
                yield event

    stopped = asyncio.Event()
    monkeypatch.setattr(loaded_process, "wait_stopped", lambda _: stopped.wait())
    ring = Mistaken(0, holds_back=True)
    process = loaded(place, ring)
    end(ring, stopped)
    assert str((await received(process))[1]) == reason
    await process.close()


async def test_a_load_that_is_cancelled_while_opening_leaves_no_process_and_no_files(place, monkeypatch):
    opening = asyncio.Event()

    async def send(command: RingCommand) -> None:
        assert isinstance(command, Open)
        opening.set()
        await asyncio.Event().wait()

    class Deaf(FakeProcesses):
        async def start(self, *args: object, **options: object) -> FakeRingProcess:
            process = await super().start(*args, **options)
            process.send = send
            return process

    processes = Deaf()
    monkeypatch.setattr(loading, "RingProcess", processes)
    monkeypatch.setattr(loading, "read_header", lambda _: None)
    config = load_config({"home": place.run.parent, "name": "lap", "host": "127.0.0.1"}, {})
    open_home(config)
    load = a_load(1, metadata=b"GGUF", layers=())
    async with asyncio.timeout(PATIENCE_S):
        windows = WindowLoad(
            load, 7, SimpleNamespace(workspace=place, config=config, gpu_care=GpuCare(NO_LIMITS)), PROFILE
        )
        await windows.prepare(lambda *_: pytest.fail("nothing is missing"), lambda *_: None)
        starting = asyncio.create_task(windows.start(windows.key()))
        await opening.wait()
        assert [path.name for path in place.run.iterdir()] == ["window-7-1.gguf"]
        starting.cancel()
        await asyncio.wait([starting])
    assert starting.cancelled()
    assert not processes.alive
    assert list(place.run.iterdir()) == []


def test_a_process_with_another_adapter_scale_or_rope_scaling_is_not_reused(place):
    """A parked ring process is reused only for exactly the same load."""
    config = load_config({"home": place.run.parent, "name": "lap", "host": "127.0.0.1"}, {})
    node = SimpleNamespace(workspace=place, config=config, gpu_care=GpuCare(NO_LIMITS))
    ref = LayerRef("ab" * 32, 32, (LayerTensor("blk.*.attn_q.weight.lora_a", 0, (4, 2), 0, 32),))
    adapter = AdapterSpec(architecture="llama", alpha=8.0, scale=1.0, numbers=(0,), layers=(ref,))
    (plain,) = a_load(1, metadata=b"GGUF", layers=()).windows
    other = msgspec.structs.replace(ref, digest="cd" * 32)

    def key(*adapters: AdapterSpec, rope: Rope = AS_IN_THE_MODEL) -> object:
        spec = msgspec.structs.replace(plain.spec, adapters=adapters)
        load = a_load(1, windows=[msgspec.structs.replace(plain, spec=spec)], rope=rope)
        return WindowLoad(load, 7, node, PROFILE).key()

    keys = [
        key(),
        key(adapter),
        key(msgspec.structs.replace(adapter, scale=0.5)),
        key(msgspec.structs.replace(adapter, layers=(other,))),
        key(msgspec.structs.replace(adapter, numbers=(1,))),
        key(adapter, rope=Rope(freq_base=1e6)),
    ]
    assert len({*keys}) == len(keys)
    assert key(adapter) == keys[1]


async def test_windows_for_a_gpu_that_was_left_out_since_planning_request_another_plan(place):
    """Loaded without that GPU, they would seem to lack memory."""
    config = load_config({"home": place.run.parent, "name": "lap", "host": "127.0.0.1"}, {})
    node = SimpleNamespace(workspace=place, config=config, gpu_care=GpuCare(NO_LIMITS))
    (plain,) = a_load(1, metadata=b"GGUF", layers=()).windows
    for others, profile in (((), replace(PROFILE, gpu=None)), ((1,), PROFILE)):
        assignment = in_memory(0, 4, gpu_layers=4, other_gpus=others)
        load = a_load(1, windows=[msgspec.structs.replace(plain, assignment=assignment)])
        windows = WindowLoad(load, 7, node, profile)
        with pytest.raises(LoadAgainError, match="a GPU was left out since the plan was made"):
            await windows.start(windows.key())
