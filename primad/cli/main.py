"""The command line: parse, call, print. Every error of primad is one line on standard error and exit code 2."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from primad import __version__
from primad.cli.cache import cache_app
from primad.cli.chat import chat
from primad.cli.check import check
from primad.cli.commands import CommandGroup
from primad.cli.devices import devices_app
from primad.cli.doctor import doctor
from primad.cli.fit import fit
from primad.cli.join import JOIN_SHOWN, JOIN_TABLE, join
from primad.cli.key import key_app
from primad.cli.load_unload import load, unload
from primad.cli.models import models, pull, rm
from primad.cli.options import Gpu, Home, Name, Threads
from primad.cli.output import err, out, write_json
from primad.cli.page import page
from primad.cli.pair_pause_leave import leave, pair, pause, resume
from primad.cli.plan import PLAN_SHOWN, PLAN_TABLE, plan
from primad.cli.progress import RichReporter
from primad.cli.serve import SERVE_SHOWN, SERVE_TABLE, serve
from primad.cli.service.command import service_app
from primad.cli.service.service import GIVE_UP_VARIABLE
from primad.cli.status import status
from primad.cli.trust import revoke, trust
from primad.errors import ConfigError, NotNowError, PrimadError, Stopped
from primad.settings.config import load_config
from primad.system.gpus import hide_gpus
from primad.system.notify import MAX_STATUS_CHARS, notify
from primad.system.terminal import start_logging

app = CommandGroup(
    name="primad",
    help="Run one large language model across the machines you own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
UsageError: Any = typer.BadParameter.__bases__[0]
"""What typer raises for every mistake on the command line; it has no public name."""

_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EIO)
_INTERRUPTED = 130
"""Typer's exit code after a KeyboardInterrupt, and the one that a shell expects after Ctrl-C."""


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"primad {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details, for debugging.")] = False,
) -> None:
    """Run one large language model across the machines you own.

    Start `primad serve --model FILE.gguf` on the device that has the model; it shows a code. Then start
    `primad join --code CODE` on each other device, and from then on plain `primad join`.
    """
    del version
    level = (os.environ.get("PRIMAD_LOG") or ("DEBUG" if verbose else "WARNING")).upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"PRIMAD_LOG: {level!r} is not a log level; use DEBUG, INFO, WARNING or ERROR")
    start_logging(level, "%(levelname)s %(name)s: %(message)s")
    os.environ["PRIMAD_LOG"] = level  # for the ring process
    try:
        Path.home()
    except RuntimeError as exc:
        raise ConfigError("HOME: not set, and this user has no home folder; set it to a folder of this user") from exc
    hide_gpus()  # a head loads the vocabulary with llama.cpp; only its child processes touch GPU drivers


app.command(shown=JOIN_SHOWN, table=JOIN_TABLE)(join)
app.command(shown=SERVE_SHOWN, table=SERVE_TABLE)(serve)


@app.command()
def profile(
    home: Home = None,
    name: Name = None,
    threads: Threads = None,
    gpu: Gpu = None,
    remeasure: Annotated[
        bool, typer.Option("--remeasure", help="Measure again, and reset what was learned from requests.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Measure for at most 8 seconds, less accurately.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the stored profile.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write it to this file.", show_default=False)] = None,
) -> None:
    """Measure this device: CPU, GPU, memory and disk. Takes at most half a minute, once.

    Examples:

        primad profile

        primad profile --remeasure --save desk.json
    """
    from primad.daemon.run import profile as run_profile
    from primad.head.model.learning import correction_line
    from primad.profiler.device import how_measured
    from primad.profiler.effort import QUICK, Effort
    from primad.profiler.store import encode_profile, save_profile
    from primad.profiler.table import profile_table

    config = load_config({"home": home, "name": name, "threads": threads, "gpu": gpu})
    device = run_profile(config, RichReporter(err), again=remeasure, effort=QUICK if quick else Effort())
    measured, how = how_measured(config.home, config.threads)
    if save is not None:
        save_profile(save, device, how, measured)
    if json:
        write_json(encode_profile(device, how, measured).decode())
    else:
        for part in profile_table(device):
            out.print(part)
        out.print(f"measured {measured}")
        learnt = correction_line(config.home, device)
        if learnt is not None:
            out.print(learnt)


app.command(shown=PLAN_SHOWN, table=PLAN_TABLE)(plan)
app.command()(fit)
devices_app.command()(trust)
devices_app.command()(revoke)
app.add_typer(devices_app, name="devices")
app.add_typer(cache_app, name="cache")
app.add_typer(key_app, name="key")
app.add_typer(service_app, name="service")
for command in (status, page, pair, leave, pause, resume, doctor, chat, check, pull, models, load, unload, rm):
    app.command()(command)


def _fail(message: str, *, for_good: bool = False) -> NoReturn:
    """Print ``message`` and exit. ``for_good``: another start would fail in the same way, which a service manager must
    know."""
    line = " ".join(message.split())
    err.print(f"primad: error: {line}")
    notify(f"STATUS=it failed: {line[:MAX_STATUS_CHARS]}")
    code = os.environ.get(GIVE_UP_VARIABLE, "")
    sys.exit(int(code) if for_good and code.isdecimal() and int(code) < 256 else 2)


def main() -> None:
    """Entry point of the ``primad`` command."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends every command like Ctrl-C
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # not every terminal or pipe can encode all characters
    try:
        code = app(standalone_mode=False) or 0
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
        sys.stdout.flush()
        sys.exit(code)
    except Stopped:  # a daemon ends in no other way
        err.print("stopped")
        sys.exit(0)
    except KeyboardInterrupt:
        err.print("stopped")
        sys.exit(_INTERRUPTED)
    except PrimadError as exc:
        _fail(str(exc), for_good=isinstance(exc, ConfigError) and not isinstance(exc, NotNowError))
    except UsageError as exc:
        if not exc.format_message():  # a command group without a command: its help has been printed
            sys.exit(2)
        command = "primad" if exc.ctx is None else exc.ctx.command_path
        _fail(f"{exc.format_message().rstrip('.')}; see '{command} --help'", for_good=True)
    except OSError as exc:
        if exc.errno not in _NO_ROOM or exc.filename is not None:
            raise
        with Path(os.devnull).open("wb") as nothing:  # otherwise Python tries again at exit
            os.dup2(nothing.fileno(), 1)
        _fail(f"standard output: {exc.strerror}; free some space there")
