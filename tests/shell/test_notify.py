"""What a daemon reports to systemd."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from primad.system import notify as module
from primad.system.notify import notify, report, watchdog_s
from tests.fakes import manager

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="systemd is Linux's")


@pytest.fixture
def ear() -> Iterator[socket.socket]:
    with manager.listening() as listener:
        yield listener


def environment(ear: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": ear.getsockname(), **more}


def test_nothing_is_sent_without_a_notify_socket(tmp_path: Path) -> None:
    assert not notify("READY=1", environ={})
    assert not notify("READY=1", environ={"NOTIFY_SOCKET": str(tmp_path / "nobody")})


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such names")
def test_a_socket_without_a_file_is_reached() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("")  # Linux chooses a free name
        listener.settimeout(60)
        name = listener.getsockname().decode().replace("\0", "@")
        assert notify("READY=1", environ={"NOTIFY_SOCKET": name})
        assert listener.recv(100) == b"READY=1"


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "90000000"}, 90.0),
        ({"WATCHDOG_USEC": "90000000", "WATCHDOG_PID": "{pid}"}, 90.0),
        (
            {"WATCHDOG_USEC": "90000000", "WATCHDOG_PID": "1"},
            None,
        ),  # of another process, whose environment was inherited
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
    ids=["none", "all", "ours", "another", "no number", "zero"],
)
def test_the_watchdog_is_the_one_of_this_process(environ: dict[str, str], seconds: float | None) -> None:
    assert watchdog_s({name: value.format(pid=os.getpid()) for name, value in environ.items()}) == seconds


async def test_a_daemon_notifies_that_it_is_ready_alive_and_stopping(ear: socket.socket) -> None:
    states = iter(["waiting for a head", "waiting for a head"])

    async def receive() -> str:
        return (await asyncio.to_thread(ear.recv, 1000)).decode()

    task = asyncio.create_task(
        report(lambda: next(states, "computes\nfor desk"), environment(ear, WATCHDOG_USEC="20000"))
    )
    printed = [await receive() for _ in range(3)]
    task.cancel()
    await asyncio.wait([task])
    while (last := await receive()) == "WATCHDOG=1":
        pass
    assert [*printed, last] == [
        "READY=1\nSTATUS=waiting for a head",
        "WATCHDOG=1",
        "STATUS=computes for desk\nWATCHDOG=1",
        "STOPPING=1",
    ]


async def test_without_a_watchdog_only_changes_are_sent(ear: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATUS_EVERY_S", 0.001)
    states = iter(["one", "one", "one", "two"])
    task = asyncio.create_task(report(lambda: next(states, "two"), environment(ear)))
    printed = [(await asyncio.to_thread(ear.recv, 1000)).decode() for _ in range(2)]
    task.cancel()
    await asyncio.wait([task])
    assert printed == ["READY=1\nSTATUS=one", "STATUS=two"]


async def test_without_a_notify_socket_reporting_ends_at_once() -> None:
    await report(lambda: "state", {})
