"""Fork processes of primad from one that has already imported everything, which saves half a CPU second per start.

Inside ``forking`` this applies to every ``primad`` command and ``python -m primad...`` that this process starts. The
caller gets what ``exec`` would give: a child of its own, with its arguments, environment, descriptors and network. The
template forks twice, so the orphaned grandchild becomes a child of the nearest subreaper, the requesting process. Each
command has its own template, since it starts processes too (``template.py``).

Linux only; elsewhere processes start as usual. Tests of the start itself use ``exec`` (``executing``).
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from tools.lab.device import INSIDE

PYTHON: Final = sys.executable
PROGRAM: Final = Path(PYTHON).with_name("primad")
CHILDREN: Final = (
    "primad.certify.child",
    "primad.engine.embedding_process",
    "primad.head.model.text_process",
    "primad.planning.solver_process",
    "primad.ring.process",
    "primad.ring.speculation.process",
    "tests.homelab.client",
    "tests.homelab.seed",
)
"""Modules that run as processes, except those that measure."""
COMMAND: Final = "primad.cli.main"
ENTERING: Final = [os.fsencode(each) for each in (PYTHON, "-I", "-S", INSIDE, "enter")]
"""Prefix of a command on a lab device; the device's settings and the command itself follow."""
ROOT: Final = Path(__file__).parents[1]
NETWORK: Final = 0x40000000
"""CLONE_NEWNET."""
_TAKES_ORPHANS: Final = 36
"""PR_SET_CHILD_SUBREAPER."""
_PADDING: Final = 1 << 14
"""Bytes reserved for the arguments, and for the environment, that a forked process shows as its own."""
SIZE: Final = struct.Struct("<I")
_AS_EVER: Final = (-1, None, None, None, -1, None)
"""No other process group, user, groups or file mask, and no ``preexec_fn``."""
_exec = subprocess._fork_exec  # type: ignore[attr-defined]


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start. ``places`` are its numbers for the descriptors sent along, before a network namespace."""

    module: str
    arguments: list[bytes]
    variables: list[bytes]
    folder: str
    places: list[int]
    leads: bool
    device: dict[str, Any] | None
    """The lab device to enter, as ``inside.py`` takes it."""


class Template:
    """The connection to a template process, which waits to be forked."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def start(self, start: Start, descriptors: Sequence[int]) -> int:
        """Start a child of this process; return its id."""
        library = ctypes.CDLL(None)
        with self._lock:
            library.prctl(_TAKES_ORPHANS, 1)
            try:
                message = msgspec.msgpack.encode(start)
                socket.send_fds(self._connection, [SIZE.pack(len(message))], list(descriptors))
                self._connection.sendall(message)
                (pid,) = SIZE.unpack(exactly(self._connection, SIZE.size))
            finally:
                library.prctl(_TAKES_ORPHANS, 0)
        return int(pid)


_template: Template | None = None


def ask(template: Template | None) -> None:
    """Fork processes from ``template`` from now on; with None, start them as usual."""
    global _template
    _template = template
    subprocess._fork_exec = _exec if template is None else _fork_exec  # type: ignore[attr-defined]


def _fork_exec(arguments: Sequence[Any], *others: Any) -> int:
    """Replace ``subprocess._fork_exec``, whose arguments are positional."""
    ours, device = list(map(os.fsencode, arguments)), None
    if ours[: len(ENTERING)] == ENTERING:
        device, ours = json.loads(ours[len(ENTERING)]), ours[len(ENTERING) + 1 :]
    module = _module_of(ours)
    _, _, kept, folder, variables, stdin, _, _, stdout, _, stderr, _, failed, _, leads, *more = others
    if module is None or _template is None or folder is not None or tuple(more[:6]) != _AS_EVER:
        return int(_exec(arguments, *others))
    with open("/proc/thread-self/ns/net", "rb") as network:  # noqa: PTH123
        descriptors = [number if given < 0 else given for number, given in enumerate((stdin, stdout, stderr))]
        passed = sorted(set(kept) - {failed})
        start = Start(
            module=module,
            arguments=ours,
            variables=_environment() if variables is None else variables,
            folder=os.getcwd(),  # noqa: PTH109
            places=[0, 1, 2, *passed],
            leads=leads,
            device=device,
        )
        return _template.start(start, [*descriptors, *passed, network.fileno()])


def _environment() -> list[bytes]:
    return [key + b"=" + value for key, value in os.environb.items()]


def _module_of(arguments: list[bytes]) -> str | None:
    """Return the module that these ``arguments`` run; None if it must not be forked."""
    if arguments[0] == os.fsencode(PROGRAM):
        return COMMAND
    if arguments[:2] == [os.fsencode(PYTHON), b"-m"] and (module := arguments[2].decode()) in CHILDREN:
        return module
    return None


@contextmanager
def forking() -> Iterator[None]:
    """Fork the processes that this one starts inside the block."""
    if sys.platform != "linux":
        yield
        return
    ours, theirs = socket.socketpair()
    variables = os.environ | {"PADDING": "=" * _PADDING}
    program = f"from tests.template import prepare; prepare({theirs.fileno()})"
    command = [PYTHON, "-c", program, "-" * _PADDING]
    with theirs, subprocess.Popen(command, env=variables, pass_fds=[theirs.fileno()], cwd=ROOT) as root:
        theirs.close()
        ask(Template(ours))
        try:
            yield
        finally:
            ask(None)
            ours.close()
            root.wait()


@contextmanager
def executing() -> Iterator[None]:
    """Start processes inside the block as users do."""
    before = _template
    ask(None)
    try:
        yield
    finally:
        ask(before)


def exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data
