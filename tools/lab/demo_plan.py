"""The demo's options of ``primad serve``, and its suggestions of what to try next."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from primad.gguf.architectures.cuts import cut_points
from primad.gguf.architectures.layers import layer_count
from primad.gguf.model import open_model
from tools.lab.local_ring import even_windows

NEXT = """
What to try next:

  .venv/bin/primad fit                    which models this machine can run, how fast, and what to type for them
  .venv/bin/primad plan --model-shape llama3-70b-q4k --fleet mixed-home
                                          a plan that is solved for: four machines of a home and a model of 70B
  ./tools/demo --keep                     the same as now, and the endpoint stays up
  ./packaging/install.sh                  installs primad; README.md has the five commands of a first cluster
  docs/first-models.md                    which model first
"""


def plan_options(model: Path, devices: int) -> list[str]:
    """Return options that split the layers equally if the model can be cut that way; otherwise all devices take
    part."""
    if devices == 1:
        return []
    header = open_model(model, header_only=True)
    windows = even_windows(layer_count(header), devices) or []
    is_cut = min(windows) > 0 and set(accumulate(windows)) <= set(cut_points(header))
    by_hand = ["--windows", ",".join(map(str, windows)), "--rounds", "1"]
    return by_hand if is_cut else ["--use-all"]
