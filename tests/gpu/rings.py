"""Rings whose worker has a made-up profile with a fast GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from halda import OffloadSpeed
from primad.engine.devices import GpuDevice
from primad.profiler.records import write
from tests.e2e.cluster import Head, Primad, all_joined, heading
from tests.fakes.profile import GPU, home_record, machine_record


@contextmanager
def measured(
    gpu: GpuDevice,
    home: Path,
    threads: int,
    prefill_offload: tuple[OffloadSpeed, ...] = (),
    others: Sequence[str] = (),
) -> Iterator[None]:
    """Give the device of ``home`` a profile with a fast GPU, whatever the real one is, and the same for ``others``.

    Profiles depend on pinned threads: only the one for ``threads`` has a GPU.
    """
    record = machine_record(threads)
    fast = replace(GPU, id=gpu.id, name=gpu.name, backend=gpu.backend, prefill_offload=prefill_offload)
    gpus = (fast, *(replace(fast, id=other) for other in others))
    write(msgspec.structs.replace(record, gpus=gpus), home_record(), home)
    yield
    write(record, home_record(), home)


def gpu_layers(head: Head) -> int:
    """The number of layers on a GPU in the serving plan."""
    return sum(device.get("gpu_layers", 0) for device in head.status().get("devices", ()))


@contextmanager
def ring_of_two(
    model: Path,
    homes: tuple[Path, Path],
    cluster: str,
    threads: int,
    *arguments: object,
    of_worker: Sequence[object] = (),
    **variables: str,
) -> Iterator[tuple[Head, Primad]]:
    """A head in ``homes[0]`` that serves with a worker in ``homes[1]``, which has ``threads`` and ``variables``."""
    with ExitStack() as stack:
        (worker,) = stack.enter_context(all_joined([homes[1]], cluster, "--threads", threads, *of_worker, **variables))
        options = ("--wait", 1, "--use-all", "--context", 512, *arguments)
        head = stack.enter_context(heading(model, homes[0], cluster, *options, config=""))
        head.wait_serving()
        yield head, worker
