"""Commands that do little more than start, each in a process of its own that need not import everything anew."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from primad.cli.main import main

PATIENCE_S = 180.0
_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload([__name__, "primad.cli.chat", "primad.daemon.run", "primad.head.serve"])


def run_forked(arguments: Sequence[object], variables: Mapping[str, str]) -> tuple[int, str, str]:
    """Run ``primad`` with ``arguments`` in an environment to its end: exit code, standard output and error."""
    with TemporaryDirectory() as folder:
        outputs = Path(folder, "out"), Path(folder, "errors")
        process = _FORKS.Process(target=_primad, args=([*map(str, arguments)], dict(variables), *outputs))
        process.start()
        process.join(PATIENCE_S)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"primad {arguments} did not end within {PATIENCE_S:g} s")
        out, errors = (path.read_text() for path in outputs)
        return process.exitcode, out, errors


def _primad(arguments: list[str], variables: dict[str, str], out: Path, errors: Path) -> None:
    os.environ.clear()
    os.environ.update(variables)
    for number, path in ((1, out), (2, errors)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.argv = ["primad", *arguments]
    main()
