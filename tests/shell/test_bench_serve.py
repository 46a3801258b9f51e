"""What ``tools/bench serve`` and ``http`` compare, and the machines that they count."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tools.lab.http_servers import as_machine
from tools.lab.names import LabError
from tools.lab.served import Served


def served(devices: int, streams: int, *rates: float, **changes: object) -> Served:
    return Served(**{"model": "m", "devices": devices, "streams": streams, "tokens_per_s": list(rates), **changes})


def judged(rows: list[Served]) -> dict[str, tuple[float, float | None]]:
    return {each.what: (each.value, each.at_least) for each in Served.figures(rows)}


def test_two_devices_are_compared_with_twice_one_and_four_answers_with_one():
    rows = [served(1, 1, 10, 20), served(1, 4, 11, 11), served(2, 1, 10, 10), served(2, 4, 18, 40)]
    reported = "m: ring of {}, 4 streams, of {}".format
    assert judged(rows) == {
        reported(1, "one stream of it"): (pytest.approx(0.825), None),
        reported(2, "one stream of it"): (pytest.approx(2.9), 1.7),
        reported(2, "2 x one device with one"): (pytest.approx(0.95), 0.9),
    }


def test_processes_of_one_machine_are_compared_with_the_best_other_server_of_the_round():
    rows = [
        served(2, 1, 10, 20, first_s=[2, 3]),
        served(1, 1, 8, 10, first_s=[1, 1], system="llama-server"),
        served(1, 1, 10, 20, first_s=[4, 4], system="llama-server --no-repack"),
        served(1, 4, 90, 90, first_s=[1, 1], system="llama-server"),
    ]
    assert judged(rows) == {
        "m: ring of 2, 1 streams, of the best other server: tokens/s": (1.0, 0.95),
        "m: ring of 2, 1 streams, of the best other server: time to the first token": (2.5, None),
    }


def test_without_the_system_that_it_is_compared_with_there_is_no_ratio():
    assert judged([served(3, 4, 45), served(2, 4, 18)]) == {}


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
