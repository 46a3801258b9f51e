"""What ``tools/bench serve`` and ``http`` compare, and how they count machines."""

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


def test_two_devices_are_compared_with_twice_one_and_four_streams_with_one():
    rows = [served(1, 1, 10, 20), served(1, 4, 11, 11), served(2, 1, 10, 10), served(2, 4, 18, 40)]
    reported = "m: ring of {}, 4 streams, of {}".format
    assert judged(rows) == {
        reported(1, "one stream of it"): (pytest.approx(0.825), None),
        reported(2, "one stream of it"): (pytest.approx(2.9), 1.7),
        reported(2, "2 x one device with one"): (pytest.approx(0.95), 0.9),
    }


def other(*rates: float, streams: int = 1, **changes: object) -> Served:
    return served(1, streams, *rates, **{"system": "llama-server", "first_s": [1, 1], "whole_s": [9, 9], **changes})


def test_processes_of_one_machine_are_compared_with_the_other_server_with_the_same_extra_buffers():
    rows = [
        served(2, 1, 10, 20, first_s=[2, 3], extra_buffers="on"),
        served(2, 4, 30, 30, first_s=[3, 3], extra_buffers="off"),
        other(8, 10, extra_buffers="off"),
        other(10, 40, extra_buffers="on"),
        other(40, 40, extra_buffers="off", streams=4),
    ]
    on, off = (
        f"m: ring of 2, {one}, of the other server"
        for one in ("1 streams, extra buffers on", "4 streams, extra buffers off")
    )
    assert judged(rows) == {
        f"{on}: tokens/s": (0.75, 0.95),
        f"{on}: time to the first token": (2.5, None),
        f"{off}: tokens/s": (0.75, 0.95),
        f"{off}: time to the first token": (3.0, None),
    }
    assert [each.at_most for each in Served.figures(rows)] == [None, None, None, 1.2]


def test_an_automatic_choice_of_extra_buffers_is_judged_by_the_time_of_requests():
    rows = [
        served(1, 1, 10, 10, whole_s=[6, 8], extra_buffers="auto"),
        served(1, 1, 10, 10, first_s=[1, 1], whole_s=[5, 5], extra_buffers="on"),
        served(1, 1, 10, 10, first_s=[1, 1], whole_s=[4, 4], extra_buffers="off"),
        other(99, 99, extra_buffers="off"),
        other(10, 10, extra_buffers="on", whole_s=[7, 7]),
    ]
    whole = {each.what: (each.value, each.at_most) for each in Served.figures(rows) if "request" in each.what}
    assert whole == {
        "m: ring of 1, 1 streams, extra buffers auto, of the best other server: a request's time": (
            1.0,
            pytest.approx(1 / 0.97),
        ),
        "m: ring of 1, 1 streams, extra buffers auto, of extra buffers off: a request's time": (1.75, 1.05),
    }


def test_without_the_reference_system_there_is_no_ratio():
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
