"""``python -m tests.gpu.differences FOLDER [experts-on-cpu]``: how far logits with layers on the GPU differ from the CPU's.

With ``experts-on-cpu``, experts stay on the CPU. Each line of standard input names an architecture. The reply is a
line of JSON: the name, whether the GPU has flash attention for the model's heads, the differences of whole models in
llama.cpp, and those of windows by placement. It runs in a process of its own because a device may end it, and takes
several architectures because most of the time goes into compiling shaders.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path

import numpy as np

from halda.cost import lacks_flash
from primad.engine.devices import list_gpus
from primad.gguf.architectures.cuts import cut_multiple, tail_layers
from primad.gguf.architectures.layers import block_count, layer_count
from primad.gguf.header import Header, read_header
from primad.gguf.profile import model_profile
from tests.core.test_architectures import value
from tests.shell.test_cut_exact import Route, whole_logits
from tools import synth


def places(each: int, few: tuple[int, ...]) -> dict[str, tuple[tuple[int | None, ...], bool]]:
    """GPU layers of the first, middle and tail window of ``each`` layers, and whether the rest use prefill offload.

    ``few`` is the smallest number that llama.cpp can place there.
    """
    return {
        "the middle window alone": ((0, each, 0), False),
        "few layers of each window": (few, False),
        "the output alone": ((0, 0, None), False),
        "none, helped": ((0, 0, 0), True),
        "the tail, the others helped": ((0, 0, each), True),
        "all": ((each, each, each), False),
    }


def whole_places(each: int, few: int) -> list[tuple[int | None, bool]]:
    """The placements of a whole model."""
    return [(0, True), (each, True), (None, False), (few, False), (each, False), (each + 1, False), (3 * each, False)]


MIXTURE_PLACES = ("the middle window alone", "few layers of each window", "all")


def fewest(header: Header, first: int, last: int) -> int:
    """The smallest number of layers from ``first`` to ``last`` that llama.cpp can place on a GPU."""
    profile = model_profile(header)
    return next(few for few in range(1, last - first + 1) if profile.openable(range(first, last), few) == few)


def write_for_three_windows(path: Path, architecture: str) -> Header:
    """A model of three windows, as short as possible but of at least two layers."""
    synth.write_model(path, architecture=architecture)
    header = read_header(path)
    predicting = block_count(header) - layer_count(header)
    name = header.text("general.architecture")
    experts = header.values.get(f"{name}.expert_count")
    # All experts are used: with random weights the choice may depend on a last bit, which would void a comparison.
    values = {f"{name}.expert_used_count": experts} if experts is not None else {}
    # llama.cpp aborts unless it sums as many of the experts that a group shares as of the others.
    shared = f"{name}.experts_per_group"
    values |= {shared: value(1)} if shared in header.values else {}
    for each in count(2):
        synth.write_model(path, architecture=architecture, layers=3 * each + predicting, values=values)
        header = read_header(path)
        if each >= tail_layers(header) and each % cut_multiple(header) == 0:  # both depend on the number of layers
            break
    return header


def differences(architecture: str, folder: Path, backend: str, *, experts_on_cpu: bool) -> dict[str, object]:
    """Differences of whole models and of windows on a GPU of this ``backend``."""
    header = write_for_three_windows(folder / "model.gguf", architecture)
    each = layer_count(header) // 3
    cuts = [0, each, 2 * each, 3 * each]
    few = fewest(header, 0, 3 * each)
    chunks, expected = whole_logits(header)

    def differs(found: Sequence[np.ndarray]) -> float:
        return max(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True))

    whole = [
        differs(whole_logits(header, on_gpu, chunks, prefill_offload=prefill_offload, experts_on_cpu=experts_on_cpu)[1])
        for on_gpu, prefill_offload in (
            [(each, False), (3 * each, False)] if experts_on_cpu else whole_places(each, few)
        )
    ]
    of_windows = tuple(fewest(header, first, last) for first, last in pairwise(cuts))
    found = {}
    for number, (name, (on_gpu, prefill_offload)) in enumerate(places(each, of_windows).items()):
        if experts_on_cpu and name not in MIXTURE_PLACES:
            continue
        of_route = folder / str(number)
        of_route.mkdir()
        route = Route(
            header, cuts, of_route, on_gpu=on_gpu, prefill_offload=prefill_offload, experts_on_cpu=experts_on_cpu
        )
        position, logits = 0, []
        for tokens in chunks:
            logits.append(route.logits(tokens, position))
            position += len(tokens)
        route.release()
        found[name] = differs(logits)
    flash = not lacks_flash(backend, model_profile(header))
    return {"architecture": architecture, "flash": flash, "whole": whole, "windows": found}


def main(folder: Path, *, experts_on_cpu: bool) -> None:
    """Answer each line of standard input."""
    backend = next(list_gpus()).backend
    for line in sys.stdin:
        architecture = line.strip()
        own = folder / architecture
        own.mkdir()
        reported = differences(architecture, own, backend, experts_on_cpu=experts_on_cpu)
        shutil.rmtree(own)
        sys.stdout.write(json.dumps(reported) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), experts_on_cpu="experts-on-cpu" in sys.argv[2:])
