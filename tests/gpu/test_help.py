"""A ring serves with a worker whose GPU holds some of its layers and helps with the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from halda import HelpedSpeed
from primad.engine.devices import GpuDevice
from primad.profiler.records import write
from tests.e2e.cluster import all_joined, heading
from tests.e2e.streams import STORY, ask
from tests.fakes.profile import GPU, home_record, machine_record

WORKER_THREADS = 4
"""Figures are kept by pinned threads: the worker's have a GPU in them, the head's have none."""
HELPED = tuple(
    HelpedSpeed(type=kind, few_bytes_per_s=2e10, prefill_flop_per_s=2e13) for kind in ("Q8_0", "Q4_K", "F16")
)


@pytest.fixture
def helped(gpu: GpuDevice, new_home) -> Iterator[Path]:
    """A home whose device counts as measured with a fast GPU that helps, whatever this one is."""
    home = new_home("lap")
    record = machine_record(WORKER_THREADS)
    fast = replace(GPU, id=gpu.id, name=gpu.name, backend=gpu.backend, helped=HELPED)
    write(msgspec.structs.replace(record, gpus=(fast,)), home_record(), home)
    yield home
    write(record, home_record(), home)


@pytest.mark.parametrize("batching", ["auto", "exact"])
def test_a_ring_that_is_helped_serves(smollm2, new_home, helped, cluster, batching):
    limit = ("--threads", WORKER_THREADS, "--max-vram", "300MiB")
    arguments = ("--wait", 1, "--use-all", "--context", 512, "--batching", batching)
    with (
        all_joined([helped], cluster, *limit) as (worker,),
        heading(smollm2, new_home("head"), cluster, *arguments, config="") as head,
    ):
        head.wait_serving()
        assert ("prompts with the help of the GPU" in head.run.output) == (batching == "auto"), head.run.output
        told = ask(head, prompt=STORY * 12, tokens=20)
        assert (told.finish, told.error) == ("length", None), head.run.output + worker.output
        assert told.text
