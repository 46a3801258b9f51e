"""``primad fit``: its options and table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import typer
from rich import box
from rich.table import Table

from primad.cli.completion import one_of
from primad.cli.fleet import FleetOptions, LiveOptions, ProfileFiles, found_devices, wishes_of
from primad.cli.grouped import grouped
from primad.cli.options import Context, KvCacheType
from primad.cli.output import err, out, print_json, tables
from primad.cli.progress import RichReporter
from primad.settings.quantities import parse_choice, show_bytes, show_ms, show_speed

if TYPE_CHECKING:
    from primad.planning.fit import Fit, FitResult
    from primad.planning.question import Question

_QUANTISATIONS: Final = ("q4k", "q4_k_m", "q8", "f16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsOptions:
    """The models to plan for."""

    PANEL: ClassVar[str] = "Models"

    quant: Annotated[
        list[str] | None,
        typer.Option(
            help="q4k, q4_k_m, q8 or f16; repeatable [default: q4k].",
            show_default=False,
            autocompletion=one_of(*_QUANTISATIONS),
        ),
    ] = None
    only: Annotated[
        str | None, typer.Option(help="Models with this in their name, such as qwen3.", show_default=False)
    ] = None
    context: Context = None
    kv_type: KvCacheType = "f16"
    time_limit: Annotated[float, typer.Option(help="Seconds for the solver per model.", min=0.05, max=60)] = 0.5
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


@grouped
def fit(
    models: ModelsOptions,
    fleet: FleetOptions,
    live: LiveOptions,
    files: ProfileFiles = None,
) -> None:
    """Show which well-known models these devices can run, and how fast.

    By default for this device and those in sight. The largest models with at least 5 tokens/s are marked.

    Examples:

        primad fit

        primad fit --fleet mixed-home --quant q4k --quant q8

        primad fit --only qwen3 --context 16384
    """
    from primad.planning.fit import fit_all

    questions = list(_questions(models, fleet, live, files))
    with RichReporter(err).waiting(f"planning for {len(questions)} models") as show:
        answer = fit_all(questions, planned=lambda count: show(f"planned for {count} of {len(questions)} models"))
    if models.json:
        print_json(answer)
    else:
        _show(answer)


def _questions(
    models: ModelsOptions, fleet: FleetOptions, live: LiveOptions, files: list[Path] | None
) -> Iterator[tuple[str, Question]]:
    from halda import KV_TYPES
    from primad.errors import ConfigError
    from primad.gguf.published import published_file, published_profile
    from primad.gguf.shapes import popular_shapes, shape
    from primad.planning.question import Wishes, ask
    from primad.planning.run_config import RunConfig

    kinds = [parse_choice(kind.lower(), _QUANTISATIONS, "--quant") for kind in models.quant or ("q4k",)]
    names = [name for name in popular_shapes() if (models.only or "").lower() in name]
    if not names:
        raise ConfigError(
            f"--only {models.only}: no model has that in its name; without --only 'primad fit' lists them all"
        )
    found = found_devices(fleet, files, live)
    run = RunConfig(objective="latency", kv_type=parse_choice(models.kv_type, KV_TYPES, "--kv-type"))
    wishes = Wishes(time_limit_s=models.time_limit, **wishes_of(fleet))
    wishes = replace(wishes, head=wishes.head or found.own)
    for name in names:
        for kind in kinds:
            file = published_file(f"{name}-{kind}")
            profile = shape(f"{name}-{kind}") if file is None else published_profile(file)
            context = None if models.context is None else min(models.context, profile.context_tokens)
            yield (
                f"{name}-{kind}",
                ask(replace(wishes, run=replace(run, context_tokens=context)), found.devices, found.links, profile),
            )


def _show(answer: FitResult) -> None:
    from primad.planning.table import widen

    widen(tables)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in ("", "model", "size", "runs", "a second", "first token", "context", "devices", "bottleneck"):
        numbers = column in ("size", "a second", "first token", "context", "devices")
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for each in reversed(answer.models):  # the best ones come last, next to the prompt
        table.add_row(*_columns(each))
    tables.print(table)
    if answer.help:
        tables.print(f"What would help most: {answer.help}.")
    tables.print(what_is_marked(answer))
    for line in next_commands(answer):
        out.print(line)


def what_is_marked(answer: FitResult) -> str:
    """The meaning of the star; without any, that no model is fast enough, and a possible reason."""
    names = "each name is a --model-shape of primad plan"
    if any(each.is_best for each in answer.models):
        return f"* the largest with at least 5 tokens/s; {names}"
    slow = "none reaches 5 tokens/s here; if a device was busy when it was measured: primad profile --remeasure"
    return f"{slow}; {names}"


def next_commands(answer: FitResult) -> list[str]:
    """The commands for the best models, and for the best downloadable ones; if none is fast enough, for the first that
    run."""
    from primad.planning.fit import BEST

    runs = [each for each in answer.models if each.runs != "no"]
    best = [each for each in runs if each.is_best] or runs[:BEST]
    if not best:
        return []
    fetched = [] if any(each.hub for each in best) else [each for each in runs if each.hub][:1]
    commands = [
        f"  primad serve --model {each.hub}" if each.hub else f"  primad plan --model-shape {each.name}"
        for each in (*fetched, *reversed(best))
    ]
    return ["Next, for one of them:", *commands]


def _columns(each: Fit) -> list[str]:
    mark = "*" if each.is_best else ""
    if each.runs == "no":
        return [mark, each.name, show_bytes(each.bytes), "no", "", "", "", "", each.why]
    runs = "in memory" if each.runs == "memory" else f"streams {show_bytes(each.streamed_bytes)}"
    return [
        mark,
        each.name,
        show_bytes(each.bytes),
        runs,
        show_speed(each.tokens_per_s),
        show_ms(each.ttft_ms),
        str(each.context_tokens),
        str(len(each.devices)),
        each.why.split(" (")[0],
    ]
