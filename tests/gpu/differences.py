"""``python -m tests.gpu.differences ARCHITECTURE FOLDER [apart]``: how far logits with layers on the GPU are from the CPU's.

``apart``: their experts are on the CPU. Two lines of JSON: of whole models, as llama.cpp computes them there, and of windows
by where their layers are. A process of its own, since a device may end it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from primad.gguf.architectures import cut_multiple
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


def main(architecture: str, folder: Path, *, apart: bool) -> None:
    """Compute and tell."""
    path = folder / "model.gguf"
    synth.write_model(path, architecture=architecture)
    each = max(2, cut_multiple(read_header(path)))
    synth.write_model(path, architecture=architecture, layers=3 * each)
    header = read_header(path)
    chunks, expected = whole_logits(header)

    def differs(found: Sequence[np.ndarray]) -> float:
        return max(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True))

    whole = [
        differs(whole_logits(header, on_gpu, chunks, helped=helped, apart=apart)[1])
        for on_gpu, helped in ([(each, False), (3 * each, False)] if apart else whole_places(each))
    ]
    sys.stdout.write(json.dumps(whole) + "\n")
    sys.stdout.flush()
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
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), apart="apart" in sys.argv[3:])
