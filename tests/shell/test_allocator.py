"""Processes load only what they need of llama_cpp and gguf; the whole packages stay available."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from primad.system.allocator import without_top


def python(program: str, *arguments: str) -> str:
    """The output of ``program`` in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def test_a_ring_process_loads_only_modules_that_it_uses():
    heavy = {
        "jinja2",
        "diskcache",
        "yaml",
        "csv",
        "email",
        "importlib.metadata",
        "zeroconf",
        "typer",
        "fastapi",
        "asyncio",
    }
    loaded = python("import sys, primad.ring.process; print(' '.join(sys.modules))").split()
    assert heavy.isdisjoint(loaded)
    assert {"llama_cpp.llama_cpp", "gguf.constants"} <= set(loaded)


def test_a_waiting_worker_loads_no_arrays_no_web_server_and_no_solver():
    heavy = {"numpy", "llama_cpp", "fastapi", "uvicorn", "pydantic", "pulp", "highspy", "halda.search", "spake2"}
    loaded = python("import sys, primad.worker.join; print(' '.join(sys.modules))").split()
    assert heavy.isdisjoint(loaded)
    assert {"primad.worker.daemon", "primad.gguf.windows", "primad.profiler.device"} <= set(loaded)


def test_a_command_loads_no_arrays_no_network_and_no_model():
    heavy = {"numpy", "llama_cpp", "zmq", "httpx", "cryptography", "pydantic", "zeroconf", "pulp"}
    loaded = python("import sys, primad.cli.main; print(' '.join(sys.modules))").split()
    assert heavy.isdisjoint(loaded)
    assert "primad.cli.chat" in loaded


def test_later_imports_get_the_whole_packages():
    program = """
import primad.engine.llama.model as ours
from primad.gguf.constants import GGMLQuantizationType
import gguf, llama_cpp
assert gguf.GGMLQuantizationType is GGMLQuantizationType and gguf.GGUFReader and gguf.__spec__.name == "gguf"
assert llama_cpp.Llama and llama_cpp.llama_decode is ours.llama.llama_decode
print("whole")
"""
    assert python(program) == "whole\n"


def test_a_package_that_is_loaded_already_stays_as_it_is():
    program = """
import gguf
from primad.system.allocator import without_top
with without_top("gguf"):
    import gguf.constants
import sys
assert sys.modules["gguf"] is gguf and gguf.GGUFReader
print("the same")
"""
    assert python(program) == "the same\n"


def test_a_missing_package_raises_the_usual_error():
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), without_top("no_such_package"):
        import no_such_package  # noqa: F401
    assert "no_such_package" not in sys.modules
    with pytest.raises(ModuleNotFoundError), without_top("gguf.nothing"):
        import gguf.nothing  # noqa: F401


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library decides for itself")
def test_blocks_that_are_freed_go_back_to_the_system():
    program = """
import os, sys, threading
from primad.system.allocator import keep_little_freed
from primad.system.memory import held_bytes
if sys.argv[1] == "little":
    keep_little_freed()

def take_and_free():
    os.urandom(4 << 20)  # the largest block ever freed
    blocks = [os.urandom(1 << 20) for _ in range(8)]
    pinned = os.urandom(64 << 10)
    del blocks
    kept.append(pinned)

kept = []
before = held_bytes([os.getpid()])
for _ in range(4):
    thread = threading.Thread(target=take_and_free)
    thread.start()
    thread.join()
print(held_bytes([os.getpid()]) - before)
"""
    assert int(python(program, "little")) < 2 << 20
    assert int(python(program, "as ever")) > 6 << 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library decides for itself")
def test_the_memory_of_an_ended_model_returns_to_the_system():
    program = """
import os
from primad.system.allocator import give_back_freed, keep_little_freed, keep_what_is_loaded
from primad.system.memory import held_bytes
keep_little_freed()
keep_what_is_loaded()

class Model:
    def __init__(self):
        self.itself, self.header = self, [os.urandom(4 << 10) for _ in range(4 << 10)]

before = held_bytes([os.getpid()])
model = Model()
pinned = os.urandom(4 << 10)
del model
give_back_freed()
print(held_bytes([os.getpid()]) - before)
"""
    assert int(python(program)) < 2 << 20


def test_the_garbage_collector_skips_objects_that_a_daemon_loaded_at_its_start():
    program = """
import gc
from primad.daemon.run import run
import primad.head.serve

async def main():
    print(len(gc.get_objects()) < gc.get_freeze_count() // 10, gc.get_threshold()[2] >= 1000)

run(main())
"""
    assert python(program) == "True True\n"
