"""``tools/bench copies``: what it costs that the KV cells of an answer are kept twice while it grows.

Two rings of a head and two workers, real daemons with the same windows, one with copies and one without: both are there
before the first run and take turns. Beside the tokens a second: the bytes that are kept twice, and those that the plan says.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console

from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.head.options import model_id
from tools.bench_api import HeadHere, wait_until_serving
from tools.demo import PRIMAD, daemon
from tools.lab.local_ring import even_windows

NAMES: Final = ("head", "w1", "w2")
TOKENS: Final = 256
RINGS: Final[Mapping[str, tuple[str, ...]]] = {"without": ("--kv-backup", "off"), "with": ("--kv-backup", "16")}
AT_LEAST: Final = 0.98

out = Console(highlight=False)


@dataclass
class CopiesFigures:
    """Run by run, by ring: tokens a second. Of the ring with copies, after an answer: what is kept twice and was to be."""

    tokens_per_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in RINGS})
    lag_tokens: list[int] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median of what the ring with copies gives of the other's tokens a second."""
        pairs = zip(self.tokens_per_s["with"], self.tokens_per_s["without"], strict=True)
        return statistics.median(a / b for a, b in pairs)


def measure(model: Path, rounds: int, threads: int) -> CopiesFigures:
    """All figures of ``model``, in so many rounds after one to warm up. Raises ``LabError``."""
    found = CopiesFigures()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="primad-copies-")))
        for name in NAMES:
            home = folder / "without" / name
            subprocess.run([PRIMAD, "profile", "--home", home, "--name", name], check=True, stdout=subprocess.DEVNULL)
        shutil.copytree(folder / "without", folder / "with")
        heads = {ring: _ring(stack, model, folder / ring, threads, options) for ring, options in RINGS.items()}
        for number in range(rounds + 1):
            for ring, (head, url) in heads.items():
                _, token_s = head.stream(TOKENS, ignore_eos=True)
                if number:
                    found.tokens_per_s[ring].append(1 / token_s)
                if number and ring == "with":
                    found.lag_tokens.append(_status(url)["kv"]["lag_tokens"])
                time.sleep(1)  # what came last is copied and forgotten before the other ring has its turn
    return found


def _ring(stack: ExitStack, model: Path, homes: Path, threads: int, options: tuple[str, ...]) -> tuple[HeadHere, str]:
    """A head that serves ``model`` with two workers, and where."""
    cluster = f"copies-{secrets.token_hex(4)}"
    same = ("--cluster", cluster, "--threads", str(threads))
    for name in NAMES[1:]:
        log = stack.enter_context((homes / f"{name}.log").open("wb"))
        joining = ["join", "--home", str(homes / name), "--name", name, *same]
        stack.enter_context(daemon(joining, homes, stderr=log))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serving = ["serve", "--model", str(model), "--home", str(homes / "head"), "--name", "head", *same, *options]
    serving += ["--port", str(port), "--extra-buffers", "off", "--context", "1024", "--sequences", "1"]
    serving += ["--wait", str(len(NAMES) - 1), "--wait-timeout", "300", "--rounds", "1"]
    windows = even_windows(len(model_profile(open_model(model)).layers), len(NAMES))
    serving += ["--windows", ",".join(map(str, windows or ()))]
    log = stack.enter_context((homes / "head.log").open("wb"))
    process = stack.enter_context(daemon(serving, homes, stderr=log))
    wait_until_serving(process, port, homes / "head.log")
    return HeadHere(process, port, model_id(model)), f"http://127.0.0.1:{port}"


def _status(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/status", timeout=60).json())


def add_bench(benches: argparse._SubParsersAction[argparse.ArgumentParser], model: Path) -> None:
    """Adds ``copies`` to the command line."""
    one = benches.add_parser("copies", help="what it costs to keep the KV cells of answers twice")
    one.add_argument("--model", type=Path, default=model, help="GGUF file")
    one.add_argument("--rounds", type=int, default=9)
    one.add_argument("--threads", type=int, default=1)
    one.add_argument("--json", help="also write the figures to this file")


def show(figures: CopiesFigures) -> list[dict[str, Any]]:
    """Print what is judged; plain data for ``--json``."""
    for ring, rates in figures.tokens_per_s.items():
        out.print(f"{ring:<8} copies {statistics.median(rates):7.1f} tokens/s")
    out.print(
        f"with copies {figures.ratio:.3f} of without (at least {AT_LEAST}); {max(figures.lag_tokens)} tokens behind at most"
    )
    return [asdict(figures)]
