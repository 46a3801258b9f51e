"""Measuring this device: with fakes and tiny trials, and once for real."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
from typer.testing import CliRunner

from halda import RATE_WIDTH, GpuProfile, StateKind
from primad.cli import main as cli
from primad.engine import devices
from primad.engine.devices import GpuDevice, find_gpu, list_gpus, own_memory_of, reserve_bytes
from primad.errors import ConfigError, EngineError
from primad.profiler import device, disk, gpus, measure, processors, speeds, synthetic
from primad.profiler.device import check_chosen_gpu, is_disturbed, is_profiled, profile_device, unused_gpus
from primad.profiler.effort import MORE_COMPARED, QUICK, TYPES, Budget, Effort
from primad.profiler.records import VERSION, home_file, machine_file, read_home, read_machine, write
from primad.profiler.shapes import (
    CACHED,
    MODEL_BYTES,
    measure_attention,
    measure_caches,
    measure_exact,
    measure_rows,
    measure_widths,
)
from primad.profiler.speeds import (
    Bench,
    RetryBudget,
    choose,
    fit_layer,
    measure_step,
    measure_types,
    speed,
)
from primad.profiler.state_windows import WIDTH as STATE_WIDTH
from primad.profiler.state_windows import write_state_window
from primad.profiler.store import load_profiles
from primad.profiler.synthetic import BIG, MIDDLE, NARROW, SMALL, WIDE, LayerShape, write_window
from primad.profiler.trial import affordable_rows, own_s
from primad.profiler.trial_messages import CompareRows, ExactRows, SteppedOn, TimeWindow, TrialTimes
from primad.profiler.trials import child_trials
from primad.settings import profiles
from primad.settings.limits import NO_LIMITS
from primad.settings.profiles import check_disk, check_profile
from primad.system import gpus as vram
from primad.system.memory import Memory
from primad.system.processors import Others, usable_cpus
from tests.fakes.profile import CPU, DISK, GPU, PROFILE, SEEDED_CPU, home_record, machine_record, seed

TINY = LayerShape(width=256, feed_forward=512, heads=4, heads_kv=2)


def steady(decode_s: float, batch_s: float = 1.0, prefill_s: float = 1.0) -> TrialTimes:
    return TrialTimes(decode_s=(decode_s,) * 3, batch_s=(batch_s,), prefill_s=(prefill_s,) * 2, prefill_rows=512)


def shape_of(task: TimeWindow) -> LayerShape:
    return next(shape for shape in (BIG, WIDE, MIDDLE, NARROW, SMALL) if shape.width == task.width)


class Machine:
    """A fake of ``Trials``: windows take exactly the time of the cost model; ``broken`` extra buffers crash."""

    def __init__(self, step_s: float = 2e-4, layer_s: float = 3e-5, rate: float = 2e10) -> None:
        self.step_s, self.layer_s, self.rate = step_s, layer_s, rate
        self.row_s = self.attention_s = self.plain_attention_s = self.rows_attention_s = 0.0
        self.extra_factor: float | None = 1.0
        self.cache_bytes, self.cached_ratio = 0, 1.0
        self.disturbed = 0
        self.tasks: list[TimeWindow] = []

    def time(self, task: TimeWindow) -> TrialTimes | str:
        self.tasks.append(task)
        if task.window.extra_buffers and self.extra_factor is None:
            return "a trial ended with code -11"
        shape = shape_of(task)
        size = sum(Path(path).stat().st_size for path in task.window.layers)
        weights = task.window.assignment.layers * min(
            (shape.weight_bytes(kind) for kind in TYPES), key=lambda b: abs(b * task.window.assignment.layers - size)
        )
        factor = self.extra_factor or 1.0 if task.window.extra_buffers else 1.0
        if not task.many_rows and weights <= self.cache_bytes:
            factor *= self.cached_ratio
        step_s = self.step_s + task.window.assignment.layers * self.layer_s + factor * weights / self.rate
        rows = shape.short_rows * task.window.assignment.layers * (shape is NARROW)
        step_s += self.row_s * rows * (1 - shape.width / RATE_WIDTH)
        step_s += (
            (task.rows * self.rows_attention_s if task.rows > 1 else self.single_s(flash=task.flash))
            * task.cached
            * shape.width
            * task.window.assignment.layers
        )
        noise = 3.0 if self.disturbed else 1.0
        self.disturbed = max(0, self.disturbed - 1)
        return TrialTimes(
            decode_s=(step_s, noise * step_s, noise * step_s),
            batch_s=(2 * step_s,),
            prefill_s=(100 * step_s,) * 2 if task.many_rows else (),
            prefill_rows=512 if task.many_rows else 0,
            few_s=20 * step_s if task.window.assignment.prefill_offload else 0.0,
        )

    def single_s(self, *, flash: bool) -> float:
        return self.attention_s if flash else self.plain_attention_s

    def compare(self, task: CompareRows) -> ExactRows:
        return ExactRows(rows=7, piece_rows=8, replay_rows=7)

    def gpus(self) -> Sequence[GpuDevice] | str:
        raise AssertionError("not asked for")


@pytest.fixture
def has_weights() -> None:
    """Request this where llama.cpp computes."""


@pytest.fixture(autouse=True)
def _no_weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave holes in place of weights: a ``Machine`` only asks for their size, and writing gigabytes takes time."""
    if "has_weights" not in request.fixturenames:
        monkeypatch.setattr(synthetic, "fill", lambda file, piece, size: file.truncate(file.seek(size, os.SEEK_CUR)))


def bench(
    folder: Path,
    machine: Any,
    *,
    on_gpu: bool = False,
    patience_s: float = 0.0,
    effort: Effort = Effort(),
    budget: Budget | None = None,
) -> Bench:
    return Bench(
        trials=machine,
        folder=folder,
        threads=2,
        batch_threads=2,
        gpu="CUDA0" if on_gpu else None,
        weights=1,
        model_bytes=1,
        sweep_bytes=8,
        effort=effort,
        budget=budget or Budget(60.0, lambda: 0.0),
        patience=RetryBudget(patience_s),
    )


