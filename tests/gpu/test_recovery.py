"""A request that began with layers on a GPU resumes on CPUs alone, or where the GPU has no room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest

from tests.e2e.cluster import Head, Primad, ring_process, wait_until
from tests.e2e.streams import ask
from tests.gpu.rings import gpu_layers, measured, ring_of_two

WORKER_THREADS = 3
TOO_LITTLE_MEMORY = {"GGML_VK_FORCE_MAX_ALLOCATION_SIZE": "65536", "GGML_VK_FORCE_MAX_BUFFER_SIZE": "65536"}


@pytest.fixture
def ring_with(smollm2, new_home, cluster, gpu) -> Iterator[partial[AbstractContextManager[tuple[Head, Primad]]]]:
    """Starts a ring; the keyword arguments are the worker's environment variables."""
    home = new_home("lap")
    with measured(gpu, home, WORKER_THREADS):
        yield partial(ring_of_two, smollm2, (new_home("head"), home), cluster, WORKER_THREADS)


@pytest.fixture
def ring(ring_with) -> Iterator[tuple[Head, Primad]]:
    with ring_with() as found:
        yield found


def test_a_worker_with_gpu_layers_is_killed(ring):
    head, worker = ring
    assert gpu_layers(head) > 0, head.run.output
    reported = ask(head, worker.kill)
    assert (reported.finish, reported.error) == ("length", None), head.run.output
    assert reported.text
    assert gpu_layers(head) == 0
    again = ask(head)
    assert (again.finish, again.error) == ("length", None)


def test_a_ring_process_with_gpu_layers_is_killed(ring):
    head, worker = ring
    assert gpu_layers(head) > 0, head.run.output
    reported = ask(head, ring_process(worker).kill)
    assert (reported.finish, reported.error) == ("length", None), head.run.output
    wait_until(lambda: gpu_layers(head) > 0, "the GPU is not to blame for a process that was killed")


def test_a_gpu_without_room_serves_with_what_fits(ring_with, gpu):
    if gpu.backend != "Vulkan":
        pytest.skip(f"{gpu.backend} cannot be told to have no memory")
    with ring_with(**TOO_LITTLE_MEMORY) as (head, worker):
        reported = ask(head)
        assert (reported.finish, reported.error) == ("length", None), head.run.output
        worker.wait_for("the GPU has too little memory left: none of .* planned layers are on it")
        assert "Traceback" not in worker.output + head.run.output


_ALLOCATE = """
from primad.engine import devices

asked = devices.own_memory_of

def own_memory_of(wanted):
    found = asked(wanted)
    assert found is not None
    return (lambda: 0 if os.path.exists(FILE) else found[0]()), found[1]

devices.own_memory_of = own_memory_of
"""


def test_layers_leave_the_gpu_when_other_programs_take_its_memory(ring_with, tmp_path):
    """No program really fills this device's memory: the ring process reads made-up values."""
    marker = tmp_path / "taken"
    (tmp_path / "sitecustomize.py").write_text(f"import os\nFILE = {str(marker)!r}\n{_ALLOCATE}")
    folders = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    with ring_with(PYTHONPATH=folders) as (head, worker):
        before = gpu_layers(head)
        assert before > 0, head.run.output

        def take() -> None:
            marker.touch()
            worker.wait_for("other programs need memory of the GPU")

        reported = ask(head, take)
        assert (reported.finish, reported.error) == ("length", None), head.run.output
        assert reported.text
        wait_until(lambda: gpu_layers(head) < before, "the next ring has fewer layers there")
        assert "Traceback" not in worker.output + head.run.output
