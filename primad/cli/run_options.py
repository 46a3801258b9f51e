"""Options for running a model, shared by ``serve`` and ``plan``, so that a plan matches what is served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from primad.cli.completion import device_names, objectives, one_of
from primad.cli.options import Context, Experts, KvCacheType, Parallel
from primad.errors import ConfigError
from primad.settings.quantities import parse_choice, parse_count

if TYPE_CHECKING:
    from primad.planning.run_config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The plan's objective, or the plan itself."""

    PANEL: ClassVar[str] = "Plan"

    objective: Annotated[
        str,
        typer.Option(
            help="Objective to minimise: latency, ttft, throughput (of all sequences) or balanced.",
            autocompletion=objectives,
        ),
    ] = "balanced"
    experts: Experts = "auto"
    use_all: Annotated[
        bool,
        typer.Option("--use-all", help="Give every device layers, even if fewer devices would be faster."),
    ] = False
    context: Context = None
    sequences: Annotated[
        str,
        typer.Option(
            help="Concurrent requests, each with its own KV cache of --context tokens. auto: 1, 2 or 4, as memory "
            "allows.",
            autocompletion=one_of("auto", "1", "2", "4", "8"),
        ),
    ] = "auto"
    batching: Annotated[
        str,
        typer.Option(
            help="Batching of concurrent requests: exact (output is identical to running alone), fast (highest "
            "throughput), or auto: exact if that keeps nine tenths of the throughput.",
            autocompletion=one_of("auto", "exact", "fast"),
        ),
    ] = "auto"
    prompt: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a typical prompt [default: 512].",
            min=1,
            max=1 << 24,
            show_default=False,
        ),
    ] = None
    answer: Annotated[
        int | None,
        typer.Option(help="Tokens of a typical response [default: 256].", min=1, max=1 << 24, show_default=False),
    ] = None
    kv_type: KvCacheType = "f16"
    windows: Annotated[
        str | None,
        typer.Option(
            help="Set the plan by hand: layers per round of this device and each other one, such as 10,12,7. "
            "This device also computes the remaining layers. 12x2: the next two devices share 12 layers.",
            show_default=False,
        ),
    ] = None
    rounds: Annotated[
        int | None, typer.Option(help="Rounds per token, with --windows.", min=1, max=1000, show_default=False)
    ] = None
    parallel: Parallel = "pipeline"
    mmproj_device: Annotated[
        str,
        typer.Option(
            help="The device that encodes images; auto: the fastest.",
            metavar="NAME|auto",
            autocompletion=device_names,
        ),
    ] = "auto"
    wire: Annotated[
        str,
        typer.Option(
            help="Precision of the all-reduce with --parallel tensor: f32, or f16 (half the traffic, other last bits).",
            autocompletion=one_of("f32", "f16"),
        ),
    ] = "f32"
    extra_buffers: Annotated[
        str,
        typer.Option(
            help="Repacked or AMX copies of weights: auto (if the profile shows a gain), on or off.",
            autocompletion=one_of("auto", "on", "off"),
        ),
    ] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """Speculative decoding."""

    PANEL: ClassVar[str] = "Speculative decoding"

    speculate: Annotated[
        str,
        typer.Option(
            help="Compute draft tokens when the ring is idle: auto (if it has idle time), "
            "lookup (always, from prompt and response), draft (always, with --draft), mtp (always, with the model's layer "
            "for multi-token prediction) or off.",
            autocompletion=one_of("auto", "lookup", "draft", "mtp", "off"),
        ),
    ] = "auto"
    draft: Annotated[
        Path | None,
        typer.Option(
            help="A draft model: a small GGUF file of the same family, or one by name. auto: a downloaded one.",
            metavar="FILE|auto",
            show_default=False,
        ),
    ] = None
    draft_on: Annotated[
        str,
        typer.Option(
            help="The device that runs the draft model; auto: the best one.",
            metavar="NAME|auto",
            autocompletion=device_names,
        ),
    ] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling of requests that do not set it."""

    PANEL: ClassVar[str] = "Sampling defaults, to override the model's"

    temperature: Annotated[float | None, typer.Option(help="0 to 2.", min=0, max=2, show_default=False)] = None
    top_k: Annotated[int | None, typer.Option(help="0: all tokens.", min=0, max=2**31 - 1, show_default=False)] = None
    top_p: Annotated[float | None, typer.Option(help="0 to 1.", min=0, max=1, show_default=False)] = None
    min_p: Annotated[float | None, typer.Option(help="0 to 1.", min=0, max=1, show_default=False)] = None
    repeat_penalty: Annotated[
        float | None, typer.Option(help="0.01 to 10; 1 for none.", min=0.01, max=10, show_default=False)
    ] = None


def run_config(run: RunOptions, draft: DraftOptions) -> RunConfig:
    """Parse ``run`` and ``draft``. Raises ``ConfigError`` naming the wrong option."""
    from halda import EXPERT_PLACES, KV_TYPES, OBJECTIVES
    from primad.planning.batching import BATCHING_MODES
    from primad.planning.drafting import SPECULATE_MODES
    from primad.planning.run_config import EXTRA_BUFFERS, MAX_SEQUENCES, PARALLEL_MODES, WIRES, RunConfig

    if run.rounds is not None and run.windows is None:
        raise ConfigError(f"--rounds {run.rounds}: needs --windows; give both or neither")
    if run.use_all and run.windows is not None:
        raise ConfigError("--use-all: contradicts --single-device and --windows; leave one of them out")
    parallel = parse_choice(run.parallel, PARALLEL_MODES, "--parallel")
    wire = parse_choice(run.wire, WIRES, "--wire")
    if wire != "f32" and parallel == "pipeline":
        raise ConfigError(f"--wire {wire}: needs devices that share layers; add --parallel tensor, or leave it out")
    windows, ranks = (None, ()) if run.windows is None else _windows(run.windows)
    if parallel == "tensor":
        _check_tensor(run, draft, shares=max(ranks, default=1) > 1)
    elif max(ranks, default=1) > 1:
        raise ConfigError(f"--windows {run.windows}: devices share layers with --parallel tensor; give both or neither")
    return RunConfig(
        objective=parse_choice(run.objective, OBJECTIVES, "--objective"),
        use_all=run.use_all,
        experts=parse_choice(run.experts, EXPERT_PLACES, "--experts"),
        context_tokens=run.context,
        kv_type=parse_choice(run.kv_type, KV_TYPES, "--kv-type"),
        sequences=parse_count(run.sequences, MAX_SEQUENCES, "--sequences"),
        batching=parse_choice(run.batching, BATCHING_MODES, "--batching"),
        prompt_tokens=run.prompt,
        answer_tokens=run.answer,
        extra_buffers=parse_choice(run.extra_buffers, EXTRA_BUFFERS, "--extra-buffers"),
        speculate=parse_choice(draft.speculate, SPECULATE_MODES, "--speculate"),
        draft_on=None if draft.draft_on == "auto" else draft.draft_on,
        encoder_on=None if run.mmproj_device == "auto" else run.mmproj_device,
        windows=windows,
        rounds=run.rounds,
        ranks=ranks,
        parallel=parallel,
        wire=wire,
    )


def _check_tensor(run: RunOptions, draft: DraftOptions, *, shares: bool) -> None:
    """Check for options that a group of devices does not support; windows by hand say whether it ``shares`` layers.

    Raises ``ConfigError``.
    """
    refused = {
        "--windows without shares": run.windows is not None and not shares,
        f"--rounds {run.rounds}": run.rounds not in (None, 1),
        "--batching exact": run.batching == "exact",
        "--extra-buffers on": run.extra_buffers == "on",
        "--speculate mtp": draft.speculate == "mtp",
    }
    for option, is_set in refused.items():
        if is_set:
            raise ConfigError(f"--parallel tensor: cannot be combined with {option}; leave one of them out")


def _windows(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parse the layers of each window and the number of devices that share them."""
    parts = [part.partition("x") for part in text.split(",")]
    try:
        windows = tuple(int(layers) for layers, _, _ in parts)
        ranks = tuple(int(ranks) if has_ranks else 1 for _, has_ranks, ranks in parts)
    except ValueError as exc:
        raise ConfigError(f"--windows {text}: give whole numbers separated by commas, such as 10,12,7") from exc
    if not 1 <= len(windows) <= 1000 or min((*windows, *ranks)) < 1:
        raise ConfigError(f"--windows {text}: every window needs at least one layer")
    return windows, ranks
