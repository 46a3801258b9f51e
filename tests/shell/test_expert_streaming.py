"""Streaming by expert: logits match those with everything in memory, and only picked experts are read."""

import json
import os
import sys
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from halda import WindowAssignment
from halda.assignment import in_memory
from primad.engine.llama.embedding import TokenEmbedding
from primad.engine.llama.windows import FirstWindow, TailWindow, WholeModel
from primad.engine.protocol import EngineOptions, WindowSource
from primad.engine.streaming.expert_loader import ExpertLoader
from primad.engine.streaming.experts import Change, Pool
from primad.engine.streaming.pages import ReadCall
from primad.engine.streaming.prefetch import WindowStream
from primad.engine.streaming.pressure import Hold, PressureWatch
from primad.engine.streaming.residency import ladder
from primad.engine.streaming.streams import StreamedWindow, Streams
from primad.engine.streaming.units import units_of_model, units_of_window
from primad.errors import EngineError
from primad.gguf.architectures.layers import layer_count
from primad.gguf.architectures.tensors import embedding_scale
from primad.gguf.header import read_header
from primad.gguf.layers import layer_header
from primad.gguf.windows import ModelCutter, token_embedding, vocabulary_size
from primad.ring.loading import open_head
from primad.ring.messages import HeadPart, Open
from primad.ring.meter import Meter
from tests.shell.test_cut_exact import rows, synth

