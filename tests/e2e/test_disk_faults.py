"""Disks fail and files change under a streaming model: one clear line, the layer is fetched again, no token changes.

A slow head leaves the layers to two workers with little memory, which read most of them for each token.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from primad.gguf.layers import HEADER_BYTES
from primad.profiler.records import write
from tests.e2e.cluster import PATIENCE_S, Head, Primad, all_joined, heading, ring_process, wait_until
from tests.e2e.streams import STORY, ask
from tests.fakes import bad_disk
from tests.fakes.profile import SEEDED_CPU, home_record, machine_record, speeds
from tests.figures import note
from tools.synth import FEW_TOKENS, write_model

pytestmark = pytest.mark.slow

MAX_RAM = "65MiB"
"""Memory for the runtime and little more than two layers, so that nearly all layers stream."""
TOKENS, MIDDLE = 32, 8
ONE_ATTENTION = ("--kv-type", "q8_0")
"""It needs flash attention. Of f16, a plan that is made while nobody asks may have either, by which layers stream."""
ENDLESS = 2000
"""Tokens of a request; few are sampled before it ends with an error: however late a client acts, there are more."""
needs_bad_disk = pytest.mark.skipif(
    not bad_disk.is_possible(), reason="a disk that fails needs Linux, root and /dev/fuse"
)
needs_pages = pytest.mark.skipif(sys.platform != "linux", reason="only on Linux are layers read where they are mapped")


def slow_machine(folder: Path) -> Path:
    """Return a cache folder in which this machine counts as a slow one."""
    slow = replace(SEEDED_CPU, speeds=speeds(3e8, 2e9), layer_s=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        for threads in (None, *range(1, 9)):
            write(
                msgspec.structs.replace(machine_record(threads), cpu=slow, ram_read_bytes_per_s=3e9),
                home_record(),
                folder,
            )
    return folder


class Lab:
    """A head and two workers; where possible, the layers of ``w1`` are on a disk that can fail."""

    def __init__(self, stack: ExitStack, model: Path, make_home: Callable[[str], Path], cache: Path) -> None:
        self.cluster = f"lab-{secrets.token_hex(6)}"
        self._homes = {name: make_home(name) for name in ("head", "w1", "w2")}
        self.disk = self._homes["w1"] / "disk"
        if bad_disk.is_possible():
            self.disk.mkdir()
            self.folder("w1").mkdir(parents=True)
            stack.enter_context(bad_disk.mounted(self.folder("w1"), self.disk))
        homes = [self._homes[name] for name in ("w1", "w2")]
        workers = all_joined(homes, self.cluster, "--max-ram", MAX_RAM, PRIMAD_KEEP_LOADED="0")
        self._runs: dict[str, Primad] = dict(zip(("w1", "w2"), stack.enter_context(workers), strict=True))
        arguments = ("--wait", 2, "--use-all", "--context", 256, *ONE_ATTENTION)
        slow = {"XDG_CACHE_HOME": str(slow_machine(cache))}
        self.head: Head = stack.enter_context(heading(model, self._homes["head"], self.cluster, *arguments, **slow))
        self._runs["head"] = self.head.run
        self.head.wait_serving()
        self.undisturbed = ask(self.head, tokens=TOKENS).text

    def folder(self, name: str) -> Path:
        """Return the folder of a device's layers."""
        return self._homes[name] / "cache" / "layers"

    def layers(self, name: str, *, streamed: bool) -> list[Path]:
        """Return the layer files that a device uses now; if ``streamed``, only those that are not in memory now."""
        run = self._runs[name]
        found = {place.path: place.rss for place in ring_process(run).memory_maps()}
        files = sorted(path for path in self.folder(name).glob("*.gguf") if str(path) in found)
        return [path for path in files if not streamed or found[str(path)] < path.stat().st_size // 2]

    def streamed(self, name: str, number: int) -> Path:
        """Wait until ``name`` has more than ``number`` layer files out of memory; return that one."""
        found: list[Path] = []

        def enough() -> bool:
            found[:] = self.layers(name, streamed=True)
            return len(found) > number

        wait_until(enough, f"{name} reads more than {number} layers")
        return found[number]

    def status(self) -> dict[str, dict]:
        """Return the status of each device of the ring by name."""
        return {device["name"]: device for device in self.head.status().get("devices", ())}

    def wait_computing(self, *names: str) -> None:
        """Wait until exactly these workers compute."""
        try:
            wait_until(lambda: set(self.status()) == {"head", *names}, f"{names} compute", stays=True)
        except AssertionError as exc:
            exc.add_note(self.head.run.output)
            raise

    def wait_whole(self, name: str, file: Path, is_whole: Callable[[], bool]) -> None:
        """Wait until a file was fetched again, or ``name`` has other layers: equal workers may swap places."""
        wait_until(
            lambda: (file.exists() and is_whole()) or file not in self.layers(name, streamed=False),
            f"{file.name} was fetched again",
        )

    def continues_after(self, act: Callable[[], object], what: str, *, breaking: bool = True) -> list[str]:
        """Check a completion with ``act`` in its middle; return the head's lines since, with the cause if ``breaking``."""
        before: list[int] = []

        def begin() -> None:
            before.append(len(self.head.run.lines))
            act()

        reported = ask(self.head, begin, still=True, tokens=TOKENS, middle=MIDDLE)
        if breaking and reported.error is None:  # the answer may be there before the line was read
            wait_until(lambda: bool(breaks(self.head.run.lines[before[0] :])), f"the head says why: {what}")
        printed = self.head.run.lines[before[0] :]
        note("recovery from a disk", reported.gap_s, f"{what}; {printed[:1]}")
        assert (reported.text, reported.finish, reported.error) == (self.undisturbed, "length", None), (
            self.head.run.output
        )
        assert self.head.health()[0] == 200
        assert "Traceback" not in "".join(run.output for run in self._runs.values())
        return printed


@pytest.fixture(scope="module")
def slow_model(smollm2: Path, tmp_path_factory) -> Path:
    """Write a model with most of SmolLM2's layers, its first tokens and random weights."""
    path = tmp_path_factory.mktemp("slow") / "slow-24-layers.gguf"
    shape = {
        "layers": 24,
        "width": 576,
        "heads": 9,
        "heads_kv": 3,
        "head_width": 64,
        "feed_forward": 1536,
        "tied": True,
    }
    write_model(path, vocabulary=f"from:{smollm2}", tokens=FEW_TOKENS, quantisation="q4_1", **shape)
    return path


@pytest.fixture(scope="module")
def lab(slow_model: Path, module_home, tmp_path_factory) -> Iterator[Lab]:
    with ExitStack() as stack:
        yield Lab(stack, slow_model, module_home, tmp_path_factory.mktemp("slow"))


def breaks(printed: list[str]) -> list[str]:
    """Return the lines that say why a ring was formed again."""
    return [line for line in printed if line.endswith("; forming the ring again")]


def written_to(file: Path) -> str:
    """Return the message about a file that was changed during a step that used it."""
    return f"{file}: this file was modified while it was used; it is no longer the model; forming the ring again"


def overwrite(file: Path) -> None:
    """Invert a byte in the middle of a file, as another program might."""
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 0xFF]))


