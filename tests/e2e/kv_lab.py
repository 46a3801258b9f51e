"""A ring of three with replicas of the KV cache, for tests in which devices die or join."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from primad.kv.store import KvStore
from tests.e2e.cluster import SHORT_S, Head, Primad, all_joined, heading, ring_processes, stopped, wait_until
from tests.e2e.streams import CompletionOverError, Reported, ask, is_open, show

BLOCK = 16
"""Tokens per KV block."""
_STOP_S, _RUN_S = 1.4, 1.1
"""A daemon checks every second whether a ring process is stopped, and acts when it is three times in a row: between two
stops, which hold two checks at most, there is one at least."""


class Lab:
    """A head and two workers, all on one machine; dead workers are replaced before the next test."""

    def __init__(
        self,
        stack: ExitStack,
        model: Path,
        make_home: Callable[[str], Path],
        *,
        tokens: int,
        middle: int,
        context: int = 1024,
        sequences: int = 1,
        serving: tuple[str, ...] = (),
        joining: tuple[str, ...] = (),
        **fields: Any,
    ) -> None:
        self._stack, self._make_home = stack, make_home
        self._tokens, self._middle, self._fields, self._joining = tokens, middle, fields, joining
        self._cluster = f"kept-{secrets.token_hex(6)}"
        self._count = 0
        self.workers: dict[str, Primad] = {}
        self.homes: dict[str, Path] = {}
        self.add(2)
        arguments = ("--wait", 2, "--use-all", "--context", context, "--sequences", sequences, *serving)
        self.homes["head"] = make_home("head")
        self.head: Head = stack.enter_context(heading(model, self.homes["head"], self._cluster, *arguments, config=""))
        self.head.wait_serving()
        self.undisturbed = self.ask().text

    def add(self, count: int) -> list[str]:
        """Start more workers concurrently; return their names."""
        names = [f"w{self._count + 1 + each}" for each in range(count)]
        self._count += count
        self.homes |= {name: self._make_home(name) for name in names}
        runs = self._stack.enter_context(
            all_joined([self.homes[name] for name in names], self._cluster, *self._joining)
        )
        self.workers |= dict(zip(names, runs, strict=True))
        return names

    def ask(self, act: Callable[[], object] | None = None, **other: Any) -> Reported:
        """Run a request with this lab's fields, except for ``other`` ones."""
        return ask(self.head, act, **{"tokens": self._tokens, "middle": self._middle, **self._fields, **other})

    @property
    def kv(self) -> dict[str, Any]:
        """The head's status of the KV cache; empty while a ring is formed."""
        return dict(self.head.status()["kv"] or {})

    def replica_of(self, device: str) -> str:
        return next(copy["replica"] for copy in self.kv["copies"] if copy["device"] == device)

    def two(self) -> tuple[str, str]:
        """Wait until exactly two workers compute; return their names."""
        for name in [name for name, run in self.workers.items() if run.process.poll() is not None]:
            del self.workers[name]
        self.add(2 - len(self.workers))
        wait_until(lambda: self.computing() == set(self.workers), f"{list(self.workers)} compute", stays=True)
        first, second = self.workers
        return first, second

    def computing(self) -> set[str]:
        return {device["name"] for device in self.head.status().get("devices", ()) if device["role"] == "worker"}

    def resumes_after(
        self, act: Callable[[], object], *, still: bool = False, restored: int = 0, again: int | None = None
    ) -> None:
        """Do ``act`` in the middle of a request, with a ``still`` ring or not: at least ``restored`` tokens come from KV
        blocks, and at most ``again`` are computed again."""
        before = self.kv
        reported = self.ask(act, still=still)
        after = self.kv
        computed = after["computed_again_tokens"] - before["computed_again_tokens"]
        found = after["restored_tokens"] - before["restored_tokens"]
        show(f"gap {reported.gap_s:.2f} s, {computed} tokens again, {after}")
        assert (reported.text, reported.finish, reported.error) == (self.undisturbed, "length", None), (
            self.head.run.output
        )
        assert after["restores"] > before["restores"]
        assert found >= restored
        assert again is None or computed <= again
        assert found + computed >= self._middle - 1
        assert "Traceback" not in self.head.run.output

    @contextmanager
    def all_copied(self, name: str, other: str) -> Iterator[None]:
        """Wait during a request until all blocks of worker ``name`` but the newest are replicated; the ring stands
        still in the block.

        It does as worker ``other`` is stopped, briefly. Raises ``CompletionOverError`` if the request ends first.
        """
        replica = KvStore(self.cells(self.replica_of(name)))
        while True:
            with ExitStack() as stack:
                for process in ring_processes(self.workers[other]):
                    stack.enter_context(stopped(process))
                until = time.monotonic() + _STOP_S
                while time.monotonic() < until:
                    if not is_open(self.head):
                        raise CompletionOverError
                    computed = list(self.cells(name).glob("*/*.cells"))
                    if sum(not is_copied(path, replica) for path in computed) <= 1 < len(computed):
                        yield
                        return
                    time.sleep(SHORT_S)
            time.sleep(_RUN_S)

    def kill(self, name: str) -> None:
        """Kill the daemon of a worker, and wait until its ring process has ended by itself."""
        self.workers[name].kill()
        wait_until(lambda: not ring_processes(self.workers[name]), f"the ring process of {name} has ended")

    def cells(self, name: str) -> Path:
        """Return the folder of a device's KV blocks."""
        return self.homes[name] / "run" / "cells"

    def copied(self, name: str) -> list[Path]:
        """Return one replica file of each block on a device, in the order of the request; a block may have several."""
        found = self.cells(name).glob("*/*.copy")
        by_block: dict[Path, Path] = {}
        for path in sorted(found, key=lambda path: path.stat().st_mtime_ns):
            by_block.setdefault(path.parent, path)
        return list(by_block.values())


def is_copied(path: Path, replica: KvStore) -> bool:
    """Whether a device holds a copy of the layers of a block in file ``path`` of another one."""
    first, last = map(int, path.stem.split("-"))
    return replica.held(path.parent.name, first, last)