# ---- from times to figures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step_s", "layer_s"), [(2e-4, 3e-5), (1e-3, 5e-4), (5e-5, 2e-6)])
def test_the_fixed_costs_are_recovered_from_the_times(tmp_path, step_s, layer_s):
    place = bench(tmp_path, Machine(step_s, layer_s), effort=Effort(types=TYPES[:3]))
    assert measure_step(place) == pytest.approx(step_s, rel=1e-3)
    found, _ = measure_types(place, step_s, lambda _: None)
    assert found == pytest.approx(layer_s, rel=1e-3)


def test_absurd_times_still_give_positive_figures(tmp_path):
    class Absurd(Machine):
        def time(self, task: TimeWindow) -> TrialTimes:
            return steady(1.0 / task.window.assignment.layers)

    place = bench(tmp_path, Absurd())
    assert measure_step(place) > 0
    assert fit_layer(place, "Q4_K", 0.0, steady(1.0), steady(0.5)) > 0
    layer_s, found = measure_types(place, 1.0, lambda _: None)
    assert layer_s > 0
    assert all(figures.decode_bytes_per_s > 0 for figures in found)
    assert speed(place, "Q4_K", steady(1e-9), 1.0, 1.0, extra_buffers=False).decode_bytes_per_s > 0


def test_every_type_gets_the_rate_of_the_machine(tmp_path):
    machine = Machine()
    reported: list[str] = []
    layer_s, found = measure_types(bench(tmp_path, machine), machine.step_s, reported.append)
    assert layer_s == pytest.approx(machine.layer_s, rel=0.01)
    assert [figures.type for figures in found] == reported == list(TYPES)
    for figures in found:
        assert figures.decode_bytes_per_s == pytest.approx(machine.rate, rel=0.01)
        assert not figures.extra_buffers
    assert not list(tmp_path.iterdir())


def test_one_token_is_timed_on_more_than_the_caches_hold(tmp_path):
    machine = Machine()
    place = replace(bench(tmp_path, machine), model_bytes=3 * BIG.weight_bytes("Q4_K"), sweep_bytes=4096)
    measure_types(replace(place, effort=Effort(types=TYPES[:1])), machine.step_s, lambda _: None)
    decode = [task for task in machine.tasks if not task.many_rows]
    assert {
        task.window.assignment.layers * shape_of(task).weight_bytes("Q4_K") >= place.model_bytes for task in decode
    } == {True}
    assert {task.sweep_bytes for task in decode} == {0}
    assert {task.sweep_bytes for task in machine.tasks if task.many_rows} == {4096}


def test_faster_extra_buffers_are_chosen(tmp_path):
    machine = Machine()
    machine.extra_factor = 0.5
    _, found = measure_types(bench(tmp_path, machine), machine.step_s, lambda _: None)
    assert all(figures.extra_buffers for figures in found)
    assert found[0].decode_bytes_per_s == pytest.approx(2 * machine.rate, rel=0.01)


def test_a_quick_effort_tries_no_extra_buffers(tmp_path):
    machine = Machine()
    measure_types(bench(tmp_path, machine, effort=QUICK), machine.step_s, lambda _: None)
    assert machine.tasks
    assert not any(task.window.extra_buffers for task in machine.tasks)


def test_a_temporary_disturbance_of_a_type_does_not_count_as_its_speed(tmp_path):
    class Slowed(Machine):
        """Other programs slow the timing of the first type."""

        def time(self, task: TimeWindow) -> TrialTimes | str:
            found = super().time(task)
            if len(self.tasks) > 6 or isinstance(found, str):
                return found
            return msgspec.structs.replace(found, decode_s=tuple(3 * seconds for seconds in found.decode_s))

    machine = Slowed()
    _, found = measure_types(bench(tmp_path, machine, effort=Effort(types=TYPES[:2])), machine.step_s, lambda _: None)
    assert [figures.decode_bytes_per_s for figures in found] == pytest.approx([machine.rate] * 2, rel=0.01)


def test_the_main_type_is_timed_with_more_tokens_of_a_chunk_on_a_slow_device(tmp_path):
    class Slow(Machine):
        """It has time for 64 tokens; a chunk that may take as long has 256, each a tenth faster."""

        def time(self, task: TimeWindow) -> TrialTimes | str:
            found = super().time(task)
            few_s = 50 * found.decode_s[0]
            chunk = (256, 4 * 0.9 * few_s) if task.chunk_s else (64, few_s)
            rows = {"few_s": few_s, "prefill_rows": chunk[0], "prefill_s": (chunk[1],)}
            return msgspec.structs.replace(found, **rows) if task.many_rows else found

    machine = Slow(step_s=1e-9, layer_s=1e-9)
    _, (main, other, *_) = measure_types(bench(tmp_path, machine), machine.step_s, lambda _: None)
    assert {task.chunk_s for task in machine.tasks if task.many_rows} == {0.0, 0.02 * Effort().seconds}
    for figures, rows, row_s in ((main, 256, 0.9), (other, 64, 1.0)):
        assert max(at.rows for at in figures.rows) == rows, "other types have no more tokens for it"
        one_s = BIG.weight_bytes(figures.type) / machine.rate
        chunk_s = one_s + (50 / 64 * row_s * rows - 1) * one_s * 512 / rows
        assert 2 * 512 * BIG.weights / figures.prefill_flop_per_s == pytest.approx(chunk_s, rel=0.05)


def test_the_costs_of_other_shapes_are_recovered_from_the_times(tmp_path):
    machine = Machine()
    machine.row_s, machine.attention_s, machine.plain_attention_s = 8e-9, 5e-10, 1e-10
    machine.rows_attention_s = 2e-11
    place = bench(tmp_path, machine)
    layer_s, (main, *_) = measure_types(place, machine.step_s, lambda _: None)
    assert measure_rows(place, main, machine.step_s, layer_s) == pytest.approx(8e-9, rel=0.05)
    assert measure_attention(place, main) == pytest.approx(
        {"attention_s": 5e-10, "plain_attention_s": 1e-10, "rows_attention_s": 2e-11}, rel=0.01
    )
    assert [width.ratio for width in measure_widths(place, main, machine.step_s, layer_s)] == pytest.approx(
        [1, 1, 1], rel=0.01
    )
    assert {task.cached for task in machine.tasks} == {0, CACHED}


