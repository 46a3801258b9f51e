"""A ring serves with a worker whose GPU holds some layers and computes prefill for the others."""

from __future__ import annotations

import pytest

from halda import OffloadSpeed
from tests.e2e.streams import STORY, ask
from tests.gpu.rings import measured, ring_of_two

WORKER_THREADS = 4
OFFLOADED = tuple(
    OffloadSpeed(type=kind, few_bytes_per_s=2e10, prefill_flop_per_s=2e13) for kind in ("Q8_0", "Q4_K", "F16")
)


@pytest.mark.parametrize("batching", ["auto", "exact"])
def test_a_ring_with_prefill_offload_serves(smollm2, new_home, cluster, gpu, batching):
    homes = new_home("head"), new_home("lap")
    with (
        measured(gpu, homes[1], WORKER_THREADS, OFFLOADED),
        ring_of_two(
            smollm2,
            homes,
            cluster,
            WORKER_THREADS,
            *("--batching", batching, "--objective", "ttft"),
            of_worker=("--max-vram", "300MiB"),
        ) as (head, worker),
    ):
        head.run.wait_for(r"lap: \d+ layers? \(")  # it serves shortly before it prints the layers
        assert ("prefill offload to the GPU" in head.run.output) == (batching == "auto"), head.run.output
        reported = ask(head, prompt=STORY * 12, tokens=20)
        assert (reported.finish, reported.error) == ("length", None), head.run.output + worker.output
        assert reported.text