OPTIONS = EngineOptions(context=256, sequences=1, rows=64, threads=1, batch_threads=1, kv_type="f16", lock=False)
PROMPT = [1, *range(40, 80)]
DECODED = 12
COARSE = {"width": 512, "expert_feed_forward": 1024, "experts": 8, "layers": 4}
"""Experts of many pages, of which they share few with neighbours."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells and drops pages")


@pytest.fixture(autouse=True)
def _nobody_watches(monkeypatch):
    """Tests alone decide what is held: no growth after a prompt, no shrinking when the machine is short of memory."""
    monkeypatch.setattr(PressureWatch, "sample", lambda *_, **__: Hold())


def a_model(path, architecture="qwen3moe", **shape):
    synth.write_model(path, architecture=architecture, **shape)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # only what is on disk can leave memory
    return read_header(path)


def files_of(header):
    count = layer_count(header)
    return WindowSource(
        window=0, metadata=str(header.path), layers=(), assignment=in_memory(0, count), extra_buffers=False
    )


def assigned(first, units, streamed, slots):
    """An assignment for ``units``: all is resident but what ``slots`` lack for the ``streamed`` layers or output."""
    sizes = [sum(part.size for part in unit) for unit in units.layers]
    output = sum(part.size for part in units.output)
    streams = [size for unit, size in enumerate([*sizes, output]) if unit in streamed]
    held = max(slots * max(sizes), sum(sorted(streams)[-2:]))
    return WindowAssignment(
        first=first,
        last=first + len(sizes),
        gpu_layers=0,
        output="cpu" if output else "none",
        layer_bytes=sum(sizes),
        output_bytes=output,
        resident_bytes=sum(sizes) + output - max(0, sum(streams) - held),
    )


class Run:
    """The whole model with ``streamed`` layers (None: nothing streams) and ``slots`` pool slots."""

    def __init__(self, header, streamed, slots=2, usage=None):
        files = files_of(header)
        self.position = 0
        units = units_of_model(header, files)
        window = StreamedWindow(index=0, assignment=assigned(0, units, streamed or (), slots), units=units)
        self.streams = Streams([window], read_ahead_bytes=0, lock=False, usage=usage)
        with self.streams.loading():
            self.model = WholeModel(files, OPTIONS, frozenset(), vocabulary=vocabulary_size(header))
        self.streamer = self.streams.streamer
        self.experts = self.streamer.experts
        if streamed is not None:
            self.streams.begin({0: self.model})

    def logits(self, tokens):
        self.model.forward(rows(np.array(tokens, np.int32), self.position))
        self.position += len(tokens)
        return self.model.logits(len(tokens) - 1).copy()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.streams.end()
        self.model.release()


def expected(header):
    """The chunks, and the logits of each with everything in memory."""
    chunks, found = [PROMPT], []
    with Run(header, None) as run:
        for _ in range(1 + DECODED):
            found.append(run.logits(chunks[-1]))
            chunks.append([int(found[-1].argmax())])
    return list(zip(chunks, found, strict=False))


def same(run, steps):
    for number, (tokens, logits) in enumerate(steps):
        difference = np.abs(run.logits(tokens) - logits).max()
        assert difference == 0, f"step {number}: logits differ by {difference}"


@pytest.mark.parametrize(
    ("architecture", "streamed"),
    [
        ("llama-moe", range(6)),
        ("qwen2moe", range(6)),
        ("deepseek2", range(6)),
        ("gpt-oss", range(6)),
        ("qwen2moe", (1, 4, 6)),
        ("deepseek2", (3,)),
    ],
)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_logits_are_those_of_a_model_in_memory(architecture, streamed, slots, tmp_path):
    header = a_model(tmp_path / "model.gguf", architecture)
    steps = expected(header)
    with Run(header, streamed, slots) as run:
        if run.experts is None:
            assert not run.streamer.residency.streams
        else:
            assert 0 < run.streamer.residency.pool_bytes < run.experts.pool.total_bytes
        same(run, steps)


def test_windows_of_layer_files_share_one_pool(tmp_path):
    header = a_model(tmp_path / "model.gguf", "qwen2moe")
    steps = expected(header)
    cutter, count = ModelCutter(header), layer_count(header)
    models, windows = {}, []
    for number, (first, last) in enumerate(pairwise((0, 3, count))):
        spec = cutter.spec(number, first, last)
        metadata = tmp_path / f"{number}.gguf"
        metadata.write_bytes(spec.metadata)
        paths = []
        for split, ref in enumerate(spec.layers, start=1):
            paths.append(tmp_path / f"{ref.digest}.gguf")
            head = layer_header(ref.tensors, number=split - 1, split=split)
            paths[-1].write_bytes(head + b"".join(cutter.source(ref.digest).chunks()))
        files = WindowSource(
            window=number,
            metadata=str(metadata),
            layers=tuple(map(str, paths)),
            assignment=in_memory(first, last),
            extra_buffers=False,
        )
        if number == 0:
            embedding = TokenEmbedding(token_embedding(header), embedding_scale(header))
            models[0] = FirstWindow(files, OPTIONS, embedding)
        else:
            models[1] = TailWindow(files, OPTIONS, frozenset(), vocabulary=vocabulary_size(header))
        units = units_of_window(files)
        assignment = assigned(first, units, range(last - first), 1)
        windows.append(StreamedWindow(index=number, assignment=assignment, units=units))
    streams = Streams(windows, read_ahead_bytes=0, lock=False, usage=tmp_path / "usage")
    assert streams.streamer.experts.units == frozenset((0, 1, 2, 3, 4, 5))
    streams.begin(models)
    position = 0
    for tokens, logits in steps:
        models[1].forward(rows(models[0].forward(rows(np.array(tokens, np.int32), position)), position))
        assert np.array_equal(models[1].logits(len(tokens) - 1), logits)
        position += len(tokens)
    streams.end()
    for model in models.values():
        model.release()
    digests = {path.stem for path in tmp_path.glob("*.gguf")}
    kept = {path.stem for path in (tmp_path / "usage").iterdir()}
    assert len(kept) == count
    assert kept <= digests, "a layer's use is kept under the name of its weights"


@pytest.mark.parametrize("whole", [True, False])
def test_layers_on_a_gpu_have_only_their_experts_in_ram(whole, tmp_path):
    """Six layers: two on the CPU, two on the GPU without their experts, two with them."""
    header = a_model(tmp_path / "model.gguf")
    files = msgspec.structs.replace(files_of(header), assignment=in_memory(0, 6, gpu_layers=4, cpu_experts=2))
    if whole:
        units = units_of_model(header, files)
    else:
        cutter, paths = ModelCutter(header), []
        for split, ref in enumerate(cutter.spec(0, 0, 6).layers, start=1):
            paths.append(tmp_path / f"{split}.gguf")
            head = layer_header(ref.tensors, number=split - 1, split=split)
            paths[-1].write_bytes(head + b"".join(cutter.source(ref.digest).chunks()))
        units = units_of_window(msgspec.structs.replace(files, layers=tuple(map(str, paths))))
    sizes = [sum(part.size for part in layer) for layer in units.layers]
    experts = [sum(tensor.whole.size for tensor in files.tensors) for files in units.experts]
    assert len(sizes) == len(experts) == 4
    assert sizes[2:] == experts[2:]
    assert min(experts) > 0
    assert all(size > part for size, part in zip(sizes[:2], experts[:2], strict=True))


def present(loader):
    """The share of each expert's bytes in memory, by layer."""
    return [1 - np.max([tensor.missing() for tensor in layer], axis=0) for layer in loader._slices]


class Watch:
    """Records what routers picked and which pieces were read, step by step."""

    def __init__(self, monkeypatch):
        self.picked, self.read = set(), []
        pick, read = WindowStream.pick, ReadCall.read
        watch = self

        def watched_pick(stream, place, picks):
            watch.picked |= {(place, int(e)) for e in picks.ravel()}
            pick(stream, place, picks)

        def watched_read(piece):
            watch.read.append((piece.span.offset + piece.start, piece.size))
            return read(piece)

        monkeypatch.setattr(WindowStream, "pick", watched_pick)
        monkeypatch.setattr(ReadCall, "read", watched_read)

    def begin(self):
        self.picked, self.read = set(), []


