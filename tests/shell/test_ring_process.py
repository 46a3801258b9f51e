"""The ring process from the daemon's side: how it starts, what it reports when it cannot continue, and how it ends."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from halda.assignment import in_memory
from primad.daemon.ring_process import CUT_SHORT, RingProcess, _last_line
from primad.engine.protocol import EngineOptions, WindowSource
from primad.errors import ProtocolError, RingError, WeightsError
from primad.ring.messages import (
    FAULTS,
    Cancel,
    Connect,
    Drain,
    HeadPart,
    Open,
    Opened,
    Reopen,
    Report,
    RingBroken,
    RingCommand,
    Status,
)
from primad.system.children.channel import LENGTH, frame
from primad.system.children.spawn import SPIN_COUNT, environment
from primad.system.gpus import NO_GPU
from tests.fakes.ring import generate

PATIENCE_S = 180
KEY = zmq.curve_keypair()[0].decode()
OPTIONS = EngineOptions(context=64, sequences=1, rows=16, threads=1, batch_threads=1, kv_type="f16", lock=False)
WHOLE = WindowSource(
    window=0, metadata="/nowhere/model.gguf", layers=(), assignment=in_memory(0, 1), extra_buffers=False
)


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[RingProcess]:
    """A ring process; asserts that it leaves nothing behind."""
    process = await RingProcess.start(folder / "ring.log", threads=1)
    watched = psutil.Process(process.pid)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield process
    finally:
        await process.close()
        assert not watched.is_running(), "the ring process is still there"


def an_open(**changes) -> Open:
    opening = Open(
        ring=1,
        epoch=1,
        windows=[WHOLE],
        route=1,
        width=8,
        host="127.0.0.1",
        head=HeadPart(model="/nowhere/model.gguf", vocabulary=9, ends=(), depth=1, at_once=1, chunk_rows=8, min_rows=1),
        step_timeout_s=5,
        options=OPTIONS,
        read_ahead_bytes=0,
        usage=None,
    )
    return msgspec.structs.replace(opening, **changes)


def a_reopen(**changes) -> Reopen:
    reopen = Reopen(
        ring=2,
        epoch=5,
        windows=[1],
        route=3,
        host="127.0.0.1",
        step_timeout_s=5,
        assignments=[in_memory(0, 1)],
        read_ahead_bytes=0,
    )
    return msgspec.structs.replace(reopen, **changes)


async def last_words(process: RingProcess) -> str:
    """The error that ends its events."""
    with pytest.raises(RingError) as caught:
        async for _ in process.events():
            pass
    return str(caught.value)


async def broken_by(folder: Path, *commands: RingCommand | bytes) -> str:
    """The last words of a ring process after ``commands``; bytes are sent unchanged."""
    async with started(folder) as process:
        for command in commands:
            if isinstance(command, bytes):
                process._writer.write(command)
            else:
                await process.send(command)
        return await last_words(process)


async def test_it_ends_when_its_daemon_closes_the_connection(tmp_path):
    process = await RingProcess.start(tmp_path / "ring.log", threads=1)
    watched = psutil.Process(process.pid)
    async with asyncio.timeout(PATIENCE_S):
        process._writer.close()
        code = await asyncio.to_thread(watched.wait, PATIENCE_S)
        await process.close()
    assert code in (0, None)
    assert process._process.returncode == 0
    assert not (tmp_path / "ring.log").exists(), "it had nothing to say"


async def test_closing_twice_is_closing(tmp_path):
    async with started(tmp_path) as process:
        await process.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_the_signal_that_ended_it_is_named(tmp_path, number):
    async with started(tmp_path) as process:
        os.kill(process.pid, number)
        assert await last_words(process) == f"the ring process was ended by {number.name}"


@pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="the system has no SIGBUS")
async def test_a_process_with_a_truncated_mapped_file_logs_its_stacks_and_one_line(tmp_path):
    """llama.cpp reads weights through a mapping, and reading beyond the end of the file raises SIGBUS."""
    async with started(tmp_path) as process:
        await process.send(an_open(route=3, head=None, windows=[]))
        events = process.events()
        assert isinstance(await anext(events), Opened)  # its signal handlers are installed
        os.kill(process.pid, signal.SIGBUS)
        with pytest.raises(WeightsError, match="cut short or its disk failed while it was read") as caught:
            await anext(events)
        assert (str(caught.value), caught.value.file) == (CUT_SHORT, None)
        assert "Fatal Python error: Bus error" in (tmp_path / "ring.log").read_text()


async def test_a_model_file_that_cannot_be_read_is_named(tmp_path):
    model = tmp_path / "model.gguf"
    model.symlink_to(model)
    async with started(tmp_path) as process:
        head = an_open().head
        assert head is not None
        await process.send(an_open(head=msgspec.structs.replace(head, model=str(model))))
        with pytest.raises(WeightsError, match="cannot be read: ") as caught:
            await anext(process.events())
        assert caught.value.file == str(model)


async def test_weights_are_the_cause_of_a_sigbus_even_if_writing_the_stacks_crashed(tmp_path):
    """Other threads go on meanwhile, and what is read of their frames may be gone."""
    async with started(tmp_path) as process:
        (tmp_path / "ring.log").write_text("Fatal Python error: Bus error\n\nFatal Python error: Segmentation fault\n")
        os.kill(process.pid, signal.SIGKILL)  # it has no time to write there itself
        with pytest.raises(WeightsError, match="cut short or its disk failed while it was read"):
            await anext(process.events())


def test_the_last_line_of_a_log_is_the_one_before_the_stacks():
    assert _last_line("") == ""
    aborted = "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File x\n"
    assert _last_line(f"GGML_ASSERT(x) failed\n\n{aborted}") == "GGML_ASSERT(x) failed"
    assert _last_line(aborted) == ""


async def test_a_process_that_does_not_end_is_killed(tmp_path):
    async with started(tmp_path) as process:
        os.kill(process.pid, signal.SIGSTOP)


async def test_a_process_that_reads_no_commands_can_still_be_killed(tmp_path):
    """Unread commands are still in the daemon's buffer."""
    async with started(tmp_path) as process:
        os.kill(process.pid, signal.SIGSTOP)
        sending = asyncio.create_task(process.send(generate(1, list(range(1 << 20)))))
        await asyncio.sleep(0)
        assert not sending.done(), "it fits the socket's own buffer"
        await process.close()
        await sending


