"""``primad plan``: its options, and what it calls."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from primad.cli.options import Cluster, Home, KvCacheType, Name, NamedDevices, OnInterface
from primad.settings.config import Flags, load_config

if TYPE_CHECKING:
    from primad.planning.question import Question, Wishes

_out = Console(highlight=False, markup=False, emoji=False)
_err = Console(stderr=True, highlight=False, soft_wrap=True)


def plan(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="More profile files, as from --devices *.json.", metavar="[FILE]...", show_default=False),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="The GGUF file; its header is enough.", show_default=False)] = None,
    model_shape: Annotated[
        str | None, typer.Option(help="A built-in model, as in llama3-70b-q4k.", show_default=False)
    ] = None,
    devices: Annotated[
        list[Path] | None,
        typer.Option(help="A profile file or a folder of them; may be repeated.", show_default=False),
    ] = None,
    fleet: Annotated[str | None, typer.Option(help="A built-in fleet, or a fleet's file.", show_default=False)] = None,
    head: Annotated[
        str | None,
        typer.Option(help="The head [default: the best; this device for live ones].", show_default=False),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="What to make small: latency, ttft, throughput (of all sequences) or balanced.")
    ] = "balanced",
    solver: Annotated[str, typer.Option(help="halda, or paper: Halda as published (in a source checkout).")] = "halda",
    context: Annotated[
        int | None,
        typer.Option(
            help="Context in tokens [default: what the model was trained for, at most 4096].",
            min=16,
            max=1 << 24,
            show_default=False,
        ),
    ] = None,
    kv_type: KvCacheType = "f16",
    sequences: Annotated[int, typer.Option(help="Generations at once.", min=1, max=256)] = 1,
    prompt: Annotated[
        int | None,
        typer.Option(help="Tokens of a typical prompt [default: 512].", min=1, max=1 << 24, show_default=False),
    ] = None,
    answer: Annotated[
        int | None,
        typer.Option(help="Tokens of a typical answer [default: 256].", min=1, max=1 << 24, show_default=False),
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            help="Links that nothing measured [default: 100MB/s,2ms]: rate and round trip. "
            "A:B=300Mbit/s,4ms sets that between two devices; may be repeated.",
            show_default=False,
        ),
    ] = None,
    max_ram: Annotated[
        list[str] | None,
        typer.Option(help="At most so much RAM: NAME=16GiB; may be repeated.", show_default=False),
    ] = None,
    max_vram: Annotated[
        list[str] | None, typer.Option(help="At most so much VRAM: NAME=8GiB.", show_default=False)
    ] = None,
    max_disk: Annotated[
        list[str] | None, typer.Option(help="At most so much disk for layers: NAME=50GB.", show_default=False)
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="add=FILE, drop=NAME, ram:NAME=16GiB, vram:NAME=12GiB, disk:NAME=3GB/s, link=1Gbit/s,2ms or "
            "link:A:B=300Mbit/s; may be repeated. Shows what it changes.",
            show_default=False,
        ),
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for the solver.", min=0.1, max=3600)] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/plan.md says what).")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a picture to this file (.png, .svg, .pdf).", show_default=False)
    ] = None,
    device: NamedDevices = None,
    seconds: Annotated[float, typer.Option(help="Live: how long to look for devices.", min=0, max=600)] = 2.0,
    home: Home = None,
    name: Name = None,
    cluster: Cluster = None,
    interface: OnInterface = None,
) -> None:
    """Say who would compute what and how fast, before any device does anything.

    Without --devices and --fleet, for this device and those in sight. No weights are needed.

    Examples:

        primad plan --model llama3-70b.gguf

        primad plan --model-shape llama3-70b-q4k --fleet mixed-home

        primad plan --model qwen2.5-7b.gguf --devices profiles/*.json --objective latency --link 300Mbit/s,5ms

        primad plan --model-shape llama3-8b --fleet apple-home --what-if ram:mac-mini-m4-24gb=32GiB --json
    """
    from primad.planning.plot import check_plot
    from primad.planning.question import Wishes

    wishes = Wishes(
        solver=solver,
        objective=objective,
        context=context,
        kv_type=kv_type,
        sequences=sequences,
        prompt=prompt,
        answer=answer,
        head=head,
        links=tuple(link or ()),
        max_ram=tuple(max_ram or ()),
        max_vram=tuple(max_vram or ()),
        max_disk=tuple(max_disk or ()),
        time_limit_s=time_limit,
    )
    if plot is not None:
        check_plot(plot)
    live = {
        "home": home,
        "name": name,
        "cluster": cluster,
        "interface": interface,
        "devices": tuple(device or ()),
    }
    asked = _ask(wishes, model, model_shape, [*(devices or ()), *(files or ())], fleet, live, seconds)
    _answer(asked, tuple(what_if or ()), json=json, plot_path=plot)


def _ask(
    wishes: Wishes,
    model: Path | None,
    model_shape: str | None,
    paths: list[Path],
    fleet: str | None,
    live: Flags,
    seconds: float,
) -> Question:
    from primad.planning.question import ask, check
    from primad.planning.sources import read_devices, read_model

    profile = read_model(model, model_shape)
    check(wishes, profile)
    if paths or fleet is not None:
        return ask(wishes, *read_devices(paths, fleet), profile)
    from primad.cli.progress import RichReporter
    from primad.head.survey import survey

    found = survey(load_config(live), seconds, RichReporter(_err))
    own = found.devices[0].device
    return ask(dataclasses.replace(wishes, head=wishes.head or own), found.devices, found.links, profile)


def _answer(asked: Question, changes: tuple[str, ...], *, json: bool, plot_path: Path | None) -> None:
    from primad.planning.explain import explain
    from primad.planning.plot import plot
    from primad.planning.schema import encode
    from primad.planning.sources import read_file
    from primad.planning.table import show
    from primad.planning.whatif import change

    answer = explain(change(asked, changes, read_file), changes, asked) if changes else explain(asked)
    if plot_path is not None:
        plot(answer, plot_path)
    if json:
        sys.stdout.write(encode(answer).decode())
    else:
        show(answer, _out)
