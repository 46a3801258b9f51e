"""The head's ring process uses the thread count that its profile found best; a worker's is tested with its stages."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from halda import Plan, Window
from primad.api.answering.pieces import CONTROL, END, ModelPieces, PieceTable
from primad.cli.progress import RichReporter
from primad.daemon import loading
from primad.engine.rope import AS_IN_THE_MODEL
from primad.errors import RingError
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.head.members.link_book import LinkBook
from primad.head.members.worker_link import Caller
from primad.head.model.service import ModelSource, Service
from primad.head.rings.ring import HeadRing
from primad.head.rings.ring_inputs import RingDevices, RingInputs
from primad.membership.types import RingFailed
from primad.planning.forecast import Forecast
from primad.planning.question import default_workload
from primad.planning.run_config import RunConfig
from primad.ring.messages import Open
from primad.settings.timings import NetworkTimings
from tests.fakes.control import HEAD
from tests.fakes.node import node_of
from tests.fakes.profile import PROFILE

DEVICE = dataclasses.replace(PROFILE, cpu=dataclasses.replace(PROFILE.cpu, cores=8, threads=3, batch_threads=7))


class FakeProcess:
    """Accepts ``Open`` and ends."""

    pid = 1

    def __init__(self) -> None:
        self.threads = 0
        self.opened: list[Open] = []

    async def start(self, log: Path, *, threads: int, place: int = 0, gpu: bool = False) -> FakeProcess:
        self.threads = threads
        return self

    async def send(self, command: Open) -> None:
        self.opened.append(command)

    def listen(self, handle: object) -> None:
        """Nothing arrives."""

    async def events(self) -> AsyncIterator[object]:
        raise RingError("it ends here")
        yield

    async def close(self) -> None:
        """It has ended."""


async def one_token() -> ModelPieces:
    return ModelPieces(PieceTable.of([(b"a", 0), (b"", CONTROL | END)], bos="", eos="", chat_template=None))


async def test_the_head_passes_on_threads_and_gpu_layers_and_reports_the_end_of_its_process_once(
    monkeypatch, smollm2, tmp_path
):
    process, broken = FakeProcess(), []
    monkeypatch.setattr(loading, "RingProcess", process)
    window = Window(device="desk", first=0, last=30, gpu_layers=30)
    header = open_model(smollm2)
    node = node_of(tmp_path, "desk", HEAD)
    plan = Plan(rounds=1, route=(window,), output_on_gpu=True, streaming=(), left_out=())
    inputs = RingInputs(
        epoch=3,
        session=1,
        forecast=Forecast.of(plan, model_profile(header), None, context_tokens=64),
        service=Service(
            model=ModelSource(header, model_profile(header), tmp_path, again_s=1.0),
            options=SimpleNamespace(
                run=RunConfig(chunk_rows=16, extra_buffers="off"),
                rope=AS_IN_THE_MODEL,
                step_timeout_s=5.0,
                block_tokens=lambda has_cache: None,
            ),
            workload=default_workload(64, 16, "f16"),
        ),
        pieces=one_token,
        devices=RingDevices(
            workers={}, holders={}, links=LinkBook(Caller.of(node.config, None, HEAD, "b", NetworkTimings()))
        ),
        node=node,
        profile=DEVICE,
        layer_port=1,
        context=None,
        listener=SimpleNamespace(broken=broken.append),
        reporter=RichReporter(None),
    )
    ring = HeadRing(inputs)
    with pytest.raises(RingError, match="it ends here"):
        await ring.form()
    await ring.close()
    await ring.close()
    assert broken == [RingFailed(3, None, "it ends here")]
    (opening,) = process.opened
    assert (opening.options.threads, opening.options.batch_threads) == (3, 7)
    assert (opening.head.vocabulary, opening.head.ends) == (2, (1,))
    assert process.threads == 7, "the process has room for the larger team"
    (opened,) = opening.windows
    assert (opened.metadata, opened.layers) == (str(header.path), ())
    assert (opened.assignment.layers, opened.assignment.gpu_layers, opened.assignment.output) == (30, 30, "gpu")
