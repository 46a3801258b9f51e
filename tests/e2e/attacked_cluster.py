"""A cluster under attack: a head and a worker that serve, their open ports, and limits of what attacks may cost."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from primad.network.admin import OpenPairing, PairingCode, ask, note_path
from primad.trust.identity import Identity, key_hex, load_identity, new_identity
from primad.trust.local_trust import LocalTrust
from primad.trust.pairing import Who
from primad.trust.trust import BY_HAND, HEAD, WORKER, TrustRole, TrustStore, trusted_now
from tests.e2e import streams
from tests.e2e.attacks_wire import Door
from tests.e2e.cluster import (
    Head,
    Primad,
    control_port,
    joining,
    run_primad,
    serving,
    steady_processes,
    wait_joined,
    wait_until,
)
from tests.e2e.streams import show

MAX_GROWTH_BYTES = 64 << 20
MORE_DESCRIPTORS = 12
"""The cluster's own connections come and go."""
LINES_PER_S = 8
"""Each gate and each link logs at most one refusal per second; there are about seven."""
TOKENS = 60
PAUSE_S = 0.5
"""Pause between two requests, which leaves the CPU to the attacked processes."""
ROGUE = new_identity()
"""A malicious device that the head trusts."""


@dataclass(frozen=True)
class Costs:
    """What the daemons' processes use, by process id: bytes of memory, and descriptors."""

    rss_bytes: dict[int, int]
    descriptors: dict[int, int]


class AttackedCluster:
    """A head and a worker that serve by ``plan``, and a second worker that waits for a head of another cluster.

    With manual windows the plan is stable: on a busy machine devices are slower than their profiles, so a solved plan
    is replaced, and ring processes come and go.
    """

    def __init__(self, stack: ExitStack, model: Path, make_home: Callable[[str], Path], *plan: object) -> None:
        self.code = PairingCode(code="", expires_s=0, port=0)
        self.cluster = f"lab-{secrets.token_hex(6)}"
        self.homes = {name: make_home(f"{name}-{secrets.token_hex(3)}") for name in ("head", "w1", "idle")}
        trust(self.homes["head"], ROGUE, WORKER)
        trust(self.homes["idle"], ROGUE, HEAD)
        self.idle: Primad = stack.enter_context(joining(self.homes["idle"], f"idle-{secrets.token_hex(6)}"))
        self.worker: Primad = stack.enter_context(joining(self.homes["w1"], self.cluster))
        wait_joined(self.idle, self.homes["idle"])
        wait_joined(self.worker, self.homes["w1"])
        self.head: Head = stack.enter_context(serving(model, self.homes["head"], self.cluster, *plan, "--context", 512))
        streams.ask(self.head, tokens=TOKENS)
        self.undisturbed = streams.ask(self.head, tokens=TOKENS).text

    @property
    def daemons(self) -> dict[str, Primad]:
        """All three by name."""
        return {"head": self.head.run, "w1": self.worker, "idle": self.idle}

    def name(self, owner: str) -> str:
        """The name of a device."""
        return self.homes[owner].name

    def key_text(self, owner: str) -> str:
        """The public key of a device, in the form that commands take."""
        return key_hex(self.key(owner))

    def command(self, *arguments: object) -> None:
        """Run a ``primad`` command to its end."""
        run = run_primad(*arguments)
        assert run.returncode == 0, run

    def key(self, owner: str) -> str:
        """The public key of a device."""
        return load_identity(self.homes[owner]).public

    def port(self, worker: str) -> int:
        """The control port of a worker."""
        return control_port(self.daemons[worker])

    def layer(self) -> str:
        """Return the digest of a layer that the worker has."""
        return next((self.homes["w1"] / "cache" / "layers").glob("*.gguf")).stem

    async def open_pairing(self) -> PairingCode:
        """Make the head show a pairing code; return it."""
        answer = await asyncio.to_thread(ask, self.homes["head"], OpenPairing())
        assert isinstance(answer, PairingCode)
        return answer

    def doors(self, pairing: int) -> list[Door]:
        """Return every TCP port on which a process of the cluster listens; ``pairing`` is that of the open code."""
        kinds = {self.head.port: "http", pairing: "pairing"}
        found = [
            Door(owner, port, kinds.get(port, "zmq"), self.key(owner))
            for owner in ("head", "w1")
            for port in sorted(listening(self.daemons[owner]))
        ]
        # head: HTTP, pairing, layers, relayed requests, admin, ring; worker: control, layers, admin, ring
        assert [door.kind for door in found].count("zmq") == 8, found
        assert len(found) == 10, found
        return found

    def costs(self) -> Costs:
        """Return what all processes use now, except solver processes, which come and go."""
        rss: dict[int, int] = {}
        descriptors: dict[int, int] = {}
        for process in (each for run in self.daemons.values() for each in steady_processes(run)):
            rss[process.pid] = process.memory_info().rss
            descriptors[process.pid] = process.num_fds()
        return Costs(rss, descriptors)

    def logs(self) -> int:
        """Return the number of lines logged so far, by ring processes too."""
        files = (path for home in self.homes.values() for path in (home / "run").glob("ring-*.log"))
        return sum(len(run.lines) for run in self.daemons.values()) + sum(
            path.read_text().count("\n") for path in files
        )

    @contextmanager
    def undisturbed_by(self, what: str) -> Iterator[None]:
        """Check that what happens inside changes no completion, and no process ends, grows, leaks or floods its log."""
        before, printed, began = self.costs(), self.logs(), time.monotonic()
        try:
            with self._serving_requests():
                yield
        except BaseException as exc:
            exc.add_note(self.output())
            raise
        took_s = time.monotonic() - began
        after = self.costs()
        assert after.rss_bytes.keys() == before.rss_bytes.keys(), f"{what}: a process ended\n{self.output()}"
        growth = {pid: (after.rss_bytes[pid] - rss) / 2**20 for pid, rss in before.rss_bytes.items()}
        lines = self.logs() - printed
        show(f"{what}: {took_s:.1f} s, MiB more {[round(each, 1) for each in growth.values()]}, {lines} lines")
        assert max(growth.values()) * 2**20 < MAX_GROWTH_BYTES, (what, growth)
        assert lines < 30 + LINES_PER_S * took_s, (what, self.output())
        assert "Traceback" not in self.output()
        wait_until(lambda: self._recovered(before), f"descriptors after {what}: {before}, {self.costs()}")

    def _recovered(self, before: Costs) -> bool:
        now = self.costs().descriptors
        return all(now[pid] <= count + MORE_DESCRIPTORS for pid, count in before.descriptors.items())

    @contextmanager
    def _serving_requests(self) -> Iterator[None]:
        """Repeat a request while inside; every completion equals the undisturbed one."""
        ended = threading.Event()
        reported: list[streams.Reported] = []

        def repeat_request() -> None:
            while not (reported and ended.wait(PAUSE_S)):
                reported.append(streams.ask(self.head, tokens=TOKENS))

        thread = threading.Thread(target=repeat_request)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        assert reported, "no answer came"
        for each in reported:
            assert (each.text, each.finish, each.error) == (self.undisturbed, "length", None), self.output()
        assert self.head.health()[0] == 200

    def output(self) -> str:
        """Return the output of all daemons."""
        return "\n\n".join(f"{name}:\n{run.output}" for name, run in self.daemons.items())


