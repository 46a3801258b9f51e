"""Processes of primad that fork from one that has imported everything already: a start takes half a second of a core less.

``forking`` does so with all that this process starts: ``primad`` commands and ``python -m primad...``. Who starts one gets
what ``exec`` would give: a child of its own, with its arguments, environment, descriptors and network. A template forks
twice: what is left without a parent becomes the child of the nearest ancestor that takes orphans, which is the process that
asked for it. Each command has a template of its own, since it starts processes too.

Linux only; elsewhere processes start as ever. A test of starts has them by ``exec`` (``executing``).
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

PYTHON: Final = sys.executable
PROGRAM: Final = Path(PYTHON).with_name("primad")
CHILDREN: Final = (
    "primad.certify.child",
    "primad.engine.embedding_process",
    "primad.head.model.text_process",
    "primad.planning.solver_process",
    "primad.ring.process",
    "primad.ring.speculation.process",
)
"""Modules that run as processes, but those that measure."""
COMMAND: Final = "primad.cli.main"
IMPORTED: Final = (
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
)
"""What commands and children import while they run."""
ROOT: Final = Path(__file__).parents[1]
NETWORK: Final = 0x40000000
"""CLONE_NEWNET."""
_TAKES_ORPHANS: Final = 36
"""PR_SET_CHILD_SUBREAPER."""
_MMAP_THRESHOLD: Final = -3
"""M_MMAP_THRESHOLD."""
_PADDING: Final = 1 << 14
"""Bytes of arguments and of environment that a forked process can show as its own."""
_SIZE: Final = struct.Struct("<I")
_AS_EVER: Final = (-1, None, None, None, -1, None)
"""No other group of processes, user, groups or file mask, and nothing to call before."""
_exec = subprocess._fork_exec  # type: ignore[attr-defined]


class _Start(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start. ``places`` are the numbers of the descriptors that come with it, the last one a network."""

    module: str
    arguments: list[bytes]
    variables: list[bytes]
    folder: str
    places: list[int]
    leads: bool


class Template:
    """The other end of a process that waits to be forked."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def start(self, start: _Start, descriptors: Sequence[int]) -> int:
        """The number of the new process, a child of this one."""
        library = ctypes.CDLL(None)
        with self._lock:
            library.prctl(_TAKES_ORPHANS, 1)
            try:
                message = msgspec.msgpack.encode(start)
                socket.send_fds(self._connection, [_SIZE.pack(len(message))], list(descriptors))
                self._connection.sendall(message)
                (pid,) = _SIZE.unpack(_exactly(self._connection, _SIZE.size))
            finally:
                library.prctl(_TAKES_ORPHANS, 0)
        return int(pid)


_template: Template | None = None


def _fork_exec(arguments: Sequence[Any], *others: Any) -> int:
    """As ``subprocess`` has it, which takes what it needs of Python's own without a name."""
    module = _module_of(arguments := list(map(os.fsencode, arguments)))
    _, _, kept, folder, variables, stdin, _, _, stdout, _, stderr, _, failed, _, leads, *more = others
    if module is None or _template is None or folder is not None or tuple(more[:6]) != _AS_EVER:
        return int(_exec(arguments, *others))
    with open("/proc/thread-self/ns/net", "rb") as network:  # noqa: PTH123
        descriptors = [number if given < 0 else given for number, given in enumerate((stdin, stdout, stderr))]
        passed = sorted(set(kept) - {failed})
        start = _Start(
            module=module,
            arguments=arguments,
            variables=_environment() if variables is None else variables,
            folder=os.getcwd(),  # noqa: PTH109
            places=[0, 1, 2, *passed],
            leads=leads,
        )
        return _template.start(start, [*descriptors, *passed, network.fileno()])


def _environment() -> list[bytes]:
    return [key + b"=" + value for key, value in os.environb.items()]


def _module_of(arguments: list[bytes]) -> str | None:
    """What runs in a process of these ``arguments``, if it may be forked."""
    if arguments[0] == os.fsencode(PROGRAM):
        return COMMAND
    if arguments[:2] == [os.fsencode(PYTHON), b"-m"] and (module := arguments[2].decode()) in CHILDREN:
        return module
    return None