async def test_a_process_is_killed_if_waiting_for_its_end_is_cancelled(tmp_path):
    async with started(tmp_path) as process:
        os.kill(process.pid, signal.SIGSTOP)
        closing = asyncio.create_task(process.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        assert await asyncio.to_thread(process._process.wait, PATIENCE_S) == -signal.SIGKILL
        assert list(tmp_path.iterdir()) == []


async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path, monkeypatch):
    started_processes: list[subprocess.Popen[bytes]] = []
    real_begin = RingProcess._begin

    def noted(*arguments: object) -> subprocess.Popen[bytes]:
        started_processes.append(real_begin(*arguments))
        return started_processes[-1]

    monkeypatch.setattr(RingProcess, "_begin", noted)
    starting = asyncio.create_task(RingProcess.start(tmp_path / "ring.log", threads=1))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    assert started_processes[0].returncode is not None, "the ring process is still there"
    assert list(tmp_path.iterdir()) == []


async def test_a_process_that_cannot_be_started_is_a_ring_error(tmp_path):
    with pytest.raises(RingError, match="the ring process cannot be started: No such file or directory"):
        await RingProcess.start(tmp_path / "nowhere" / "ring.log", threads=1)


async def test_an_interrupt_of_the_terminal_is_the_daemons_business(tmp_path):
    async with started(tmp_path) as process:
        await process.send(an_open(route=3, head=None, windows=[]))
        events = process.events()
        assert isinstance(await anext(events), Opened)
        os.kill(process.pid, signal.SIGINT)
        await process.send(Report())
        assert isinstance(await anext(events), Status)


