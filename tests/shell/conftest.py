"""Fixtures for tests of commands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest

from primad.cli import main as cli


@pytest.fixture(scope="session", autouse=True)
def _forked(forks: None) -> None:
    """primad's processes start by fork."""


@pytest.fixture
def command(capsys, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Runs ``primad`` with the arguments; returns exit code, output and error output."""
    monkeypatch.setenv("PRIMAD_LOG", "WARNING")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["primad", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run