def test_only_picked_experts_are_read_and_no_other_is_touched(tmp_path, monkeypatch):
    header = a_model(tmp_path / "model.gguf", **COARSE)
    steps = expected(header)
    monkeypatch.setattr(Pool, "ahead", lambda *_: Change((), ()))  # nothing is read ahead
    watch = Watch(monkeypatch)
    with Run(header, range(5), slots=2) as run:
        loader = run.experts
        pool, files = loader.pool, loader._files
        for number, (tokens, logits) in enumerate(steps):
            held = {(layer, e) for layer in range(4) for e in range(8) if pool.held(layer)[e]}
            watch.begin()
            before = loader.asked_bytes
            assert np.array_equal(run.logits(tokens), logits)
            if number == 0:
                assert {layer for layer, _ in watch.picked} == {0, 1, 2, 3}, "every layer reported its router's choice"
                continue
            assert len(watch.picked) == 4 * 2
            missed = watch.picked - held  # some of those may have been evicted within the step
            places = {
                (tensor.whole.offset + e * (tensor.whole.size // 8), tensor.whole.size // 8)
                for layer, e in watch.picked
                for tensor in files[layer].tensors
            }
            assert set(watch.read) <= places, "something else was read"
            assert len(watch.read) >= 3 * len(missed)
            outer = sum(size + 2 * 4096 for _, size in watch.read)
            assert loader.asked_bytes - before <= outer
            memory = present(loader)
            for layer in range(4):
                for e in range(8):
                    if pool.held(layer)[e]:
                        assert memory[layer][e] == 1, "what is held is in memory"
                    else:
                        assert memory[layer][e] < 0.05, "what is not held was given back and not touched"
        assert loader.asked_bytes > 0


def test_usage_persists_between_runs_and_a_damaged_file_is_ignored(tmp_path):
    header = a_model(tmp_path / "model.gguf", **COARSE)
    steps, folder = expected(header), tmp_path / "home" / "usage"
    with Run(header, range(5), usage=folder) as run:
        same(run, steps)
        shares = [usage.share() for usage in run.experts.pool.usages]
        assert any(share.max() > 1.5 * share.min() for share in shares)
    files = sorted(folder.iterdir())
    assert len(files) == 4
    with Run(header, range(5), usage=folder) as run:
        for usage, share in zip(run.experts.pool.usages, shares, strict=True):
            assert usage.share() == pytest.approx(share, abs=1e-3)
        first = {(layer, int(e)) for layer in range(4) for e in np.flatnonzero(run.experts.pool.held(layer))}
        ranked = sorted(((s, (layer, e)) for layer, share in enumerate(shares) for e, s in enumerate(share)))
        likeliest = {expert for _, expert in ranked[-len(first) :]}
        assert len(first & likeliest) >= len(first) - 1, "the pool begins with the experts used most"
        same(run, steps)
    good = json.loads(files[0].read_bytes())
    for bad in (b"", b"{", b"[1]", json.dumps({**good, "counts": [1.0]}).encode(), files[0].read_bytes()[:-9]):
        for file in files:
            file.write_bytes(bad)
        with Run(header, range(5), usage=folder) as run:
            assert all(usage.used == 0 for usage in run.experts.pool.usages)
    for wrong in ({"rows": -1.0}, {"counts": [1e300] * 8}, {"used": 9}, {"other": 1}):
        files[0].write_text(json.dumps({**good, **wrong}))
        with Run(header, range(5), usage=folder) as run:
            assert all(usage.used == 0 for usage in run.experts.pool.usages)


def test_a_folder_that_cannot_be_written_costs_only_the_saved_usage(tmp_path):
    header = a_model(tmp_path / "model.gguf")
    (tmp_path / "file").write_bytes(b"")
    with Run(header, range(6), usage=tmp_path / "file" / "usage") as run:
        same(run, expected(header))


def test_a_router_that_was_not_reported_costs_page_faults_once(tmp_path):
    header = a_model(tmp_path / "model.gguf", **COARSE)
    steps = expected(header)
    with Run(header, range(5)) as run:
        same(run, steps[:4])
        routers, run.model._tap._routers = run.model._tap._routers, {}
        run.model._tap.clear()
        same(run, steps[4:5])
        memory = present(run.experts)
        for layer in range(4):
            absent = ~run.experts.pool.held(layer)
            assert absent.any()
            assert memory[layer][absent].mean() < 0.5, "what was read by faults is given back"
        assert not run.model._tap, "callbacks for all nodes are on again"
        run.model._tap._routers = routers
        same(run, steps[5:])
        assert run.experts._reported == set()


def test_a_disk_that_fails_is_the_error_of_the_step(tmp_path, monkeypatch):
    header = a_model(tmp_path / "model.gguf")
    steps = expected(header)
    with Run(header, range(6)) as run:
        same(run, steps[:2])

        def broken(*_):
            raise EngineError("the disk is broken")

        monkeypatch.setattr(ExpertLoader, "_read_at_once", broken)
        with pytest.raises(EngineError, match="the disk is broken"):
            same(run, steps[2:])


def test_experts_evicted_by_the_system_while_the_ring_was_idle_are_noticed(tmp_path, monkeypatch):
    header = a_model(tmp_path / "model.gguf", **COARSE)
    steps = expected(header)
    with Run(header, range(5)) as run:
        same(run, steps[:4])
        loader = run.experts
        nothing = np.zeros(8, np.bool_)
        with loader._condition:
            for layer in loader._slices:
                for tensor in layer:
                    for number in range(8):
                        tensor.release(number, nothing)
            loader._departed_s -= 60
        monkeypatch.setattr(loader.pool, "fill", lambda *_: ())
        same(run, steps[4:])
        assert loader.evicted_bytes > 0
        with loader._condition:  # some likely experts may still be on their way
            memory = present(loader)
            for layer in range(4):
                arrived = [e for e in np.flatnonzero(loader.pool.held(layer)) if (layer, e) not in loader._arriving]
                assert (memory[layer][arrived] == 1).all()


def test_every_rung_of_pressure_gives_the_same_logits_within_its_room(tmp_path):
    header = a_model(tmp_path / "model.gguf", **COARSE)
    steps = expected(header)
    with Run(header, (0, 1, 3), slots=2) as run:
        levels = ladder(run.streamer.residency, None)
        assert levels[0].pool_bytes > levels[1].pool_bytes
        for number, (tokens, logits) in enumerate(steps):
            now = levels[min(number, len(levels) - 1)]
            run.streamer.change(now)
            assert run.experts.pool.held_bytes <= now.pool_bytes
            assert np.array_equal(run.logits(tokens), logits)
            assert run.experts.pool.held_bytes <= now.pool_bytes
        run.streamer.change(levels[0])
        assert np.array_equal(run.logits([5]).shape, steps[0][1].shape)


def test_a_ring_process_streams_by_expert_and_reports_its_memory(tmp_path):
    header = a_model(tmp_path / "model.gguf", **COARSE)
    files = files_of(header)
    assignment = assigned(0, units_of_model(header, files), (0, 1, 3), 2)
    opening = Open(
        ring=1,
        epoch=1,
        windows=[msgspec.structs.replace(files, assignment=assignment)],
        route=1,
        width=512,
        host="127.0.0.1",
        head=HeadPart(
            model=str(header.path),
            vocabulary=vocabulary_size(header),
            ends=(),
            depth=1,
            at_once=1,
            chunk_rows=8,
            min_rows=1,
        ),
        step_timeout_s=5,
        options=OPTIONS,
        read_ahead_bytes=0,
        usage=str(tmp_path / "usage"),
    )
    head, streams = open_head(opening, lambda _: None, lambda _: None)
    head._tail.forward(rows(np.array(PROMPT, np.int32), 0))
    pool = streams.streamer.experts.pool
    memory = Meter().status(0, streams).memory
    assert (memory.resident, memory.streamed) == (3, 1), "of each layer some experts stay, a layer's worth does not"
    assert not memory.streams_output
    assert memory.streamed_bytes == pytest.approx(assignment.streamed_bytes, rel=0.05)
    assert memory.resident_bytes + memory.streamed_bytes == sum(streams.streamer.residency.sizes) + pool.total_bytes
    assert memory.resident_bytes == streams.streamer.residency.held_bytes
    assert memory.read_bytes > 0
    assert 0 < memory.experts_found < memory.experts_picked
    streams.end()
    head._tail.release()
    assert len(list((tmp_path / "usage").iterdir())) == 4


def test_layers_without_experts_and_models_that_fit_stream_as_they_did(tmp_path):
    dense = a_model(tmp_path / "dense.gguf", "llama")
    with Run(dense, range(6)) as run:
        assert run.experts is None
    header = a_model(tmp_path / "model.gguf")
    with Run(header, ()) as run:
        assert run.experts is None
    with Run(header, (6,)) as run:  # the output matrix alone
        assert run.experts is None
    files = files_of(header)
    units = units_of_model(header, files)
    assert all(layer.tensors for layer in units.experts)
    none = replace(units, experts=tuple(replace(layer, tensors=()) for layer in units.experts))
    assert none.layers == units.layers