async def test_a_command_to_a_dead_process_shows_in_its_events(tmp_path):
    async with started(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        assert "SIGKILL" in await last_words(process)
        for _ in range(3):
            await process.send(Report())


async def test_a_missing_model_breaks_it_with_the_models_name(tmp_path):
    assert await broken_by(tmp_path, an_open()) == "/nowhere/model.gguf: no such file; check the path"


async def test_a_host_of_another_machine_breaks_it(tmp_path):
    words = await broken_by(tmp_path, an_open(route=3, host="192.0.2.1"))
    assert words.startswith("cannot listen for the ring on 192.0.2.1: ")


async def test_invalid_layer_files_break_it(tmp_path):
    (tmp_path / "window.gguf").write_bytes(b"not a model")
    window = WindowSource(
        window=1,
        metadata=str(tmp_path / "window.gguf"),
        layers=(str(tmp_path / "none.gguf"),),
        assignment=in_memory(0, 1),
        extra_buffers=False,
    )
    words = await broken_by(tmp_path, an_open(head=None, route=3, windows=[window]))
    assert words == f"{tmp_path / 'none.gguf'}: cannot be opened: No such file or directory"


@pytest.mark.parametrize(
    "command", [Report(), Connect("tcp://127.0.0.1:1", KEY, KEY), Cancel(1), generate(1, [1]), Drain(), a_reopen()]
)
async def test_a_first_command_other_than_open_breaks_it(tmp_path, command):
    assert await broken_by(tmp_path, command) == f"the first command was {type(command).__name__}, not Open"


GARBAGE = {
    "random bytes in a frame": (LENGTH.pack(256) + bytes(range(256)), "not a command of the other process: "),
    "an empty frame": (LENGTH.pack(0), "not a command of the other process: "),
    "an endless frame": (LENGTH.pack(1 << 31), "frame of 2147483648 bytes from the other process; at most "),
    "a cut Open": (LENGTH.pack(20) + frame(an_open())[4:24], "not a command of the other process: "),
    "an Open without a field": (
        LENGTH.pack(len(msgspec.msgpack.encode({"type": "open", "ring": 1})))
        + msgspec.msgpack.encode({"type": "open", "ring": 1}),
        "not a command of the other process: Object missing required field",
    ),
    "an unknown command": (
        LENGTH.pack(11) + msgspec.msgpack.encode({"type": "dance"}),
        "not a command of the other process: ",
    ),
}


@pytest.mark.parametrize(("content", "why"), GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_breaks_it_with_a_reason(tmp_path, content, why):
    assert (await broken_by(tmp_path, content)).startswith(why)


@pytest.mark.parametrize(
    "opening",
    [
        an_open(windows=[]),
        an_open(head=None, route=1),
        an_open(route=0),
        an_open(width=-1, route=3),
    ],
    ids=["no windows", "a worker without a ring", "no route", "a negative width"],
)
async def test_an_open_that_makes_no_sense_is_one_line_and_no_silence(tmp_path, opening):
    words = await broken_by(tmp_path, opening)
    assert words
    assert "\n" not in words


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (RingBroken("it broke", None), RingError),
        *((RingBroken("it takes no step", None, fault), kind) for fault, kind in FAULTS.items()),
        (RingBroken("it cannot be read", "/a/file"), WeightsError),
    ],
)
async def test_the_daemon_gets_the_kind_of_error(tmp_path, event, error):
    async with started(tmp_path) as process:
        process._events.data_received(frame(event))
        with pytest.raises(error, match=event.error) as caught:
            async for _ in process.events():
                pass
        assert type(caught.value) is error


async def test_garbage_from_the_process_is_refused(tmp_path):
    async with started(tmp_path) as process:
        process._events.data_received(LENGTH.pack(3) + b"abc")
        with pytest.raises(ProtocolError, match="not an event of the ring process: "):
            async for _ in process.events():
                pass