@needs_pages
def test_layers_stream(lab):
    def stream() -> bool:
        devices = lab.status()  # a figure is null if the device did not reply in time
        return all((devices[name]["memory"]["streamed"] or 0) > 0 for name in ("w1", "w2"))

    wait_until(stream, "layers of both workers stream")


@needs_bad_disk
def test_a_layer_that_cannot_be_read(lab):
    lab.wait_computing("w1", "w2")
    bad = lab.streamed("w1", 0)
    printed = lab.continues_after(lambda: bad_disk.spoil(lab.disk / bad.name), "a bad sector under a layer of a worker")
    assert breaks(printed) == [f"w1: {bad}: weights cannot be read: Input/output error; forming the ring again"]
    lab.wait_computing("w1", "w2")
    lab.wait_whole("w1", bad, lambda: not bad_disk.is_spoilt(lab.disk / bad.name))


@needs_pages
def test_a_layer_file_is_cut_short(lab):
    lab.wait_computing("w1", "w2")
    cut = lab.streamed("w2", 0)
    size = cut.stat().st_size
    printed = lab.continues_after(lambda: os.truncate(cut, size // 2), "a layer file of a worker cut short")
    (line,) = breaks(printed)
    assert line.startswith("w2: ")
    assert str(cut) in line
    assert "cut short" in line or line == f"w2: {written_to(cut)}"
    lab.wait_computing("w1", "w2")
    lab.wait_whole("w2", cut, lambda: cut.stat().st_size == size)


@needs_pages
def test_a_layer_file_is_overwritten(lab):
    lab.wait_computing("w1", "w2")
    file = lab.streamed("w1", 1)
    before = file.read_bytes()
    printed = lab.continues_after(lambda: overwrite(file), "a layer file of a worker overwritten")
    assert breaks(printed) == [f"w1: {written_to(file)}"]
    lab.wait_computing("w1", "w2")
    lab.wait_whole("w1", file, lambda: file.read_bytes()[HEADER_BYTES:] == before[HEADER_BYTES:])


@needs_pages
def test_a_layer_file_is_replaced(lab, tmp_path):
    """The old file stays mapped, so nothing happens until the next load."""
    lab.wait_computing("w1", "w2")
    file = lab.streamed("w2", 1)
    other = file.with_name("other")
    other.write_bytes(os.urandom(file.stat().st_size))
    assert (
        breaks(lab.continues_after(lambda: other.replace(file), "a layer file of a worker replaced", breaking=False))
        == []
    )


@needs_pages
def test_a_layer_of_the_head_is_cut_short(lab):
    """The layer is resident, and the cut so small that its use is the first to notice, with a SIGBUS.

    If the cut comes between that use and the end of the step, the change of the file is reported instead.
    """
    lab.wait_computing("w1", "w2")
    cut = lab.layers("head", streamed=False)[0]
    size = cut.stat().st_size
    printed = lab.continues_after(lambda: os.truncate(cut, size - size // 100), "a layer file of the head cut short")
    (line,) = breaks(printed)
    signalled = f"a layer file was cut short or its disk failed while it was read (SIGBUS): {cut};"
    assert line.startswith(signalled) or line == written_to(cut), line
    assert cut.stat().st_size == size, "it was cut out of the model again"


@needs_bad_disk
def test_a_disk_that_fails_again_and_again(lab):
    """The device has already fetched layers again twice; the third time it is left out."""
    lab.wait_computing("w1", "w2")
    bad = lab.streamed("w1", 2)
    printed = lab.continues_after(lambda: bad_disk.spoil(lab.disk / bad.name), "a disk that fails for the third time")
    assert breaks(printed) == [f"w1: {bad}: weights cannot be read: Input/output error; forming the ring again"]
    lab.wait_computing("w2")

    def reason() -> str:
        return next((each["reason"] for each in lab.head.status()["cluster"] if each["device"] == "w1"), "")

    wait_until(lambda: reason().startswith(f"w1: {bad}: weights cannot"), "the reason for leaving it out is shown")


@needs_bad_disk
def test_the_model_file_of_a_single_device_cannot_be_read(slow_model, new_home, cluster, tmp_path):
    folder, disk = tmp_path / "models", tmp_path / "disk"
    folder.mkdir()
    disk.mkdir()
    shutil.copyfile(slow_model, disk / "model.gguf")
    model = folder / "model.gguf"

    def fail() -> None:
        bad_disk.spoil(disk / "model.gguf")
        model.open("rb").close()  # what was in memory of it is not any more

    with (
        bad_disk.mounted(folder, disk),
        heading(model, new_home("head"), cluster, "--alone", "--context", ENDLESS + 100) as head,
    ):
        head.wait_serving()
        reported = ask(head, fail, still=True, tokens=ENDLESS, middle=MIDDLE)
        assert reported.error is not None
        assert str(model) in reported.error["message"]
        wait_until(lambda: head.health()[0] == 503, "the health check says so")
        assert "check the disk" in head.health()[1]
        assert head.run.process.poll() is None
        assert "Traceback" not in head.run.output


@needs_pages
@pytest.mark.parametrize(
    "act", [overwrite, lambda file: os.truncate(file, file.stat().st_size // 2)], ids=["overwritten", "cut"]
)
def test_the_model_file_of_a_single_device_changes(slow_model, new_home, cluster, tmp_path, act):
    """There is no other source for the file: clients get an error that says what the owner can do."""
    model = tmp_path / "model.gguf"
    shutil.copyfile(slow_model, model)
    with heading(model, new_home("head"), cluster, "--alone", "--context", ENDLESS + 100) as head:
        head.wait_serving()
        reported = ask(head, lambda: act(model), still=True, tokens=ENDLESS, middle=MIDDLE)
        assert reported.error is not None
        assert str(model) in reported.error["message"]
        wait_until(lambda: head.health()[0] == 503, "the health check says so")
        assert "start 'primad serve' again" in head.health()[1]
        body = {"prompt": STORY, "max_tokens": 1}
        answer = httpx.post(f"{head.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 503
        assert str(model) in answer.json()["error"]["message"]
        assert head.run.process.poll() is None
        assert "Traceback" not in head.run.output
