"""``primad plan``: its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import msgspec
import typer

from primad.cli.commands import HelpAll
from primad.cli.completion import shapes
from primad.cli.encoders import encoder_of, encoder_of_model_shape
from primad.cli.fleet import FleetOptions, LiveOptions, ProfileFiles, found_devices, wishes_of
from primad.cli.grouped import grouped, names_of
from primad.cli.hub import model_path
from primad.cli.library import ModelFolders
from primad.cli.options import Lora, Mmproj, RopeOptions, rope_of
from primad.cli.output import err, tables, write_json
from primad.cli.progress import RichReporter
from primad.cli.run_options import DraftOptions, RunOptions, run_config
from primad.errors import ConfigError
from primad.settings.config import Config, load_config, models_folder

if TYPE_CHECKING:
    from halda import ShareBytes
    from primad.engine.rope import Rope
    from primad.gguf.header import Header
    from primad.planning.question import PlannedDraft, Question, Wishes
    from primad.planning.run_config import RunConfig

Checked = Callable[[Iterable[int]], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The model to serve."""

    PANEL: ClassVar[str] = "Model"

    model: Annotated[
        Path | None,
        typer.Option(
            help="A GGUF file (its header is enough), or a model that 'primad models' lists.",
            show_default=False,
        ),
    ] = None
    mmproj: Mmproj = Path("auto")
    model_shape: Annotated[
        str | None,
        typer.Option(help="A built-in model, such as llama3-70b-q4k.", show_default=False, autocompletion=shapes),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveOptions:
    """Solver and output."""

    PANEL: ClassVar[str] = "Output"

    time_limit: Annotated[float, typer.Option(help="Seconds for the solver.", min=0.1, max=3600)] = 5.0
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="add=FILE, drop=NAME, ram:NAME=16GiB, vram:NAME=12GiB, disk:NAME=3GB/s, link=1Gbit/s,2ms or "
            "link:NAME:NAME=300Mbit/s; repeatable. Shows before and after.",
            show_default=False,
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print JSON (see docs/plan.md).")] = False
    plot: Annotated[
        Path | None, typer.Option(help="Plot the plan to this file (.png, .svg, .pdf).", show_default=False)
    ] = None


PLAN_SHOWN: Final = (
    *("files", "model", "model_shape", "draft", "devices", "fleet", "head", "link"),
    *("objective", "context", "sequences", "what_if", "json"),
)
"""Options that ``--help`` shows."""
PLAN_TABLE: Final = {"lora", "seconds"} | names_of(
    ModelOptions, FleetOptions, RunOptions, DraftOptions, RopeOptions, SolveOptions
)
"""Options allowed in the configuration file, in addition to the keys of the device."""


@grouped
def plan(
    model: ModelOptions,
    fleet: FleetOptions,
    live: LiveOptions,
    run: RunOptions,
    draft: DraftOptions,
    rope: RopeOptions,
    answer: SolveOptions,
    files: ProfileFiles = None,
    models: ModelFolders = None,
    lora: Lora = None,
    help_all: HelpAll = False,
) -> None:
    """Show which device would compute which layers and how fast, before any device does anything.

    By default for this device and all discovered ones. No weights are needed.

    Examples:

        primad plan --model llama3-70b.gguf

        primad plan --model-shape llama3-70b-q4k --fleet mixed-home

        primad plan --model qwen2.5-7b.gguf --devices profiles/devices/*.json --objective latency --link 300Mbit/s,5ms

        primad plan --model-shape llama3-8b --fleet apple-home --what-if ram:mac-mini-m4-24gb=32GiB --json
    """
    from primad.planning.table import check_plot

    del help_all
    wishes = _wishes(fleet, run_config(run, draft), answer)
    if answer.plot is not None:
        check_plot(answer.plot)
    asked, checked = _ask(
        wishes, model, draft.draft, rope_of(rope), lora or [], fleet, files, live, tuple(models or ())
    )
    _answer(asked, answer, checked)


def _wishes(fleet: FleetOptions, run: RunConfig, answer: SolveOptions) -> Wishes:
    from primad.planning.question import Wishes

    return Wishes(run=run, time_limit_s=answer.time_limit, **wishes_of(fleet))


def _ask(
    wishes: Wishes,
    model: ModelOptions,
    draft: Path | None,
    rope: Rope,
    lora: list[str],
    fleet: FleetOptions,
    files: list[Path] | None,
    live: LiveOptions,
    folders: tuple[Path, ...],
) -> tuple[Question, Checked]:
    """The question, and the check whether windows of the model are exact."""
    from primad.certify.verdict import load_verdict, windows_line, with_verdict
    from primad.gguf.architectures.cuts import why_whole
    from primad.gguf.architectures.table import NotCutError
    from primad.gguf.model import open_model
    from primad.gguf.share_rules import ShareRules
    from primad.gguf.shares import share_bytes, shared_ranks
    from primad.planning.adapters import (
        open_adapters,
        parse_lora,
        whole_line,
        with_adapters,
        with_expert_use,
        with_rope,
    )
    from primad.planning.check_run import check_run
    from primad.planning.predicting import predicts, with_predicting
    from primad.planning.question import ask, check
    from primad.planning.sources import read_model

    path = model.model
    if path is None and draft is not None:
        raise ConfigError(f"--draft {draft}: needs --model, since it must have the same tokens")
    if path is None and lora:
        raise ConfigError(f"--lora {lora[0]}: needs --model, since it changes its weights")
    if path is not None:
        otherwise = ", and --model-shape plans without it"
        path = model_path(path, lambda: _config(live.home, folders), fetches=False, otherwise=otherwise)
    read = read_model(path, model.model_shape)
    profile = with_rope(read, None if path is None else open_model(path, header_only=True), rope)
    check_run(wishes.run, profile, draft)
    check(wishes)
    found = found_devices(fleet, files, live)
    checked: Checked = _unknown
    drafts: PlannedDraft | None = None
    may_be_several, max_ranks, units, encoder = True, None, None, None
    of_ranks: ShareBytes | None = None
    if path is not None:
        header, home = open_model(path, header_only=True), found.home or load_config({"home": live.home}).home
        adapters = open_adapters(parse_lora(lora), header)
        if (line := whole_line(adapters)) is not None:
            err.print(line, markup=False, highlight=False)
        profile = with_rope(
            with_adapters(with_verdict(read, header, load_verdict(home, header)), adapters), header, rope
        )
        checked = partial(windows_line, home, header)
        if found.home is not None:
            profile = with_expert_use(profile, header, found.home)
        other = "--draft names another model that drafts" if draft else "adapters change the model" if lora else ""
        head = next((each for each in found.devices if each.device == (wishes.head or found.own)), None)
        if predicts(wishes.run, header, other, free_bytes=None if head is None else head.ram_available_bytes):
            profile = with_predicting(profile, header)
        drafts, may_be_several = _draft(draft, header, home, folders), not why_whole(header)
        encoder = encoder_of(model.mmproj, model.model or path, path, lambda: _config(live.home, folders))
        max_ranks, is_asked = 1, wishes.run.parallel == "tensor"
        if is_asked or wishes.run.may_share:
            try:
                rules = ShareRules(header)
                max_ranks = shared_ranks(rules, max(len(found.devices), 2))
                units, of_ranks = rules.units, cache(partial(share_bytes, rules))
            except NotCutError:
                if is_asked:
                    raise
    elif model.model_shape is not None and model.mmproj != Path("none") and wishes.run.parallel != "tensor":
        encoder = encoder_of_model_shape(model.model_shape)
    asked = ask(dataclasses.replace(wishes, head=wishes.head or found.own), found.devices, found.links, profile)
    more = dataclasses.replace(
        asked,
        draft=drafts,
        encoder=encoder,
        may_be_several=may_be_several,
        max_ranks=max_ranks or asked.max_ranks,
        units=units if max_ranks else asked.units,
        share_bytes=of_ranks,
    )
    return more, checked


def _config(home: Path | None, folders: tuple[Path, ...]) -> Config:
    return load_config({"home": home, "models": folders})


def _draft(given: Path | None, header: Header, home: Path, folders: tuple[Path, ...]) -> PlannedDraft | None:
    """The draft model. Raises ``ConfigError`` for an unsuitable one."""
    from primad.gguf.architectures.cuts import why_whole
    from primad.planning.draft_model import AUTO, MAX_CONTEXT, choose_draft, draft_profile, memory_of, models_here
    from primad.planning.question import PlannedDraft

    if given is None:
        return None
    if given == AUTO:
        found = choose_draft(header, models_here(header, models_folder(home)), context=MAX_CONTEXT, free_bytes=None)
        err.print(f"--draft auto: {found}", markup=False, highlight=False)
        path = found.path
    else:
        path = model_path(given, lambda: _config(home, folders), fetches=False)
    if path is None:
        return None
    own, profile = draft_profile(path, header, header_only=True)
    memory_bytes = memory_of(profile, MAX_CONTEXT)
    return PlannedDraft(path=str(path), model=profile, memory_bytes=memory_bytes, may_move=not why_whole(own))


def _unknown(_: Iterable[int]) -> None:
    """A shape has no verdict."""


def _answer(asked: Question, wanted: SolveOptions, checked: Checked) -> None:
    from primad.planning.explain import explain
    from primad.planning.schema import encode
    from primad.planning.table import plot, show
    from primad.planning.whatif import change
    from primad.profiler.store import load_profiles

    changes = tuple(wanted.what_if or ())
    with RichReporter(err).waiting("planning"):
        answer = explain(change(asked, changes, load_profiles), changes, asked) if changes else explain(asked)
    firsts = [window.first for device in answer.devices for window in device.windows]
    answer = msgspec.structs.replace(answer, checked=checked(firsts))
    if wanted.plot is not None:
        plot(answer, wanted.plot)
    if wanted.json:
        write_json(encode(answer).decode())
    else:
        show(answer, tables)
