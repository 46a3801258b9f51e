"""Another program takes a worker's memory during a completion: others take over its layers, and no token changes.

The worker first gives memory back layer by layer, then asks for another plan. When the program ends it computes again.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from primad.system.memory import groups
from tests.forks import executing
from tests.homelab.cluster import Cluster
from tests.homelab.running import MakeLab, Running
from tests.homelab.stream import Stream
from tools.lab import DeviceSpec
from tools.lab.device import Device
from tools.synth import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MB = 1_000_000
LAYERS = 32
"""Layers of 9 MB: several hundred megabytes, read a little at a time."""
WORKER_BYTES = 500 * MB
"""Enough for the daemon and the ring process (about 110 MB) and more than half of the model."""
HEAD_RAM = "255MB"
"""So little that the head alone would stream most layers, and the plan uses the worker."""
ONE_ATTENTION = ("--kv-type", "q8_0")
"""It needs flash attention. Of f16, a plan that is made while nobody asks may have either, by the memory that it has left
over, and the texts differ from the third token on."""
FIRST_BYTES, STEP_BYTES, LAST_BYTES = 310 * MB, 8 * MB, 4 * MB
GAIN = 0.3
"""The plan with the worker gains more than twice that, and no other does."""
FREE_BYTES = 120 * MB
"""The free memory besides a whole share, and some more."""
FEW_BYTES, LAST_S = 25 * MB, 0.8
LEFT_BYTES = 13 * MB
"""Memory that the other program always leaves free, however slowly the worker reacts, so that nothing is killed."""
PROMPT, MORE_TOKENS = "Once upon a time", 10
UNENDING = {"0": -100, "2": -100}
"""No token ends the completion."""
SHORT_S, RELIEF_S = 240.0, 240.0
"""A new ring resumes a request by recomputing its tokens one at a time."""

HOLDER = """
import sys
held = []
for line in sys.stdin:
    held.append(b"1" * int(line))  # written to, so that it is there
    print(len(held), flush=True)
