"""llama.cpp's RPC servers on this machine, as children of a benchmark; run as a program it is one of them.

llama.cpp is built here without its RPC. Its library, ``libggml-rpc``, works beside the installed ones where it was built of
the same sources, with ``-DGGML_RPC=ON``. Each server computes on the processor, with threads of its own.
"""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final, Self

START_S: Final = 20.0
_CPU: Final = 0
"""``GGML_BACKEND_DEVICE_TYPE_CPU``"""


def installed_library() -> Path | None:
    """The RPC library of the llama.cpp that is installed, where it was built with one."""
    found = find_spec("llama_cpp")  # it stays out of this process
    assert found is not None
    assert found.origin is not None
    return next((Path(found.origin).parent / "lib").glob("*ggml-rpc*"), None)


class RpcServers:
    """``count`` servers of ``threads`` threads, from the beginning of the block to its end, at ``endpoints``."""

    def __init__(self, library: Path, count: int, threads: int) -> None:
        self.library, self.endpoints = library, list[str]()
        self._count, self._threads = count, threads
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            for _ in range(self._count):
                self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        endpoint = f"127.0.0.1:{port}"
        process = subprocess.Popen(
            [sys.executable, __file__, str(self.library), endpoint, str(self._threads)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._processes.append(process)
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            except OSError:
                if process.poll() is not None or time.monotonic() >= deadline:
                    raise RuntimeError(
                        f"{self.library}: no RPC server; it must be of the version that is installed"
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