def trust(home: Path, device: Identity, role: TrustRole) -> None:
    """Make the device of ``home`` trust ``device``, as ``primad devices trust`` does."""
    store = TrustStore(home, load_identity(home), LocalTrust(home / "nobody"))
    store.add(trusted_now("rogue", device.public, BY_HAND, role))


def listening(run: Primad) -> set[int]:
    """Return the TCP ports on which a daemon's processes listen; they and the UDP ports must be on loopback."""
    return set().union(*map(listening_of, steady_processes(run)))


def listening_of(process: psutil.Process) -> set[int]:
    """Return the TCP ports on which one process listens."""
    found = set()
    for each in process.net_connections("inet"):
        if each.status == psutil.CONN_LISTEN:
            assert each.laddr.ip in ("127.0.0.1", "::ffff:127.0.0.1"), each
            found.add(each.laddr.port)
        elif each.type == socket.SOCK_DGRAM:
            assert each.laddr.port == 5353, each
    return found


def connected(one: psutil.Process, other: psutil.Process) -> bool:
    """Whether there is a connection between the two."""
    try:
        ends = [{each.laddr for each in process.net_connections("tcp")} for process in (one, other)]
        return any(each.raddr in ends[1] for each in one.net_connections("tcp") if each.raddr)
    except psutil.NoSuchProcess:
        return False


def guest(attacked: AttackedCluster, device: str = "guest") -> Who:
    """Return the introduction of a device that wants to be paired."""
    return Who(device=device, key=new_identity().public, cluster=attacked.cluster, version="0")


def admin_port(home: Path) -> int:
    """Return the admin port of the daemon of ``home``."""
    return int(json.loads(note_path(home).read_text())["port"])
