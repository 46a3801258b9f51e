"""Start a head and many workers at once on this machine, several times in a row: does every start come to serve?

They run as an owner would start them, with no flag about the network: they find each other by mDNS over every interface
of this machine, and any of its addresses may be the chosen one. So many at once also make it a very busy machine. A start
counts when all devices serve, a question is answered, and nobody printed a traceback. Exit code 1 when one did not.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tools.lab.daemons import PRIMAD, daemon  # noqa: E402
from tools.lab.ports import free_port  # noqa: E402

MODEL = ROOT / ".models" / "smollm2-135m-q4_1.gguf"
START_S: Final = 600.0
LAST_LINES: Final = 12


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failed = 0
    with tempfile.TemporaryDirectory(prefix="primad-starts-") as folder:
        profile = _measured(Path(folder))
        for number in range(1, options.times + 1):
            place = Path(folder) / str(number)
            began = time.monotonic()
            trouble = _start(options, place, profile)
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
        description="Start a head and many workers at once on this machine, again and again.",
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


def _measured(folder: Path) -> Path:
    """The figures of this machine's disk, measured once for all homes; those of its processor are kept for the user."""
    home = folder / "measured"
    subprocess.run([str(PRIMAD), "profile", "--home", str(home)], check=True, stdout=subprocess.DEVNULL)
    return home / "profile.json"


def _start(options: argparse.Namespace, place: Path, profile: Path) -> str:
    """What went wrong with one start, in a few words; empty when nothing did."""
    cluster = ("--cluster", f"starts-{secrets.token_hex(4)}")  # so that devices in real use stay out of it
    everywhere = ("--host", options.host) if options.host else ()
    workers = [f"w{number}" for number in range(1, options.devices)]
    with ExitStack() as stack:
        for name in workers:
            stack.enter_context(_device(place, profile, name, "join", *cluster, *everywhere, "--port", "0"))
        port = free_port()
        model = ("--model", str(options.model), "--port", str(port))
        wait = ("--wait", str(len(workers)), "--wait-timeout", str(int(START_S)), "--use-all")
        head = stack.enter_context(_device(place, profile, "head", "serve", *cluster, *everywhere, *model, *wait))
        trouble = _asked(head, f"http://127.0.0.1:{port}", options.devices)
    logs = [log.read_text(encoding="utf-8", errors="replace") for log in place.glob("*.log")]
    return trouble or ("a traceback was printed" if any("Traceback" in log for log in logs) else "")


@contextmanager
def _device(place: Path, profile: Path, name: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A primad daemon with a home of its own, ended with the block; what it prints is in ``place``."""
    home = place / name
    home.mkdir(parents=True)
    shutil.copy(profile, home)
    with (
        (place / f"{name}.log").open("wb") as log,
        daemon([words[0], "--home", home, "--name", name, *words[1:]], place, log, host=None) as process,
    ):
        yield process


def _asked(head: subprocess.Popen[bytes], url: str, devices: int) -> str:
    """What goes wrong until a question is answered by all ``devices``; empty when nothing does."""
    wanted = f"serving with {devices} devices"
    printed = "nothing"
    with httpx.Client(base_url=url, timeout=START_S) as client:
        deadline = time.monotonic() + START_S
        while printed != wanted:
            if time.monotonic() > deadline:
                return f"it does not serve within {START_S:g} s, and says {printed!r}"
            try:
                head.wait(0.2)
                return f"the head ended with code {head.returncode}"
            except subprocess.TimeoutExpired:
                printed = _printed(client)
        message = {"role": "user", "content": "Why is the sky blue?"}
        answer = client.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 4, "temperature": 0})
        return "" if answer.is_success else f"the question got {answer.status_code}: {answer.text}"


def _printed(client: httpx.Client) -> str:
    try:
        return str(client.get("/health").json()["detail"])
    except httpx.TransportError:
        return "nothing"


def _show(place: Path) -> None:
    """The last words of every device, the head's first."""
    logs: Sequence[Path] = sorted(place.glob("*.log"))
    for log in logs:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join((f"  {log.stem}:", *(f"    {line}" for line in lines[-LAST_LINES:]))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
