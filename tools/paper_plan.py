"""Halda as published beside our solver, for any built-in model and fleet, both under our evaluator.

.venv/bin/python tools/paper_plan.py llama3-70b-q4k mixed-home
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from primad.gguf.shapes import shape
from primad.planning.question import Wishes, ask
from primad.planning.run_config import RunConfig
from primad.profiler.fleets import read_fleet
from tools.lab.paper_plan import compare


def main() -> int:
    """Print both."""
    parser = argparse.ArgumentParser(description="Halda as published beside our solver.")
    parser.add_argument("model_shape", help="a built-in model, as in llama3-70b-q4k")
    parser.add_argument("fleet", help="a built-in fleet, or a fleet's file")
    parser.add_argument("--context", type=int, default=4096)
    options = parser.parse_args()
    fleet = read_fleet(options.fleet)
    run = RunConfig(objective="latency", context_tokens=options.context, sequences=1)
    print(*compare(ask(Wishes(run=run), fleet.devices, fleet.links, shape(options.model_shape))), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
