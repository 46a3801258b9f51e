"""``-p tests.processes --processes 7``: run whole test files in processes that fork once all tests are collected.

With pytest-xdist each process collects all tests again, which takes eight seconds. A process asks for its next file
before the last test of the current one, so fixtures that outlive a file are kept. Linux only.
"""

from __future__ import annotations

import gc
import os
from collections import deque
from contextlib import suppress
from itertools import groupby, pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from typing import Any, NoReturn

import pytest

from tests.lazily import import_all


class Process:
    """A test process, as seen by the process that collected the tests."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.last = "its first test"
        self.location: tuple[str, int | None, str] = ("", None, "")
        self.has_ended = False


class Reports:
    """Sends reports to the process that collected the tests."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._connection.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, help="how many processes run files of tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Fork, hand out files and collect reports."""
    config, count = session.config, session.config.option.processes
    if count < 2 or config.option.collectonly or session.testsfailed or not session.items:
        return None
    config._tmp_path_factory.getbasetemp()
    import_all()
    gc.freeze()
    files = [list(items) for _, items in groupby(session.items, attrgetter("path"))]
    left, running = deque(range(len(files))), dict[Connection, Process]()
    for number in range(min(count, len(files))):
        ours, theirs = Pipe()
        if not (pid := os.fork()):
            for each in (ours, *running):
                each.close()
            _run(session, files, theirs, number, count)
        theirs.close()
        running[ours] = Process(pid)
    while running:
        for connection in wait(list(running)):
            assert isinstance(connection, Connection)
            _handle(config, connection, running, left)
            if session.shouldfail or session.shouldstop:
                left.clear()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


def _handle(
    config: pytest.Config, connection: Connection, running: dict[Connection, Process], left: deque[int]
) -> None:
    """Handle a report, or a process that asks for a file: send the next one, None if none is left."""
    process = running[connection]
    try:
        data: dict[str, Any] | None = connection.recv()
    except (EOFError, ConnectionResetError):
        del running[connection]
        connection.close()
        _, status = os.waitpid(process.pid, 0)
        if not process.has_ended or status:
            reason = f"the process of tests ended ({os.waitstatus_to_exitcode(status)}) after {process.last}"
            report = pytest.TestReport(process.last, process.location, {}, "failed", reason, "call")
            config.hook.pytest_runtest_logreport(report=report)
        return
    if data is None:
        process.has_ended = not left
        connection.send(left.popleft() if left else None)
        return
    report = config.hook.pytest_report_from_serializable(config=config, data=data)
    process.last, process.location = report.nodeid, report.location
    config.hook.pytest_runtest_logreport(report=report)


def _run(
    session: pytest.Session, files: list[list[pytest.Item]], connection: Connection, number: int, count: int
) -> NoReturn:
    """Run files until there are none left."""
    _isolate(session.config, number, count)
    session.config.pluginmanager.register(Reports(session.config, connection))
    protocol, status = session.config.hook.pytest_runtest_protocol, 1
    try:
        at = _next(connection)
        while at is not None:
            items = files[at]
            for item, following in pairwise(items):
                protocol(item=item, nextitem=following)
            at = _next(connection)
            protocol(item=items[-1], nextitem=None if at is None else files[at][0])
        status = 0
    finally:
        with suppress(BaseException):
            session._setupstate.teardown_exact(None)  # after an interrupt, everything still open
        os._exit(status)


def _next(connection: Connection) -> int | None:
    connection.send(None)
    at: int | None = connection.recv()
    return at


def _isolate(config: pytest.Config, number: int, count: int) -> None:
    """Share nothing with other processes: no captured output, temporary files or terminal."""
    os.environ["PYTEST_XDIST_WORKER_COUNT"] = str(count)
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    config.pluginmanager.getplugin("terminalreporter")._tw._file = open(os.devnull, "w")  # noqa: PTH123, SIM115
    factory = config._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / f"process-{number}"
    factory._basetemp.mkdir()
