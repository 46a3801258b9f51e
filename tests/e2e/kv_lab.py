"""A ring of three with replicas of the KV cache, for tests in which devices die or join."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.cluster import Head, Primad, all_joined, heading, wait_until
from tests.e2e.streams import Reported, ask, show

BLOCK = 16
"""Tokens per KV block."""
_STOP_S, _RUN_S = 1.9, 0.6
"""A daemon looks every second whether a ring process is stopped, and acts when it is three times in a row."""


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

    def resumes_after(self, act: Callable[[], object], max_again: int) -> None:
        """Do ``act`` in the middle of a request, of which at most ``max_again`` tokens may be computed again."""
        before = self.kv
        reported = self.ask(act)
        after = self.kv
        again = after["computed_again_tokens"] - before["computed_again_tokens"]
        show(f"gap {reported.gap_s:.2f} s, {again} tokens again, {after}")
        assert (reported.text, reported.finish, reported.error) == (self.undisturbed, "length", None), (
            self.head.run.output
        )
        assert after["restores"] > before["restores"]
        assert again <= max_again
        assert after["restored_tokens"] - before["restored_tokens"] + again >= self._middle - 1
        assert "Traceback" not in self.head.run.output

    @contextmanager
    def all_copied(self, slowed: Sequence[psutil.Process]) -> Iterator[None]:
        """Wait during a request until all its complete blocks but the newest are replicated.

        The processes ``slowed`` are stopped most of the time meanwhile, so that the request does not end first.
        """
        with running_in_slices(slowed):
            wait_until(lambda: self.kv.get("lag_tokens", self._tokens) <= BLOCK, "the replica has all blocks but one")
            yield

    def copied(self, name: str) -> list[Path]:
        """Return one replica file of each block on a device, in the order of the request; a block may have several."""
        found = (self.homes[name] / "run" / "cells").glob("*/*.copy")
        by_block: dict[Path, Path] = {}
        for path in sorted(found, key=lambda path: path.stat().st_mtime_ns):
            by_block.setdefault(path.parent, path)
        return list(by_block.values())


@contextmanager
def running_in_slices(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Suspend ``processes`` repeatedly, too briefly for one to count as hanging."""
    is_over = threading.Event()

    def stop_often() -> None:
        while not is_over.is_set():
            send(signal.SIGSTOP)
            is_over.wait(_STOP_S)
            send(signal.SIGCONT)
            is_over.wait(_RUN_S)

    def send(number: int) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    stopping = threading.Thread(target=stop_often)
    stopping.start()
    try:
        yield
    finally:
        is_over.set()
        stopping.join()
