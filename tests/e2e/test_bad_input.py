"""Bad input gets one clear line that names the file or flag, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from gguf import GGUFValueType

from primad.gguf.header import read_header, scalar_value
from tests.e2e.cluster import (
    PATIENCE_S,
    PRIMAD,
    command_of,
    environment,
    joined,
    marked,
    primad,
    serving,
    snapshot,
)
from tests.forks import executing
from tests.ports import free_port
from tools.synth import write_model

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Ended:
    """The result of a command."""

    code: int
    out: str
    errors: list[str]


def forked(*arguments: object, temporary: Path, **more: str) -> Ended:
    """Run ``primad`` to its end; check that it left no process and no temporary file."""
    mark = os.urandom(8).hex()
    run = subprocess.run(
        [PRIMAD, *map(str, arguments)],
        env=environment(mark, temporary, **more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert [command_of(process) for process in marked(mark)] == []
    assert list(temporary.rglob("*")) == []
    return Ended(run.returncode, run.stdout, run.stderr.splitlines())


def ended(*arguments: object, temporary: Path, **more: str) -> Ended:
    """The same, started by ``exec``."""
    with executing():
        return forked(*arguments, temporary=temporary, **more)


def assert_refused(run: Ended, *named: object, after: tuple[str, ...] = ()) -> None:
    """Check for exit code 2 and one line with all of ``named``, after progress lines that begin with ``after``."""
    *progress, error = run.errors
    assert all(line.startswith(after) for line in progress), run
    assert error.startswith("primad: error: "), run
    for name in named:
        assert str(name) in error
    assert run.code == 2
    assert run.out == ""


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """The temporary folder of a test's processes."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid model of 6 layers, under 1 MB."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_model(path)
    return path


def numbers(content: bytes, at: int, form: str, value: int) -> bytes:
    """Return ``content`` with one number overwritten."""
    return content[:at] + struct.pack(form, value) + content[at + struct.calcsize(form) :]


def first_offset(content: bytes) -> int:
    """Return the position in the header of the offset of ``token_embd.weight``."""
    name = b"token_embd.weight"
    return content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 2 * 8 + 4


