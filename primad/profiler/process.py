"""The child process that measures this device for a daemon: ``python -m primad.profiler.process``, with a request on
its input.

It reports each measurement as a line of JSON, and the result. The daemon continues meanwhile, ends the process
if it has more urgent work, and never loads the measuring code.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import msgspec

from primad.errors import PrimadError
from primad.profiler.device import profile_device
from primad.profiler.effort import QUICK, Effort
from primad.system.terminal import escape_uncaught


class MeasureRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Measure the device ``name`` for the daemon of ``home``, with ``threads`` pinned threads or the best count."""

    name: str
    home: str
    threads: int | None
    is_quick: bool

    @property
    def effort(self) -> Effort:
        """The requested effort."""
        return QUICK if self.is_quick else Effort()


class Measuring(msgspec.Struct, frozen=True, tag="measuring"):
    """``what`` is measured now."""

    what: str


class Unmeasured(msgspec.Struct, frozen=True, tag="unmeasured"):
    """The device cannot be measured."""

    reason: str


def _report_line(line: Measuring | Unmeasured) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Measure what was asked for on standard input."""
    escape_uncaught()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that trials end with it, and their files go
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=MeasureRequest)
        profile_device(
            request.name,
            Path(request.home),
            request.threads,
            lambda what: _report_line(Measuring(what)),
            effort=request.effort,
        )
    except PrimadError as exc:
        _report_line(Unmeasured(str(exc)))
    except (KeyboardInterrupt, BrokenPipeError):  # the daemon no longer waits for the result
        sys.exit(1)


if __name__ == "__main__":
    main()
