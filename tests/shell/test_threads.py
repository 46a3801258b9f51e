"""A ring process computes with the threads that the profile of its device found best, on worker and head."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from halda import DeviceProfile, Plan, Window
from primad.cluster.messages import Load
from primad.config import load_config
from primad.daemon import head_ring, worker
from primad.daemon.backend import RingBackend
from primad.daemon.head_ring import HeadRing, RingOptions, RingParts
from primad.daemon.links import LinkBook
from primad.daemon.shard import Place
from primad.engine.protocol import WindowFiles
from primad.errors import RingError
from primad.gguf.cache import LayerCache
from primad.gguf.model import open_model
from primad.gguf.windows import WindowSpec
from primad.reporting import RichReporter
from primad.ring.messages import Open
from tests.fakes.profile import PROFILE

DEVICE: DeviceProfile = dataclasses.replace(
    PROFILE, cpu=dataclasses.replace(PROFILE.cpu, cores=8, threads=3, batch_threads=7)
)
FILES = WindowFiles(metadata="window.gguf", layers=(), layer_count=2, gpu_layers=1, output_on_gpu=False)


class FakeProcess:
    """Takes ``Open`` and ends."""

    def __init__(self) -> None:
        self.threads = 0
        self.opened: list[Open] = []

    async def start(self, log: Path, *, threads: int, place: int = 0) -> FakeProcess:
        self.threads = threads
        return self

    async def send(self, command: Open) -> None:
        self.opened.append(command)

    async def events(self) -> AsyncIterator[object]:
        raise RingError("it ends here")
        yield

    async def close(self) -> None:
        pass


@pytest.fixture
def process(monkeypatch) -> FakeProcess:
    fake = FakeProcess()
    for module in (worker, head_ring):
        monkeypatch.setattr(module, "RingProcess", fake)
    return fake


def assert_threads_of_the_profile(process: FakeProcess) -> None:
    (opening,) = process.opened
    assert (opening.options.threads, opening.options.batch_threads) == (3, 7)
    assert process.threads == 7, "the process has room for the larger team"


def a_place(home: Path) -> Place:
    return Place(cache=LayerCache(home), run=home, verdicts=home / "verdicts", build="b")


def test_of_a_worker(process, monkeypatch, tmp_path):
    monkeypatch.setattr(worker, "place_windows", lambda *_: [FILES])
    monkeypatch.setattr(worker, "read_header", lambda _: None)
    load = Load(
        ring=1,
        epoch=1,
        route=3,
        width=8,
        windows=[WindowSpec(window=1, first=0, last=2, metadata=b"", layers=())],
        gpu_layers=[1],
        probe=None,
        force_extra_buffers=False,
        sources=[],
        context=64,
        sequences=1,
        rows=16,
        step_timeout_s=5.0,
        place=0,
    )

    async def once() -> None:
        config = load_config({"home": tmp_path, "name": "lap"}, {})
        daemon = worker.WorkerDaemon(config, a_place(tmp_path), lambda _: DEVICE, lambda _: None)
        try:
            await daemon._compute(load, DEVICE)
        finally:
            daemon._end.close()
            daemon._context.term()

    with pytest.raises(RingError, match="it ends here"):
        asyncio.run(once())
    assert_threads_of_the_profile(process)
    assert process.opened[0].windows[0].files == FILES


def test_of_the_head_which_passes_on_what_is_on_its_gpu(process, smollm2, tmp_path):
    window = Window(device="desk", first=0, last=30, gpu_layers=30)
    header = open_model(smollm2)

    async def once() -> None:
        parts = RingParts(
            plan=Plan(rounds=1, route=(window,), output_on_gpu=True, streaming=(), left_out=()),
            prediction=None,
            workers={},
            config=load_config({"home": tmp_path, "name": "desk"}, {}),
            place=a_place(tmp_path),
            header=header,
            cutter=None,
            profile=DEVICE,
            options=RingOptions(
                epoch=1,
                session=1,
                context_tokens=64,
                rows=16,
                extra_buffers="off",
                step_timeout_s=5.0,
                layer_port=1,
            ),
            backend=RingBackend(),
            reporter=RichReporter(None),
            links=LinkBook(None, "desk", 1),
        )
        async with asyncio.TaskGroup() as group:
            await HeadRing(parts, group)._start_own([])

    with pytest.raises(ExceptionGroup):
        asyncio.run(once())
    assert_threads_of_the_profile(process)
    (opened,) = process.opened[0].windows
    assert opened.files == WindowFiles(
        metadata=str(header.path), layers=(), layer_count=30, gpu_layers=30, output_on_gpu=True
    )
