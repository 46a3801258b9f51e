"""``primad fit``: its options and table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import typer
from msgspec.structs import replace
from rich import box
from rich.table import Table

from primad.cli.completion import one_of
from primad.cli.encoders import encoder_of, encoder_of_model_shape
from primad.cli.fleet import FleetOptions, LiveOptions, ProfileFiles, found_devices, wishes_of
from primad.cli.grouped import grouped
from primad.cli.hub import model_path
from primad.cli.library import ModelFolders
from primad.cli.options import Context, KvCacheType, Parallel
from primad.cli.output import err, out, print_json, tables
from primad.cli.progress import RichReporter
from primad.errors import ConfigError
from primad.settings.config import load_config
from primad.settings.quantities import parse_choice, show_bytes, show_ms, show_speed

if TYPE_CHECKING:
    from halda import ModelProfile
    from primad.planning.fit import Fit, FitResult
    from primad.planning.question import PlannedEncoder, Question

_QUANTISATIONS: Final = ("q4k", "q4_k_m", "q8", "f16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsOptions:
    """The models to plan for."""

    PANEL: ClassVar[str] = "Models"

    model: Annotated[
        list[Path] | None,
        typer.Option(
            help="A model that 'primad models' lists, or a GGUF file; repeatable [default: well-known models].",
            show_default=False,
        ),
    ] = None
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
    parallel: Parallel = "pipeline"
    time_limit: Annotated[float, typer.Option(help="Seconds for the solver per model.", min=0.05, max=60)] = 0.5
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


@grouped
def fit(
    models: ModelsOptions,
    fleet: FleetOptions,
    live: LiveOptions,
    files: ProfileFiles = None,
    folders: ModelFolders = None,
) -> None:
    """Show which well-known models, or models on this device, these devices can run, and how fast.

    By default for this device and all discovered ones. The largest models with at least 5 tokens/s are marked.

    Examples:

        primad fit

        primad fit --fleet mixed-home --quant q4k --quant q8

        primad fit --only qwen3 --context 16384

        primad fit --model llama3.2:1b --model qwen3:4b
    """
    from primad.planning.fit import fit_all

    profiles = list(_of_library(models, live, folders) if models.model else _well_known(models))
    questions = list(_questions(profiles, models, fleet, live, files))
    with RichReporter(err).waiting(f"planning for {len(questions)} models") as show:
        answer = fit_all(questions, planned=lambda count: show(f"planned for {count} of {len(questions)} models"))
    if models.model:
        answer = replace(answer, models=[replace(each, hub=each.name) for each in answer.models])
    if models.json:
        print_json(answer)
    else:
        _show(answer)


_Asked = tuple[str, "ModelProfile", "PlannedEncoder | None"]


def _well_known(models: ModelsOptions) -> Iterator[_Asked]:
    from primad.gguf.published import published_file, published_profile
    from primad.gguf.shapes import popular_shapes, shape

    kinds = [parse_choice(kind.lower(), _QUANTISATIONS, "--quant") for kind in models.quant or ("q4k",)]
    names = [name for name in popular_shapes() if (models.only or "").lower() in name]
    if not names:
        raise ConfigError(
            f"--only {models.only}: no model has that in its name; without --only 'primad fit' lists them all"
        )
    for name in names:
        for kind in kinds:
            file = published_file(f"{name}-{kind}")
            profile = shape(f"{name}-{kind}") if file is None else published_profile(file)
            yield f"{name}-{kind}", profile, encoder_of_model_shape(name)


def _of_library(models: ModelsOptions, live: LiveOptions, folders: list[Path] | None) -> Iterator[_Asked]:
    from primad.planning.sources import read_model

    if models.only or models.quant:
        raise ConfigError("--model: contradicts --only and --quant; leave one of them out")
    given = {"home": live.home, "models": tuple(folders or ())}
    for name in dict.fromkeys(models.model or ()):
        path = model_path(name, lambda: load_config(given), fetches=False)
        encoder = encoder_of(Path("auto"), name, path, lambda: load_config(given))
        yield name.as_posix(), read_model(path, None), encoder


def _questions(
    profiles: Iterable[_Asked],
    models: ModelsOptions,
    fleet: FleetOptions,
    live: LiveOptions,
    files: list[Path] | None,
) -> Iterator[tuple[str, Question]]:
    from halda import KV_TYPES
    from primad.planning.question import Wishes, ask
    from primad.planning.run_config import PARALLEL_MODES, RunConfig

    found = found_devices(fleet, files, live)
    run = RunConfig(
        objective="latency",
        kv_type=parse_choice(models.kv_type, KV_TYPES, "--kv-type"),
        parallel=parse_choice(models.parallel, PARALLEL_MODES, "--parallel"),
    )
    wishes = Wishes(time_limit_s=models.time_limit, **wishes_of(fleet))
    wishes = dataclasses.replace(wishes, head=wishes.head or found.own)
    for name, profile, encoder in profiles:
        context = None if models.context is None else min(models.context, profile.context_tokens)
        asked = dataclasses.replace(wishes, run=dataclasses.replace(run, context_tokens=context))
        yield name, dataclasses.replace(ask(asked, found.devices, found.links, profile), encoder=encoder)


def _show(answer: FitResult) -> None:
    from primad.planning.table import widen

    widen(tables)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in ("", "model", "size", "runs", "speed", "TTFT", "context", "devices", "bottleneck"):
        numbers = column in ("size", "speed", "TTFT", "context", "devices")
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
    """The meaning of the star; without a marked model, a line that none is fast enough, with a possible reason."""
    is_served = all(each.hub == each.name for each in answer.models)
    names = f"each name is a {'--model of primad serve' if is_served else '--model-shape of primad plan'}"
    if any(each.is_best for each in answer.models):
        return f"* the largest with at least 5 tokens/s; {names}"
    slow = "none reaches 5 tokens/s here; if a device was busy when it was measured: primad profile --remeasure"
    return f"{slow}; {names}"


def next_commands(answer: FitResult) -> list[str]:
    """The commands for the best models and the best downloadable one; if none is fast enough, for the first that run."""
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
    from primad.planning.question import senses

    mark = "*" if each.is_best else ""
    can = senses(each.sees, each.hears)
    name = f"{each.name} ({can})" if can else each.name
    if each.runs == "no":
        return [mark, name, show_bytes(each.bytes), "no", "", "", "", "", each.why]
    runs = "in memory" if each.runs == "memory" else f"streams {show_bytes(each.streamed_bytes)}"
    return [
        mark,
        name,
        show_bytes(each.bytes),
        runs,
        show_speed(each.tokens_per_s),
        show_ms(each.ttft_ms),
        str(each.context_tokens),
        str(len(each.devices)),
        each.why.split(" (")[0],
    ]