def test_the_speedup_of_small_models_in_caches_is_measured(tmp_path):
    machine = Machine()
    place = bench(tmp_path, machine)
    layer_s, (main, *_) = measure_types(place, machine.step_s, lambda _: None)
    machine.cache_bytes, machine.cached_ratio = MODEL_BYTES[0], 0.5
    found = measure_caches(place, main, machine.step_s, layer_s)
    assert [each.ratio for each in found] == pytest.approx([0.5, 1], rel=0.03)
    assert [each.bytes for each in found] == pytest.approx(MODEL_BYTES, rel=0.2)


def test_without_time_no_other_shapes_are_measured(tmp_path):
    machine = Machine()
    for place in (bench(tmp_path, machine, effort=QUICK), bench(tmp_path, machine, budget=Budget(0.0, lambda: 0.0))):
        _, (main, *_) = measure_types(place, machine.step_s, lambda _: None)
        assert measure_rows(place, main, machine.step_s, 1e-5) == 0
        assert measure_attention(place, main) == {}
        assert measure_widths(place, main, machine.step_s, 1e-5) == ()
        assert measure_caches(place, main, machine.step_s, 1e-5) == ()


def test_a_crash_with_extra_buffers_leaves_them_out(tmp_path):
    machine = Machine()
    machine.extra_factor = None
    _, found = measure_types(bench(tmp_path, machine), machine.step_s, lambda _: None)
    assert len(found) == len(TYPES)
    assert not any(figures.extra_buffers for figures in found)


def test_a_gpu_is_measured_without_extra_buffers_and_holds_every_layer(tmp_path):
    machine = Machine()
    measure_types(bench(tmp_path, machine, on_gpu=True), machine.step_s, lambda _: None)
    assert not any(task.window.extra_buffers for task in machine.tasks)
    assert all(task.window.assignment.gpu_layers == task.window.assignment.layers for task in machine.tasks)


@pytest.mark.parametrize("trial_s", [0.01, 1.0, 20.0])
def test_a_slow_device_measures_fewer_types_instead_of_longer(tmp_path, trial_s):
    now = 0.0

    class Slow(Machine):
        def time(self, task: TimeWindow) -> TrialTimes | str:
            nonlocal now
            now += trial_s + task.seconds
            return super().time(task)

    _, found = measure_types(bench(tmp_path, Slow(), budget=Budget(26.0, lambda: now)), 1e-4, lambda _: None)
    of_type_s = 5 * (trial_s + 26.0 / 5)
    assert [figures.type for figures in found] == list(TYPES[: len(found)])
    assert now <= max(26.0, of_type_s), "a type that would take longer than there is time is left out"
    assert (len(found) == len(TYPES)) == (trial_s == 0.01)


@pytest.mark.parametrize(
    ("row_s", "seconds", "rows"), [(1e-4, 1.0, 512), (2e-3, 1.0, 256), (0.02, 1.0, 64), (1.0, 0.0, 64)]
)
def test_a_slow_device_is_timed_with_fewer_prompt_tokens(row_s, seconds, rows):
    assert affordable_rows(row_s, seconds) == rows


def test_a_step_that_waited_for_others_counts_as_its_compute_time_and_another_as_its_wall_time():
    assert own_s(0.010, 0.003, 0.004) == 0.004
    assert own_s(0.010, 0.0001, 0.004) == 0.010, "it waited for a slower core of its own"
    assert own_s(0.010, 0.003, 0.011) == 0.010


def test_fewer_prompt_tokens_predict_the_rate_of_a_chunk_whose_weights_are_read_once(tmp_path):
    place = bench(tmp_path, Machine())
    flop = {rows: place.layers_to_compute * rows * (2 * BIG.weights + 4 * rows * BIG.width) for rows in (64, 512)}
    read_s = 0.1 * flop[64] / 1e11
    decode_s = read_s * place.layers_to_read(BIG, "Q4_K") / place.layers_to_compute
    found = {
        rows: speed(
            place,
            "Q4_K",
            TrialTimes(
                decode_s=(decode_s,), batch_s=(1.0,), prefill_s=(read_s + flop[rows] / 1e11,), prefill_rows=rows
            ),
            0.0,
            0.0,
            extra_buffers=False,
        )
        for rows in (512, 64)
    }
    assert found[512].prefill_flop_per_s == pytest.approx(found[64].prefill_flop_per_s)
    assert [[at.rows for at in each.rows] for each in found.values()] == [[], [64]]
    weights_s = place.layers_to_compute * BIG.weight_bytes("Q4_K") / found[64].rows[0].bytes_per_s
    assert weights_s == pytest.approx(read_s + flop[64] / 1e11), "what they took is known besides"


def test_a_trial_that_always_crashes_is_one_clear_error(tmp_path):
    class Dead:
        def time(self, task: TimeWindow) -> str:
            return "a trial ended with code -9"

    with pytest.raises(EngineError, match="cannot compute any"):
        measure_types(bench(tmp_path, Dead()), 1e-4, lambda _: None)
    with pytest.raises(EngineError, match="ended with code -9"):
        measure_step(bench(tmp_path, Dead()))


def test_a_disturbed_trial_is_repeated_while_there_is_patience(tmp_path):
    machine = Machine()
    machine.disturbed = 2
    found = bench(tmp_path, machine, patience_s=60).time_small(2, 1.0)
    assert isinstance(found, TrialTimes)
    assert len(machine.tasks) == 3
    assert len(set(found.decode_s)) == 1
    machine.disturbed = 2
    bench(tmp_path, machine).time_small(2, 1.0)
    assert len(machine.tasks) == 4


@pytest.mark.parametrize(
    ("plain", "extra", "chosen"),
    [
        (steady(0.010), steady(0.005), True),
        (steady(0.010), steady(0.0099), False),  # not worth the memory
        (steady(0.010, prefill_s=1.0), steady(0.005, prefill_s=3.0), True),  # a plan decides
        (steady(0.010, prefill_s=3.0), steady(0.020, prefill_s=1.0), True),
        (steady(0.010, prefill_s=1.0), steady(0.010, prefill_s=3.0), False),
        (steady(0.010), "crashed", False),
        ("crashed", steady(0.010), True),
    ],
)
def test_a_type_has_extra_buffers_if_a_token_or_a_prompt_is_faster_with_them(plain, extra, chosen):
    assert choose(plain, extra) == (extra if chosen else plain, chosen)


