"""Check a ``RunConfig`` against the model before devices are discovered, for ``serve`` and ``plan`` alike."""

from __future__ import annotations

from pathlib import Path

from halda import ModelProfile
from primad.errors import ConfigError
from primad.gguf.architectures.table import SUPPORTED
from primad.planning.by_hand import plan_by_hand
from primad.planning.question import workload_of
from primad.planning.run_config import RunConfig


def check_run(run: RunConfig, model: ModelProfile, draft: Path | None = None) -> None:
    """Raise ``ConfigError`` or ``PlanError`` naming the option that does not suit ``model``; ``draft`` is its draft
    model."""
    workload_of(run, model)
    check_speculate(run, model, draft)
    check_sequences(run, model)
    if run.windows is not None:
        names = [f"device {i}" for i in range(run.devices_by_hand)]
        plan_by_hand(names, run.windows, run.rounds, model, run.ranks)


def check_sequences(run: RunConfig, model: ModelProfile) -> None:
    """Raise ``ConfigError`` for more concurrent requests than llama.cpp has room for in the graph of ``model``."""
    entry = SUPPORTED.get(model.architecture)
    maximum = 0 if entry is None else entry.max_sequences
    if maximum and (run.sequences or 1) > maximum:
        raise ConfigError(
            f"--sequences {run.sequences}: for '{model.architecture}' llama.cpp computes at most {maximum} "
            "requests at once; give fewer"
        )


def check_speculate(run: RunConfig, model: ModelProfile, draft: Path | None) -> None:
    """Raise ``ConfigError`` where the options for drafts contradict each other."""
    mode = run.speculate
    if mode == "draft" and draft is None:
        raise ConfigError("--speculate draft: needs a draft model; give it with --draft FILE.gguf, or --draft auto")
    if mode in ("off", "lookup", "mtp") and draft is not None:
        raise ConfigError(f"--draft {draft}: contradicts --speculate {mode}; leave one of them out")
