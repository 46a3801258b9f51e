"""Measure speed and memory side by side in one run: systems take turns, results are medians and ratios.

    tools/bench NAME [--quick] [--rounds N] [--model FILE.gguf ...] [--json FILE] [--against FILE] ...
    tools/bench all [--quick] [--only NAME ...] [--folder FOLDER] [--keep] [--report]

Each bench is a file of ``tools/benches``, which says what it measures; ``tools/bench NAME --help`` shows its options.
``tools/lab/harness.py`` is shared by all of them; ``all`` is ``tools/lab/report.py``.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from primad.engine.binding import hear_llama  # noqa: E402
from primad.errors import PrimadError  # noqa: E402
from tools.benches import BENCHES  # noqa: E402
from tools.lab import report  # noqa: E402
from tools.lab.harness import add_bench, execute  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/bench", description="Speed and memory, measured side by side.")
    benches = parser.add_subparsers(dest="bench", required=True)
    for name, bench in BENCHES.items():
        add_bench(benches, name, bench)
    report.add_all(benches, BENCHES)
    options = parser.parse_args()
    if options.quick and options.bench in BENCHES:
        benches.choices[options.bench].set_defaults(**BENCHES[options.bench].quick)
        options = parser.parse_args()
    hear_llama()  # else llama_cpp's own logger prints what was loaded among the figures
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # files and processes of the run are cleaned up
    try:
        if options.bench == "all":
            return report.run_all(options, BENCHES)
        return execute(options.bench, BENCHES[options.bench], options)
    except PrimadError as exc:
        print(f"tools/bench {options.bench}: error: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
