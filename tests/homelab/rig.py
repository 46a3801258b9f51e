"""A head and three workers that serve together, and all that a cell of the fault matrix needs of them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterable
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
"""Some 1,000 tokens."""
TOKENS: Final = 60
STORY: Final = "Tell me a story of a castle in the mountains."
TALE: Final = "Tell me the tale of seven islands and their kings."
STORY_TOKENS: Final = 150
"""So many that what happens in the middle comes well before the last, also where the machine is busy."""
PATIENCE_S: Final = 180.0
LONG_PATIENCE_S: Final = 200.0
"""For a device with little CPU time that has its share of a long prompt or answer to compute."""
_PLAIN: Final = {"logit_bias": {"0": -100, "2": -100}, "speculate": False}
"""No answer ends before its tokens are sampled, one by one."""


def fleet() -> Fleet:
    """The devices: without limits, since two cores are few as it is."""
    return Fleet((DeviceSpec(name="h"), *(DeviceSpec(name=name, disk_bytes=DISK_BYTES) for name in WORKERS)))


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait until something holds that tells nobody about it."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


class Rig:
    """The cluster, what it answers undisturbed, and which of its workers are in their head's bad books."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.lab: Homelab = cluster.lab
        self._texts: dict[str, str] = {}
        self._at_fault: set[str] = set()
        self._marks: dict[str, tuple[Running, int]] = {}

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds; if it does not come, tell what all said until then."""
        try:
            wait_until(holds, what)
        except AssertionError as exc:
            exc.add_note(self.cluster.logs())
            raise

    # ---- answers ----------------------------------------------------------------------------------------------------

    def ask(self, prompt: str = SHORT, tokens: int = TOKENS) -> Stream:
        """Ask for an answer; does not wait for it."""
        return self.cluster.stream(prompt, tokens, **_PLAIN)

    def undisturbed(self, prompt: str, tokens: int = TOKENS) -> None:
        """Note what the answer is as long as nothing happens. Asked once for each prompt."""
        if prompt not in self._texts:
            stream = self.ask(prompt, tokens)
            stream.wait_end(PATIENCE_S)
            assert settled(stream), self.cluster.logs()
            assert stream.finish_reason == "length", self.cluster.logs()
            self._texts[prompt] = stream.text

    def check(self, stream: Stream, prompt: str = SHORT, patience_s: float = PATIENCE_S) -> None:
        """The answer ends as every answer must, and its text is the undisturbed one."""
        stream.wait_end(patience_s)
        assert stream.error is None, f"{stream.error}\n{self.cluster.logs()}"
        assert settled(stream), f"{stream.end}\n{self.cluster.logs()}"
        assert (stream.finish_reason, stream.text) == ("length", self._texts[prompt]), self.cluster.logs()

    # ---- the ring ---------------------------------------------------------------------------------------------------

    def serves_with(self, count: int) -> None:
        """Wait until so many devices serve."""
        self.cluster.wait_serving(PATIENCE_S, f"serving with {count} devices")

    def whole(self) -> None:
        """Wait until all devices serve."""
        self.serves_with(1 + len(self.cluster.workers))

    def restart_head(self) -> None:
        """A new head bears no grudges."""
        daemon = self.cluster.daemons[self.cluster.head.name]
        daemon.process.send_signal(signal.SIGINT)
        daemon.wait_end()
        self.cluster.start_head(*self.cluster.gathered)
        self.cluster.wait_serving()
        self._at_fault.clear()

    def next_victim(self) -> str:
        """A worker that has done no harm yet: devices that did are taken in again later and later."""
        innocent = [name for name in WORKERS if name not in self._at_fault]
        if not innocent:
            self.restart_head()
            innocent = list(WORKERS)
        self._at_fault.add(innocent[0])
        return innocent[0]

    def take_out(self, name: str) -> None:
        """Have a worker leave; the others take over."""
        daemon = self.cluster.daemons[name]
        daemon.process.send_signal(signal.SIGINT)
        daemon.wait_end()
        self.serves_with(len(self.cluster.workers))

    # ---- what they say, and what lies on their disks ------------------------------------------------------------------

    def mark(self) -> None:
        """What is said from now on is looked at."""
        self._marks = {name: (daemon, len(daemon.lines)) for name, daemon in self.cluster.daemons.items()}

    def _since(self, name: str) -> int:
        daemon, start = self._marks.get(name, (None, 0))
        return start if daemon is self.cluster.daemons[name] else 0

    def wait_said(self, name: str, pattern: str) -> None:
        """Wait until a daemon has said a line since the mark."""
        self.cluster.daemons[name].wait_for(pattern, start=self._since(name))

    def cache(self, name: str) -> Path:
        """A device's layer cache."""
        return home(self.lab.device(name)) / "cache" / "layers"

    def whole_layers(self, name: str) -> dict[str, int]:
        """The names of the layer files that a device holds, with what tells a file from one written anew."""
        return {path.name: path.stat().st_ino for path in self.cache(name).glob("*.gguf")}

    def in_use(self, name: str) -> list[Path]:
        """The layer files that a device computes with, or loads."""
        holds: dict[str, list[str]] = {}
        for file in self.cache(name).glob("in-use-*.json"):
            printed = json.loads(file.read_bytes())
            if printed["pid"] in self.lab.device(name).pids():
                holds |= printed["holds"]
        latest = max(holds, key=lambda part: int(part.rpartition("-")[2]), default=None)
        return [] if latest is None else [self.cache(name) / f"{digest}.gguf" for digest in holds[latest]]

    def damaged(self, name: str, files: Iterable[Path]) -> list[str]:
        """Those of the layer files of a device that are not what their name says."""
        cache = LayerCache(self.cache(name), owner=False)
        return [bad.name for file in files for bad in cache.damaged(file.stem, fix=False)]

    def check_clean(self) -> None:
        """Nobody stumbled, what is computed with is whole, and one daemon a device runs."""
        assert "Traceback" not in self.cluster.logs(), self.cluster.logs()
        for device in self.cluster.workers:
            assert self.damaged(device.name, self.in_use(device.name)) == []
            assert [role(pid) for pid in device.pids()].count("daemon") == 1
