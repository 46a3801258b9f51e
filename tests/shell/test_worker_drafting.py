"""A worker that drafts for a head: with a whole model from layer files, in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import psutil
import pytest
from msgspec.structs import replace

from primad.daemon.draft_process import DraftingProcess
from primad.daemon.layer_files import copy_layers
from primad.errors import ProtocolError
from primad.gguf.model import open_model
from primad.gguf.windows import ModelCutter, vocabulary_size
from primad.head.rings.drafting import RemoteDrafter
from primad.network.messages import (
    DraftInput,
    DraftModelState,
    DraftsMade,
    LoadDraft,
    ReleaseDraft,
    WorkerMessage,
    decode_from_head,
)
from primad.planning.draft_model import draft_model
from primad.ring.messages import DraftPlaceChanged, DraftsHeard, RingCommand
from primad.ring.speculation.drafter import DraftToken
from primad.ring.speculation.messages import Drafted, DraftText
from primad.ring.speculation.tree import TreeNode, first_path
from primad.system.wire import encode
from primad.worker.drafting import DraftService
from tests.fakes.node import worker_node
from tools.synth import write_model

TEXT = [5, 9, 40, 5, 9]
PATIENCE_S = 60.0
Kind = TypeVar("Kind")


class Worker:
    """A worker's drafting service, and what it reported to the head and the owner."""

    def __init__(self, home: Path) -> None:
        node = worker_node(home)
        self.place = node.workspace
        self.reported: asyncio.Queue[WorkerMessage] = asyncio.Queue()
        self.printed: list[str] = []
        self.drafting = DraftService(
            node,
            context=cast("Any", None),
            number=count(1).__next__,
            notify=self.reported.put,
            report_line=self.printed.append,
        )

    async def hear(self, kind: type[Kind], wanted: Callable[[Kind], bool] = lambda _: True) -> Kind:
        """The next message of ``kind`` that fulfils ``wanted``."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.reported.get()
                if isinstance(message, kind) and wanted(message):
                    return message


def a_load(cutter: ModelCutter, epoch: int, context: int = 64) -> LoadDraft:
    return LoadDraft(
        epoch=epoch,
        window=cutter.without_text(),
        vocabulary=vocabulary_size(cutter.header),
        context=context,
        maximum=3,
        first=0,
        sources=[],
    )


def process_of(worker: Worker) -> psutil.Process:
    current = worker.drafting._current
    assert current is not None
    assert current.process is not None
    return psutil.Process(current.process.pid)


def path_of(drafted: Drafted) -> int:
    """The length of the first path."""
    nodes = [TreeNode(DraftToken(token=0, sure=0.0), parent) for parent in drafted.parents]
    return len(first_path(nodes))


async def drafted_by_file(path: Path, log: Path) -> Drafted:
    """The drafts of a process that has the model file."""
    process = await DraftingProcess.start(log)
    try:
        process.notify(replace(draft_model(path, open_model(path), context=64, threads=1), maximum=3))
        process.notify(DraftText(number=1, tokens=TEXT))
        async with asyncio.timeout(PATIENCE_S):
            async for drafted in process.drafts():
                if path_of(drafted) == 3:
                    return drafted
    finally:
        await process.close()
    raise AssertionError


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
async def test_a_worker_drafts_from_layer_files_as_from_a_model_file_until_released(tmp_path, tied):
    path = tmp_path / "small.gguf"
    write_model(path, layers=2, tied=tied)
    expected = await drafted_by_file(path, tmp_path / "log")
    cutter, worker = ModelCutter(open_model(path)), Worker(tmp_path / "home")
    load = a_load(cutter, 1)
    await copy_layers(cutter.source, worker.place.cache, load.window.layers, lambda _: None)
    await worker.drafting.load(load, 1)
    assert await worker.hear(DraftModelState) == DraftModelState(epoch=1, ready=False)
    assert await worker.hear(DraftModelState) == DraftModelState(epoch=1, ready=True)
    worker.drafting.notify(2, DraftText(number=8, tokens=[1]))
    worker.drafting.notify(1, DraftText(number=1, tokens=TEXT))
    made = await worker.hear(DraftsMade, lambda each: path_of(each.drafted) == 3)
    assert (made.epoch, made.drafted.number, made.drafted.tokens) == (1, 1, expected.tokens)
    assert (made.drafted.parents, made.drafted.sures) == (expected.parents, pytest.approx(expected.sures))
    await worker.drafting.load(a_load(cutter, 2), 1)
    assert await worker.hear(DraftModelState) == DraftModelState(epoch=2, ready=True), (
        "the next ring has the same process"
    )
    await worker.drafting.release(1)
    worker.drafting.notify(2, DraftText(number=1, tokens=TEXT))
    assert (await worker.hear(DraftsMade)).epoch == 2
    process = process_of(worker)
    await worker.drafting.release(2)
    assert not process.is_running()
    assert not list(worker.place.run.glob("window-*"))


async def test_the_head_is_notified_if_a_draft_model_cannot_load_or_ends(tmp_path):
    path = tmp_path / "small.gguf"
    write_model(path, layers=2)
    cutter, worker = ModelCutter(open_model(path)), Worker(tmp_path / "home")
    load = a_load(cutter, 1)
    await worker.drafting.load(load, 1)
    failed = await worker.hear(DraftModelState, lambda state: bool(state.error))
    assert "no device was named that has it" in failed.error
    await copy_layers(cutter.source, worker.place.cache, load.window.layers, lambda _: None)
    await worker.drafting.load(load, 1)
    await worker.hear(DraftModelState, lambda state: state.ready)
    process_of(worker).kill()
    failed = await worker.hear(DraftModelState, lambda state: bool(state.error))
    assert failed.error == "the draft process was ended by SIGKILL"
    assert worker.printed[-1] == f"stops drafting: {failed.error}"
    await worker.drafting.load(load, 1)
    await worker.hear(DraftModelState, lambda state: state.ready)
    process = process_of(worker)
    await worker.drafting.stop("paused by its owner")
    assert not process.is_running()
    assert (await worker.hear(DraftModelState)).error == "paused by its owner"


async def test_a_device_without_memory_for_a_model_fetches_none_of_it(tmp_path, monkeypatch):
    path = tmp_path / "small.gguf"
    write_model(path, layers=2)
    load = a_load(ModelCutter(open_model(path)), 1)
    weights = sum(each.size_bytes for each in load.window.layers)
    free = SimpleNamespace(available_bytes=weights, total_bytes=0)
    monkeypatch.setattr("primad.worker.spare.memory", lambda: free)
    worker = Worker(tmp_path / "home")
    await worker.drafting.load(replace(load, memory_bytes=weights + 1), 1)
    failed = await worker.hear(DraftModelState, lambda state: bool(state.error))
    assert "free there" in failed.error, "the KV cache is more than what the weights leave"
    free.available_bytes = 999
    await worker.drafting.load(load, 1)
    failed = await worker.hear(DraftModelState, lambda state: bool(state.error))
    assert "do not fit the 999 B that are free there" in failed.error


def test_an_incomplete_draft_model_is_refused_before_fetching(tmp_path):
    path = tmp_path / "small.gguf"
    write_model(path, layers=2)
    cutter = ModelCutter(open_model(path))
    load = a_load(cutter, 1)
    assert decode_from_head(encode(load)) == load
    with pytest.raises(ProtocolError, match="a draft model that is not whole"):
        decode_from_head(encode(LoadDraft(**{**as_fields(load), "window": cutter.spec(0, 1, 2)})))
    with pytest.raises(ProtocolError, match="not a control message"):
        decode_from_head(encode(LoadDraft(**{**as_fields(load), "context": 0})))


def as_fields(load: LoadDraft) -> dict[str, Any]:
    return {name: getattr(load, name) for name in load.__struct_fields__}


class Link:
    """A worker as its head sees it, with scripted replies."""

    name = "lap"

    def __init__(self) -> None:
        self.sent: asyncio.Queue[object] = asyncio.Queue()

    def drafts_for(self, drafts: RemoteDrafter) -> None:
        self.drafts = drafts

    def forget_drafts(self, _: RemoteDrafter) -> None: ...

    async def send(self, message: object) -> None:
        await self.sent.put(message)


class Elsewhere:
    """The head's side of a ring whose draft model belongs on ``lap``, with messages to its ring process and owner."""

    def __init__(self, path: Path, *, head_has_room: bool = True) -> None:
        write_model(path, layers=2)
        self.header = open_model(path)
        self.link: Link | None = Link()
        self.printed: list[str] = []
        self.ring = asyncio.Queue[RingCommand]()
        draft = draft_model(path, self.header, context=64, threads=1)
        source = SimpleNamespace(cutter=ModelCutter(self.header), header=self.header)
        inputs = SimpleNamespace(
            epoch=4,
            draft=draft,
            forecast=SimpleNamespace(plan=SimpleNamespace(head="desk")),
            service=SimpleNamespace(draft=draft, draft_source=source, head_has_room=head_has_room),
            reporter=SimpleNamespace(report_line=self.printed.append),
        )
        routes = SimpleNamespace(sources=self._no_sources)
        self.drafts = RemoteDrafter(
            cast("Any", inputs), "lap", lambda: cast("Any", self.link), cast("Any", routes), self.ring.put
        )

    async def _no_sources(self, _: object) -> list[object]:
        return []

    async def get_ready(self) -> Link:
        """Have the device load the model."""
        link = self.link
        assert link is not None
        load = await link.sent.get()
        assert isinstance(load, LoadDraft)
        assert (load.epoch, load.window) == (4, ModelCutter(self.header).without_text())
        self.drafts.ask(DraftText(number=1, tokens=TEXT))
        self.drafts.hear(DraftModelState(epoch=4, ready=False))
        self.drafts.hear(DraftModelState(epoch=4, ready=True))
        assert await self.ring.get() == DraftPlaceChanged("elsewhere")
        assert self.drafts.place == "lap"
        return link

    async def run(self, steps: Coroutine[Any, Any, None]) -> None:
        """Run ``steps`` while it runs."""
        running = asyncio.create_task(self.drafts.run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await steps
        finally:
            running.cancel()


async def test_a_head_forwards_nonempty_drafts_and_drafts_itself_while_the_device_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("primad.head.rings.drafting.LOOK_S", 0.0)
    head = Elsewhere(tmp_path / "small.gguf")
    drafts = head.drafts

    async def steps() -> None:
        link = await head.get_ready()
        drafts.ask(DraftText(number=2, tokens=TEXT))
        assert await link.sent.get() == DraftInput(epoch=4, task=DraftText(number=2, tokens=TEXT))
        bad = Drafted(number=2, known=5, tokens=[vocabulary_size(head.header)], sures=[0.5])
        good = Drafted(number=2, known=5, tokens=[7], sures=[0.5])
        drafts.hear(DraftsMade(epoch=4, drafted=bad))
        drafts.hear(DraftsMade(epoch=4, drafted=good))
        assert await head.ring.get() == DraftsHeard(good)
        drafts.lost("its primad ended")
        assert await head.ring.get() == DraftPlaceChanged("here")
        assert drafts.place == "desk"
        head.link = Link()
        await head.get_ready()

    await head.run(steps())
    assert head.printed == ["lap does not draft: its primad ended; this device does"]


async def test_a_device_paused_by_the_owner_of_the_head_does_not_draft_until_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr("primad.head.rings.drafting.LOOK_S", 0.0)
    monkeypatch.setattr("primad.head.rings.drafting.TRY_S", (0.0, 0.0))
    head = Elsewhere(tmp_path / "small.gguf", head_has_room=False)

    async def steps() -> None:
        link, head.link = await head.get_ready(), None
        assert await head.ring.get() == DraftPlaceChanged("nowhere")
        assert head.drafts.place is None
        assert await link.sent.get() == ReleaseDraft(epoch=4)
        head.link = link
        await head.get_ready()

    await head.run(steps())
    (line,) = head.printed
    assert line.endswith("paused by the owner of this head; nothing does, for this device has no room")
