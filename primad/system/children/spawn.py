"""Child processes at the other end of a socket pair: their environment, how one starts, and how it ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Final

from primad.errors import RingError
from primad.system.children.channel import LENGTH, frame_bytes
from primad.system.gpus import NO_GPU

GRACE_S: Final = 1.0
SPIN_COUNT: Final = 5000
"""How often libgomp's threads spin at a barrier before they sleep. Its own default of some hundred milliseconds starves
the other programs of the machine, ring processes among them; sleeping immediately ruins decode. Between 2,000 and
20,000 one process keeps its full speed and several can share the cores. With 100,000 threads outlast the gap between
two tokens and one process of a small model is a tenth faster, but where other programs fill the cores a token takes
four times as long."""

MMAP_THRESHOLD_BYTES: Final = 3 << 19
"""Freed memory of this size and more returns to the system immediately (glibc). By default glibc raises the threshold to
the largest block ever freed, and keeps the hidden states of a prompt's chunks, 70 MB of them in a ring of eight windows
per device. The value is above the blocks that each token allocates again, such as logits."""


def environment(base: Mapping[str, str], threads: int, place: int, *, gpu: bool = False) -> dict[str, str]:
    """The environment of a ring process with ``threads`` compute threads: ``base``, with defaults for how they wait and
    when freed memory goes back to the system. Without ``gpu`` no GPU is visible.

    Threads that fill all cores are bound to one each: otherwise the scheduler now and then puts two that wait for each
    other on one core, which costs a factor of ten while anything else runs. Fewer threads than cores are left free to
    move away from what the owner runs. ``place`` is the core (counted from the first) of the first thread, which also
    sends and receives: devices that follow each other in a ring on one machine get different ones, so that the next one
    starts on a core that the last one has left.
    """
    chosen = {"GGML_NO_BACKTRACE": "1", "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD_BYTES)}
    if "OMP_WAIT_POLICY" not in base:
        chosen["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        if threads == len(cores) > 1:
            places = [f"{{{cores[(place + i) % threads]}}}" for i in range(threads)]
            chosen |= {"OMP_PROC_BIND": "true", "OMP_PLACES": ",".join(places)}
    return chosen | dict(base) | ({} if gpu else NO_GPU)


async def connected(
    begin: Callable[[socket.socket], subprocess.Popen[bytes]],
    what: str,
    protocol: Callable[[asyncio.StreamReader], asyncio.StreamReaderProtocol] = asyncio.StreamReaderProtocol,
) -> tuple[subprocess.Popen[bytes], asyncio.StreamReader, asyncio.StreamWriter]:
    """A process that ``begin`` starts with one end of a socket pair, and the other end. ``what`` names the process in
    errors. Raises ``RingError`` if it cannot be started.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = begin(theirs)
    except OSError as exc:  # for example, no memory, processes or disk space are left
        ours.close()
        raise RingError(f"{what} cannot be started: {exc.strerror or exc}") from exc
    try:
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        spoken = protocol(reader)
        transport, _ = await loop.create_connection(lambda: spoken, sock=ours)
        return process, reader, asyncio.StreamWriter(transport, spoken, reader, loop)
    except BaseException:  # cancelled meanwhile; no other code would end the process
        ours.close()
        process.kill()
        process.wait()
        raise


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next message of a process. Raises ``asyncio.IncompleteReadError`` or ``OSError`` when it is gone."""
    return await reader.readexactly(frame_bytes(await reader.readexactly(LENGTH.size)))


def how_it_ended(code: int) -> str:
    """Words for the exit code of a child process, to follow its name."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
