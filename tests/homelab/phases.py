"""Bring a worker of a rig into the middle of each phase of its life."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from tests.homelab.cluster import Cluster, home
from tests.homelab.rig import LONG, STORY, STORY_TOKENS, TALE, Rig, wait_until
from tests.homelab.running import Running
from tests.homelab.stream import Stream
from tools.lab.device import Device, role

MIN_LIMIT: Final = 1_000_000
LITTLE_CPUS: Final = 0.25
MIDDLE_TOKENS: Final = 20
LATE_TOKENS: Final = 800
MIDDLE_CPU_S: Final = 0.05
"""CPU time after which a worker, even with a single layer, is still early in a long prompt."""

_ESTABLISHED: Final = "01"

Reach = Callable[[Rig, str], Stream | None]
"""Brings the worker of that name into the phase; returns the running completion, if any."""


def profiling(rig: Rig, name: str) -> None:
    """The worker is being profiled; it gets little CPU time, as this would end too soon otherwise."""
    rig.take_out(name)
    rig.mark()
    rig.cluster.start_worker(name).wait_for("head .* is here")
    rig.lab.device(name).slow(LITTLE_CPUS)
    rig.wait_until(lambda: phase_of(rig, name) != "paired", "it says welcome")
    assert phase_of(rig, name) == "profiled"


def phase_of(rig: Rig, name: str) -> str:
    """Return a device's phase, as the head reports it."""
    phases = {each["device"]: each["phase"] for each in rig.cluster.status()["cluster"]}
    return str(phases.get(name, "paired")).replace("gone", "paired")


def transfer(rig: Rig, name: str) -> None:
    """The worker has some layers and is receiving others. It counts as the fastest until the caller seeds it again, and
    so gets the most layers. It is frozen in this state: on a busy machine the fault would come after the last layer.
    """
    rig.take_out(name)
    rig.cluster.seed(name, 2.0)
    layer_bytes = max(path.stat().st_size for path in rig.cache(name).glob("*.gguf"))
    shutil.rmtree(rig.cache(name))
    limit = f'transfer_limit = "{max(2 * layer_bytes, MIN_LIMIT)}B/s"\n'  # two layers per second, if the minimum allows
    (home(rig.lab.device(name)) / "config.toml").write_text(limit, encoding="ascii")
    rig.mark()
    worker = rig.cluster.start_worker(name)

    def is_caught() -> bool:
        if len(rig.whole_layers(name)) < 2:
            return False
        rig.lab.device(name).freeze()
        return True

    rig.wait_until(is_caught, "layers arrive")
    assert "computing layers" not in worker.output


def loading(rig: Rig, name: str) -> None:
    """The ring process is loading; the device gets little CPU time, as this would end too soon otherwise."""
    rig.take_out(name)
    rig.mark()
    worker = rig.cluster.start_worker(name)
    worker.wait_for("head .* is here")
    device = rig.lab.device(name)
    device.slow(LITTLE_CPUS)
    rig.wait_until(lambda: "ring" in {role(pid) for pid in device.pids()}, "it loads")
    assert "computing layers" not in worker.output


def prefill(rig: Rig, name: str) -> Stream:
    """The ring computes a long prompt; the worker has begun, and no token has been sampled."""
    rig.undisturbed(LONG)
    rig.mark()
    device = rig.lab.device(name)
    before = ring_cpu_s(device)
    stream = rig.ask(LONG)

    def is_under_way() -> bool:
        return any(used_s >= before.get(pid, 0.0) + MIDDLE_CPU_S for pid, used_s in ring_cpu_s(device).items())

    rig.wait_until(is_under_way, "it computes")
    assert not stream.times, "the prompt was read already"
    return stream


def ring_cpu_s(device: Device) -> dict[int, float]:
    """Return the CPU time that each ring process of a device has used."""
    used_s = {}
    for pid in device.pids():
        with suppress(psutil.NoSuchProcess):
            if role(pid) == "ring":
                times = psutil.Process(pid).cpu_times()
                used_s[pid] = times.user + times.system
    return used_s


def decode(rig: Rig, name: str) -> Stream:
    """A completion is being generated."""
    del name
    rig.undisturbed(STORY, STORY_TOKENS)
    rig.mark()
    stream = rig.ask(STORY, STORY_TOKENS)
    stream.wait_tokens(MIDDLE_TOKENS)
    return stream


def long_answer(rig: Rig, name: str) -> Stream:
    """Most of a long completion has been generated."""
    del name
    rig.undisturbed(TALE, LATE_TOKENS + STORY_TOKENS)
    rig.mark()
    stream = rig.ask(TALE, LATE_TOKENS + STORY_TOKENS)
    stream.wait_tokens(LATE_TOKENS)
    return stream


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
    "long answer": long_answer,
    "idle": idle,
}


class HalfPaired:
    """A device that has sent its first message to a head that stays stopped until ``go_on``."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        code, port = cluster.code()
        (self._head,) = (pid for pid in cluster.head.pids() if role(pid) == "daemon")
        os.kill(self._head, signal.SIGSTOP)
        self.joining: Running = cluster.bring(name, code, port)
        wait_until(lambda: has_unread(self._head, port), f"it speaks to the head\n{cluster.logs()}", 30.0)

    def go_on(self) -> None:
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
