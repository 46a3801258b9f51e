"""The command line: parse, call, print. Every error of primad is one line on standard error and exit code 2."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from primad import __version__
from primad.config import DEFAULT_HTTP_PORT, LOOPBACK, check_host, load_config
from primad.errors import ConfigError, PrimadError, Stopped
from primad.plan_command import plan
from primad.reporting import RichReporter

app = typer.Typer(
    name="primad",
    help="The machines you own run one large language model together.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
UsageError: Any = typer.BadParameter.__bases__[0]
"""What typer raises for every mistake on the command line; it has no public name."""

_INTERRUPTED = 130
"""What typer answers when a KeyboardInterrupt ended a command."""

_out = Console(highlight=False, soft_wrap=True)
_err = Console(stderr=True, highlight=False, soft_wrap=True)

Home = Annotated[
    Path | None,
    typer.Option(help="Folder for configuration, profile and layer cache.", envvar="PRIMAD_HOME", show_default=False),
]
Name = Annotated[str | None, typer.Option(help="This device's name [default: host name].", show_default=False)]
Cluster = Annotated[
    str | None, typer.Option(help="Devices of one cluster find each other [default: home].", show_default=False)
]
Threads = Annotated[
    int | None, typer.Option(help="Compute threads [default: as many as the profile found best].", show_default=False)
]
InsecureLan = Annotated[
    bool | None,
    typer.Option(
        "--insecure-lan",
        help="Listen and announce beyond this machine. Nothing is encrypted or checked yet: anyone on the network can "
        "read prompts and answers and use this device.",
        show_default=False,
    ),
]
Devices = Annotated[
    list[str] | None,
    typer.Option("--device", help="Address host:port of a device; may be repeated.", show_default=False),
]


def _version(wanted: bool) -> None:
    if wanted:
        _out.print(f"primad {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what goes on, for finding faults.")] = False,
) -> None:
    """The machines you own run one large language model together.

    Start `primad join` on each device, then `primad serve --model FILE.gguf` on the one that has the model.
    """
    del version
    level = (os.environ.get("PRIMAD_LOG") or ("DEBUG" if verbose else "WARNING")).upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"PRIMAD_LOG: {level!r} is no log level; use DEBUG, INFO, WARNING or ERROR")
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    os.environ["PRIMAD_LOG"] = level  # for the ring process


@app.command()
def join(
    home: Home = None,
    name: Name = None,
    cluster: Cluster = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default=False)] = None,
    port: Annotated[
        int | None, typer.Option(help="Control port [default: 7770, or any when it is taken].", show_default=False)
    ] = None,
    threads: Threads = None,
    insecure_lan: InsecureLan = None,
) -> None:
    """Lend this device to a head: announce it, wait for work, serve until stopped.

    Examples:

        primad join

        primad join --name desk --insecure-lan

        primad join --home /tmp/second --name second --port 7781
    """
    from primad.daemon.run import join as run_join

    config = load_config(
        {
            "home": home,
            "name": name,
            "cluster": cluster,
            "host": host,
            "port": port,
            "threads": threads,
            "insecure_lan": insecure_lan,
        }
    )
    _warn_lan(config.insecure_lan)
    run_join(config, RichReporter(_err))


@app.command()
def serve(
    model: Annotated[Path, typer.Option(help="The GGUF file; the first part of a split one.", show_default=False)],
    home: Home = None,
    name: Name = None,
    cluster: Cluster = None,
    host: Annotated[str, typer.Option(help="Address of the HTTP server.")] = LOOPBACK,
    port: Annotated[int, typer.Option(help="Port of the HTTP server.", min=0, max=65_535)] = DEFAULT_HTTP_PORT,
    device: Devices = None,
    wait: Annotated[
        int | None, typer.Option(help="Wait for this many devices besides this one.", min=0, show_default=False)
    ] = None,
    wait_timeout: Annotated[float, typer.Option(help="Seconds to wait for them.", min=0.1, max=86_400)] = 60.0,
    alone: Annotated[bool, typer.Option("--alone", help="Use this device only.")] = False,
    windows: Annotated[
        str | None,
        typer.Option(
            help="Set the plan by hand: layers a round for this device and each other one, as in 10,12,7. "
            "This device also computes the layers that are left at the end.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds a token makes, with --windows.", min=1, max=1000, show_default=False)
    ] = None,
    objective: Annotated[
        str, typer.Option(help="What the plan makes small: latency, ttft, throughput or balanced.")
    ] = "balanced",
    use_all: Annotated[
        bool,
        typer.Option("--use-all", help="Every device found gets layers, even where fewer devices would be faster."),
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(
            help="Context in tokens [default: what the model was trained for, at most 4096].",
            min=16,
            max=1 << 24,
            show_default=False,
        ),
    ] = None,
    extra_buffers: Annotated[
        str, typer.Option(help="Repacked or AMX copies of weights: auto (try and time them), on or off.")
    ] = "auto",
    step_timeout: Annotated[
        float, typer.Option(help="Seconds after which a step that is not back breaks the ring.", min=1, max=86_400)
    ] = 120.0,
    threads: Threads = None,
    insecure_lan: InsecureLan = None,
) -> None:
    """Serve a model with all devices in sight; any OpenAI client talks to it.

    Examples:

        primad serve --model llama3-70b.gguf

        primad serve --model llama3-70b.gguf --wait 3 --context 8192

        primad serve --model qwen2.5-7b.gguf --device 192.168.1.20:7770 --insecure-lan

        primad serve --model qwen2.5-7b.gguf --objective ttft --use-all

        primad serve --model smollm2.gguf --windows 10,12,7 --rounds 1
    """
    from primad.daemon.head import ServeOptions
    from primad.daemon.run import serve as run_serve
    from primad.planning.question import check_objective

    config = load_config(
        {
            "home": home,
            "name": name,
            "cluster": cluster,
            "threads": threads,
            "insecure_lan": insecure_lan,
            "devices": tuple(device or ()),
        },
        {key: value for key, value in os.environ.items() if key not in ("PRIMAD_HOST", "PRIMAD_PORT")},
    )
    check_host(host, "--host", insecure_lan=config.insecure_lan)
    if extra_buffers not in ("auto", "on", "off"):
        raise ConfigError(f"--extra-buffers {extra_buffers}: choose auto, on or off")
    if rounds is not None and windows is None:
        raise ConfigError(f"--rounds {rounds}: goes with --windows; give both or neither")
    if alone and (wait or device):
        raise ConfigError("--alone: contradicts --wait and --device; leave one of them out")
    if use_all and (alone or windows is not None):
        raise ConfigError("--use-all: contradicts --alone and --windows; leave one of them out")
    _warn_lan(config.insecure_lan)
    options = ServeOptions(
        wait=wait,
        wait_timeout_s=wait_timeout,
        windows=None if windows is None else _windows(windows),
        rounds=rounds,
        extra_buffers=extra_buffers,
        context_tokens=context,
        rows=512,
        step_timeout_s=step_timeout,
        http_port=port,
        alone=alone,
        objective=check_objective(objective),
        use_all=use_all,
    )
    run_serve(config, model, options, host, RichReporter(_err))


@app.command()
def devices(
    cluster: Cluster = None,
    insecure_lan: InsecureLan = None,
    seconds: Annotated[float, typer.Option(help="How long to look.", min=0.1, max=600)] = 2.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the devices in sight.

    Examples:

        primad devices

        primad devices --insecure-lan --seconds 5 --json
    """
    from primad.cluster.discovery import look

    config = load_config({"cluster": cluster, "insecure_lan": insecure_lan})
    peers = asyncio.run(look(config.host, seconds))
    if json:
        import msgspec

        sys.stdout.write(msgspec.json.encode(peers).decode() + "\n")
        return
    if not peers:
        _out.print("no device in sight; start 'primad join' on one")
        return
    table = Table("device", "role", "cluster", "address", "version")
    for peer in peers:
        address = ", ".join(f"{address}:{peer.port}" for address in peer.addresses)
        table.add_row(peer.device, peer.role, peer.cluster, address, peer.version)
    _out.print(table)


