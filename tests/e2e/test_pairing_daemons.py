"""Two users' devices: strangers until a code is typed, then they trust each other until one is revoked."""

from __future__ import annotations

import json
import re
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from zeroconf import IPVersion, ServiceBrowser, ServiceListener, Zeroconf

from primad.network.discovery import SERVICE
from primad.trust.local_trust import VARIABLE as LOCAL_TRUST
from primad.trust.words import parse_code
from tests.e2e.cluster import PATIENCE_S, PRIMAD, Head, Primad, command_of, environment, heading, joined, wait_until
from tools.synth import write_model

pytestmark = pytest.mark.slow


@dataclass
class Owner:
    """One user's device: its home, and its folder of local trust between daemons of one user."""

    home: Path
    local: str

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a ``primad`` command on this device to its end."""
        return subprocess.run(
            [PRIMAD, *map(str, arguments), "--home", self.home],
            env=environment("command", **{LOCAL_TRUST: self.local}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    @property
    def secret(self) -> str:
        """The secret key of this device."""
        return json.loads((self.home / "identity.json").read_text())["secret"]


@pytest.fixture
def owners(tmp_path, new_home) -> tuple[Owner, Owner]:
    """The owners of a head and of a worker."""
    made = [Owner(new_home(name), str(tmp_path / f"local-{name}")) for name in ("head", "worker")]
    return made[0], made[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 6 layers, under 1 MB."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_model(path)
    return path


def a_head(stack: ExitStack, owner: Owner, model: Path, cluster: str) -> Head:
    """Start a head with default timeouts, so that a worker notices its silence soon."""
    local = {LOCAL_TRUST: owner.local}
    head = stack.enter_context(heading(model, owner.home, cluster, "--use-all", config="", **local))
    head.wait_serving()
    return head


def a_worker(stack: ExitStack, owner: Owner, cluster: str, *arguments: object) -> Primad:
    return stack.enter_context(joined(owner.home, cluster, *arguments, **{LOCAL_TRUST: owner.local}))


def shown(owner: Owner) -> tuple[str, str]:
    """Return the code that ``primad pair`` shows, and the host:port that accepts it."""
    answer = owner.run("pair")
    assert (answer.returncode, answer.stderr) == (0, "")
    code = re.search(r"^code (\S+), good for ", answer.stdout)
    place = re.search(r"--device \S+:(\d+)$", answer.stdout, re.MULTILINE)
    assert code is not None, answer.stdout
    assert place is not None, answer.stdout
    return code[1], f"127.0.0.1:{place[1]}"


def another(code: str) -> str:
    """Return a wrong code with the same number."""
    known = parse_code(code)
    return f"{known.number}-{'lamp' if known.first != 'lamp' else 'river'}-{known.second}"


def test_strangers_pair_by_a_code_and_know_each_other_until_one_is_revoked(tiny, owners, cluster):
    ours, theirs = owners
    with ExitStack() as stack:
        head = a_head(stack, ours, tiny, cluster)
        stranger = a_worker(stack, theirs, cluster)
        head.run.wait_for("^worker was discovered, but is not paired; 'primad pair' here shows a code")
        assert stranger.stop() == 0

        code, place = shown(ours)
        wrong = theirs.run("join", "--name", "worker", "--cluster", cluster, "--code", another(code), "--device", place)
        assert wrong.returncode == 2
        assert re.fullmatch(r"primad: error: .*wrong code \(4 tries are left\).*\n", wrong.stderr)

        worker = a_worker(stack, theirs, cluster, "--code", code, "--device", place)
        worker.wait_for("^paired with head$")
        head.run.wait_for("^paired with worker$")
        head.run.wait_for("^worker: [0-9]+ layers?")
        assert_secrets_stay_home(owners, cluster, [head.run, worker, stranger], code)
        assert worker.stop() == 0
        assert head.run.stop() == 0

    with ExitStack() as stack:
        worker = a_worker(stack, theirs, cluster)
        head = a_head(stack, ours, tiny, cluster)
        head.run.wait_for("^worker: [0-9]+ layers?")
        before = len(head.run.lines)
        revoked = ours.run("devices", "revoke", "worker")
        assert revoked.returncode == 0
        assert revoked.stdout.startswith("worker is no longer trusted here")
        head.run.wait_for("^worker is gone: it is no longer trusted", start=before)
        wait_until(lambda: head.health()[0] == 200, "the head continues alone")
        head.run.wait_for("^head: 6 layers", start=before)
        worker.wait_for("^head revoked this device and gives it no more work")
        assert not any(line.startswith("worker: ") for line in head.run.lines[before:])
        assert_secrets_stay_home(owners, cluster, [head.run, worker], code)
        assert worker.stop() == 0


def assert_secrets_stay_home(owners: tuple[Owner, Owner], cluster: str, runs: list[Primad], code: str) -> None:
    """Check that no secret key is in arguments, output, logs or mDNS, and other users cannot read the key files."""
    printed = [run.output for run in runs]
    arguments = [" ".join(command_of(process)) for run in runs for process in run.processes()]
    logs = [path.read_text(errors="replace") for owner in owners for path in owner.home.glob("run/*.log")]
    announced = list(mdns(cluster))
    assert any("worker" in text and cluster in text for text in announced)
    for owner in owners:
        for text in (*printed, *arguments, *logs, *announced):
            assert owner.secret not in text
        for name in ("identity.json", "trust.json"):
            assert stat.S_IMODE((owner.home / name).stat().st_mode) == 0o600
    known = parse_code(code)
    assert not any(
        word in text for text in (*announced, *logs) for word in (str(known), f"{known.first}-{known.second}")
    )


def mdns(cluster: str) -> Iterator[str]:
    """Wait for the worker of ``cluster`` in mDNS on loopback; return all announcements as text."""
    names: set[str] = set()
    found: set[str] = set()

    class Listener(ServiceListener):
        def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
            del zc, type_
            names.add(name)

        update_service = add_service

        def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
            del zc, type_, name

    with Zeroconf(interfaces=["127.0.0.1"], ip_version=IPVersion.V4Only) as zeroconf:
        browser = ServiceBrowser(zeroconf, SERVICE, Listener())

        def is_announced() -> bool:
            for name in tuple(names):  # queried again if it did not reply in time
                info = zeroconf.get_service_info(SERVICE, name)
                found.add(f"{name} {info and info.properties}")
            return any("worker" in text and cluster in text for text in found)

        wait_until(is_announced, "the worker is announced")
        browser.cancel()
    return iter(found)