def test_fewer_threads_are_chosen_only_if_clearly_faster():
    assert processors.fastest({8: 1.0, 4: 0.98}, 0.0) == 8
    assert processors.fastest({8: 1.0, 4: 0.8}, 0.1) == 4
    assert processors.fastest({8: 1.0}, 0.0) == 8


def test_fewer_threads_are_not_chosen_because_others_kept_cores_busy():
    assert processors.fastest({8: 1.0, 4: 0.5}, 1.0) == 8


# ---- children -------------------------------------------------------------------------------------------------------


def a_task(folder: Path, kind: str = "Q4_K", *, many_rows: bool = False) -> TimeWindow:
    return TimeWindow(
        window=write_window(folder, TINY, kind, 1, 0),
        width=TINY.width,
        threads=1,
        batch_threads=1,
        sweep_bytes=8,
        many_rows=many_rows,
        seconds=0.0,
    )


def test_llama_cpp_computes_a_window_of_every_type(tmp_path, has_weights):
    with child_trials(1) as children:
        for kind in TYPES:
            one = children.time(a_task(tmp_path, kind))
            assert isinstance(one, TrialTimes), f"{kind}: {one}"
            many = children.time(a_task(tmp_path, kind, many_rows=True))
            assert isinstance(many, TrialTimes), f"{kind}: {many}"
            assert (len(one.decode_s), one.batch_s, one.prefill_s) == (1, (), ()), "once, where there is no time"
            assert (many.decode_s, len(many.batch_s), len(many.prefill_s)) == ((), 1, 1)
            assert min(one.decode_s + many.batch_s + many.prefill_s) > 0


@pytest.mark.parametrize(
    ("seconds", "effort", "more"), [(60.0, Effort(), MORE_COMPARED), (0.0, Effort(), ()), (60.0, QUICK, ())]
)
def test_batches_of_rarer_types_are_compared_if_there_is_time(tmp_path, seconds, effort, more):
    place = bench(tmp_path, Machine(), effort=effort, budget=Budget(seconds, lambda: 0.0))
    assert [found.type for found in measure_exact(place, ())] == [*TYPES, *more]


def test_llama_cpp_compares_batches_of_every_type(tmp_path, has_weights):
    with child_trials(1) as children:
        for kind in (*TYPES, *MORE_COMPARED):
            window = write_window(tmp_path, SMALL, kind, 1, gpu_layers=0)
            found = children.compare(CompareRows(window=window, width=SMALL.width, threads=1))
            assert isinstance(found, ExactRows), f"{kind}: {found}"


def test_batches_of_every_kind_of_state_are_compared(tmp_path, has_weights):
    with child_trials(1) as children:
        for state in get_args(StateKind):
            (folder := tmp_path / state).mkdir()
            window = write_state_window(folder, state, "Q4_K")
            found = children.compare(CompareRows(window=window, width=STATE_WIDTH, threads=1, has_state=True))
            assert isinstance(found, ExactRows), f"{state}: {found}"
            assert found.rows > 1, "on all processors that were tried"


def test_a_crash_is_a_result_and_the_next_task_gets_a_new_child(tmp_path, has_weights):
    task = a_task(tmp_path)
    missing = msgspec.structs.replace(task.window, metadata=str(tmp_path / "none.gguf"))
    with child_trials(1) as children:
        answer = children.time(msgspec.structs.replace(task, window=missing))
        assert isinstance(answer, str)
        assert "ended with code 1" in answer
        assert "none.gguf" in answer
        assert isinstance(children.time(task), TrialTimes)