@app.command()
def profile(
    home: Home = None,
    name: Name = None,
    threads: Threads = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what was measured before.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as it is stored.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write it to this file.", show_default=False)] = None,
) -> None:
    """Measure this device: processor, GPU, memory and disk. Takes about a minute, once.

    Examples:

        primad profile

        primad profile --again --save desk.json
    """
    from primad.daemon.run import profile as run_profile
    from primad.profiler.measure import how_measured
    from primad.profiler.store import encode_profile, save_profile
    from primad.profiler.table import profile_table

    config = load_config({"home": home, "name": name, "threads": threads})
    device = run_profile(config, RichReporter(_err), again=again)
    measured, how = how_measured(config.home, config.threads)
    if save is not None:
        save_profile(save, device, how, measured)
    if json:
        sys.stdout.write(encode_profile(device, how, measured).decode())
    else:
        for part in profile_table(device):
            _out.print(part)
        _out.print(f"measured {measured}", markup=False)


app.command()(plan)


@app.command()
def chat(
    prompt: Annotated[str | None, typer.Argument(help="One question; without it, a conversation.")] = None,
    url: Annotated[str, typer.Option(help="The endpoint.")] = f"http://{LOOPBACK}:{DEFAULT_HTTP_PORT}",
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 to 2.", min=0, max=2, show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Makes an answer repeatable.", min=0, show_default=False)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.", min=1, show_default=False)] = None,
) -> None:
    """Talk to a running endpoint.

    Examples:

        primad chat

        primad chat "Why is the sky blue?" --temperature 0

        primad chat --url http://127.0.0.1:9000 --system "Answer in French."
    """
    from primad.chat import converse

    options: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens}
    chosen = {key: value for key, value in options.items() if value is not None}
    converse(url, prompt, system=system, options=chosen, out=_out, err=_err)


def _windows(text: str) -> tuple[int, ...]:
    try:
        windows = tuple(int(part) for part in text.split(","))
    except ValueError as exc:
        raise ConfigError(f"--windows {text}: give whole numbers with commas between, as in 10,12,7") from exc
    if not 1 <= len(windows) <= 1000 or min(windows) < 1:
        raise ConfigError(f"--windows {text}: every window needs at least one layer")
    return windows


def _warn_lan(insecure_lan: bool) -> None:
    if insecure_lan:
        _err.print(
            "warning: --insecure-lan: nothing is encrypted or checked yet; everyone on this network can read prompts and "
            "answers, use this device, and send it layers to load"
        )


def _fail(message: str) -> NoReturn:
    line = " ".join(message.split())
    _err.print(f"primad: error: {line}", markup=False, emoji=False)
    sys.exit(2)


def main() -> None:
    """Entry point of the ``primad`` command."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends every command as Ctrl-C does
    try:
        code = app(standalone_mode=False) or 0
        if code == _INTERRUPTED:
            raise Stopped
        sys.exit(code)
    except (Stopped, KeyboardInterrupt):
        _err.print("stopped")
    except PrimadError as exc:
        _fail(str(exc))
    except UsageError as exc:
        _fail(f"{exc.format_message()}; see 'primad --help'")
