"""``python -m tests.gpu.halves FOLDER ARCHITECTURE...``: windows on one GPU and split over two, and their memory on
each.

Standard output has a line of JSON for each architecture: digests of the logits by placement, and bytes by GPU, both
allocated (by ggml's log) and planned. It runs in a process of its own because the environment may show one device as
two.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from halda import Plan, Window, Workload, evaluate, instance
from halda.cost import GPU_RUNTIME_BYTES
from primad.engine.binding import hear_llama
from primad.engine.devices import list_gpus
from primad.engine.protocol import EngineOptions
from primad.gguf.header import Header, read_header
from primad.gguf.profile import model_profile
from tests.fakes.profile import GPU, PROFILE
from tests.shell.test_cut_exact import OPTIONS, Route, whole_logits
from tools import synth

CONTEXT = 1024
CUTS = (0, 4, 8, 12)
SPLITS: dict[str, tuple[int, ...]] = {"one": (), "both": (2, 1, 3), "the other": (4, 4, 4)}
_BUFFER = re.compile(r": +(\S+) (?:model|KV|compute|RS|LoRA) buffer size = +([0-9.]+) MiB")


class AllocationLog(logging.Handler):
    """Adds up the memory that llama.cpp logs for each GPU."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.bytes: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        match = _BUFFER.search(record.getMessage())
        if match is not None:
            self.bytes[match[1]] = self.bytes.get(match[1], 0.0) + float(match[2]) * (1 << 20)


def planned(header: Header, options: EngineOptions, others: Sequence[int]) -> dict[str, int]:
    """The planned bytes by GPU, with the windows on two devices and without the backend's own overhead."""
    names = ("desk", "lap", "desk")
    gpus = [replace(GPU, id=name) for name in (options.gpu, *options.other_gpus)]
    devices = [replace(PROFILE, device=name, host=name).with_gpus(gpus) for name in ("desk", "lap")]
    split = [(count,) for count in others] or [()] * len(names)
    route = tuple(
        Window(device=name, first=first, last=last, gpu_layers=last - first, other_gpus=each)
        for name, first, last, each in zip(names, CUTS[:-1], CUTS[1:], split, strict=True)
    )
    plan = Plan(rounds=1, route=route, output_on_gpu=True, streaming=(), left_out=())
    work = Workload(
        context_tokens=CONTEXT,
        kv_type="f16",
        sequences=1,
        prompt_tokens=options.rows,
        answer_tokens=8,
        chunk_rows=options.rows,
    )
    found: dict[str, int] = {}
    for device in evaluate(plan, instance(devices, [], model_profile(header), work, {})).devices:
        for gpu in device.each_gpu:
            found[gpu.id] = found.get(gpu.id, 0) + gpu.vram_bytes - GPU_RUNTIME_BYTES * (gpu.vram_bytes > 0)
    return found


def halves(architecture: str, folder: Path, gpus: Sequence[str]) -> dict[str, object]:
    """The digests and bytes of one architecture."""
    path = folder / "model.gguf"
    synth.write_model(path, architecture=architecture, layers=CUTS[-1], width=512)
    header = read_header(path)
    options = msgspec.structs.replace(OPTIONS, context=CONTEXT, sequences=1, gpu=gpus[0], other_gpus=tuple(gpus[1:2]))
    chunks, _ = whole_logits(header)
    found: dict[str, object] = {"architecture": architecture}
    for name, others in SPLITS.items():
        own, allocations = folder / name, AllocationLog()
        own.mkdir()
        logging.getLogger("primad.engine.binding").addHandler(allocations)
        route, position, logits = Route(header, CUTS, own, options, (4, 4, 4), others=others), 0, []
        for tokens in chunks:
            logits.append(route.logits(tokens, position))
            position += len(tokens)
        route.release()
        logging.getLogger("primad.engine.binding").removeHandler(allocations)
        digest = hashlib.blake2b(np.concatenate(logits).tobytes()).hexdigest()
        found[name] = {
            "logits": digest,
            "taken": {gpu: allocations.bytes.get(gpu, 0.0) for gpu in gpus[:2]},
            "planned": planned(header, options, others),
        }
    return found


def main(folder: Path, architectures: Sequence[str]) -> None:
    """Write a line for each architecture."""
    gpus = [gpu.id for gpu in list_gpus()]
    hear_llama()
    logging.getLogger("primad.engine.binding").setLevel(logging.DEBUG)
    for architecture in architectures:
        own = folder / architecture
        own.mkdir()
        sys.stdout.write(json.dumps(halves(architecture, own, gpus)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
