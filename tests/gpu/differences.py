"""``python -m tests.gpu.differences FOLDER [apart] ARCHITECTURE...``: how far layers on the GPU take logits from the CPU's.

``apart``: their experts are on the CPU. A line of JSON for each architecture: its name, the differences of whole models, as
llama.cpp computes them there, and those of windows by where their layers are. A process of its own, since a device may end
it; one for several architectures, since most of the time is that of compiling what a GPU runs.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from primad.gguf.architectures import block_count, cut_multiple, layer_count
from primad.gguf.header import read_header
from tests.shell.test_cut_exact import Route, whole_logits
from tools import synth


def places(each: int) -> dict[str, tuple[tuple[int | None, ...], bool]]:
    """Of a first window, a middle one and a tail of ``each`` layers how many are there, and whether others are helped."""
    return {
        "the middle window alone": ((0, each, 0), False),
        "one layer of each window": ((1, 1, 1), False),
        "the output alone": ((0, 0, None), False),
        "none, helped": ((0, 0, 0), True),
        "the tail, the others helped": ((0, 0, each), True),
        "all": ((each, each, each), False),
    }


def whole_places(each: int) -> list[tuple[int | None, bool]]:
    """Those of a whole model."""
    return [(0, True), (each, True), (None, False), (1, False), (each, False), (each + 1, False), (3 * each, False)]


APART = ("the middle window alone", "one layer of each window", "all")


def differences(architecture: str, folder: Path, *, apart: bool) -> tuple[list[float], dict[str, float]]:
    """Of whole models and of windows."""
    path = folder / "model.gguf"
    synth.write_model(path, architecture=architecture)
    header = read_header(path)
    each = max(2, cut_multiple(header))
    predicting = block_count(header) - layer_count(header)
    name = header.text("general.architecture")
    experts = header.values.get(f"{name}.expert_count")
    # All are used: which are picked of random ones may hang on a last bit, and then a difference says nothing.
    values = {f"{name}.expert_used_count": experts} if experts is not None else {}
    synth.write_model(path, architecture=architecture, layers=3 * each + predicting, values=values)
    header = read_header(path)
    chunks, expected = whole_logits(header)

    def differs(found: Sequence[np.ndarray]) -> float:
        return max(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True))

    whole = [
        differs(whole_logits(header, on_gpu, chunks, helped=helped, apart=apart)[1])
        for on_gpu, helped in ([(each, False), (3 * each, False)] if apart else whole_places(each))
    ]
    found = {}
    for number, (name, (on_gpu, helped)) in enumerate(places(each).items()):
        if apart and name not in APART:
            continue
        of_route = folder / str(number)
        of_route.mkdir()
        route = Route(header, [0, each, 2 * each, 3 * each], of_route, on_gpu=on_gpu, helped=helped, apart=apart)
        position, logits = 0, []
        for tokens in chunks:
            logits.append(route.logits(tokens, position))
            position += len(tokens)
        route.release()
        found[name] = differs(logits)
    return whole, found


def main(folder: Path, architectures: Sequence[str], *, apart: bool) -> None:
    """Compute and tell."""
    for architecture in architectures:
        own = folder / architecture
        own.mkdir()
        whole, windows = differences(architecture, own, apart=apart)
        shutil.rmtree(own)
        sys.stdout.write(json.dumps({"architecture": architecture, "whole": whole, "windows": windows}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [each for each in sys.argv[2:] if each != "apart"], apart="apart" in sys.argv[2:])