DAMAGES = {
    "empty": lambda content: b"",
    "text": lambda content: b"This is a letter, not a model.\n" * 100,
    "four bytes": lambda content: content[:4],
    "cut in the counts": lambda content: content[:20],
    "cut in the metadata": lambda content: content[:700],
    "cut in the tensor infos": lambda content: content[: first_offset(content)],
    "cut in the weights": lambda content: content[: len(content) // 2],
    "cut by one byte": lambda content: content.rstrip(b"\0")[:-1],
    "tensor count": lambda content: numbers(content, 8, "<Q", 1 << 60),
    "metadata count": lambda content: numbers(content, 16, "<Q", (1 << 64) - 1),
    "key length": lambda content: numbers(content, 24, "<Q", 1 << 40),
    "offset beyond the file": lambda content: numbers(content, first_offset(content), "<Q", 1 << 50),
    "offset that is crooked": lambda content: numbers(content, first_offset(content), "<Q", 7),
    "dimension": lambda content: numbers(content, first_offset(content) - 12, "<Q", 1 << 62),
    "tensor type": lambda content: numbers(content, first_offset(content) - 4, "<I", 4000),
    "version": lambda content: numbers(content, 4, "<I", 77),
    "big-endian": lambda content: content[:4] + struct.pack(">IQQ", 3, 10, 10) + content[24:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_model(tiny, tmp_path, temporary, damage):
    model, home = tmp_path / "model.gguf", tmp_path / "home"
    model.write_bytes(DAMAGES[damage](tiny.read_bytes()))
    run = forked("serve", "--model", model, "--home", home, temporary=temporary)
    assert_refused(run, model, *(["big-endian"] if damage == "big-endian" else []))
    assert not home.exists()


def test_model_cut_at_many_bytes(tiny, tmp_path, temporary):
    """The cuts hit every structure of the header; the fast tests fuzz the reader itself."""
    content, home = tiny.read_bytes(), tmp_path / "home"
    end = read_header(tiny).data_offset
    model = tmp_path / "model.gguf"
    for at in range(1, end, end // 7):
        model.write_bytes(content[:at])
        assert_refused(forked("serve", "--model", model, "--home", home, temporary=temporary), model)
    assert not home.exists()


def test_no_such_model(tmp_path, temporary):
    model, home = tmp_path / "missing.gguf", tmp_path / "home"
    run = ended("serve", "--model", model, "--home", home, temporary=temporary)
    assert_refused(run, model, "no such file")
    assert not home.exists()


@pytest.mark.parametrize("damage", ["text", "cut in the weights", None], ids=str)
def test_an_invalid_embedding_model(tiny, tmp_path, temporary, damage):
    second = tmp_path / "second.gguf"
    if damage is not None:
        second.write_bytes(DAMAGES[damage](tiny.read_bytes()))
    home = tmp_path / "home"
    run = forked("serve", "--model", tiny, "--embedding", second, "--home", home, temporary=temporary)
    assert_refused(run, second)
    assert not home.exists()


def test_model_is_a_directory(tmp_path, temporary):
    home = tmp_path / "home"
    assert_refused(forked("serve", "--model", tmp_path, "--home", home, temporary=temporary), tmp_path, "directory")
    assert not home.exists()


def test_part_of_a_split_model_is_missing(tmp_path, temporary):
    first, home = tmp_path / "big-00001-of-00003.gguf", tmp_path / "home"
    counts = {
        "split.no": scalar_value(GGUFValueType.UINT16, 0),
        "split.count": scalar_value(GGUFValueType.UINT16, 3),
        "split.tensors.count": scalar_value(GGUFValueType.INT32, 100),
    }
    write_model(first, values=counts)
    run = forked("serve", "--model", first, "--home", home, temporary=temporary)
    assert_refused(run, "big-00002-of-00003.gguf", "missing")
    assert not home.exists()


def test_architecture_that_cannot_be_cut(tiny, tmp_path, new_home, cluster, temporary):
    content = tiny.read_bytes()
    model = tmp_path / "strange.gguf"
    model.write_bytes(content.replace(b"llama", b"rwkv7"))
    home, worker_home = new_home("head"), new_home("worker")
    with joined(worker_home, cluster):
        before = snapshot(worker_home)
        arguments = ("--home", home, "--name", "head", "--cluster", cluster, "--port", free_port(), "--wait", 1)
        run = forked("serve", "--model", model, *arguments, temporary=temporary)
        assert_refused(run, "rwkv7", model)
        assert snapshot(worker_home) == before
    assert_clean(home)


def assert_clean(home: Path) -> None:
    """Check that a used home folder has no temporary files."""
    files = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    trust = {f"{name}.{kind}" for name in ("identity", "trust") for kind in ("json", "lock")}
    assert files <= {"config.toml", "profile.json", "daemon.lock", "digests.json", *trust} | {
        name for name in files if name.startswith("cache/layers/") and name.endswith((".gguf", ".tree"))
    }


def test_windows_that_do_not_fit(tiny, new_home, cluster, temporary):
    home, worker_home = new_home("head"), new_home("worker")
    refused = {
        ("--windows", "3,9"): ("--windows 3,9", "12 layers", "6"),
        ("--windows", "2,2", "--rounds", 2): ("--windows 2,2", "8 layers", "6"),
        ("--windows", "1,1,1"): ("--windows 1,1,1", "3 devices", "found 2"),
    }
    with joined(worker_home, cluster):
        for arguments, named in refused.items():
            base = ("--home", home, "--name", "head", "--cluster", cluster, "--port", free_port(), "--wait", 1)
            run = forked("serve", "--model", tiny, *base, *arguments, temporary=temporary)
            assert_refused(run, *named, after=("head: measuring links: done", "waiting for 1 of 1 devices: "))
            assert_clean(home)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--windows", "ten"), "--windows ten"),
        (("--windows", "3,,4"), "--windows 3,,4"),
        (("--windows", "0,3"), "--windows 0,3"),
        (("--windows", "-1,3"), "--windows -1,3"),
        (("--rounds", "2"), "--rounds 2"),
        (("--rounds", "0", "--windows", "1"), "--rounds"),
        (("--alone", "--wait", "1"), "--alone"),
        (("--alone", "--use-all"), "--use-all"),
        (("--windows", "3", "--use-all"), "--use-all"),
        (("--objective", "speed"), "--objective speed"),
        (("--extra-buffers", "maybe"), "--extra-buffers maybe"),
        (("--context", "1000000"), "--context 1000000"),
        (("--prompt", "64", "--context", "64"), "--prompt 64"),
        (("--kv-type", "q5_1"), "--kv-type q5_1"),
        (("--sequences", "many"), "--sequences many: give a whole number from 1 to 64, or auto"),
        (("--tool-parser", "odd"), "--tool-parser odd: choose auto, "),
        (("--port", "99999"), "--port"),
        (("--insecure-lan",), "--insecure-lan"),
        (("--listen", "no.such.host.invalid"), "--listen"),
        (("--interface", "no-such0"), "no-such0"),
        (("--max-ram", "much"), "--max-ram: 'much'"),
        (("--nice", "20"), "--nice"),
        (("--host", "no.such.host.invalid"), "--host"),
        (("--device", "desk:"), "desk:"),
        (("--device", "desk:0"), "desk:0"),
        (("--cluster", "my home"), "--cluster"),
        (("--name", "-"), "--name"),
        (("--threads", "0"), "--threads"),
        (("--frobnicate",), "--frobnicate"),
        (("surplus",), "surplus"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_of_serve(tiny, tmp_path, temporary, arguments, named):
    home = tmp_path / "home"
    run = forked("serve", "--model", tiny, "--home", home, *arguments, temporary=temporary)
    assert_refused(run, named)
    assert not home.exists()


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        (("serve", "--lora", "x.gguf"), {}, "--lora"),
        (("join", "--insecure-lan"), {}, "--insecure-lan"),
        (("join", "--code", "lamp"), {}, "lamp"),
        (("join", "--device", "127.0.0.1:7770"), {}, "--code"),
        (("join", "--max-disk", "little"), {}, "--max-disk: 'little'"),
        (("leave",), {}, "no primad runs"),
        (("pair",), {}, "no primad runs"),
        (("join", "--port", "x"), {}, "--port"),
        (("join", "--name", "a b"), {}, "--name"),
        (("join",), {"PRIMAD_NAME": "a b"}, "PRIMAD_NAME"),
        (("join",), {"PRIMAD_PORT": "many"}, "PRIMAD_PORT"),
        (("join",), {"PRIMAD_HOME": "/proc/nothing"}, "/proc/nothing"),
        (("join",), {"PRIMAD_HOME": "/dev/null"}, "/dev/null"),
        (("chat", "Hi", "--url", "http://127.0.0.1:1"), {}, "http://127.0.0.1:1"),
        (("chat", "Hi", "--url", "nonsense"), {}, "nonsense"),
        (("chat", "Hi", "--temperature", "3"), {}, "--temperature"),
        (("devices", "--seconds", "soon"), {}, "--seconds"),
        (("frobnicate",), {}, "frobnicate"),
        (("--frobnicate",), {}, "--frobnicate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_other_commands(tmp_path, temporary, arguments, variables, named):
    before = snapshot(tmp_path)
    variables = {"PRIMAD_HOME": str(tmp_path / "home"), **variables}
    assert_refused(forked(*arguments, temporary=temporary, **variables), named)
    assert snapshot(tmp_path) == before


def test_configuration_file(tmp_path, temporary):
    home = tmp_path / "home"
    home.mkdir()
    for text, named in (
        ("name = 'x", "TOML"),
        ("nmae = 'x'", "nmae"),
        ("port = 'x'", "'port'"),
        ("threads = 0", "threads"),
    ):
        (home / "config.toml").write_text(text)
        before = snapshot(home)
        assert_refused(forked("join", "--home", home, temporary=temporary), home / "config.toml", named)
        assert snapshot(home) == before


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is already in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_port_in_use(tiny, new_home, cluster, temporary, taken):
    home = new_home("home")
    run = forked("serve", "--model", tiny, "--home", home, "--port", taken, "--alone", temporary=temporary)
    assert_refused(run, f"--port {taken}")
    assert_clean(home)
    assert_refused(forked("join", "--home", home, "--port", taken, "--cluster", cluster, temporary=temporary), taken)
    assert_clean(home)


def test_fewer_devices_than_waited_for(tiny, new_home, cluster, temporary):
    home = new_home("home")
    arguments = ("--cluster", cluster, "--port", free_port(), "--wait", 2, "--wait-timeout", 1)
    run = forked("serve", "--model", tiny, "--home", home, *arguments, temporary=temporary)
    assert_refused(run, "--wait 2", "0 of 2", after=("waiting for 2 of 2 devices: ",))
    assert_clean(home)


def test_named_device_that_is_unreachable(tiny, new_home, cluster, temporary):
    """The head waits for it, since services and containers may start in any order."""
    home, port = new_home("home"), free_port()
    arguments = ("--cluster", cluster, "--port", free_port(), "--device", f"127.0.0.1:{port}")
    with primad("serve", "--model", tiny, "--home", home, *arguments, temporary=temporary) as head:
        head.wait_for(f"^--device 127.0.0.1:{port}: .*; retrying. Start 'primad join' there; ")
        head.wait_for("^waiting for 1 of 1 devices: ")
        assert head.stop() == 0
    assert_clean(home)


def test_home_of_another_daemon(tiny, new_home, cluster, temporary):
    home = new_home("home")
    with joined(home, cluster):
        before = snapshot(home)
        assert_refused(forked("join", "--home", home, temporary=temporary), home)
        run = forked("serve", "--model", tiny, "--home", home, "--port", free_port(), temporary=temporary)
        assert_refused(run, home)
        assert snapshot(home) == before


def test_a_busy_worker_refuses_another_head(tiny, new_home, cluster, temporary):
    """The worker names its head, which is not disturbed."""
    home, port = new_home("second"), free_port()
    with (
        joined(new_home("worker"), cluster),
        serving(tiny, new_home("first"), cluster, "--wait", 1, "--use-all") as head,
    ):
        arguments = ("--cluster", cluster, "--port", port, "--name", "second", "--wait", 1)
        with primad("serve", "--model", tiny, "--home", home, *arguments, temporary=temporary) as second:
            second.wait_for("^worker is left out: worker works for the head first$")
            assert second.stop() == 0
        assert head.health()[0] == 200
    assert_clean(home)


def test_warnings_are_lines_of_their_own(tmp_path, temporary):
    run = ended("serve", "--model", tmp_path / "x.gguf", "--host", "0.0.0.0", "--no-auth", temporary=temporary)
    assert [line.split(":")[0] for line in run.errors] == ["warning", "primad"]
    assert run.code == 2


def test_a_killed_daemon_leaves_a_home_that_works(new_home, cluster):
    home = new_home("worker")
    with joined(home, cluster) as first:
        first.kill()
        (home / "run" / "window-7-0.gguf").write_bytes(b"left")
        (home / "cache" / "layers" / "partial" / "left").write_bytes(b"left")
        with primad("join", "--home", home, "--cluster", cluster) as second:
            second.wait_for("waiting for a head")
            assert second.stop() == 0
            assert_clean(home)