@contextmanager
def forking() -> Iterator[None]:
    """In the block, what this process starts is forked."""
    global _template
    if sys.platform != "linux":
        yield
        return
    ours, theirs = socket.socketpair()
    variables = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PADDING": "=" * _PADDING}
    program = f"from {__name__} import prepare; prepare({theirs.fileno()})"
    command = [PYTHON, "-c", program, "-" * _PADDING]
    with theirs, subprocess.Popen(command, env=variables, pass_fds=[theirs.fileno()], cwd=ROOT) as root:
        theirs.close()
        _template = Template(ours)
        subprocess._fork_exec = _fork_exec  # type: ignore[attr-defined]
        try:
            yield
        finally:
            _template = None
            subprocess._fork_exec = _exec  # type: ignore[attr-defined]
            ours.close()
            root.wait()


@contextmanager
def executing() -> Iterator[None]:
    """In the block, processes start as users start them."""
    global _template
    before, _template = _template, None
    try:
        yield
    finally:
        _template = before


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def prepare(descriptor: int) -> None:
    """Entry point of the first template."""
    for module in (COMMAND, *IMPORTED):
        import_module(module)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has the thread alone that forks"
    _wait(socket.socket(fileno=descriptor))


def _wait(connection: socket.socket) -> None:
    """Fork what is asked for until nobody asks any more; a forked process does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it ends with who asks
    gc.collect()
    gc.freeze()
    while True:
        size, descriptors, _, _ = socket.recv_fds(connection, _SIZE.size, 64)
        if not size:
            return
        start = msgspec.msgpack.decode(_exactly(connection, *_SIZE.unpack(size)), type=_Start)
        told, tell = os.pipe()
        middle = os.fork()
        if not middle:
            pid = os.fork()
            if pid:
                os.write(tell, _SIZE.pack(pid))
                os._exit(0)
            for each in (told, connection.fileno()):
                os.close(each)
            _begin(start, descriptors, tell)
        os.waitpid(middle, 0)
        os.close(tell)
        with os.fdopen(told, "rb") as number:
            connection.sendall(number.read())  # to the end: by then the new process shows what it is
        for each in descriptors:
            os.close(each)


def _begin(start: _Start, descriptors: list[int], tell: int) -> NoReturn:
    """Become what was asked for; ``tell`` is closed as soon as the system says so."""
    *descriptors, network = descriptors
    if start.leads:
        os.setsid()
    if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:  # noqa: PTH116
        assert ctypes.CDLL(None).setns(network, NETWORK) == 0
    os.close(network)
    high = max(start.places) + 1
    moved = [_above(each, high) for each in descriptors]
    tell = _above(tell, high)
    for place, each in zip(start.places, moved, strict=True):
        os.dup2(each, place, inheritable=True)
        os.close(each)
    os.chdir(start.folder)
    os.environb.clear()
    os.environb.update(dict(each.split(b"=", 1) for each in start.variables))
    if threshold := os.environ.get("MALLOC_MMAP_THRESHOLD_"):  # read when a process starts
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, int(threshold))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os._exit(_run(start, tell))


def _run(start: _Start, tell: int) -> int:
    """The exit code of what was asked for, which has ended."""
    sys.argv = list(map(os.fsdecode, start.arguments))
    code: Any = 0
    try:
        if start.module == COMMAND:
            _be_asked(tell)
        _show(start)
        os.close(tell)
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


def _be_asked(tell: int) -> None:
    """Have a template of its own for the processes that this one will start."""
    from primad.system.memory import staying

    global _template
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        os.close(tell)
        nothing = os.open(os.devnull, os.O_RDWR)
        for each in (0, 1, 2):
            os.dup2(nothing, each)
        _wait(theirs)
        os._exit(0)
    theirs.close()
    staying.add(pid)  # it is not what the command holds memory for
    _template = Template(ours)
    subprocess._fork_exec = _fork_exec  # type: ignore[attr-defined]


def _show(start: _Start) -> None:
    """Have the system tell the arguments and the environment that the process would have had from ``exec``."""
    begins = list(map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]))
    for begin, end, texts in zip(begins[::2], begins[1::2], (start.arguments, start.variables), strict=True):
        data = b"".join(text + b"\0" for text in texts)
        assert len(data) <= end - begin, "too long for the template"
        ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


def _above(descriptor: int, high: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD, high)
    os.close(descriptor)
    return moved
