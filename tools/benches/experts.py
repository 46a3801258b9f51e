"""``experts``: a mixture of experts beside Hugging Face Transformers, and over the number of its experts.

The shape is that of FlexFlow's seed: 12 blocks of width 1024, experts of width 4096, two of them used; float32. One
device answers in turn with a process of ``--transformers``, a Python that has torch, transformers and gguf, with the same
weights and threads: its best tokens should be those that the ring drew, but for a few that the rounding of 16-bit KV
cells changes (with 32 bits llama.cpp draws the same; random weights have near experts). Without it, what a token takes
over the number of experts is measured alone.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from tools.lab import LabError
from tools.lab.figures import Figure, Row
from tools.lab.harness import Bench, Run, flag, threads_flag
from tools.lab.local_ring import LocalRing
from tools.synth import write_model

PROMPT: Final = tuple(range(40, 56))
CHILD: Final = Path(__file__).parent.parent / "lab" / "transformers_child.py"


@dataclass(kw_only=True)
class Mixture(Row):
    """A model with so many ``experts``, run by run: seconds a token of a ring of one device, and of Transformers.

    ``below``: how far each token's logit is below Transformers' best one.
    """

    columns: ClassVar[str] = (
        "experts, size_bytes=MB:MB, token_s=s a token:.4f, transformers_token_s=Transformers:.4f, times=times:.2f"
    )

    experts: int
    size_bytes: int
    token_s: list[float] = field(default_factory=list)
    transformers_token_s: list[float] = field(default_factory=list)
    below: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The share of tokens that are Transformers' best ones."""
        return sum(each == 0 for each in self.below) / len(self.below)

    @property
    def times(self) -> list[float]:
        """How many times as long Transformers takes."""
        return [theirs / ours for theirs, ours in zip(self.transformers_token_s, self.token_s, strict=False)]

    def cells(self) -> Mapping[str, str]:
        below = f"{self.best:.0%}, {max(self.below):.3f}" if self.below else "-"
        return {**super().cells(), "best, below": below}

    @classmethod
    def figures(cls, rows: Sequence[Mixture]) -> Iterator[Figure]:
        """No slower than Transformers with the same tokens, and less than linear in the experts."""
        for row in rows:
            if row.times:
                name = f"{row.experts} experts: tokens"
                yield Figure(what=f"{name}/s, of Transformers'", values=tuple(row.times), at_least=1.0)
                yield Figure(what=f"{name} that are Transformers' best", values=(row.best,), at_least=0.9)
        first, last = rows[0], rows[-1]
        if first.experts < last.experts:
            longer = statistics.median(last.token_s) / statistics.median(first.token_s)
            what = f"a token with {last.experts} experts, of one with {first.experts}"
            yield Figure(what=what, values=(longer,), at_most=last.experts / first.experts)


class TransformersChild:
    """``transformers_child.py`` in the environment of ``python``. Raises ``LabError`` when it ends."""

    def __init__(self, python: str, model: Path, threads: int) -> None:
        command = [python, str(CHILD), str(model), str(threads)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as exc:
            raise LabError(f"--transformers {python}: cannot be started: {exc.strerror}") from exc
        self._read()

    def ask(self, tokens: Sequence[int]) -> dict[str, Any]:
        """What it says of ``tokens`` behind ``PROMPT``, and the seconds it took."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": PROMPT, "tokens": list(tokens)}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise LabError(f"transformers ended with code {code}; its Python needs torch, transformers and gguf")
        found: dict[str, Any] = json.loads(line)
        return found


async def measure(run: Run, _: None) -> None:
    """A model a number of experts, each loaded by both while they take turns."""
    for experts in run.options.experts:
        async with run.part():
            await _measure(run, experts)


async def _measure(run: Run, experts: int) -> None:
    options, folder = run.options, run.folder()
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
    ring = LocalRing(model, None, context=256, rows=64, threads=options.threads, folder=folder)
    await run.stack.enter_async_context(ring)
    other = TransformersChild(options.transformers, model, options.threads) if options.transformers else None
    if other is not None:
        run.stack.callback(other.close)

    async def turn(_: int) -> tuple[float, dict[str, Any] | None]:
        sampled, finished = await ring.generate(PROMPT, options.tokens)
        theirs = None
        if other is not None:
            theirs = await asyncio.to_thread(other.ask, [each.token for each in sampled])
        return finished.decode_s / (len(sampled) - 1), theirs

    found = Mixture(experts=experts, size_bytes=model.stat().st_size)
    for token_s, theirs in (await run.alternate({"": turn}))[""]:
        found.token_s.append(token_s)
        if theirs is not None:
            found.below += theirs["below"]
            found.transformers_token_s.append(statistics.mean(theirs["next_s"]))
    run.add(found)


BENCH: Final = Bench(
    help="a mixture beside Transformers, and over the number of its experts",
    measure=measure,
    models=None,
    quick={"rounds": 1, "experts": [2, 6]},
    flags=(
        flag("--experts", type=int, nargs="+", default=[2, 6, 12]),
        flag("--tokens", type=int, default=32),
        threads_flag(),
        flag("--transformers", metavar="PYTHON", help="an interpreter that has torch, transformers and gguf"),
    ),
)
