"""llama.cpp's RPC servers on this machine, as children of a benchmark; run as a program it is one of them.

llama.cpp is built here without its RPC. Its library, ``libggml-rpc``, works beside the installed ones where it was built of
the same sources (``tools/setup-llama``). Each server computes on the processor, with threads of its own. They wait, and are
bound, as those of primad's rings: with libgomp's own patience the threads of processes that take turns on the same cores
keep each other from them, and a token of SmolLM2 takes twice as long.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from primad.system.children.spawn import environment
from tools.lab.names import LabError
from tools.lab.ports import free_port

START_S: Final = 20.0
_CPU: Final = 0
"""``GGML_BACKEND_DEVICE_TYPE_CPU``"""


class RpcServers:
    """``count`` servers of ``threads`` threads, from the beginning of the block to its end, at ``endpoints``.

    Raises ``LabError`` where ``library`` gives none.
    """

    def __init__(self, library: Path, count: int, threads: int) -> None:
        self.library, self.endpoints = library, list[str]()
        self._count, self._threads = count, threads
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            for number in range(self._count):
                self._start(place=1 + number)  # the head's is 0
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _start(self, place: int) -> None:
        port = free_port()
        endpoint = f"127.0.0.1:{port}"
        process = subprocess.Popen(
            [sys.executable, __file__, str(self.library), endpoint, str(self._threads)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(os.environ, self._threads, place),
        )
        self._processes.append(process)
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            except OSError:
                if process.poll() is not None or time.monotonic() >= deadline:
                    raise LabError(
                        f"{self.library} gives no RPC server; tools/setup-llama builds one of the version that is installed"
                    ) from None
                time.sleep(0.05)
            else:
                break
        self.endpoints.append(endpoint)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def main() -> None:
    from llama_cpp._ggml import libggml

    library, endpoint, threads = sys.argv[1:]
    libggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(libggml.ggml_backend_dev_by_type(_CPU))
    serve = ctypes.CDLL(library).ggml_backend_rpc_start_server
    serve.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)
    serve(endpoint.encode(), None, int(threads), 1, ctypes.cast(devices, ctypes.c_void_p))


if __name__ == "__main__":
    main()
