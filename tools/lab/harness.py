"""The frame of every bench: its command line, its models, alternating systems, and its exit code.

A ``Bench`` declares its options and how one model is measured. ``measure`` loads the systems to compare, alternates
them (``Run.alternate``) and adds rows; the rest is the same for every bench. The exit code is 0 if it was measured,
whether the figures are as wanted or not, and 1 if something ended early or a row failed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from tools import synthetic
from tools.lab import LabError, figures
from tools.lab.figures import Row, out
from tools.lab.http_servers import HttpServer, head_here
from tools.synth import PRESETS

SMALL: Final = "smollm2-135m-q4_1"
CORES: Final = psutil.cpu_count(logical=False) or 1
BUSY_SHARE: Final = 0.1

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Flag = tuple[tuple[str, ...], Mapping[str, Any]]


def flag(*names: str, **how: Any) -> Flag:
    """Return an option of a bench, as argparse takes it."""
    return names, how


def threads_flag(default: int | None = CORES) -> Flag:
    """Return the option of threads per process."""
    return flag("--threads", type=int, default=default, help="threads a process")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """``measure`` is called for each model: those of ``--model``, or ``models`` by name or from a function; once with
    None if there are no models. ``quick`` has the options that ``--quick`` sets, and the models that it uses.
    ``all_quick`` are arguments in ``tools/bench all --quick``; None if it is not part of it.
    """

    help: str
    measure: Callable[[Run, Any], Awaitable[None]]
    models: Sequence[str] | Callable[[argparse.Namespace, ExitStack], Sequence[Path | None]] | None = (SMALL,)
    rounds: int | None = 5
    flags: Sequence[Flag] = ()
    quick: Mapping[str, Any] = field(default_factory=dict)
    quick_models: Sequence[str] = ()
    all_quick: Sequence[str] | None = ("--quick",)


class Run:
    """One command: its options, and the rows measured so far, which are written as they come."""

    def __init__(self, name: str, bench: Bench, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        self.rows: list[Row] = []
        self.stack = AsyncExitStack()
        """Resources of the current model."""
        self._all = ExitStack()
        self._homes: list[Path] = []
        self._bench = bench
        self._machine = figures.machine()
        self._facts = figures.run_facts(sys.argv[1:])
        if self._machine["busy_share_before"] > BUSY_SHARE:
            share = self._machine["busy_share_before"]
            out.print(f"warning: the machine is {share:.0%} busy; the figures will not mean much")

    def say(self, text: str) -> None:
        """Print ``text``."""
        out.print(text, markup=False)

    def add(self, *rows: Row) -> None:
        """Add measured rows."""
        self.rows += rows
        if self.options.json is not None:
            figures.write_file(self.options.json, self.name, self._machine, self._facts, self.rows)

    def folder(self, place: str | Path | None = None) -> Path:
        """Return a folder that is removed after the current model."""
        return Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="primad-bench-", dir=place)))

    @asynccontextmanager
    async def part(self) -> AsyncIterator[None]:
        """Remove what is loaded and made inside at the end; the model's other resources stay."""
        whole = self.stack
        try:
            async with AsyncExitStack() as self.stack:
                yield
        finally:
            self.stack = whole

    def homes(self) -> Path:
        """Return a new folder for homes of daemons, next to the others of this command: they are profiled once."""
        if not self._homes:
            self._homes.append(Path(self._all.enter_context(tempfile.TemporaryDirectory(prefix="primad-bench-"))))
        self._homes.append(self._homes[0] / str(len(self._homes)))
        return self._homes[-1]

    def head(self, model: Path, devices: int, *options: str, **how: Any) -> HttpServer:
        """Return ``primad serve`` with ``options`` on ``devices`` devices, all taking part; ``how`` as in
        ``head_here``. It ends with the part or the current model."""
        workers = [f"w{place}" for place in range(1, devices)]
        all_take_part = ["--use-all"] if workers and "--windows" not in options else []
        head = [*options, *all_take_part]
        return self.stack.enter_context(head_here(model, self.homes(), workers, head=head, **how))

    async def alternate(
        self, systems: Mapping[K, Callable[[int], Awaitable[V]]], rounds: int | None = None
    ) -> dict[K, list[V]]:
        """Return what each of ``systems`` returned, round by round; each gets the round's number. Round 0 warms up and
        does not count. All take turns, so that other load on the machine disturbs all alike.
        """
        found: dict[K, list[V]] = {name: [] for name in systems}
        for number in range((self.options.rounds if rounds is None else rounds) + 1):
            for name, system in systems.items():
                result = await system(number)
                if number:
                    found[name].append(result)
        return found

    async def measure(self) -> None:
        """Run the bench on all models."""
        with self._all:
            for model in self._models(self._all):
                async with AsyncExitStack() as self.stack:
                    await self._bench.measure(self, model)

    def _models(self, stack: ExitStack) -> Sequence[Path | None]:
        found = self._bench.models
        if found is None:
            return [None]
        if callable(found):
            return found(self.options, stack)
        if self.options.model:
            return list(self.options.model)
        return list(map(model_named, (self._bench.quick_models if self.options.quick else ()) or found))


def in_thread(call: Callable[[int], V]) -> Callable[[int], Awaitable[V]]:
    """Wrap a blocking system for ``Run.alternate``."""
    return lambda number: asyncio.to_thread(call, number)


def model_named(name: str) -> Path:
    """Return a test model, or a synthetic one, which is written if missing."""
    known = synthetic.MODELS.resolve() / f"{name}.gguf"
    return known if name not in PRESETS else synthetic.write(synthetic.model_path(name), name)


def add_bench(benches: argparse._SubParsersAction[argparse.ArgumentParser], name: str, bench: Bench) -> None:
    """Add a bench to the command line."""
    one = benches.add_parser(name, help=bench.help)
    if bench.models is not None:
        which = "" if callable(bench.models) else f" (default: {', '.join(bench.models)})"
        one.add_argument("--model", type=Path, action="append", help=f"GGUF file{which}")
    if bench.rounds is not None:
        one.add_argument("--rounds", "--runs", type=int, default=bench.rounds, help="counted rounds of each")
    for names, how in bench.flags:
        one.add_argument(*names, **how)
    one.add_argument("--quick", action="store_true", help="few rounds with small models")
    one.add_argument("--json", type=Path, metavar="FILE", help="also write rows and figures to this file")
    one.add_argument("--against", type=Path, metavar="FILE", help="show the figures next to those of such a file")


def execute(name: str, bench: Bench, options: argparse.Namespace) -> int:
    """Measure what the command line requests, print and write it. Return the exit code."""
    before = None if options.against is None else figures.read_file(options.against)
    run, failed = Run(name, bench, options), False
    try:
        asyncio.run(run.measure())
    except LabError as exc:
        failed = True
        print(f"tools/bench {name}: error: {exc}", file=sys.stderr)
    run.add()
    judged = figures.figures_of(run.rows)
    figures.show(run.rows)
    figures.show_figures(judged)
    if before is not None:
        figures.show_against(before, judged)
    return int(failed or any(row.failures() for row in run.rows))
