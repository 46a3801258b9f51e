"""A GPU without room, or whose driver ends the ring process: it gets fewer layers or none, and the device serves."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from halda import DeviceProfile, OffloadSpeed
from halda.assignment import in_memory
from primad.daemon import memory_watch
from primad.daemon.gpu_care import GpuCare
from primad.engine.protocol import EngineOptions, WindowSource
from primad.engine.streaming.units import units_of_window
from primad.errors import EngineError, RingError
from primad.gguf.header import read_header
from primad.gguf.layers import HEADER_BYTES, layer_header
from primad.gguf.windows import ModelCutter
from primad.profiler.synthetic import SMALL, write_window
from primad.ring.gpu_room import GpuWatch, fewer_on_gpu, load_what_fits
from primad.ring.messages import GpuLoaded, GpuLow, GroupRank, HeadPart, Open
from primad.settings.limits import NO_LIMITS, OwnerLimits
from tests.fakes.profile import GPU, PROFILE
from tools import synth

GIB = 1 << 30
PATIENCE_S = 180
OFFLOADED = OffloadSpeed(type="Q4_K", few_bytes_per_s=5e9, prefill_flop_per_s=2e12)
OPTIONS = EngineOptions(context=64, sequences=1, rows=16, threads=1, batch_threads=1, kv_type="f16", lock=False)


def opening(*windows: WindowSource) -> Open:
    return Open(
        ring=1,
        epoch=1,
        windows=list(windows),
        route=3,
        width=SMALL.width,
        host="127.0.0.1",
        head=None,
        step_timeout_s=60.0,
        options=OPTIONS,
        read_ahead_bytes=0,
        usage=None,
    )


def window(folder: Path, layers: int, gpu_layers: int) -> WindowSource:
    folder.mkdir()
    return write_window(folder, SMALL, "Q4_K", layers, gpu_layers=gpu_layers)


def on_gpu(asked: Open) -> list[int]:
    return [each.assignment.gpu_layers for each in asked.windows]


def test_fewer_layers_until_they_fit(tmp_path):
    asked = opening(window(tmp_path / "a", 6, 5), window(tmp_path / "b", 4, 2))
    tried: list[list[int]] = []
    reported: list[GpuLoaded] = []

    def load(each: Open) -> Open:
        tried.append(on_gpu(each))
        if sum(tried[-1]) > 3:
            raise EngineError(f"no room for {sum(tried[-1])}")
        return each

    free = iter([100, 70])
    loaded = load_what_fits(asked, load, reported.append, lambda _: next(free))
    assert tried == [[5, 2], [3, 1], [2, 0]]
    assert reported == [GpuLoaded(layers=2, planned=7, held_bytes=30, why="no room for 7")]
    for before, after in zip(asked.windows, loaded.windows, strict=True):
        moved = before.assignment.gpu_layers - after.assignment.gpu_layers
        size = Path(before.layers[0]).stat().st_size - HEADER_BYTES
        assert after.assignment.layer_bytes == after.assignment.resident_bytes == moved * size
        assert after.assignment.streamed_bytes == 0, "what moves to the processor stays in memory"


def test_the_output_leaves_the_gpu_last(tmp_path):
    source = window(tmp_path / "a", 3, 0)
    assignment = replace(source.assignment, gpu_layers=2, output="gpu")
    asked = opening(msgspec.structs.replace(source, assignment=assignment))
    found = []
    for _ in range(3):
        asked = fewer_on_gpu(asked)
        (left,) = asked.windows
        found.append((left.assignment.gpu_layers, left.assignment.output))
    assert found == [(1, "gpu"), (0, "gpu"), (0, "cpu")]


def test_a_share_of_layers_leaves_the_gpu_at_once(tmp_path):
    source = window(tmp_path / "a", 3, 0)
    source = msgspec.structs.replace(source, assignment=replace(source.assignment, gpu_layers=3, output="gpu"))
    sizes = {"vocabulary": 8, "depth": 1, "at_once": 1, "chunk_rows": 16, "min_rows": 16}
    part = HeadPart(model=str(tmp_path / "none.gguf"), ends=(), **sizes)
    group = GroupRank(rank=0, devices=["desk", "mini"], key=bytes(32))
    share = msgspec.structs.replace(opening(source), route=1, head=part, group=group)
    (left,) = fewer_on_gpu(share).windows
    assert (left.assignment.gpu_layers, left.assignment.output) == (0, "cpu")
    assert left.assignment.layer_bytes == 3 * (Path(source.layers[0]).stat().st_size - HEADER_BYTES)


def test_experts_in_ram_stay_there_and_the_others_follow_their_layers(tmp_path):
    synth.write_model(tmp_path / "model.gguf", architecture="qwen3moe")
    cutter, paths = ModelCutter(read_header(tmp_path / "model.gguf")), []
    for split, ref in enumerate(cutter.spec(1, 0, 6).layers, start=1):
        paths.append(tmp_path / f"{split}.gguf")
        head = layer_header(ref.tensors, number=split - 1, split=split)
        paths[-1].write_bytes(head + b"".join(cutter.source(ref.digest).chunks()))
    source = msgspec.structs.replace(window(tmp_path / "a", 1, 0), layers=tuple(map(str, paths)))
    size, found = paths[0].stat().st_size - HEADER_BYTES, []
    assignment = in_memory(0, 6, gpu_layers=6, cpu_experts=4)
    experts = sum(
        part.size for part in units_of_window(msgspec.structs.replace(source, assignment=assignment)).layers[0]
    )
    assert 0 < experts < size
    assignment = replace(assignment, layer_bytes=4 * experts, resident_bytes=4 * experts)
    asked = opening(msgspec.structs.replace(source, assignment=assignment))
    for on_gpu, cpu_experts in ((4, 4), (3, 3), (2, 2)):
        asked = fewer_on_gpu(asked)
        left = asked.windows[0].assignment
        found.append((left.gpu_layers, left.cpu_experts))
        assert left.layer_bytes == left.resident_bytes == (6 - on_gpu) * size + cpu_experts * experts
    assert found == [(4, 4), (3, 3), (2, 2)]


def test_a_load_that_fails_on_the_cpu_too_raises_its_own_error(tmp_path):
    def load(each: Open) -> Open:
        raise EngineError(f"broken with {on_gpu(each)}")

    with pytest.raises(EngineError, match=r"broken with \[0\]"):
        load_what_fits(
            opening(window(tmp_path / "a", 4, 3)), load, lambda _: pytest.fail("nothing was loaded"), lambda _: 0
        )


def test_a_window_without_gpu_is_loaded_once(tmp_path):
    tried = []

    def load(each: Open) -> Open:
        tried.append(each)
        raise EngineError("broken")

    with pytest.raises(EngineError, match="broken"):
        load_what_fits(opening(window(tmp_path / "a", 4, 0)), load, lambda _: None, lambda _: pytest.fail("no GPU"))
    assert len(tried) == 1


def test_a_gpu_that_its_driver_lost_is_no_lack_of_memory(tmp_path):
    """Fewer layers would not help, so nothing else is tried; after two failures the GPU is left out."""
    tried, why = [], "llama.cpp cannot open a context of 64 tokens: vk::Queue::submit: ErrorDeviceLost"

    def load(each: Open) -> Open:
        tried.append(each)
        raise EngineError(why)

    with pytest.raises(EngineError, match="ErrorDeviceLost"):
        load_what_fits(opening(window(tmp_path / "a", 4, 3)), load, lambda _: pytest.fail("nothing was"), lambda _: 0)
    assert len(tried) == 1
    care = Care()
    for _ in range(2):
        care.failed(EngineError(why))
    assert care.bounded(PROFILE).gpu is None


def prefill_offload(source: WindowSource) -> WindowSource:
    return msgspec.structs.replace(source, assignment=replace(source.assignment, prefill_offload=True))


@pytest.mark.parametrize(("gpu_layers", "fits"), [(0, 0), (4, 4), (4, 3)])
def test_prefill_offload_is_given_up_before_gpu_layers(tmp_path, gpu_layers, fits):
    asked, reported = opening(prefill_offload(window(tmp_path / "a", 6, gpu_layers)), window(tmp_path / "b", 2, 0)), []

    def load(each: Open) -> Open:
        if sum(on_gpu(each)) > fits or any(source.assignment.prefill_offload for source in each.windows):
            raise EngineError("no room")
        return each

    free = iter([100, 70])
    loaded = load_what_fits(asked, load, reported.append, lambda _: next(free))
    assert on_gpu(loaded) == [fits, 0]
    assert reported == [GpuLoaded(layers=fits, planned=gpu_layers, held_bytes=30, why="no room")]


def test_memory_held_for_prefill_offload_is_reported_and_plans_without_room_have_none():
    care, offloading = Care(), replace(PROFILE, gpu=replace(GPU, prefill_offload=(OFFLOADED,)))
    care.has(1, GpuLoaded(layers=0, planned=0, held_bytes=5, why=""))
    assert care.bounded(offloading) == offloading
    care.released(1)
    care.has(2, GpuLoaded(layers=0, planned=0, held_bytes=0, why="out of memory"))
    assert care.bounded(offloading) == PROFILE
    assert care.changes == 1
    assert "too little memory left to help with prompts" in care.printed[0]


class Care(GpuCare):
    """A ``GpuCare`` with ``device`` as its profile; ``again`` lists the reasons why processes were to load again."""

    def __init__(self, limits: OwnerLimits = NO_LIMITS) -> None:
        super().__init__(limits, look_every_s=0.001)
        self.printed: list[str] = []
        self.changes = 0
        self.again: list[str] = []
        self.room = asyncio.Event()
        self.device = PROFILE
        self.attend(lambda: self.device, report_line=self.printed.append, changed=self.count, recovered=self.notify)

    def count(self) -> None:
        self.changes += 1

    async def notify(self) -> None:
        self.room.set()

    def has(self, number: int, event: GpuLoaded) -> None:
        self.loaded(number, event, self.again.append)


def test_plans_use_no_more_of_a_gpu_than_loaded_on_it():
    care = Care()
    assert care.bounded(PROFILE) == PROFILE
    care.has(1, GpuLoaded(layers=3, planned=4, held_bytes=5, why="out of memory"))
    care.released(1)
    gpu = care.bounded(PROFILE).gpu
    assert gpu is not None
    assert gpu.vram_total_bytes == gpu.vram_available_bytes == GPU.vram_total_bytes * 3 // 4
    assert "3 of 4 planned layers are on it" in care.printed[0]
    care.has(2, GpuLoaded(layers=0, planned=2, held_bytes=0, why="out of memory"))
    assert care.bounded(PROFILE) == replace(PROFILE, gpu=None)
    assert care.changes == 2
    assert care.bounded(replace(PROFILE, gpu=None)).gpu is None


def test_gpu_memory_of_own_rings_counts_as_free():
    care, capped = Care(), Care(replace(NO_LIMITS, vram=2 * GIB))
    used = a_gpu(1 * GIB)
    for each in (care, capped):
        each.has(1, GpuLoaded(layers=4, planned=4, held_bytes=3 * GIB, why=""))
    assert available(care.now(used)) == 4 * GIB
    assert available(capped.now(used)) == 2 * GIB, "the owner's limit is one for all of it"
    shared = replace(PROFILE, gpu=replace(GPU, vram_available_bytes=GIB, unified_memory=True))
    assert care.now(shared) == shared, "there it is RAM, of which processes of ours count as free already"


def test_a_ring_without_room_next_to_its_predecessor_is_loaded_again_once_that_has_ended():
    care = Care()
    care.has(1, GpuLoaded(layers=4, planned=4, held_bytes=3 * GIB, why=""))
    care.has(2, GpuLoaded(layers=1, planned=4, held_bytes=1 * GIB, why="out of memory"))
    assert care.bounded(PROFILE) == PROFILE, "the ring that is replaced had the room"
    assert (care.is_cramped, care.again) == (True, [])
    care.released(1)
    assert care.is_cramped is False
    (reason,) = care.again
    assert "the GPU has room" in reason
    care.released(1)
    care.released(2)
    assert care.again == [reason]
    assert care.now(a_gpu(GIB)) == a_gpu(GIB)
    assert care.printed == []


async def test_memory_that_other_programs_need_is_released_and_used_again_later(monkeypatch):
    times = itertools.count(step=10)
    monkeypatch.setattr(memory_watch, "time", SimpleNamespace(monotonic=lambda: next(times)))
    care = Care()
    care.low(1, GpuLow(free_bytes=0, needed_bytes=GIB))
    assert (care.changes, care.again) == (0, []), "nothing of ours is on it"
    assert available(care.now(a_gpu(8 * GIB))) == 8 * GIB
    care.has(1, GpuLoaded(layers=4, planned=4, held_bytes=6 * GIB, why=""))
    care.low(1, GpuLow(free_bytes=0, needed_bytes=GIB))
    assert care.changes == 1
    assert "other programs need memory of the GPU, 1024 MiB more than is free" in care.again[0]
    assert available(care.bounded(a_gpu(8 * GIB))) == 6 * GIB, "as much as is there"
    care.released(1)
    care.device = a_gpu(6 * GIB)
    assert available(care.now(care.device)) == 6 * GIB
    async with asyncio.TaskGroup() as group:
        running = group.create_task(care.run())
        care.device = a_gpu(9 * GIB)
        async with asyncio.timeout(PATIENCE_S):
            await care.room.wait()
        running.cancel()
    assert available(care.now(care.device)) == 9 * GIB


def a_gpu(available_bytes: int) -> DeviceProfile:
    return replace(PROFILE, gpu=replace(GPU, vram_available_bytes=available_bytes))


def available(profile: DeviceProfile) -> int:
    assert profile.gpu is not None
    return profile.gpu.vram_available_bytes


def test_a_lasting_lack_of_gpu_memory_is_reported_once():
    free, total = [300 << 20], 16 * GIB
    watch = GpuWatch(lambda: free[0], total)
    seconds = itertools.count(step=2)

    def look(free_bytes: int) -> GpuLow | None:
        free[0] = free_bytes
        return watch.look(next(seconds))

    low = GpuLow(free_bytes=100 << 20, needed_bytes=156 << 20)
    assert [look(128 << 20), look(100 << 20), look(200 << 20), look(100 << 20)] == [None] * 4, "it did not last"
    assert [look(100 << 20), look(90 << 20), look(0), look(256 << 20)] == [low, None, None, None]
    assert [look(100 << 20), look(100 << 20)] == [None, low]
    free[0] = 0
    looked = next(seconds) - 2
    assert watch.look(looked + 1.9) is None, "too early to look"


def test_memory_that_was_not_free_at_loading_is_no_later_lack():
    free = [10 << 20]
    watch = GpuWatch(lambda: free[0], 24 * GIB)
    assert [watch.look(now) for now in (0, 2, 4)] == [None] * 3
    free[0] = 4 << 20
    assert [watch.look(now) for now in (6, 8)] == [None, GpuLow(free_bytes=4 << 20, needed_bytes=6 << 20)]


def test_a_driver_that_ends_the_ring_process_twice_leaves_the_gpu_out():
    care = Care()
    for kill in ("the ring process was ended by SIGKILL", "the ring process was stopped"):
        for _ in range(3):
            care.failed(RingError(kill))
    assert care.bounded(PROFILE) == PROFILE, "whoever was killed tells nothing of a GPU"
    care.failed(RingError("the ring process was ended by SIGABRT: vk::DeviceLostError"))
    assert care.bounded(PROFILE) == PROFILE, "once may be chance"
    care.failed(RingError("llama.cpp failed to compute a step (code -3): device lost"))
    assert care.bounded(PROFILE) == replace(PROFILE, gpu=None)
    (line,) = care.printed
    assert "device lost" in line
    assert "--gpu off" in line
    assert care.changes == 1


OTHER = replace(GPU, id="CUDA1")
BOTH = replace(PROFILE, other_gpus=(OTHER,))


def test_memory_held_on_each_gpu_is_reported_and_counts_as_free_there(tmp_path):
    source = window(tmp_path / "a", 6, 5)
    split = msgspec.structs.replace(source, assignment=replace(source.assignment, other_gpus=(2,)))
    options = msgspec.structs.replace(OPTIONS, gpu="CUDA0", other_gpus=("CUDA1",))
    asked, reported = msgspec.structs.replace(opening(split), options=options), list[GpuLoaded]()
    free = {"CUDA0": iter([10 * GIB, 7 * GIB]), "CUDA1": iter([8 * GIB, 6 * GIB])}
    load_what_fits(asked, lambda each: each, reported.append, lambda gpu: next(free[gpu]))
    assert reported == [GpuLoaded(layers=5, planned=5, held_bytes=3 * GIB, why="", others_held={"CUDA1": 2 * GIB})]
    care, capped = Care(), Care(replace(NO_LIMITS, vram=6 * GIB))
    used = BOTH.with_gpus([replace(gpu, vram_available_bytes=GIB) for gpu in BOTH.gpus])
    found = []
    for each in (care, capped):
        each.now(used)
        each.has(1, reported[0])
        found.append([gpu.vram_available_bytes for gpu in each.now(used).gpus])
    assert found == [[4 * GIB, 3 * GIB], [4 * GIB, 2 * GIB]], "the owner's bytes are those of both"


def test_fewer_layers_leave_both_gpus(tmp_path):
    source = window(tmp_path / "a", 8, 8)
    asked = opening(msgspec.structs.replace(source, assignment=replace(source.assignment, other_gpus=(4,))))
    found = []
    for _ in range(3):
        asked = fewer_on_gpu(asked)
        found.append(asked.windows[0].assignment.on_each_gpu)
    assert found == [(3, 3), (2, 2), (2, 1)]


async def test_a_lack_on_one_gpu_leaves_the_other():
    care = Care()
    roomy = BOTH.with_gpus([replace(gpu, vram_available_bytes=8 * GIB) for gpu in BOTH.gpus])
    assert care.now(roomy) == roomy
    care.has(1, GpuLoaded(layers=4, planned=4, held_bytes=6 * GIB, why="", others_held={"CUDA1": 5 * GIB}))
    care.low(1, GpuLow(free_bytes=0, needed_bytes=GIB, other="CUDA1"))
    assert [gpu.vram_available_bytes for gpu in care.bounded(roomy).gpus] == [8 * GIB, 5 * GIB]
    assert care.again


def test_the_failing_gpu_of_two_is_found_by_trial_and_left_out():
    care, crash = Care(), RingError("the ring process was ended by SIGABRT: CUDA error")
    care.now(BOTH)
    found = []
    for _ in range(4):
        care.failed(crash)
        found.append([gpu.id for gpu in care.bounded(BOTH).gpus])
    assert found == [["CUDA0", "CUDA1"], ["CUDA0"], ["CUDA1"], []]
    assert care.bounded(replace(PROFILE, gpu=None)).gpu is None
    assert care.changes == 3
    assert [line.split(" until")[0] for line in care.printed] == [
        "of the GPUs only CUDA0 is used",
        "of the GPUs only CUDA1 is used",
        "the GPU stays unused",
    ]


def test_a_gpu_that_was_left_out_returns_if_the_other_one_was_at_fault():
    """By then, the head's profile of the worker lacks it."""
    care, crash = Care(), RingError("the ring process was ended by SIGSEGV")
    known = care.now(BOTH)
    for _ in range(3):
        care.failed(crash)
        known = care.bounded(known)
    assert [gpu.id for gpu in known.gpus] == ["CUDA1"]


def test_without_the_first_gpu_held_memory_counts_for_the_other():
    care = Care()
    used = BOTH.with_gpus([replace(gpu, vram_available_bytes=GIB) for gpu in BOTH.gpus])
    care.now(used)
    for _ in range(3):
        care.failed(RingError("the ring process was ended by SIGSEGV"))
    care.has(1, GpuLoaded(layers=4, planned=4, held_bytes=6 * GIB, why=""))
    (gpu,) = care.now(used).gpus
    assert (gpu.id, gpu.vram_available_bytes) == ("CUDA1", 7 * GIB)
