"""Plain llama.cpp in a child process, for a benchmark; see ``plain_llama.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class PlainChild:
    """A whole model in one process, mapped; ``extra_buffers`` is on or off, ``rows`` the largest batch in tokens.

    The GPU computes the last ``gpu_layers`` layers.
    """

    def __init__(
        self,
        model: Path,
        threads: int,
        extra_buffers: str,
        environ: Mapping[str, str],
        *,
        context: int,
        rows: int = 512,
        gpu_layers: int = 0,
    ) -> None:
        options = {
            "path": str(model),
            "threads": threads,
            "extra_buffers": extra_buffers == "on",
            "context": context,
            "rows": rows,
            "gpu_layers": gpu_layers,
        }
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("plain_llama.py")), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(environ),
        )
        self.rss_bytes = 0

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, **what: int) -> float:
        """Return the seconds of the request."""
        return float(self.answer(**what)["seconds"])

    def answer(self, **what: int) -> dict[str, Any]:
        """Return the whole reply. Raises ``RuntimeError`` if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"plain llama.cpp ended with code {self._process.wait(10)}")
        answer: dict[str, Any] = json.loads(line)
        self.rss_bytes = answer["rss_bytes"]
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)
