"""Bring a worker of a rig into the middle of each phase of its life."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.homelab.cluster import Cluster, home
from tests.homelab.rig import LONG, STORY, STORY_TOKENS, TALE, Rig, wait_until
from tests.homelab.running import Running
from tests.homelab.stream import Stream
from tools.lab.device import Device, role

MIN_LIMIT: Final = 1_000_000
LITTLE_CPUS: Final = 0.25
FASTEST: Final = 4.0
"""Faster than any other device: corrections by measured requests are at most a factor of two."""
MIDDLE_TOKENS: Final = 20
LATE_TOKENS: Final = 800

_ESTABLISHED: Final = "01"

Reach = Callable[[Rig, str], Stream | None]
"""Brings the worker of that name into the phase; returns the running completion, if any: its ring is stopped until
``Rig.go_on``."""


def profiling(rig: Rig, name: str) -> None:
    """The worker is being profiled; it gets little CPU time, as this would end too soon otherwise."""
    found = ""
    while found != "profiled":  # profiling may end before the head is asked
        rig.take_out(name)
        rig.mark()
        rig.cluster.start_worker(name).wait_for("head .* is here")
        rig.lab.device(name).slow(LITTLE_CPUS)
        rig.wait_until(lambda: phase_of(rig, name) != "paired", "it says welcome")
        found = phase_of(rig, name)


def phase_of(rig: Rig, name: str) -> str:
    """Return a device's phase, as the head reports it."""
    phases = {each["device"]: each["phase"] for each in rig.cluster.status()["cluster"]}
    return str(phases.get(name, "paired")).replace("gone", "paired")


def transfer(rig: Rig, name: str) -> None:
    """The worker has some layers and is receiving others. It counts as the fastest until the caller seeds it again, and
    so gets the most layers."""
    rig.take_out(name)
    rig.cluster.seed(name, FASTEST)
    while not is_caught_in_transfer(rig, name):
        rig.take_out(name)


def is_caught_in_transfer(rig: Rig, name: str) -> bool:
    """Start a worker without layers and freeze it while it has some and is receiving others. Return False if all had
    arrived before."""
    device = rig.lab.device(name)
    layer_bytes = max(path.stat().st_size for path in rig.cache(name).glob("*.gguf"))
    shutil.rmtree(rig.cache(name))
    limit = f'transfer_limit = "{max(2 * layer_bytes, MIN_LIMIT)}B/s"\n'  # two layers per second, if the minimum allows
    (home(device) / "config.toml").write_text(limit, encoding="ascii")
    rig.mark()
    worker = rig.cluster.start_worker(name)
    caught: list[bool] = []

    def is_over() -> bool:
        if len(rig.whole_layers(name)) < 2:
            return False
        device.freeze()
        caught[:] = [any((rig.cache(name) / "partial").glob("*.part"))]
        if not caught[0]:
            device.thaw()
        return caught[0] or "computing layers" in worker.output

    rig.wait_until(is_over, "layers arrive")
    return caught[0]


def loading(rig: Rig, name: str) -> None:
    """The ring process is loading; the device gets little CPU time, as this would end too soon otherwise."""
    device = rig.lab.device(name)
    while True:
        rig.take_out(name)
        rig.mark()
        worker = rig.cluster.start_worker(name)
        worker.wait_for("head .* is here")
        device.slow(LITTLE_CPUS)
        rig.wait_until(lambda: "ring" in {role(pid) for pid in device.pids()}, "it loads")
        if "computing layers" not in worker.output:
            return


def in_its_middle(rig: Rig, ask: Callable[[], Stream]) -> Stream:
    """Return a request that is still open, with the ring stopped; requests that ended before are repeated."""
    while True:
        stream = ask()
        if rig.stand_still():
            return stream
        rig.go_on()
        stream.wait_end()


def prefill(rig: Rig, name: str) -> Stream:
    """The ring computes a long prompt; every device has computed some of it, and no token has been sampled."""
    del name
    rig.undisturbed(LONG)
    rig.mark()

    def begun() -> Stream:
        stream = rig.ask(LONG, return_progress=True)
        rig.wait_until(lambda: stream.read_share > 0, "it computes")
        return stream

    while (stream := in_its_middle(rig, begun)).times:  # the whole prompt was computed before
        rig.go_on()
        stream.wait_end()
    return stream


def decode(rig: Rig, name: str) -> Stream:
    """A completion is being generated."""
    del name
    rig.undisturbed(STORY, STORY_TOKENS)
    rig.mark()
    return in_its_middle(rig, lambda: begun(rig, STORY, STORY_TOKENS, MIDDLE_TOKENS))


def begun(rig: Rig, prompt: str, tokens: int, count: int) -> Stream:
    """Start a request and wait for ``count`` tokens."""
    stream = rig.ask(prompt, tokens)
    stream.wait_tokens(count)
    return stream


def long_answer(rig: Rig, name: str) -> Stream:
    """Most of a long completion has been generated."""
    del name
    rig.undisturbed(TALE, LATE_TOKENS + STORY_TOKENS)
    rig.mark()
    return in_its_middle(rig, lambda: begun(rig, TALE, LATE_TOKENS + STORY_TOKENS, LATE_TOKENS))


def idle(rig: Rig, name: str) -> None:
    """There are no requests."""
    del name
    rig.mark()


REACH: Final[dict[str, Reach]] = {
    "profiling": profiling,
    "transfer": transfer,
    "loading": loading,
    "prefill": prefill,
    "decode": decode,
    "long response": long_answer,
    "idle": idle,
}


class HalfPaired:
    """A device that has sent its first message to a head that stays stopped until ``resume``."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        code, port = cluster.code()
        (self._head,) = (pid for pid in cluster.head.pids() if role(pid) == "daemon")
        os.kill(self._head, signal.SIGSTOP)
        self.joining: Running = cluster.bring(name, code, port)
        wait_until(lambda: has_unread(self._head, port), f"it speaks to the head\n{cluster.logs()}", 30.0)

    def resume(self) -> None:
        """Resume the head."""
        os.kill(self._head, signal.SIGCONT)


def has_unread(pid: int, port: int) -> bool:
    """Whether a TCP connection to ``port`` has unread bytes, on the device of process ``pid``."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, queues, *_ = line.split()
            unread = int(queues.partition(":")[2], 16)
            if (state, int(local.rpartition(":")[2], 16)) == (_ESTABLISHED, port) and unread > 0:
                return True
    return False


def trusted_by(device: Device) -> set[str]:
    """Return the names in a device's trust file."""
    file = home(device) / "trust.json"
    return set(re.findall(r'"device":\s*"([^"]+)"', file.read_text(encoding="utf-8"))) if file.exists() else set()
