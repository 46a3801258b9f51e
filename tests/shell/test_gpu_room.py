"""A GPU without room, and one whose driver ends the ring process: fewer layers are on it, or none, and the device serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from halda import HelpedSpeed
from halda.assignment import in_memory
from primad.daemon.gpu_care import GpuCare
from primad.engine.protocol import EngineOptions, WindowSource
from primad.engine.streaming.units import units_of_window
from primad.errors import EngineError, RingError
from primad.gguf.header import read_header
from primad.gguf.layers import HEADER_BYTES, layer_header
from primad.gguf.windows import ModelCutter
from primad.profiler.synthetic import SMALL, write_window
from primad.ring.gpu_room import fewer_on_gpu, load_what_fits
from primad.ring.messages import GpuLoaded, Open
from primad.settings.limits import NO_LIMITS
from tests.fakes.profile import GPU, PROFILE
from tools import synth

HELPED = HelpedSpeed(type="Q4_K", few_bytes_per_s=5e9, prefill_flop_per_s=2e12)
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
        ahead_bytes=0,
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
    told: list[GpuLoaded] = []

    def load(each: Open) -> Open:
        tried.append(on_gpu(each))
        if sum(tried[-1]) > 3:
            raise EngineError(f"no room for {sum(tried[-1])}")
        return each

    free = iter([100, 70])
    loaded = load_what_fits(asked, load, told.append, lambda _: next(free))
    assert tried == [[5, 2], [3, 1], [2, 0]]
    assert told == [GpuLoaded(layers=2, planned=7, held_bytes=30, why="no room for 7")]
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


def test_experts_that_were_in_ram_stay_there_and_the_others_follow_their_layers(tmp_path):
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
    for on_gpu, apart in ((4, 4), (3, 3), (2, 2)):
        asked = fewer_on_gpu(asked)
        left = asked.windows[0].assignment
        found.append((left.gpu_layers, left.cpu_experts))
        assert left.layer_bytes == left.resident_bytes == (6 - on_gpu) * size + apart * experts
    assert found == [(4, 4), (3, 3), (2, 2)]


def test_what_no_processor_loads_either_is_its_own_error(tmp_path):
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


def helped(source: WindowSource) -> WindowSource:
    return msgspec.structs.replace(source, assignment=replace(source.assignment, helped=True))


@pytest.mark.parametrize(("gpu_layers", "fits"), [(0, 0), (4, 4), (4, 3)])
def test_help_is_given_up_before_layers_are(tmp_path, gpu_layers, fits):
    asked, told = opening(helped(window(tmp_path / "a", 6, gpu_layers)), window(tmp_path / "b", 2, 0)), []

    def load(each: Open) -> Open:
        if sum(on_gpu(each)) > fits or any(source.assignment.helped for source in each.windows):
            raise EngineError("no room")
        return each

    free = iter([100, 70])
    loaded = load_what_fits(asked, load, told.append, lambda _: next(free))
    assert on_gpu(loaded) == [fits, 0]
    assert told == [GpuLoaded(layers=fits, planned=gpu_layers, held_bytes=30, why="no room")]


def test_what_help_holds_is_told_and_plans_without_room_for_it_have_none():
    care, helping = Care(), replace(PROFILE, gpu=replace(GPU, helped=(HELPED,)))
    care.loaded(1, GpuLoaded(layers=0, planned=0, held_bytes=5, why=""))
    assert care.bounded(helping) == helping
    care.released(1)
    care.loaded(2, GpuLoaded(layers=0, planned=0, held_bytes=0, why="out of memory"))
    assert care.bounded(helping) == PROFILE
    assert care.changes == 1
    assert "too little memory left to help with prompts" in care.said[0]


class Care(GpuCare):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.changes = 0
        self.say = self.said.append
        self.changed = self._changed

    def _changed(self) -> None:
        self.changes += 1


def test_plans_have_no_more_of_a_gpu_than_it_gave():
    care = Care()
    assert care.bounded(PROFILE) == PROFILE
    care.loaded(1, GpuLoaded(layers=3, planned=4, held_bytes=5, why="out of memory"))
    care.released(1)
    gpu = care.bounded(PROFILE).gpu
    assert gpu is not None
    assert gpu.vram_total_bytes == gpu.vram_available_bytes == GPU.vram_total_bytes * 3 // 4
    assert "3 of 4 planned layers are on it" in care.said[0]
    care.loaded(2, GpuLoaded(layers=0, planned=2, held_bytes=0, why="out of memory"))
    assert care.bounded(PROFILE) == replace(PROFILE, gpu=None)
    assert care.changes == 2
    assert care.bounded(replace(PROFILE, gpu=None)).gpu is None


def test_what_our_own_rings_hold_counts_as_free():
    care = Care()
    taken = replace(PROFILE, gpu=replace(GPU, vram_available_bytes=1 << 30))
    care.loaded(1, GpuLoaded(layers=4, planned=4, held_bytes=3 << 30, why=""))
    gpu = care.now(taken, NO_LIMITS).gpu
    assert gpu is not None
    assert gpu.vram_available_bytes == 4 << 30
    bounded = care.now(taken, replace(NO_LIMITS, vram=2 << 30)).gpu
    assert bounded is not None
    assert bounded.vram_available_bytes == 2 << 30, "the owner's limit is one for all of it"
    shared = replace(PROFILE, gpu=replace(GPU, vram_available_bytes=1 << 30, unified_memory=True))
    assert care.now(shared, NO_LIMITS) == shared, "there it is RAM, of which processes of ours count as free already"
    care.loaded(2, GpuLoaded(layers=1, planned=4, held_bytes=1 << 30, why="out of memory"))
    assert care.bounded(PROFILE) == PROFILE, "the ring that is replaced had the room"
    care.released(1)
    care.released(2)
    assert care.now(taken, NO_LIMITS) == taken


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
    (line,) = care.said
    assert "device lost" in line
    assert "--gpu off" in line
    assert care.changes == 1
