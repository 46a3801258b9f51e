"""``primad profile``, ``serve`` and ``join`` succeed whatever the GPU does."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from primad.profiler.effort import TYPES, Effort
from primad.profiler.processors import measure_gpu
from primad.profiler.store import load_profiles
from primad.settings.profiles import check_gpu
from tests.e2e.cluster import heading, joined, primad
from tests.e2e.streams import ask
from tests.gpu.drivers import FAULTS, broken_driver

NO_DRIVER = {"VK_ICD_FILENAMES": "/nowhere/driver.json", "VK_DRIVER_FILES": "/nowhere/driver.json"}
TOO_LITTLE_MEMORY = {"GGML_VK_FORCE_MAX_ALLOCATION_SIZE": "65536", "GGML_VK_FORCE_MAX_BUFFER_SIZE": "65536"}
BUSY = "wait until the machine is idle"
TRIES = 5
_Found = TypeVar("_Found")
LEFT_OUT_FIGURES = "it was measured, but gpu"
LEFT_OUT = r"stays? unused: .*'primad doctor' looks at it, 'primad profile --remeasure' tries again"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home without a profile."""
    (tmp_path / "desk").mkdir()
    return tmp_path / "desk"


def when_quiet(act: Callable[[], _Found]) -> _Found:
    """The result of ``act``, tried again while the machine is too busy for plausible figures."""
    for _ in range(TRIES - 1):
        try:
            return act()
        except AssertionError as exc:
            if BUSY not in str(exc):
                raise
    return act()


def profile(home: Path, tmp_path: Path, *arguments: object, **environment: str):
    """Run ``primad profile`` to its end; returns its output and the profile."""
    saved = tmp_path / "desk.json"
    options = ("profile", "--home", home, "--name", "desk", "--save", saved, *arguments)

    def measure() -> str:
        with primad(*options, XDG_CACHE_HOME=str(tmp_path / "cache"), **environment) as run:
            assert run.wait_end() == 0, run.output
            return run.output

    output = when_quiet(measure)
    (found,) = load_profiles(saved)
    return output, found


def test_the_device_is_measured_as_it_is(home, tmp_path, gpu):
    output, found = profile(home, tmp_path, "--quick")
    if found.gpu is None:  # a busy machine may measure implausible figures
        assert LEFT_OUT_FIGURES in output, output
        assert re.search(LEFT_OUT, output), output
    else:
        assert (found.gpu.id, found.gpu.name) == (gpu.id, gpu.name)
        assert "GPU decode" in output
    _, without = profile(home, tmp_path, "--quick", "--gpu", "off")
    assert without.gpu is None
    assert without.cpu == found.cpu, "measured once"


def test_prefill_offload_is_measured_or_left_out(tmp_path, gpu):
    found = measure_gpu(tmp_path, gpu, 1, Effort(seconds=20.0, types=TYPES[:1]))
    if isinstance(found, str):
        assert LEFT_OUT_FIGURES in found, found
    else:
        assert [each.type for each in found.prefill_offload] in (["Q4_K"], [])
        check_gpu(found)


def test_without_a_driver_there_is_no_gpu(home, tmp_path):
    output, found = profile(home, tmp_path, "--quick", **NO_DRIVER)
    assert found.gpu is None
    assert "none that the installed llama.cpp can use" in output


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_failing_driver_costs_no_device(home, tmp_path, fault, gpu):
    if gpu.backend != "Vulkan":
        pytest.skip(f"{gpu.backend} asks no Vulkan driver")
    output, found = profile(home, tmp_path, "--quick", **broken_driver(tmp_path, fault))
    assert found.gpu is None
    assert re.search(LEFT_OUT, output) or fault == "has no memory", output
    assert "Traceback" not in output


def test_a_gpu_without_memory_is_left_out(home, tmp_path, gpu):
    if gpu.backend != "Vulkan":
        pytest.skip(f"{gpu.backend} cannot be told to have no memory")
    output, found = profile(home, tmp_path, "--quick", **TOO_LITTLE_MEMORY)
    assert found.gpu is None
    assert re.search(LEFT_OUT, output), output


@pytest.mark.parametrize("fault", ["none", "no driver", "no room", *FAULTS])
def test_a_first_start_measures_and_serves(home, tmp_path, smollm2, cluster, fault, monkeypatch, gpu):
    """Neither worker nor head has a profile yet."""
    if fault in ("no room", *FAULTS) and gpu.backend != "Vulkan":
        pytest.skip(f"{gpu.backend} asks no Vulkan driver")
    named = {"none": {}, "no driver": NO_DRIVER, "no room": TOO_LITTLE_MEMORY}
    for name, value in (named[fault] if fault in named else broken_driver(tmp_path, fault)).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "lap").mkdir()
    options = ("--wait", 1, "--use-all", "--context", 512)

    def serve() -> None:
        with (
            joined(tmp_path / "lap", cluster, XDG_CACHE_HOME=str(tmp_path / "of-lap")) as worker,
            heading(smollm2, home, cluster, *options, XDG_CACHE_HOME=str(tmp_path / "of-desk")) as head,
        ):
            head.wait_serving()
            reported = ask(head, tokens=8)
            assert (reported.finish, reported.error) == ("length", None), head.run.output + worker.output
            assert len(head.status()["devices"]) == 2
            assert head.run.stop(signal.SIGINT) == 0, head.run.output
            assert worker.stop(signal.SIGINT) == 0, worker.output
            assert "Traceback" not in head.run.output + worker.output

    when_quiet(serve)
