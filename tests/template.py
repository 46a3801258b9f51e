"""The template process of ``forks.py``: it has imported everything that primad does, and forks on request."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import os
import platform
import runpy
import signal
import socket
import sys
import threading
import uuid
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from primad.system.memory import staying
from tests.forks import COMMAND, NETWORK, SIZE, Start, Template, ask, exactly
from tools.lab.inside import enter

IMPORTED: Final = (
    "halda.search",
    "primad.api.dialects.openai.prepared",
    "primad.certify.route",
    "primad.certify.made",
    "primad.cli.chat",
    "primad.daemon.run",
    "primad.engine.embedder",
    "primad.head.model.tokenizer",
    "primad.head.serve",
    "primad.ring.loading",
    "primad.worker.daemon",
    "tests.fakes.profile",
)
"""Modules that commands and children import at run time."""
_MMAP_THRESHOLD: Final = -3
"""M_MMAP_THRESHOLD."""


def prepare(descriptor: int) -> None:
    """Entry point of the first template."""
    for module in (COMMAND, *IMPORTED):
        import_module(module)
    assert import_module(COMMAND).app.built, "what each fork would build anew"
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has the thread alone that forks"
    _wait(socket.socket(fileno=descriptor))


def _wait(connection: socket.socket) -> None:
    """Fork requested processes until the connection closes; a forked process does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C; it ends with its client
    gc.collect()
    gc.freeze()
    while True:
        size, descriptors, _, _ = socket.recv_fds(connection, SIZE.size, 64)
        if not size:
            return
        start = msgspec.msgpack.decode(exactly(connection, *SIZE.unpack(size)), type=Start)
        reported, report = os.pipe()
        middle = os.fork()
        if not middle:
            pid = os.fork()
            if pid:
                os.write(report, SIZE.pack(pid))
                os._exit(0)
            for each in (reported, connection.fileno()):
                os.close(each)
            _begin(start, descriptors, report)
        os.waitpid(middle, 0)
        os.close(report)
        with os.fdopen(reported, "rb") as number:
            connection.sendall(number.read())  # EOF comes once the new process shows its own arguments
        for each in descriptors:
            os.close(each)


def _begin(start: Start, descriptors: list[int], report: int) -> NoReturn:
    """Become the requested process; ``report`` is closed once the system shows it as such."""
    *descriptors, network = descriptors
    if start.leads:
        os.setsid()
    if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:  # noqa: PTH116
        assert ctypes.CDLL(None).setns(network, NETWORK) == 0
    os.close(network)
    high = max(start.places) + 1
    moved = [_above(each, high) for each in descriptors]
    report = _above(report, high)
    for place, each in zip(start.places, moved, strict=True):
        os.dup2(each, place, inheritable=True)
        os.close(each)
    os.chdir(start.folder)
    if start.device is not None:
        enter(start.device)
        platform._uname_cache = uuid._node = None  # type: ignore[attr-defined]  # cached names of the machine
    os.environb.clear()
    os.environb.update(dict(each.split(b"=", 1) for each in start.variables))
    if threshold := os.environ.get("MALLOC_MMAP_THRESHOLD_"):  # read when a process starts
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, int(threshold))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os._exit(_run(start, report))


def _run(start: Start, report: int) -> int:
    """Run the requested module to its end; return the exit code."""
    sys.argv = list(map(os.fsdecode, start.arguments))
    code: Any = 0
    try:
        if start.module == COMMAND:
            _offer_template(report)
        _show(start)
        os.close(report)
        if start.module == COMMAND:
            import_module(COMMAND).main()
        else:
            sys.argv = sys.argv[2:]
            sys.modules.pop(start.module, None)
            runpy.run_module(start.module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)  # noqa: T201
            code = 1
    except BaseException:  # noqa: BLE001 (the top of the process)
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code or 0


def _offer_template(report: int) -> None:
    """Fork a template for the processes that this one will start."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        os.close(report)
        nothing = os.open(os.devnull, os.O_RDWR)
        for each in (0, 1, 2):
            os.dup2(nothing, each)
        _wait(theirs)
        os._exit(0)
    theirs.close()
    staying.add(pid)  # the template's memory does not count as the command's
    ask(Template(ours))


def _show(start: Start) -> None:
    """Show the arguments and environment in ``/proc`` as after ``exec``."""
    begins = list(map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]))
    for begin, end, texts in zip(begins[::2], begins[1::2], (start.arguments, start.variables), strict=True):
        data = b"".join(text + b"\0" for text in texts)
        assert len(data) <= end - begin, "too long for the template"
        ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


def _above(descriptor: int, high: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD, high)
    os.close(descriptor)
    return moved