def test_a_hang_is_a_result(tmp_path, monkeypatch):
    real = subprocess.Popen

    def hanging(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[1:] == ["-m", "primad.profiler.trial"]
        return real([sys.executable, "-c", "import time; time.sleep(60)"], **options)

    monkeypatch.setattr(subprocess, "Popen", hanging)
    with child_trials(1, timeout_s=0.2) as children:
        assert children.gpus() == "a trial did not end within 0.2 s"


def test_no_gpu_is_the_ordinary_case():
    listed = gpus.list_gpus()
    assert not isinstance(listed, str)
    assert all(isinstance(device, GpuDevice) for device in listed)


def test_a_trial_without_gpu_sees_none(tmp_path, monkeypatch):
    """No driver is loaded, since it may be broken."""
    seen: list[dict[str, str]] = []
    real = subprocess.Popen

    def noting(command: list[str], env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        seen.append(env)
        return real(command, env=env, **options)

    monkeypatch.setattr(subprocess, "Popen", noting)
    for gpu in (False, True):
        with child_trials(1, gpu=gpu) as children:
            children.gpus()
    assert [env.get("GGML_DISABLE_VULKAN") for env in seen] == ["1", None]
    assert [env.get("CUDA_VISIBLE_DEVICES") for env in seen] == ["-1", os.environ.get("CUDA_VISIBLE_DEVICES")]


# ---- GPUs -----------------------------------------------------------------------------------------------------------


class FakeGgml:
    """ggml's device calls: a CPU, a card and an integrated GPU."""

    devices = ((0, b"CPU", b"a cpu", 64, 60), (1, b"CUDA", b"a card\n", 24, 30), (2, b"MTL", b"Apple M4", 48, 40))

    def ggml_backend_dev_count(self) -> int:
        return len(self.devices)

    def ggml_backend_dev_get(self, number: int) -> int:
        return number

    def ggml_backend_dev_type(self, device: int) -> int:
        return self.devices[device][0]

    def ggml_backend_dev_memory(self, device: int, free: Any, total: Any) -> None:
        free._obj.value, total._obj.value = self.devices[device][4], self.devices[device][3]

    def ggml_backend_dev_get_props(self, device: int, props: Any) -> None:
        props._obj.device_id = b"0000:01:00.%d" % device if device else None

    def ggml_backend_dev_backend_reg(self, device: int) -> int:
        return device

    def ggml_backend_reg_name(self, registry: int) -> bytes:
        return self.devices[registry][1]

    def ggml_backend_dev_name(self, device: int) -> bytes:
        return b"GPU%d" % device

    def ggml_backend_dev_description(self, device: int) -> bytes:
        return self.devices[device][2]


def test_gpus_are_listed_with_the_figures_of_their_backend():
    assert ctypes.c_size_t().value == 0
    assert list(list_gpus(FakeGgml())) == [
        GpuDevice(
            id="GPU1",
            name="a card",
            backend="CUDA",
            vram_total_bytes=24,
            vram_available_bytes=24,
            unified_memory=False,
            pci="0000:01:00.1",
        ),
        GpuDevice(
            id="GPU2",
            name="Apple M4",
            backend="Metal",
            vram_total_bytes=48,
            vram_available_bytes=40,
            unified_memory=True,
            pci="0000:01:00.2",
        ),
    ]


def test_a_gpu_is_found_by_its_name_in_llama_cpp():
    assert find_gpu("GPU2", FakeGgml()) == 2
    assert find_gpu("", FakeGgml()) == 1, "the first one"
    with pytest.raises(EngineError, match="does not see the GPU GPU0 any more"):
        find_gpu("GPU0", FakeGgml())


def test_the_systems_figure_of_free_memory_wins_if_smaller(monkeypatch):
    counted = {"0000:01:00.1": 5, "0000:01:00.2": 45}
    monkeypatch.setattr(devices, "free_vram", counted.get)
    assert [gpu.vram_available_bytes for gpu in list_gpus(FakeGgml())] == [5, 40]
    found = own_memory_of("GPU1", FakeGgml())
    assert found is not None
    free_bytes, total_bytes = found
    assert (free_bytes(), total_bytes) == (5, 24)
    counted.clear()
    assert free_bytes() == 24, "llama.cpp's own figure, no more than all of it"
    assert own_memory_of("GPU2", FakeGgml()) is None, "it shares the processor's memory"


def test_the_counters_of_a_card_are_those_of_its_driver(tmp_path, monkeypatch):
    class Nvml:
        NVMLError = RuntimeError

        def nvmlDeviceGetHandleByPciBusId(self, pci: str) -> str:  # noqa: N802
            if pci != "0000:02:00.0":
                raise RuntimeError("not found")
            return pci

        def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
            return SimpleNamespace(free=7)

    monkeypatch.setattr(vram, "_nvml", lambda: None)
    assert vram.free_vram("0000:02:00.0", tmp_path) is None
    monkeypatch.setattr(vram, "_nvml", Nvml)
    assert vram.free_vram("0000:02:00.0", tmp_path) == 7
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    assert vram.free_vram("0000:01:00.0", tmp_path) is None
    (card / "mem_info_vram_total").write_text("24\n")
    (card / "mem_info_vram_used").write_text("20\n")
    assert vram.free_vram("0000:01:00.0", tmp_path) == 4


def a_device(**changes: Any) -> GpuDevice:
    device = GpuDevice(
        id=GPU.id,
        name=GPU.name,
        backend=GPU.backend,
        vram_total_bytes=24 << 30,
        vram_available_bytes=7 << 30,
        unified_memory=False,
    )
    return msgspec.structs.replace(device, **changes)


def test_free_memory_of_a_gpu_is_read_again(monkeypatch):
    now = gpus.gpu_now(GPU, [a_device(name="another"), a_device()])
    left = (7 << 30) - reserve_bytes(24 << 30)
    assert now == replace(GPU, vram_available_bytes=left), "others have some of it"
    assert gpus.gpu_now(GPU, [a_device(name="another")]) is None
    assert gpus.gpu_now(GPU, [a_device(id="CUDA1")]) is None
    assert gpus.gpu_now(GPU, "a trial did not end within 30 s") is None
    monkeypatch.setattr(gpus, "memory", lambda: Memory(16 << 30, 2 << 30))
    shared = gpus.gpu_now(GPU, [a_device(unified_memory=True)])
    assert shared is not None
    assert shared.vram_available_bytes == 2 << 30


def test_all_gpus_or_the_chosen_ones_are_used_fastest_first():
    slow = replace(GPU, id="CUDA1", name="an old card", vram_read_bytes_per_s=1e11)
    like = replace(slow, id="CUDA2")
    assert gpus.choose_gpus([slow, GPU], None) == (GPU, slow)
    assert gpus.choose_gpus([slow, GPU, like], "cuda1") == (slow,)
    assert gpus.choose_gpus([slow, GPU, like], "old card") == (slow, like), "both have that name"
    assert gpus.choose_gpus([slow, GPU, like], "CUDA2, cuda0") == (GPU, like)
    assert gpus.choose_gpus([slow, GPU], "off") == gpus.choose_gpus([], None) == ()
    for wanted in ("4090", "CUDA0,4090"):
        known = rf"--gpu {wanted}: .* it has CUDA1 \(an old card\), CUDA0 \(a gpu\); 'off'"
        with pytest.raises(ConfigError, match=known):
            gpus.choose_gpus([slow, GPU], wanted)


def test_a_gpu_with_two_backends_is_used_through_the_faster_one():
    by_cuda = replace(GPU, pci="0000:01:00.0")
    by_vulkan = replace(by_cuda, id="Vulkan0", vram_read_bytes_per_s=1e11)
    other = replace(by_vulkan, id="Vulkan1", pci="0000:02:00.0")
    assert gpus.choose_gpus([by_vulkan, by_cuda, other], None) == (by_cuda, other)


def test_the_memory_of_a_driver_is_the_median_of_trials_within_bounds():
    card, mib = a_device(), 1 << 20
    assert processors.context_bytes([400 * mib, 500 * mib, 900 * mib], card) == 500 * mib
    assert processors.context_bytes([mib], card) == 64 * mib
    assert processors.context_bytes([20 << 30], card) == 3 << 30, "another program started in the meantime"
    assert processors.context_bytes([-mib], card) == processors.context_bytes([], card) == 0
    assert processors.context_bytes([400 * mib], a_device(unified_memory=True)) == 0


def test_the_room_that_plans_leave_of_a_gpu_grows_with_it():
    assert [reserve_bytes(size << 30) >> 20 for size in (2, 8, 16, 24, 80)] == [64, 256, 256, 384, 1280]


class FakeChildren(Machine):
    """``child_trials`` of a machine with one GPU."""

    def __call__(self, threads: int, *, timeout_s: float, gpu: bool) -> FakeChildren:
        assert gpu
        return self

    def __enter__(self) -> FakeChildren:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def gpus(self) -> Sequence[GpuDevice] | str:
        return (a_device(),)


def test_a_gpu_is_profiled_like_the_processor(tmp_path, monkeypatch):
    children = FakeChildren(step_s=1e-4, layer_s=1e-5, rate=8e11)
    monkeypatch.setattr(processors, "child_trials", children)
    monkeypatch.setattr(speeds, "_MAX_AGAIN", 1)
    found = processors.measure_gpu(tmp_path, a_device(), 2, Effort(), Budget(26.0, lambda: 0.0))
    assert isinstance(found, GpuProfile)
    assert found.id == "CUDA0"
    assert {task.gpu for task in children.tasks} == {"CUDA0"}
    assert found.vram_read_bytes_per_s == pytest.approx(8e11, rel=0.05)
    assert found.step_s == pytest.approx(1e-4, rel=0.05)
    assert found.layer_s == pytest.approx(1e-5, rel=0.2)
    assert len(found.speeds) == len(TYPES)
    check_profile(replace(PROFILE, gpu=found))


@pytest.mark.parametrize(("rate", "layers"), [(8e11, 8), (1e9, 3), (1e8, 1)])
def test_a_slow_gpu_computes_little_and_is_still_measured(tmp_path, monkeypatch, rate, layers):
    children = FakeChildren(step_s=1e-3, layer_s=1e-4, rate=rate)
    monkeypatch.setattr(processors, "child_trials", children)
    found = processors.measure_gpu(tmp_path, a_device(), 2, QUICK, Budget(26.0, lambda: 0.0))
    assert isinstance(found, GpuProfile)
    big = [task for task in children.tasks if shape_of(task) is BIG]
    assert big[0].window.assignment.layers == 1, "one layer tells how many there is time for"
    read = [task for task in big[1:] if task.window.assignment.layers and not task.many_rows]
    assert read[0].window.assignment.layers == layers
    assert all(task.run_s == task.seconds for task in children.tasks)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("a trial was ended by SIGABRT: the driver is broken", "ended by SIGABRT: the driver is broken"),
        ("a trial did not end within 40 s", "did not end within 40 s"),
        ("a trial ended with code 1: llama.cpp cannot load window.gguf: out of memory", "out of memory"),
        (steady(1e9, 1e9, 1e9), "it was measured, but gpu"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_a_reason(tmp_path, monkeypatch, answer, why):
    class Dead(FakeChildren):
        def time(self, task: TimeWindow) -> TrialTimes | str:
            return answer

    monkeypatch.setattr(processors, "child_trials", Dead())
    found = processors.measure_gpu(tmp_path, a_device(), 2)
    assert isinstance(found, str)
    assert why in found


def test_a_gpu_that_hangs_later_skips_the_remaining_measurements(tmp_path, monkeypatch):
    """Earlier measurements count, and only one hang is waited for, not one for each type."""

    class Hanging(FakeChildren):
        def time(self, task: TimeWindow) -> TrialTimes | str:
            return "a trial did not end within 40 s" if len(self.tasks) > 20 else super().time(task)

    children = Hanging(rate=8e11)
    monkeypatch.setattr(processors, "child_trials", children)
    found = processors.measure_gpu(tmp_path, a_device(), 2)
    assert isinstance(found, GpuProfile)
    assert 0 < len(found.speeds) < len(TYPES)


TWO_TYPES = Effort(types=TYPES[:2])


def once() -> Budget:
    """A budget with time for each type once."""
    return Budget(0.0, lambda: 0.0)


def test_the_speed_of_prefill_offload_is_measured_on_a_gpu(tmp_path, monkeypatch):
    children = FakeChildren(step_s=1e-4, layer_s=1e-5, rate=1e9)
    monkeypatch.setattr(processors, "child_trials", children)
    found = processors.measure_gpu(tmp_path, a_device(), 2, TWO_TYPES, once())
    prefill_offload = [task for task in children.tasks if task.window.assignment.prefill_offload]
    assert [each.type for each in found.prefill_offload] == [each.type for each in found.speeds]
    assert len(prefill_offload) == len(TWO_TYPES.types)
    for task in prefill_offload:
        assert (task.gpu, task.window.assignment.gpu_layers, task.window.extra_buffers) == ("CUDA0", 0, False)
        assert task.many_rows
        assert task.run_s == task.seconds
    step_s = 1e-4 + prefill_offload[0].window.assignment.layers * (1e-5 + BIG.weight_bytes("Q4_K") / 1e9)
    size = prefill_offload[0].window.assignment.layers * BIG.weight_bytes("Q4_K")
    assert found.prefill_offload[0].few_bytes_per_s == pytest.approx(size / (20 * step_s), rel=0.01)
    quick = processors.measure_gpu(tmp_path, a_device(), 2, QUICK, once())
    assert quick.prefill_offload == ()


@pytest.mark.parametrize("answer", ["a trial was ended by SIGSEGV", "a trial did not end within 40 s", None])
@pytest.mark.parametrize("kind", [0, 1])
def test_a_gpu_that_fails_at_prefill_offload_serves_without_it(tmp_path, monkeypatch, answer, kind):
    """Whatever ends the first type or a later one; None stands for impossible figures."""

    class Failing(FakeChildren):
        def time(self, task: TimeWindow) -> TrialTimes | str:
            self.offloads = getattr(self, "offloads", 0) + task.window.assignment.prefill_offload
            found = super().time(task)
            if self.offloads <= kind or not task.window.assignment.prefill_offload:
                return found
            return answer or msgspec.structs.replace(found, few_s=1e-12)

    monkeypatch.setattr(processors, "child_trials", Failing(step_s=1e-4, layer_s=1e-5, rate=1e9))
    found = processors.measure_gpu(tmp_path, a_device(), 2, TWO_TYPES, once())
    assert isinstance(found, GpuProfile)
    assert found.prefill_offload == ()
    assert len(found.speeds) == len(TWO_TYPES.types)


# ---- the disk -------------------------------------------------------------------------------------------------------


def test_a_disk_is_measured_and_nothing_is_left_on_it(tmp_path):
    found = disk.measure_disk(tmp_path, 0.0)
    assert found.prefetch_bytes_per_s > 0
    assert found.fault_bytes_per_s > 0
    assert found.random_bytes_per_s > 0
    assert found.free_bytes > 0
    assert found.slows_s_per_byte == 0, "nothing was computed at the same time"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("share", [1e-9, 1e9])
def test_a_disk_that_others_use_in_one_trial_and_not_in_the_next_has_a_profile(tmp_path, monkeypatch, share):
    rates = iter([1e8, 1e8 * share])
    monkeypatch.setattr(disk, "_rate", lambda *_: next(rates))
    monkeypatch.setattr(disk, "_random", lambda *_: 1e8 * share)
    check_disk(disk.measure_disk(tmp_path, 0.0))


@pytest.mark.parametrize(("loaded_s", "lost"), [(0.02, 0.5), (0.0125, 0.2), (0.01, 0.0), (0.009, 0.0), (10.0, 0.8)])
def test_the_cost_of_reading_is_what_concurrent_computing_loses(tmp_path, loaded_s, lost):
    class Computing:
        steps = iter([(0.01, 0.01, 0.5), (loaded_s,) * 3])

        def step_on(self, seconds: float) -> SteppedOn:
            return SteppedOn(next(self.steps))

    found = disk.measure_disk(tmp_path, 0.0, Computing())
    assert found.slows_s_per_byte * found.prefetch_bytes_per_s == pytest.approx(lost)
    assert not list(tmp_path.iterdir())


def test_a_trial_that_ends_during_a_disk_measurement_is_one_clear_error(tmp_path):
    class Dead:
        def step_on(self, seconds: float) -> str:
            return "a trial ended with code -9"

    with pytest.raises(EngineError, match="ended with code -9"):
        disk.measure_disk(tmp_path, 0.0, Dead())
    assert not list(tmp_path.iterdir())


# ---- cached measurements --------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_unusable_gpu_is_reported_and_the_device_stays(tmp_path, measured, monkeypatch):
    home = a_home(tmp_path)
    monkeypatch.setattr(measure, "list_gpus", lambda: (a_device(), a_device(id="CUDA1", name="another")))
    monkeypatch.setattr(measure, "measure_gpu", lambda folder, device, *_: GPU if device.id == "CUDA0" else "it hangs")
    monkeypatch.setattr(device, "list_gpus", lambda: (a_device(),))
    profile = profile_device("desk", home, None, lambda _: None)
    assert profile.gpu == replace(GPU, vram_available_bytes=(7 << 30) - reserve_bytes(24 << 30))
    assert tuple(map(str, unused_gpus(home, None))) == (
        "the GPU another (CUDA1) stays unused: it hangs; 'primad doctor' looks at it, "
        "'primad profile --remeasure' tries again",
    )
    none = profile_device("desk", home, None, lambda _: None, limits=replace(NO_LIMITS, gpu="off"))
    assert none.gpu is None
    check_chosen_gpu(home, None, "off")
    check_chosen_gpu(tmp_path, 7, "4090")  # not measured yet
    with pytest.raises(ConfigError, match="--gpu 4090"):
        check_chosen_gpu(home, None, "4090")
    with pytest.raises(ConfigError, match="--gpu 4090"):
        profile_device("desk", home, None, lambda _: None, limits=replace(NO_LIMITS, gpu="4090"))


def test_a_failure_to_list_gpus_is_reported_and_the_device_stays(tmp_path, measured, monkeypatch):
    home = a_home(tmp_path)
    monkeypatch.setattr(measure, "list_gpus", lambda: "a trial was ended by SIGABRT")
    assert profile_device("desk", home, None, lambda _: None).gpu is None
    (left_out,) = unused_gpus(home, None)
    assert str(left_out).startswith(
        "GPUs stay unused: llama.cpp cannot list them: a trial was ended by SIGABRT; 'primad doctor'"
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> list[str]:
    """The steps measured so far, by fakes on an idle machine."""
    done: list[str] = []

    def cpu(folder: Path, pinned: int | None, advance: Any, effort: Effort, budget: Budget) -> Any:
        done.append(f"cpu {pinned}" if not effort.is_quick else "quick")
        assert 0 < budget.left_s < effort.seconds
        for step in ("threads", "layers", *effort.types):
            advance(step)
        return CPU

    monkeypatch.setattr(measure, "measure_cpu", cpu)
    monkeypatch.setattr(Others, "cores", lambda _: 0.0)
    monkeypatch.setattr(measure, "list_gpus", lambda: ())
    monkeypatch.setattr(measure, "ram_read_bytes_per_s", lambda threads: 3e10)
    monkeypatch.setattr(measure, "hold_window", lambda *_: None)
    monkeypatch.setattr(measure, "measure_disk", lambda folder, seconds, computing=None: (done.append("disk"), DISK)[1])
    return done


def a_home(tmp_path: Path, name: str = "home") -> Path:
    home = tmp_path / name
    home.mkdir()
    return home


def test_homes_of_one_machine_measure_it_once_and_their_disk_each(tmp_path, measured):
    one, two = a_home(tmp_path, "one"), a_home(tmp_path, "two")
    reported: list[str] = []
    first = profile_device("one", one, None, reported.append)
    assert len(reported) == Effort().steps
    second = profile_device("two", two, None, lambda _: None)
    assert measured == ["cpu None", "disk", "disk"]
    assert (first.device, second.device) == ("one", "two")
    assert first.cpu == second.cpu == CPU
    assert profile_device("one", one, None, reported.append) is not None
    assert len(reported) == Effort().steps
    assert len(measured) == 3


def test_pinned_threads_and_remeasure_cause_a_new_measurement(tmp_path, measured):
    home = a_home(tmp_path)
    profile_device("desk", home, None, lambda _: None)
    assert is_profiled(home, None, Effort())
    assert not is_profiled(home, 3, QUICK)
    profile_device("desk", home, 3, lambda _: None)
    profile_device("desk", home, 3, lambda _: None, again=True)
    assert measured == ["cpu None", "disk", "cpu 3", "cpu 3", "disk"]


def test_figures_measured_under_load_are_used_until_an_undisturbed_measurement(tmp_path, measured, monkeypatch):
    home = a_home(tmp_path)
    with monkeypatch.context() as busy:
        busy.setattr(Others, "cores", lambda _: CPU.cores)
        profile_device("desk", home, None, lambda _: None)
    assert is_disturbed(home, None)
    assert is_profiled(home, None, QUICK)
    assert not is_profiled(home, None, Effort())
    profile_device("desk", home, None, lambda _: None)
    assert measured == ["cpu None", "disk", "cpu None"]
    assert not is_disturbed(home, None)
    assert is_profiled(home, None, Effort())


def test_a_quick_measurement_serves_until_there_is_a_better_one(tmp_path, measured):
    home = a_home(tmp_path)
    profile_device("desk", home, None, lambda _: None, effort=QUICK)
    profile_device("desk", home, None, lambda _: None, effort=QUICK)
    assert measured == ["quick", "disk"]
    assert is_profiled(home, None, QUICK)
    assert not is_profiled(home, None, Effort())
    profile_device("desk", home, None, lambda _: None)
    profile_device("desk", home, None, lambda _: None, effort=QUICK)
    assert measured == ["quick", "disk", "cpu None", "disk"]
    assert is_profiled(home, None, Effort())


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "\x00\xff",
        lambda text: text.replace(f'"version": {VERSION}', '"version": 1'),
        lambda text: text.replace('"host": "', '"host": "x'),
        lambda text: text.replace("_per_s", "_per_minute"),
        lambda text: text.replace('_bytes_per_s": ', '_bytes_per_s": -'),
    ],
)
def test_a_damaged_record_is_ignored(tmp_path, own_cache, damage):
    home = a_home(tmp_path)
    write(machine_record(None), home_record(), home)
    assert read_machine(home, None) == machine_record(None)
    assert read_home(home) == home_record()
    for path in (machine_file(None), home_file(home)):
        path.write_text(damage(path.read_text()))
    assert read_machine(home, None) is None
    assert read_home(home) is None


def test_without_a_cache_folder_all_records_are_in_the_home(tmp_path, own_cache):
    own_cache.write_text("a file where the folder should be")
    home = a_home(tmp_path)
    write(machine_record(None), home_record(), home)
    assert read_machine(home, None) == machine_record(None)


def test_a_disk_that_is_full_is_one_clear_error_and_leaves_nothing(tmp_path, measured, monkeypatch):
    home = a_home(tmp_path)

    def full(folder: Path, *_: Any) -> None:
        (folder / "part").write_bytes(bytes(100))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(measure, "measure_disk", full)
    with pytest.raises(ConfigError, match=r"--home .*home: .*No space left on device; make room"):
        profile_device("desk", home, None, lambda _: None)
    assert not list(home.iterdir())


def test_a_home_that_is_not_there_is_one_clear_error(tmp_path, measured):
    with pytest.raises(ConfigError, match=r"--home .*none: "):
        profile_device("desk", tmp_path / "none", None, lambda _: None)


def test_leftovers_of_a_killed_measurement_are_removed(tmp_path, measured):
    home = a_home(tmp_path)
    (home / "profile-trial-abc").mkdir()
    (home / "profile-trial-abc" / "layer-0.gguf").write_bytes(bytes(100))
    profile_device("desk", home, None, lambda _: None)
    assert [path.name for path in home.iterdir()] == ["profile.json"]


def test_implausible_figures_are_not_saved(tmp_path, measured, monkeypatch):
    home = a_home(tmp_path)
    monkeypatch.setattr(measure, "ram_read_bytes_per_s", lambda threads: 3e13)
    with pytest.raises(ConfigError, match="primad profile --remeasure"):
        profile_device("desk", home, None, lambda _: None)
    assert not is_profiled(home, None, QUICK)
    assert measured == ["cpu None", "disk"] * 3


def test_contradictory_figures_of_a_busy_moment_are_measured_again(tmp_path, measured, monkeypatch):
    home = a_home(tmp_path)
    rates = iter([3e13, 3e10])
    monkeypatch.setattr(measure, "ram_read_bytes_per_s", lambda threads: next(rates))
    assert profile_device("desk", home, None, lambda _: None).ram_read_bytes_per_s == 3e10
    assert measured == ["cpu None", "disk"] * 2
    assert is_profiled(home, None, QUICK)


def test_the_memory_rate_is_at_least_that_of_the_weights(tmp_path, measured, monkeypatch):
    monkeypatch.setattr(measure, "ram_read_bytes_per_s", lambda threads: 1.0)
    profile = profile_device("desk", a_home(tmp_path), None, lambda _: None)
    assert profile.ram_read_bytes_per_s == max(speed.decode_bytes_per_s for speed in CPU.speeds)
    assert measured == ["cpu None", "disk"]


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_saves_what_it_prints_as_json(tmp_path, monkeypatch):
    home = a_home(tmp_path)
    seed(home)
    saved = tmp_path / "desk.json"
    options = ["profile", "--home", str(home), "--name", "desk", "--threads", "2"]
    shown = CliRunner().invoke(cli.app, [*options, "--save", str(saved)], catch_exceptions=False)
    assert shown.exit_code == 0
    (profile,) = load_profiles(saved)
    assert profile.device == "desk"
    assert profile.cpu == SEEDED_CPU
    printed = CliRunner().invoke(cli.app, [*options, "--json"], catch_exceptions=False)
    again = tmp_path / "again.json"
    again.write_text(printed.stdout)
    assert load_profiles(again)[0].cpu == SEEDED_CPU


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "effort", [QUICK, pytest.param(Effort(), marks=pytest.mark.matrix)], ids=["quickly", "with all effort"]
)
def test_this_device_is_measured_for_real(effort, tmp_path, own_cache, has_weights, monkeypatch):
    monkeypatch.setattr(profiles, "_ratio", lambda *_: None)  # other tests share the processor during some measurements
    home = a_home(tmp_path)
    reported: list[str] = []
    profile = profile_device("desk", home, None, reported.append, effort=effort)
    check_profile(profile)
    measured = [figures.type for figures in profile.cpu.speeds]
    assert measured == list(effort.types[: len(measured)])
    assert len(reported) == effort.steps - len(effort.types) + len(measured)
    assert [path.name for path in home.iterdir()] == ["profile.json"]
    again = profile_device("desk", home, None, lambda _: pytest.fail("measured twice"), effort=effort)
    assert again.cpu == profile.cpu
    assert speeds.MAIN in TYPES


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to a core")
def test_a_process_bound_to_one_core_does_not_use_the_figures_of_all():
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        " from primad.profiler.records import machine_file;"
        " from primad.system.processors import usable_cores, usable_cpus; print(usable_cores(), usable_cpus() <= 1);"
        " print(machine_file(None))"
    )
    reported = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert reported[0] == "1 True"
    assert (reported[1] == str(machine_file(None))) == (usable_cpus() <= 1)
