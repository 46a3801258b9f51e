"""Start a head and many workers concurrently on this machine, several times in a row, and check that every start
serves.

They run as an owner would start them, without network flags: they find each other by mDNS over every interface of this
machine, and any of its addresses may be the chosen one. Their number also makes the machine very busy. A start counts
when all devices serve, a question is answered, and no process printed a traceback. Exit code 1 when a start failed.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tools.lab.http_servers import head_here  # noqa: E402
from tools.lab.names import LabError  # noqa: E402
from tools.lab.plain_llama import prompt_of  # noqa: E402

MODEL = ROOT / ".models" / "smollm2-135m-q4_1.gguf"
LAST_LINES: Final = 12


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failed = 0
    with tempfile.TemporaryDirectory(prefix="primad-starts-") as folder:
        for number in range(1, options.times + 1):
            place = Path(folder) / str(number)
            began = time.monotonic()
            trouble = _start(options, place)
            took_s = time.monotonic() - began
            print(f"start {number}: {trouble or 'serves'} ({took_s:.0f} s)", flush=True)
            if trouble:
                failed += 1
                _show(place)
            shutil.rmtree(place)
    print(f"{options.times - failed} of {options.times} starts of {options.devices} devices served")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/starts",
        description="Start a head and many workers concurrently on this machine, several times.",
        epilog="examples: tools/starts    tools/starts --devices 5 --times 20    tools/starts --host 127.0.0.1",
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="a GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--devices", type=int, default=8, help="head and workers together (default: 8)")
    parser.add_argument("--times", type=int, default=10, help="how many starts in a row (default: 10)")
    parser.add_argument("--host", help="the address that all listen on (default: every one, as without flags)")
    options = parser.parse_args()
    if not 2 <= options.devices <= 16:
        parser.error("--devices: from 2 to 16")
    return options


def _start(options: argparse.Namespace, place: Path) -> str:
    """Start once; return what went wrong, in a few words, or an empty text."""
    workers = [f"w{number}" for number in range(1, options.devices)]
    try:
        with head_here(options.model, place, workers, head=["--use-all"], host=options.host) as server:
            serving = sum(device["layers"] > 0 for device in server.status()["devices"])
            if serving != options.devices:
                return f"it serves with {serving} devices"
            server.stream(prompt_of(8), 4)
    except LabError as exc:
        return str(exc)
    traced = [log.stem for log in _logs(place) if "Traceback" in log.read_text(encoding="utf-8", errors="replace")]
    return f"a traceback was printed by {', '.join(traced)}" if traced else ""


def _logs(place: Path) -> list[Path]:
    """The logs of all devices, the head's first."""
    return sorted(place.glob("*.log"))


def _show(place: Path) -> None:
    """Print the last lines of every device's log."""
    for log in _logs(place):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join((f"  {log.stem}:", *(f"    {line}" for line in lines[-LAST_LINES:]))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
