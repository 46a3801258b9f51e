"""A head and three workers that serve together, with the actions and checks of the fault matrix."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from primad.layers.cache import LayerCache
from tests.homelab.cluster import Cluster, home
from tests.homelab.running import Running
from tests.homelab.stream import Stream, settled
from tools.lab import DeviceSpec, Fleet, Homelab
from tools.lab.device import role

WORKERS: Final = ("a", "b", "c")
DISK_BYTES: Final = 400 << 20
SHORT: Final = "Tell me a story of a village by the sea."
LONG: Final = "Repeat after me: " + " ".join(f"apple {i} pear {i + 1}" for i in range(130))
"""About 1,000 tokens."""
TOKENS: Final = 60
STORY: Final = "Tell me a story of a castle in the mountains."
TALE: Final = "Tell me the tale of seven islands and their kings."
STORY_TOKENS: Final = 150
PATIENCE_S: Final = 180.0
LONG_PATIENCE_S: Final = 200.0
"""For a device with little CPU time and its share of a long prompt or completion."""
_PLAIN: Final = {"logit_bias": {"0": -100, "2": -100}, "speculate": False}
"""Completions have full length, one token per step."""


def fleet() -> Fleet:
    """Return the devices, without limits, since two cores are few already."""
    return Fleet((DeviceSpec(name="h"), *(DeviceSpec(name=name, disk_bytes=DISK_BYTES) for name in WORKERS)))


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Poll until ``holds`` returns True."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


class Rig:
    """A cluster, its undisturbed completions, and the workers that have caused faults."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.lab: Homelab = cluster.lab
        self._texts: dict[str, str] = {}
        self._at_fault: set[str] = set()
        self._marks: dict[str, tuple[Running, int]] = {}
        self._still: list[int] = []

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Poll until ``holds`` returns True; show all logs on a timeout."""
        try:
            wait_until(holds, what)
        except AssertionError as exc:
            exc.add_note(self.cluster.logs())
            raise

    # ---- requests ---------------------------------------------------------------------------------------------------

    def ask(self, prompt: str = SHORT, tokens: int = TOKENS, **body: object) -> Stream:
        """Start a request, with further fields of its ``body``."""
        return self.cluster.stream(prompt, tokens, **_PLAIN, **body)

    def undisturbed(self, prompt: str, tokens: int = TOKENS) -> None:
        """Record the completion without faults, once per prompt."""
        if prompt not in self._texts:
            stream = self.ask(prompt, tokens)
            stream.wait_end(PATIENCE_S)
            assert settled(stream), self.cluster.logs()
            assert stream.finish_reason == "length", self.cluster.logs()
            self._texts[prompt] = stream.text

    def check(self, stream: Stream, prompt: str = SHORT, patience_s: float = PATIENCE_S) -> None:
        """Check that the completion ends regularly and its text equals the undisturbed one."""
        stream.wait_end(patience_s)
        assert stream.error is None, f"{stream.error}\n{self.cluster.logs()}"
        assert settled(stream), f"{stream.end}\n{self.cluster.logs()}"
        assert (stream.finish_reason, stream.text) == ("length", self._texts[prompt]), self.cluster.logs()

    def stand_still(self) -> bool:
        """Stop the head's ring process until ``go_on``; return whether a request is open.

        Briefly: the daemon treats a process that is found stopped three times, once a second, as one that hangs.
        """
        self._still = [pid for pid in self.cluster.head.pids() if role(pid) == "ring"]
        for pid in self._still:
            os.kill(pid, signal.SIGSTOP)
        return self.cluster.is_answering()  # the client takes time to start, in which the daemon reads all reports

    def go_on(self) -> None:
        """Continue the head's ring process."""
        for pid in self._still:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._still.clear()

    # ---- the ring ---------------------------------------------------------------------------------------------------

    def serves_with(self, count: int) -> None:
        """Wait until ``count`` devices serve."""
        self.cluster.wait_serving(PATIENCE_S, f"serving with {count} devices")

    def whole(self) -> None:
        """Wait until all devices serve."""
        self.serves_with(1 + len(self.cluster.workers))

    def restart_head(self) -> None:
        """Restart the head: a new one has no record of faults."""
        daemon = self.cluster.daemons[self.cluster.head.name]
        daemon.process.send_signal(signal.SIGINT)
        daemon.wait_end()
        self.cluster.start_head(*self.cluster.gathered)
        self.cluster.wait_serving()
        self._at_fault.clear()

    def next_victim(self) -> str:
        """Return a worker without faults: the head waits longer and longer before it readmits others."""
        innocent = [name for name in WORKERS if name not in self._at_fault]
        if not innocent:
            self.restart_head()
            innocent = list(WORKERS)
        self._at_fault.add(innocent[0])
        return innocent[0]

    def take_out(self, name: str) -> None:
        """Stop a worker and wait until the others take over."""
        daemon = self.cluster.daemons[name]
        daemon.process.send_signal(signal.SIGINT)
        daemon.wait_end()
        self.serves_with(len(self.cluster.workers))

    # ---- logs and disks ---------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Set the mark: ``wait_printed`` only considers later lines."""
        self._marks = {name: (daemon, len(daemon.lines)) for name, daemon in self.cluster.daemons.items()}

    def _since(self, name: str) -> int:
        daemon, start = self._marks.get(name, (None, 0))
        return start if daemon is self.cluster.daemons[name] else 0

    def wait_printed(self, name: str, pattern: str) -> None:
        """Wait until a daemon has printed a line since the mark."""
        self.cluster.daemons[name].wait_for(pattern, start=self._since(name))

    def cache(self, name: str) -> Path:
        """Return a device's layer cache."""
        return home(self.lab.device(name)) / "cache" / "layers"

    def whole_layers(self, name: str) -> dict[str, int]:
        """Return a device's layer files by name, with their inodes, which show whether a file was rewritten."""
        return {path.name: path.stat().st_ino for path in self.cache(name).glob("*.gguf")}

    def in_use(self, name: str) -> list[Path]:
        """Return the layer files that a device computes with or is loading."""
        holds: dict[str, list[str]] = {}
        for file in self.cache(name).glob("in-use-*.json"):
            printed = json.loads(file.read_bytes())
            if printed["pid"] in self.lab.device(name).pids():
                holds |= printed["holds"]
        latest = max(holds, key=lambda part: int(part.rpartition("-")[2]), default=None)
        return [] if latest is None else [self.cache(name) / f"{digest}.gguf" for digest in holds[latest]]

    def damaged(self, name: str, files: Iterable[Path]) -> list[str]:
        """Return the files whose contents do not match their names, which are digests."""
        cache = LayerCache(self.cache(name), owner=False)
        return [bad.name for file in files for bad in cache.damaged(file.stem, fix=False)]

    def check_clean(self) -> None:
        """Check that there is no traceback, no damaged layer file in use, and one daemon per device."""
        assert "Traceback" not in self.cluster.logs(), self.cluster.logs()
        for device in self.cluster.workers:
            assert self.damaged(device.name, self.in_use(device.name)) == []
            assert [role(pid) for pid in device.pids()].count("daemon") == 1
