"""A primad cluster on the devices of a lab: real daemons, faults and streamed completions.

    with Homelab(fleet) as lab, Cluster(lab, model) as cluster:
        cluster.start()
        stream = cluster.stream("Why is the sky blue?", max_tokens=64)
        stream.wait_tokens(8)
        died = cluster.now()
        lab.device("b").kill()
        stream.wait_end()
        stream.recovered_s(died)

The first device of the lab is the head unless told otherwise. Devices count as measured, with the made-up figures of
``tests/fakes/profile.py``, and trust each other through files in their homes; ``pair`` pairs them as users do.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.homelab.running import PATIENCE_S, Running, running
from tests.homelab.stream import Stream
from tools.lab import Homelab
from tools.lab.device import Device

REPOSITORY = Path(__file__).parents[2]
PRIMAD = Path(sys.executable).with_name("primad")
CLIENT = (sys.executable, "-m", "tests.homelab.client")
HTTP_PORT = 8080
URL = f"http://127.0.0.1:{HTTP_PORT}"
START_S = 240.0
LAST_LINES = 20
_LOOK_S = 0.1
"""Interval at which the head is checked to be alive; the awaited state itself is reported at once."""
CODE = r"\b[0-9]{1,2}-[a-z]+-[a-z]+\b"


class Cluster:
    """The daemons of one lab. ``daemons`` has the running or ended one of each device by name.

    ``trusting`` devices know each other's keys from the start. Extra arguments are those of ``primad serve`` and
    ``primad join``. Every worker is to have layers, unless ``--windows`` say how many have. A plan that serves gives way
    to a better one if that gains the share ``gain``; as it is, only to one with more devices: the times of a busy machine
    may make any other plan look better.
    """

    def __init__(
        self,
        lab: Homelab,
        model: Path,
        *,
        head: str | None = None,
        trusting: bool = True,
        serve: Sequence[object] = (),
        join: Sequence[object] = (),
        gain: float = 2.0,
    ) -> None:
        self.lab = lab
        self.model = model
        self.head = lab.device(head) if head is not None else lab.devices[0]
        self.workers = tuple(device for device in lab.devices if device is not self.head)
        self.daemons: dict[str, Running] = {}
        self._trusting, self._gain = trusting, gain
        self._serve, self._join = tuple(serve), tuple(join)
        self._clients: list[Running] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for started in (*self._clients, *self.daemons.values()):
            started.end()

    @staticmethod
    def now() -> float:
        """Return the time on the clock of all streams."""
        return time.monotonic()

    def start(self, timeout_s: float = START_S) -> None:
        """Start the workers, then the head; wait until it serves with all of them."""
        self.prepare()
        for daemon in [self._start(worker, "join", *self._join) for worker in self.workers]:
            daemon.wait_for("waiting for a head")
        self.start_head(*self.gathered)
        self.wait_serving(timeout_s)

    @property
    def gathered(self) -> tuple[object, ...]:
        """Arguments of a head that waits for every worker."""
        return ("--wait", len(self.workers), *(() if "--windows" in self._serve else ("--use-all",)))

    def prepare(self) -> None:
        """Make the home folders: profiled, and trusting each other if the cluster is ``trusting``."""
        for child in [self._seeding(device) for device in self.lab.devices]:
            assert child.wait(PATIENCE_S) == 0, "a device could not be seeded; its error stands above"
        if self._trusting:
            introduce(self.lab.devices)

    def seed(self, name: str, speed: float) -> None:
        """Make a device count as ``speed`` times as fast as others, from its next start."""
        assert self._seeding(self.lab.device(name), speed).wait(PATIENCE_S) == 0, "its error stands above"

    def _seeding(self, device: Device, speed: float = 1.0) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tests.homelab.seed", str(speed)]
        return device.popen(words, env=self._env(), stdin=subprocess.DEVNULL)

    def start_worker(self, name: str, *arguments: object) -> Running:
        """Start or restart ``primad join`` on a device, and wait until it waits for a head."""
        worker = self._start(self.lab.device(name), "join", *self._join, *arguments)
        worker.wait_for("waiting for a head")
        return worker

    def start_head(self, *arguments: object) -> Running:
        """Start or restart ``primad serve`` on the head without waiting."""
        plain = ("--model", self.model, "--port", HTTP_PORT, "--extra-buffers", "off")
        return self._start(self.head, "serve", *plain, *self._serve, *arguments)

    def _start(self, device: Device, command: str, *arguments: object) -> Running:
        if (earlier := self.daemons.pop(device.name, None)) is not None:
            earlier.end()
        words = (PRIMAD, command, "--name", device.name, "--cluster", f"lab-{self.lab.id}", *arguments)
        self.daemons[device.name] = Running(device, *words, **self._env())
        return self.daemons[device.name]

    def _env(self) -> dict[str, str]:
        # The checkout goes first on the path of whatever primad starts; its colours would get between words.
        path = f"{REPOSITORY}:{REPOSITORY / 'solver'}"
        return {"PYTHONPATH": path, "NO_COLOR": "1", "PRIMAD_REPLAN_GAIN": f"{self._gain:g}"}

    def code(self, timeout_s: float = PATIENCE_S) -> tuple[str, int]:
        """Return the code that ``primad pair`` shows on the head, and the port that accepts it."""
        done = self.head.run([PRIMAD, "pair"], env=self._env(), timeout_s=timeout_s)
        code, port = re.search(CODE, done.stdout), re.search(r"--device \S+:([0-9]+)", done.stdout)
        assert code is not None, f"primad pair shows no code: {done.stdout}{done.stderr}"
        assert port is not None, f"primad pair shows no port: {done.stdout}"
        return code[0], int(port[1])

    def bring(self, name: str, code: str, port: int | None = None) -> Running:
        """Start ``primad join --code`` on a device, with the head's address if ``port`` is given, without waiting."""
        there = () if port is None else ("--device", f"{self.head.ip}:{port}")
        return self._start(self.lab.device(name), "join", *self._join, "--code", code, *there)

    def pair(self, name: str, timeout_s: float = PATIENCE_S) -> Running:
        """Pair a device as users do: ``primad pair`` on the head, ``primad join --code`` on the device."""
        worker = self.bring(name, self.code(timeout_s)[0])
        worker.wait_for("paired with", timeout_s)
        return worker

    def run_command(self, name: str, *words: str) -> None:
        """Run ``primad`` with ``words`` on a device, such as ``pause``."""
        done = self.lab.device(name).run([PRIMAD, *words], env=self._env(), timeout_s=PATIENCE_S)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"

    def stream(self, prompt: str, max_tokens: int, **body: Any) -> Stream:
        """Request a streamed chat completion, greedy unless ``body`` says otherwise, without waiting.

        The whole prompt is computed; no cached prefix is used.
        """
        asked = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "cache_prompt": False,
            "temperature": 0,
            "stream": True,
            **body,
        }
        running = Running(self.head, *CLIENT, "chat", URL, json.dumps(asked), **self._env())
        self._clients.append(running)
        return Stream(running)

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return status and body of the health check; status 0 without a response."""
        printed = self._client("health")
        return int(printed["status"]), printed["body"]

    def status(self) -> dict[str, Any]:
        """Return the head's ``/status``."""
        return dict(self._client("status")["body"])

    def is_answering(self) -> bool:
        """Return whether a request is open."""
        return any(slot["is_processing"] for slot in self._client("slots")["body"])

    def wait_serving(self, timeout_s: float = START_S, detail: str = "") -> float:
        """Wait until the head serves, with this ``detail`` of the health check if given; return the time.

        Fails at once if the head ends first.
        """
        head = self.daemons[self.head.name]
        with running(self.head, *CLIENT, "wait", URL, f"{timeout_s:g}", detail, **self._env()) as client:
            while client.process.poll() is None:
                if (code := head.process.poll()) is not None:
                    raise AssertionError(f"the head ended with code {code} and said at last:\n{head.last(LAST_LINES)}")
                client.wait_news(_LOOK_S)
            assert client.wait_end(timeout_s) == 0, client.output
            printed: dict[str, Any] = json.loads(client.output)
        serves = printed["status"] == 200 and detail in ("", printed["body"]["detail"])
        assert serves, f"not serving within {timeout_s:g} s: {printed['body']}\n{self.logs()}"
        return float(printed["at"])

    def _client(self, action: str, *words: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        done = self.head.run([*CLIENT, action, URL, *words], env=self._env(), timeout_s=timeout_s)
        assert done.returncode == 0, done.stderr
        printed: dict[str, Any] = json.loads(done.stdout)
        return printed

    def logs(self) -> str:
        """Return the output of every daemon, for failing tests."""
        return "\n".join(f"--- {name}\n{daemon.output}" for name, daemon in self.daemons.items())


def home(device: Device) -> Path:
    """Return the home folder of a device's primad, as this process sees it."""
    return device.outside / "primad"


def introduce(devices: Sequence[Device]) -> None:
    """Make all devices trust each other, through files in their homes."""
    from primad.trust.identity import load_identity
    from primad.trust.local_trust import LocalTrust
    from primad.trust.trust import BY_HAND, HEAD, TrustStore, trusted_now

    for device in devices:
        home(device).mkdir(parents=True, exist_ok=True)
    identities = {device.name: load_identity(home(device)) for device in devices}
    for device in devices:
        store = TrustStore(home(device), identities[device.name], LocalTrust(device.outside / "local-trust"))
        for name, identity in identities.items():
            if name != device.name:
                store.add(trusted_now(name, identity.public, BY_HAND, HEAD))
