"""What ``tools/bench serve`` compares, and the llama.cpp that it compares with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from primad.system.children.spawn import environment
from tools.lab.http_servers import as_machine
from tools.lab.names import LabError
from tools.lab.plain_child import PlainChild
from tools.lab.rpc_server import RpcServers
from tools.lab.served import ONE_BATCH, RPC, Served


def served(devices: int, streams: int, *rates: float, **changes: object) -> Served:
    return Served(**{"model": "m", "devices": devices, "streams": streams, "tokens_per_s": list(rates), **changes})


def judged(rows: list[Served]) -> dict[str, tuple[float, float | None]]:
    return {each.what: (each.value, each.at_least) for each in Served.figures(rows)}


def test_a_ring_of_three_is_compared_with_other_servers_and_two_devices_with_twice_one():
    rows = [
        served(1, 1, 10, 20),
        served(1, 4, 11, 11),
        served(2, 1, 10, 10),
        served(2, 4, 18, 40),
        served(3, 4, 45, 90),
        served(1, 4, 50, 100, system=ONE_BATCH),
        served(3, 4, 30, 60, system=RPC),
    ]
    reported = "m: ring of {}, 4 streams, of {}".format
    assert judged(rows) == {
        reported(1, "one stream of it"): (pytest.approx(0.825), None),
        reported(2, "one stream of it"): (pytest.approx(2.9), 1.7),
        reported(2, "2 x one device with one"): (pytest.approx(0.95), 0.9),
        reported(3, ONE_BATCH): (0.9, 0.9),
        reported(3, RPC): (1.5, 1.5),
    }


def test_without_the_system_that_it_is_compared_with_there_is_no_ratio():
    assert judged([served(3, 4, 45), served(2, 4, 18)]) == {}


@pytest.fixture
def plain(smollm2: Path) -> Iterator[PlainChild]:
    child = PlainChild(smollm2, 1, "off", os.environ, context=256, rows=64, sequences=3)
    yield child
    child.close()


@pytest.mark.slow
def test_what_stands_for_llama_server_writes_what_llama_cpp_writes_alone(plain: PlainChild):
    alone = plain.answer(decode=8, after=40)
    for answers in (1, 3):  # of three prompts of 40 tokens the second goes in two steps
        reported = plain.answer(answers=answers, of=9, after=40)
        assert reported["tokens"] == alone["tokens"]
        assert (len(reported["first_s"]), len(reported["next_s"])) == (answers, 8 * answers)


@pytest.fixture
def library() -> Path:
    """Built once: in the owner's cache, not in that of the tests."""
    if sys.platform == "win32" or shutil.which("cmake") is None:
        pytest.skip("llama.cpp's RPC library is built by a shell script with cmake")
    environ = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    setup = Path(__file__).parents[2] / "tools" / "setup-llama"
    return Path(
        subprocess.run([setup, "rpc"], env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    )


@pytest.mark.slow
def test_a_head_and_two_servers_write_what_llama_cpp_writes_alone(plain: PlainChild, smollm2: Path, library: Path):
    with ExitStack() as stack:
        with RpcServers(library, 2, 1) as servers:
            environ = environment(os.environ, 1, 0)
            sizes = {"context": 256, "rows": 64, "sequences": 3}
            head = PlainChild(smollm2, 1, "off", environ, **sizes, rpc=servers, gpu_layers=21)
            stack.callback(head.close)
            for answers in (1, 3):
                ask = {"answers": answers, "of": 9, "after": 40}
                assert head.answer(**ask)["tokens"] == plain.answer(**ask)["tokens"]
        with pytest.raises(RuntimeError, match=r"plain llama\.cpp ended"):
            head.ask(decode=1, after=1)


def test_a_library_that_is_none_is_told(tmp_path: Path):
    library = tmp_path / "libggml-rpc.so"
    library.touch()
    with pytest.raises(LabError, match=f"{library} gives no RPC server"), RpcServers(library, 1, 1):
        pass


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="requires namespaces of Linux, and root")
def test_devices_of_one_computer_count_as_machines_with_a_core_each():
    code = (
        "from primad.profiler.records import host_id; from primad.system.processors import usable_cpus; "
        "print(host_id(), usable_cpus())"
    )
    printed = [
        subprocess.run(
            [*before, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
        ).stdout.split()
        for before in ([], as_machine("head", 0), as_machine("w1", None))
    ]
    assert len({host for host, *_ in printed}) == 3
    assert float(printed[1][1]) == 1
    with pytest.raises(LabError, match="w99: no machine of its own"):
        as_machine("w99", 99_999)
