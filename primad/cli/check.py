"""``primad check``: certify that windows of a model equal the whole model bit for bit, on a tiny model like it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from primad.cli.hub import model_path
from primad.cli.library import ModelFolders
from primad.cli.options import Home
from primad.cli.output import err, out, print_json
from primad.cli.progress import RichReporter
from primad.errors import printable
from primad.settings.config import load_config, open_home
from primad.settings.quantities import parse_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from primad.certify.verdict import CheckVerdict, TriedRoute

_MAX_SHOWN = 12


def check(
    model: Annotated[
        Path,
        typer.Argument(
            help="A GGUF file (its header is enough), a model that 'primad models' lists, or hf:owner/repo.",
            metavar="MODEL",
        ),
    ],
    home: Home = None,
    models: ModelFolders = None,
    cuts: Annotated[
        str | None,
        typer.Option(
            help="Layers at which windows after the first begin, such as 8,16,24 [default: everywhere].",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Try every cut into two windows, not only eight of them.")
    ] = False,
    time_limit: Annotated[float, typer.Option(help="Seconds.", min=1, max=86_400)] = 120.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Test whether windows of a model equal the whole model, bit for bit.

    Uses a tiny model with the same layers and random weights, in child processes. The verdict is kept, and shown by
    'primad plan' and 'primad status'. The exit code is 1 if the model is not certified.

    Examples:

        primad check MODEL.gguf

        primad check MODEL.gguf --cuts 8,16,24

        primad check MODEL.gguf --all --time-limit 600
    """
    from primad.certify.check import Wanted
    from primad.certify.check import check as try_windows
    from primad.certify.verdict import save_verdict
    from primad.gguf.model import open_model

    config = load_config({"home": home, "models": tuple(models or ())})
    open_home(config)
    layers = tuple(parse_whole(part, "--cuts", minimum=1, maximum=100_000) for part in (cuts or "").split(",") if cuts)
    header = open_model(model_path(model, lambda: config, fetches=False), header_only=True)
    wanted = Wanted(cuts=layers, every=every, time_limit_s=time_limit)
    with RichReporter(err).waiting("trying") as show:
        verdict = try_windows(header, wanted, lambda what: show(f"trying {printable(what)}"))
    try:
        save_verdict(config.home, header, verdict)
    except OSError as exc:
        err.print(f"{config.home}: cannot save the verdict: {exc.strerror or exc}")
    if json:
        print_json(verdict)
    else:
        for line in _lines(verdict):
            out.print(line)
    if verdict.result != "certified":
        raise typer.Exit(1)


def _lines(verdict: CheckVerdict) -> Iterator[str]:
    more = f" and {verdict.cut_offset} more" if verdict.cut_offset else ""
    where = "at any layer"
    if verdict.cut_multiple > 1:
        where = f"at every layer that is a multiple of {verdict.cut_multiple}{more}"
    yield f"{printable(verdict.model)} ({verdict.architecture}, {verdict.layers} layers), {verdict.library}"
    if verdict.cut_multiple >= verdict.layers:
        where = "only at the first layer: it runs on one device"
    yield f"windows may begin {where}; compared in {verdict.seconds:g} s on a tiny model of the same layers"
    for kv_type, outcome, why, routes in _together(verdict.routes):
        outcome_text = {"equal": "exact", "not opened": "not opened"}.get(outcome, f"NOT EXACT ({outcome})")
        yield f"  {kv_type:<5} {outcome_text:<12} {_places(routes)}" + (f": {why}" if why else "")
    for key in verdict.keys:
        yield f"  {key.key}: {key.outcome}" + (f" ({key.how})" if key.how else "")
    for each in verdict.forbidden:
        yield f"  no window may begin at layer {' and '.join(map(str, each.layers))}: {each.why}"
    if verdict.shares is not None:
        yield f"  shares of layers: {verdict.shares or 'add up to the whole'}"
    if verdict.left:
        yield f"not tested for lack of time: {', '.join(verdict.left)}; give more with --time-limit"
    yield f"{verdict.result}: {verdict.why}" if verdict.why else verdict.result


def _together(routes: tuple[TriedRoute, ...]) -> Iterator[tuple[str, str, str, list[TriedRoute]]]:
    """Routes with the same outcome."""
    found: dict[tuple[str, str, str], list[TriedRoute]] = {}
    for each in routes:
        found.setdefault((each.kv_type, each.outcome, each.why), []).append(each)
    for (kv_type, outcome, why), same in found.items():
        yield kv_type, outcome, why, same


def _places(routes: list[TriedRoute]) -> str:
    """Where the windows of ``routes`` begin."""
    several = [f"{len(each.cuts) - 1} windows" for each in routes if len(each.cuts) != 3]
    two = [str(each.cuts[1]) for each in routes if len(each.cuts) == 3]
    shown = f"{', '.join(two[:_MAX_SHOWN])}{' and more' if len(two) > _MAX_SHOWN else ''}"
    return "; ".join([*several, *([f"two, cut at layer {shown}"] if two else [])])
