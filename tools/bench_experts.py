"""``tools/bench experts``: a mixture of experts beside Hugging Face Transformers, and over the number of its experts.

    tools/bench experts [--json FILE] [--experts N ...] [--rounds N] [--tokens N] [--threads N] [--transformers PYTHON]

The shape is that of FlexFlow's seed: 12 blocks of width 1024, experts of width 4096, two of them used; float32. One
device answers in turn with a process of ``--transformers``, a Python that has torch, transformers and gguf, with the same
weights and threads: its best tokens should be those that the ring drew, but for a few that the rounding of 16-bit KV
cells changes (with 32 bits llama.cpp draws the same; random weights have near experts). Without it, what a token takes
over the number of experts is measured alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tools.lab import LabError
from tools.lab.local_ring import LocalRing
from tools.synth import write_model

PROMPT: Final = tuple(range(40, 56))
CHILD: Final = Path(__file__).parent / "lab" / "transformers_child.py"

out = Console(highlight=False)


@dataclass(kw_only=True)
class Mixture:
    """A model with so many ``experts``, run by run: seconds a token of a ring of one device, and of Transformers."""

    experts: int
    size_bytes: int
    token_s: list[float] = field(default_factory=list)
    transformers_token_s: list[float] = field(default_factory=list)
    below: list[float] = field(default_factory=list)
    """How far each token's logit is below Transformers' best one."""

    @property
    def best(self) -> float:
        """The share of tokens that are Transformers' best ones."""
        return sum(each == 0 for each in self.below) / len(self.below)

    @property
    def times(self) -> list[float]:
        """How many times as long Transformers takes."""
        return [theirs / ours for theirs, ours in zip(self.transformers_token_s, self.token_s, strict=False)]


class TransformersChild:
    """``transformers_child.py`` in the environment of ``python``. Raises ``LabError`` when it ends."""

    def __init__(self, python: str, model: Path, threads: int) -> None:
        try:
            self._process = subprocess.Popen(
                [python, str(CHILD), str(model), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as exc:
            raise LabError(f"--transformers {python}: cannot be started: {exc.strerror}") from exc
        self._heard()

    def ask(self, tokens: Sequence[int]) -> dict[str, Any]:
        """What it says of ``tokens`` behind ``PROMPT``, and the seconds it took."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": PROMPT, "tokens": list(tokens)}) + "\n")
        self._process.stdin.flush()
        return self._heard()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LabError(
                f"transformers ended with code {self._process.wait()}; its Python needs torch, transformers and gguf"
            )
        found: dict[str, Any] = json.loads(line)
        return found


async def measure(options: argparse.Namespace) -> list[Mixture]:
    """A model a number of experts, each loaded by both while they take turns. Raises ``LabError``."""
    return [await _mixture(experts, options) for experts in options.experts]


async def _mixture(experts: int, options: argparse.Namespace) -> Mixture:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="primad-bench-")))
        model = folder / f"mixture-{experts}.gguf"
        write_model(
            model,
            architecture="llama-moe",
            quantisation="f32",
            layers=12,
            width=1024,
            heads=16,
            heads_kv=16,
            head_width=64,
            experts=experts,
            experts_used=2,
            feed_forward=4096,
            expert_feed_forward=4096,
            tied=False,
        )
        found = Mixture(experts=experts, size_bytes=model.stat().st_size)
        ring = await stack.enter_async_context(
            LocalRing(model, None, context=256, rows=64, threads=options.threads, folder=folder)
        )
        other = None
        if options.transformers:
            other = TransformersChild(options.transformers, model, options.threads)
            stack.callback(other.close)
        for number in range(options.rounds + 1):  # the first warms up and is not counted
            sampled, finished = await ring.generate(PROMPT, options.tokens)
            theirs = None if other is None else other.ask([each.token for each in sampled])
            if number:
                found.token_s.append(finished.decode_s / (len(sampled) - 1))
                if theirs is not None:
                    found.below += theirs["below"]
                    found.transformers_token_s.append(statistics.mean(theirs["next_s"]))
        return found


def judged(rows: Sequence[Mixture]) -> list[dict[str, Any]]:
    """What is wanted: no slower than Transformers with the same tokens, and less than linear in the experts."""
    found: list[dict[str, Any]] = []
    for row in rows:
        if row.times:
            what = f"{row.experts} experts: tokens/s, of Transformers'"
            found.append({"what": what, "value": statistics.median(row.times), "at_least": 1.0, "at_most": None})
            what = f"{row.experts} experts: tokens that are Transformers' best"
            found.append({"what": what, "value": row.best, "at_least": 0.9, "at_most": None})
    first, last = rows[0], rows[-1]
    if first.experts < last.experts:
        more = last.experts / first.experts
        longer = statistics.median(last.token_s) / statistics.median(first.token_s)
        what = f"a token with {last.experts} experts, of one with {first.experts}"
        found.append({"what": what, "value": longer, "at_least": None, "at_most": more})
    return found


def show(rows: Sequence[Mixture]) -> list[dict[str, Any]]:
    """Print the rows and what is wanted; plain data for ``--json``."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("experts", "MB", "ms a token", "Transformers", "times", "best, below"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        theirs = row.transformers_token_s
        table.add_row(
            str(row.experts),
            f"{row.size_bytes / 1e6:.0f}",
            f"{1e3 * statistics.median(row.token_s):.1f}",
            f"{1e3 * statistics.median(theirs):.1f}" if theirs else "-",
            f"{statistics.median(row.times):.2f}" if theirs else "-",
            f"{row.best:.0%}, {max(row.below):.3f}" if theirs else "-",
        )
    out.print(table)
    wanted = judged(rows)
    for each in wanted:
        bound = f"at least {each['at_least']:g}" if each["at_least"] is not None else f"at most {each['at_most']:g}"
        out.print(f"{each['what']}: {each['value']:.2f} (wanted: {bound})")
    return [*map(asdict, rows), *wanted]


def add_bench(benches: argparse._SubParsersAction[argparse.ArgumentParser], threads: int) -> None:
    """Adds ``experts`` to the command line."""
    one = benches.add_parser("experts", help="a mixture beside Transformers, and over the number of its experts")
    one.add_argument("--experts", type=int, nargs="+", default=[2, 6, 12])
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument("--tokens", type=int, default=32)
    one.add_argument("--threads", type=int, default=threads, help="of both")
    one.add_argument("--transformers", metavar="PYTHON", help="an interpreter that has torch, transformers and gguf")
    one.add_argument("--json", help="also write the figures to this file")
