"""Windows with layers on the GPU compute what llama.cpp computes there; windows without, what a build without GPU does.

Every kind of architecture in the table is tried; ``differences.py`` lists the placements.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from primad.system.children.spawn import environment, how_it_ended
from tests.shell.test_cut_exact import EVERY_KIND, HYBRIDS
from tools import synth

ROOT = Path(__file__).parent.parent.parent
PLAIN = ROOT / ".venv" / "bin" / "python"
MIN_BOUND = 1e-3
"""A smaller difference, with logits of about 10, comes from another order of summation."""
SLACK = 1.1
"""llama.cpp cannot place every set of layers that windows can, so the largest of its few differences varies."""
LITE = "deepseek2-lite"
"""llama.cpp recognises it by its 27 layers, which a tiny model cannot have; its attention is that of ``deepseek2``."""
MIXTURES = [name for name in EVERY_KIND if synth.has_experts(name) and name != LITE]
OTHERS = [name for name in EVERY_KIND if not synth.has_experts(name) and name != "gemma4-per-layer"]
"""After the first window, no window of gemma4-per-layer can have all layers on a GPU."""


class Child:
    """A process of ``tests.gpu.differences``, restarted after a device ended it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder, self._options = folder, options
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0

    def of(self, architecture: str) -> dict[str, Any] | str:
        """The differences of ``architecture``, or how the process ended."""
        if self._process is None:
            self._number += 1
            folder = self._folder / str(self._number)
            folder.mkdir()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.differences", str(folder), *self._options],
                env=environment(os.environ, 1, 0, gpu=True),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{architecture}\n".encode())
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if line.endswith(b"\n"):
            reported: dict[str, Any] = json.loads(line)
            assert reported.pop("architecture") == architecture
            return reported
        ended, self._process = self._process, None
        with ended:
            return how_it_ended(ended.wait())

    def close(self) -> None:
        """End the process if it is still there."""
        if self._process is not None:
            with self._process as process:
                process.kill()


def _child(tmp_path_factory: pytest.TempPathFactory, *options: str) -> Iterator[Child]:
    """A process shared by all tests that use this fixture."""
    found = Child(tmp_path_factory.mktemp("differences"), *options)
    yield found
    found.close()


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    yield from _child(tmp_path_factory)


@pytest.fixture(scope="module")
def child_of_mixtures(tmp_path_factory):
    yield from _child(tmp_path_factory)


@pytest.fixture(scope="module")
def child_of_mixtures_of_experts(tmp_path_factory):
    yield from _child(tmp_path_factory, "experts-on-cpu")


def check(architecture: str, reported: dict[str, Any] | str) -> None:
    """All layers on the GPU, or on prefill offload, match the whole model bit for bit; some layers differ no more than
    the whole model does with some or all of its own.

    Two exceptions: For an offloaded recurrent layer, llama.cpp computes nodes without weights where the neighbours are
    computed, and a window's border changes the neighbours. If the GPU has no flash attention for the heads, a whole
    model with some layers there turns it off for all of them, a window only for its own.
    """
    assert not isinstance(reported, str), f"it {reported}"
    whole, windows = reported["whole"], reported["windows"]
    assert windows["all"] == whole[-1]
    if architecture not in HYBRIDS:
        assert windows["none, helped"] == whole[0]
        assert windows["the tail, the others helped"] == whole[1] or not reported["flash"]
    assert min(whole[:2]) > 0, "prompts are computed there"
    within(whole, windows)


def within(whole: list[float], windows: dict[str, float]) -> None:
    bound = max(MIN_BOUND, SLACK * max(whole))
    assert max(windows.values()) <= bound, f"whole models differ by {whole}, windows by {windows}"


@pytest.mark.parametrize("architecture", OTHERS)
def test_windows_differ_from_the_cpu_as_whole_models_do(architecture, child):
    check(architecture, child.of(architecture))


@pytest.mark.parametrize("architecture", MIXTURES)
def test_windows_of_mixtures_differ_as_whole_models_do(architecture, child_of_mixtures):
    check(architecture, child_of_mixtures.of(architecture))


@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_on_the_cpu_leave_the_rest_on_the_gpu(architecture, child_of_mixtures_of_experts):
    """They match a whole model of llama.cpp with the same experts on the CPU, bit for bit."""
    reported = child_of_mixtures_of_experts.of(architecture)
    assert not isinstance(reported, str), f"it {reported}"
    whole, windows = reported["whole"], reported["windows"]
    assert windows["all"] == whole[1]
    assert min(*whole, *windows.values()) > 0, "attention is computed there"
    within(whole, windows)


def test_without_gpu_layers_logits_equal_those_of_a_build_without_gpu(tmp_path):
    """This includes prompts of more than 32 tokens, which llama.cpp by default computes on the GPU."""
    models = {name: tmp_path / f"{name}.gguf" for name in EVERY_KIND if name != LITE}
    for name, model in models.items():
        synth.write_model(model, architecture=name)

    def digests(python: str, *, gpu: bool) -> dict[str, str]:
        """The digests of a child of ``python`` without layers on a GPU, whether or not it sees one."""
        child = subprocess.run(
            [python, "-m", "tests.gpu.plain", *map(str, models.values())],
            env=environment(os.environ, 1, 0, gpu=gpu),
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
        )
        return dict(zip(models, child.stdout.decode().split(), strict=True))

    seen = digests(sys.executable, gpu=True)
    assert seen == digests(sys.executable, gpu=False)
    if PLAIN.exists() and PLAIN.parent.parent != Path(sys.prefix):
        assert seen == digests(str(PLAIN), gpu=False)