"""


class Neighbour:
    """Another program on a device, which allocates memory on request."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.taken_bytes = 0

    def take(self, size: int) -> None:
        """Allocate ``size`` more bytes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{size}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline(), "the other program was killed"
        self.taken_bytes += size

    def end(self) -> None:
        """Free all memory."""
        self._process.communicate(timeout=SHORT_S)
        assert self._process.returncode == 0


@contextmanager
def neighbour(device: Device) -> Iterator[Neighbour]:
    argv = [sys.executable, "-I", "-c", HOLDER]
    with device.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Neighbour(process)
        finally:
            process.kill()


def computing(cluster: Cluster) -> set[str]:
    """Return the devices that compute now."""
    return {device["name"] for device in cluster.status().get("devices", ())}


def resident_bytes(cluster: Cluster, name: str) -> int:
    """Wait until a device reports the bytes of its resident layers, and return them; 0 if it has none."""
    deadline = time.monotonic() + SHORT_S
    while True:
        reported = [each["memory"] for each in cluster.status().get("devices", ()) if each["name"] == name]
        if not reported:
            return 0
        if (resident := reported[0]["resident_bytes"]) is not None:  # null if it did not reply in time
            return int(resident)
        assert time.monotonic() < deadline, cluster.logs()


def printed(head: Running, text: str) -> bool:
    return any(text in line for _, line in list(head.lines))


def free_bytes(device: Device) -> int:
    """Return the memory that its programs can still allocate: free memory and file pages."""
    (pid, *_) = device.pids()
    (group, *_) = groups(Path(f"/proc/{pid}/cgroup"))
    usage = group.usage()
    assert usage is not None
    return usage.limit_bytes - usage.used_bytes + usage.inactive_file_bytes + usage.active_file_bytes


def take_max(cluster: Cluster, device: Device, other: Neighbour) -> None:
    """Take memory on ``device`` (``b``) until almost no layers are resident there."""
    deadline = time.monotonic() + SHORT_S
    while resident_bytes(cluster, "b") >= FEW_BYTES:
        assert time.monotonic() < deadline, f"with {other.taken_bytes / MB:.0f} MB taken:\n{cluster.logs()}"
        if free_bytes(device) - STEP_BYTES >= LEFT_BYTES:
            other.take(STEP_BYTES)
        time.sleep(0.25)


def take_last(cluster: Cluster, device: Device, head: Running, other: Neighbour) -> None:
    """Take memory on ``device`` (``b``) in small steps until the head looks for another plan."""
    deadline = time.monotonic() + SHORT_S
    while not printed(head, "b: other programs need the memory; looking for a plan that uses less of it"):
        assert time.monotonic() < deadline, f"with {other.taken_bytes / MB:.0f} MB taken:\n{cluster.logs()}"
        if free_bytes(device) - LAST_BYTES >= LEFT_BYTES:
            other.take(LAST_BYTES)
        time.sleep(LAST_S)


def wait_computing(cluster: Cluster, names: set[str], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while computing(cluster) != names:
        assert time.monotonic() < deadline, f"{computing(cluster)} compute, not {names}:\n{cluster.logs()}"
        time.sleep(0.5)


def ask(cluster: Cluster, tokens: int) -> Stream:
    return cluster.stream(PROMPT, tokens, logit_bias=UNENDING)


def test_others_compute_the_layers_of_a_worker_short_of_memory_and_return_them(
    make_lab: MakeLab, tmp_path: Path
) -> None:
    model = tmp_path / "deep.gguf"
    write_model(model, preset="deep-q4k", layers=LAYERS)
    lab = make_lab(DeviceSpec(name="a"), DeviceSpec(name="b", memory_bytes=WORKER_BYTES))
    short = lab.device("b")
    serve = ("--max-ram", HEAD_RAM, "--context", 4096, *ONE_ATTENTION)
    with Cluster(lab, model, serve=serve, gain=GAIN) as cluster:
        cluster.prepare()
        with executing():  # the worker shall hold all the memory that it needs
            worker = cluster.start_worker("b")
        head = cluster.start_head("--wait", 1)
        cluster.wait_serving()
        assert computing(cluster) == {"a", "b"}, cluster.logs()
        with neighbour(short) as other:
            other.take(FIRST_BYTES)
            before = ask(cluster, 4000)
            before.wait_tokens(5)
            take_max(cluster, short, other)
            before.leave()
            stream = ask(cluster, 4000)
            stream.wait_tokens(5)
            take_last(cluster, short, head, other)
            wait_computing(cluster, {"a"}, SHORT_S)
            stream.wait_tokens(len(stream.times) + MORE_TOKENS, SHORT_S)
            stream.leave()
            assert stream.error is None
            assert short.oom_kills() == 0, f"with {other.taken_bytes / MB:.0f} MB taken:\n{cluster.logs()}"
            assert other.taken_bytes < WORKER_BYTES
            other.end()
        head.wait_for("b: there is memory again; looking for a better plan", RELIEF_S)
        wait_computing(cluster, {"a", "b"}, SHORT_S)
        again = ask(cluster, len(stream.times) + 10)  # some tokens bring no text
        assert again.wait_end(SHORT_S) == "done"
        assert again.text.startswith(stream.text), cluster.logs()
        assert worker.process.poll() is None
        assert "b is left out" in head.output
        assert short.oom_kills() == 0
        assert "Traceback" not in cluster.logs()
        assert head.output.count("better; changing to it") == 1, head.output


def test_a_device_of_a_group_gives_memory_back_and_no_token_changes(make_lab: MakeLab, tmp_path: Path) -> None:
    model = tmp_path / "deep.gguf"
    write_model(model, preset="deep-q4k", layers=LAYERS)
    lab = make_lab(DeviceSpec(name="a"), DeviceSpec(name="b", memory_bytes=WORKER_BYTES))
    short = lab.device("b")
    with Cluster(lab, model, serve=("--parallel", "tensor", "--context", 4096)) as cluster:
        cluster.prepare()
        with executing():
            cluster.start_worker("b")
        cluster.start_head("--wait", 1)
        cluster.wait_serving()
        assert computing(cluster) == {"a", "b"}, cluster.logs()
        held = resident_bytes(cluster, "b")
        with neighbour(short) as other:
            other.take(FREE_BYTES)
            stream = ask(cluster, 4000)
            stream.wait_tokens(5)
            deadline = time.monotonic() + SHORT_S
            while resident_bytes(cluster, "b") > held // 2:
                assert time.monotonic() < deadline, f"with {other.taken_bytes / MB:.0f} MB taken:\n{cluster.logs()}"
                if free_bytes(short) - STEP_BYTES >= LEFT_BYTES:
                    other.take(STEP_BYTES)
                time.sleep(0.1)
            stream.wait_tokens(len(stream.times) + MORE_TOKENS, SHORT_S)
            stream.leave()
            other.end()
        again = ask(cluster, len(stream.times) + 10)
        assert again.wait_end(SHORT_S) == "done"
        assert again.text.startswith(stream.text), cluster.logs()
        assert stream.error is None
        assert short.oom_kills() == 0
        assert "Traceback" not in cluster.logs()