async def test_the_last_line_of_its_log_is_part_of_the_reason(tmp_path):
    async with started(tmp_path) as process:
        (tmp_path / "ring.log").write_text("GGML_ASSERT(x) failed\n\n")
        os.kill(process.pid, signal.SIGKILL)  # it has no time to write there itself
        assert await last_words(process) == "the ring process was ended by SIGKILL: GGML_ASSERT(x) failed"


def test_the_owners_settings_decide_how_threads_wait():
    assert environment({}, 1, 0)["GOMP_SPINCOUNT"] == str(SPIN_COUNT)
    assert environment({"GOMP_SPINCOUNT": "7"}, 1, 0)["GOMP_SPINCOUNT"] == "7"
    assert "GOMP_SPINCOUNT" not in environment({"OMP_WAIT_POLICY": "passive"}, 1, 0)
    assert environment({"PATH": "/bin"}, 3, 0)["PATH"] == "/bin"


def test_only_a_ring_process_with_gpu_layers_sees_gpus():
    assert environment({"CUDA_VISIBLE_DEVICES": "1"}, 1, 0).items() >= NO_GPU.items()
    assert environment({"CUDA_VISIBLE_DEVICES": "1"}, 1, 0, gpu=True)["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.skipif(sys.platform == "win32", reason="asks the C library of a Unix")
def test_a_command_hides_gpus_from_itself_and_not_from_its_children():
    """llama.cpp reads the C library's environment, children get Python's."""
    program = (
        "import ctypes, os; from primad.system.gpus import hide_gpus; hide_gpus();"
        " getenv = ctypes.CDLL(None).getenv; getenv.restype = ctypes.c_char_p;"
        " print(getenv(b'GGML_DISABLE_VULKAN'), os.environ.get('GGML_DISABLE_VULKAN'))"
    )
    variables = {key: value for key, value in os.environ.items() if key not in NO_GPU}
    done = subprocess.run([sys.executable, "-c", program], env=variables, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["b'1'", "None"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another library of C has other rules")
def test_large_memory_goes_back_to_the_system_when_it_is_freed(tmp_path):
    """In a process with the same environment, blocks are allocated and freed in a row, as hidden states are."""
    program = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def filled(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    return block
before = resident()
for _ in range(3):  # freed in another order than taken, as it happens
    blocks = [filled(2 << 20) for _ in range(8)]
    libc.free(blocks.pop())
    keep = filled(1 << 16)
    for block in blocks:
        libc.free(block)
print(resident() - before)
"""
    variables = environment(os.environ, 1, 0)
    grown = int(
        subprocess.run([sys.executable, "-c", program], env=variables, stdout=subprocess.PIPE, check=True).stdout
    )
    assert grown < 2 << 20
    assert environment({"MALLOC_MMAP_THRESHOLD_": "7"}, 1, 0)["MALLOC_MMAP_THRESHOLD_"] == "7"


@pytest.mark.skipif(sys.platform != "linux", reason="threads are bound on Linux only")
def test_threads_are_bound_when_they_fill_the_cores():
    cores = len(os.sched_getaffinity(0))
    assert "OMP_PROC_BIND" not in environment({}, 1, 0)
    assert "OMP_PROC_BIND" not in environment({}, cores + 1, 0)
    if cores > 1:
        assert environment({}, cores, 0)["OMP_PROC_BIND"] == "true"
        assert environment({"OMP_PROC_BIND": "false"}, cores, 0)["OMP_PROC_BIND"] == "false"


@pytest.mark.skipif(sys.platform != "linux", reason="threads are bound on Linux only")
def test_neighbours_in_a_ring_start_on_different_cores():
    cores = len(os.sched_getaffinity(0))
    if cores > 1:
        first, second = (environment({}, cores, place)["OMP_PLACES"].split(",") for place in (0, 1))
        assert first[0] != second[0]
        assert sorted(first) == sorted(second)
