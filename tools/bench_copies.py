"""``tools/bench copies``: what it costs that the KV cells of an answer are kept twice while it grows.

Two rings of a head and two workers, real daemons with the same windows, one with copies and one without: both are there
before the first run and take turns. Beside the tokens a second: the bytes that are kept twice, and those that the plan says.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console

from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from tools.demo import PRIMAD
from tools.lab.http_servers import HttpServer, head_here
from tools.lab.local_ring import even_windows
from tools.lab.plain_llama import PROMPT
from tools.lab.served import by_round

NAMES: Final = ("head", "w1", "w2")
PROMPT_TOKENS: Final = 40
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
        return statistics.median(by_round(self.tokens_per_s["with"], self.tokens_per_s["without"]))


def measure(model: Path, rounds: int, threads: int) -> CopiesFigures:
    """All figures of ``model``, in so many rounds after one to warm up. Raises ``LabError``."""
    found = CopiesFigures()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="primad-copies-")))
        for name in NAMES:
            home = folder / "without" / name
            subprocess.run([PRIMAD, "profile", "--home", home, "--name", name], check=True, stdout=subprocess.DEVNULL)
        shutil.copytree(folder / "without", folder / "with")
        heads = {
            ring: stack.enter_context(_ring(model, folder / ring, threads, options)) for ring, options in RINGS.items()
        }
        for number in range(rounds + 1):
            for ring, head in heads.items():
                times = head.stream(PROMPT[:PROMPT_TOKENS], TOKENS, ignore_eos=True)
                if number:
                    found.tokens_per_s[ring].append((len(times) - 1) / (times[-1] - times[0]))
                if number and ring == "with":
                    found.lag_tokens.append(_status(head.url)["kv"]["lag_tokens"])
                time.sleep(1)  # what came last is copied and forgotten before the other ring has its turn
    return found


def _ring(model: Path, homes: Path, threads: int, options: tuple[str, ...]) -> AbstractContextManager[HttpServer]:
    """A head that serves ``model`` with two workers."""
    windows = even_windows(len(model_profile(open_model(model)).layers), len(NAMES))
    serving = ("--extra-buffers", "off", "--context", "1024", "--sequences", "1", "--rounds", "1")
    by_hand = ("--windows", ",".join(map(str, windows or ())))
    return head_here(model, homes, NAMES[1:], every=("--threads", str(threads)), head=(*serving, *by_hand, *options))


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
