"""An answer that began with layers on a GPU goes on where only processors are left, and where the GPU has no room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from primad.engine.devices import GpuDevice
from primad.profiler.records import write
from tests.e2e.cluster import Head, all_joined, heading, ring_process, wait_until
from tests.e2e.streams import ask
from tests.fakes.profile import GPU, home_record, machine_record

WORKER_THREADS = 3
"""Figures are kept by pinned threads: the worker's have a GPU in them, the head's have none."""


@pytest.fixture
def with_gpu(gpu: GpuDevice, new_home) -> Iterator[Path]:
    """A home whose device counts as measured with a fast GPU, whatever this one is."""
    home = new_home("lap")
    record = machine_record(WORKER_THREADS)
    fast = replace(GPU, id=gpu.id, name=gpu.name, backend=gpu.backend)
    write(msgspec.structs.replace(record, gpus=(fast,)), home_record(), home)
    yield home
    write(record, home_record(), home)


def gpu_layers(head: Head) -> int:
    """How many layers are on a GPU, by the plan that serves."""
    return sum(device.get("gpu_layers", 0) for device in head.status().get("devices", ()))


@pytest.fixture
def ring(smollm2, new_home, with_gpu, cluster) -> Iterator[tuple[Head, list]]:
    with ExitStack() as stack:
        workers = stack.enter_context(all_joined([with_gpu], cluster, "--threads", WORKER_THREADS))
        arguments = ("--wait", 1, "--use-all", "--context", 512)
        head = stack.enter_context(heading(smollm2, new_home("head"), cluster, *arguments, config=""))
        head.wait_serving()
        yield head, workers


def test_a_worker_with_gpu_layers_is_killed(ring):
    head, (worker,) = ring
    assert gpu_layers(head) > 0, head.run.output
    told = ask(head, worker.kill)
    assert (told.finish, told.error) == ("length", None), head.run.output
    assert told.text
    assert gpu_layers(head) == 0
    again = ask(head)
    assert (again.finish, again.error) == ("length", None)


def test_a_ring_process_with_gpu_layers_is_killed(ring):
    head, (worker,) = ring
    assert gpu_layers(head) > 0, head.run.output
    told = ask(head, ring_process(worker).kill)
    assert (told.finish, told.error) == ("length", None), head.run.output
    wait_until(lambda: gpu_layers(head) > 0, "the GPU is not to blame for a process that was killed")


def test_a_gpu_without_room_serves_with_what_fits(smollm2, new_home, with_gpu, cluster, gpu):
    if gpu.backend != "Vulkan":
        pytest.skip(f"{gpu.backend} cannot be told to have no memory")
    no_room = {"GGML_VK_FORCE_MAX_ALLOCATION_SIZE": "65536", "GGML_VK_FORCE_MAX_BUFFER_SIZE": "65536"}
    with ExitStack() as stack:
        (worker,) = stack.enter_context(all_joined([with_gpu], cluster, "--threads", WORKER_THREADS, **no_room))
        arguments = ("--wait", 1, "--use-all", "--context", 512)
        head = stack.enter_context(heading(smollm2, new_home("head"), cluster, *arguments, config=""))
        head.wait_serving()
        told = ask(head)
        assert (told.finish, told.error) == ("length", None), head.run.output
        worker.wait_for("the GPU has too little memory left: none of .* planned layers are on it")
        assert "Traceback" not in worker.output + head.run.output


_TAKEN = """
from primad.engine import devices

asked = devices.own_memory_of

def own_memory_of(wanted):
    found = asked(wanted)
    assert found is not None
    return (lambda: 0 if os.path.exists(FILE) else found[0]()), found[1]

devices.own_memory_of = own_memory_of
"""


def test_layers_leave_the_gpu_when_other_programs_take_its_memory(smollm2, new_home, with_gpu, cluster, tmp_path):
    """No program takes all of this device's memory: what a ring process reads of it says that one has."""
    taken = tmp_path / "taken"
    (tmp_path / "sitecustomize.py").write_text(f"import os\nFILE = {str(taken)!r}\n{_TAKEN}")
    with ExitStack() as stack:
        others = {"PYTHONPATH": str(tmp_path)}
        (worker,) = stack.enter_context(all_joined([with_gpu], cluster, "--threads", WORKER_THREADS, **others))
        arguments = ("--wait", 1, "--use-all", "--context", 512)
        head = stack.enter_context(heading(smollm2, new_home("head"), cluster, *arguments, config=""))
        head.wait_serving()
        before = gpu_layers(head)
        assert before > 0, head.run.output

        def take() -> None:
            taken.touch()
            worker.wait_for("other programs need memory of the GPU")

        told = ask(head, take)
        assert (told.finish, told.error) == ("length", None), head.run.output
        assert told.text
        wait_until(lambda: gpu_layers(head) < before, "the next ring has fewer layers there")
        assert "Traceback" not in worker.output + head.run.output
