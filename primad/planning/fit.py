"""``primad fit``: which well-known models some devices can run, and how fast."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Final, Literal

import msgspec

from halda import DeviceProfile, Infeasible
from primad.gguf.published import published_file
from primad.planning.describe import bottleneck
from primad.planning.explain import best_plan
from primad.planning.plan import Planned
from primad.planning.question import Question, with_room_for_encoder
from primad.planning.whatif import change
from primad.profiler.store import load_profiles
from primad.system.processors import usable_cores

READABLE_TOKENS_PER_S: Final = 5.0
"""About as fast as people read."""
BEST: Final = 3
"""Number of the largest models with at least that speed that are marked."""
MORE_RAM_BYTES: Final = 16 << 30
CABLE: Final = "link=1Gbit/s,1ms"
HURRIED_S: Final = 0.05
"""Time limit of the solver for improvements that are not near the best."""
_NEAR: Final = 1.1
_WORTH: Final = 1.1
"""Smallest speed-up that is worth naming."""
SCHEMA: Final = 1


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What a model gives: it ``runs`` from memory, streamed from a disk, or not at all; then ``why`` says what is
    short.

    ``hub`` is the name for ``serve --model``, where a file of the model is known; ``bytes`` is then that file's size.
    """

    name: str
    model: str
    bytes: int
    runs: Literal["memory", "disk", "no"]
    why: str
    tokens_per_s: float = 0.0
    ttft_ms: float = 0.0
    context_tokens: int = 0
    streamed_bytes: int = 0
    devices: list[str] = []
    hub: str = ""
    is_best: bool = False
    sees: bool = False
    hears: bool = False


class FitResult(msgspec.Struct, frozen=True, kw_only=True):
    """All models, those that run well first and the largest of them in front; ``help`` names the most useful upgrade."""

    schema: int
    devices: list[str]
    models: list[Fit]
    help: str


def fit_all(
    questions: Sequence[tuple[str, Question]],
    processes: int | None = None,
    planned: Callable[[int], None] = lambda count: None,
) -> FitResult:
    """Plan each named question, in several processes, and find what would improve the next model most.

    ``planned`` is called with the number of finished questions.
    """
    count, fits = min(processes or usable_cores(), len(questions)), list[Fit]()
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        for each in pool.map(_fit, questions):
            fits.append(each)
            planned(len(fits))
        found = ranked(fits)
        wished = next((each for each in found if not each.is_best and each.runs != "memory"), None)
        help_line = "" if wished is None else _help(dict(questions)[wished.name], wished, pool)
    names = [device.device for device in questions[0][1].devices]
    return FitResult(schema=SCHEMA, devices=names, models=found, help=help_line)


def ranked(fits: Iterable[Fit]) -> list[Fit]:
    """Sort ``fits``: models that are fast enough, the largest first; then slower ones; then those that do not run, both
    the smallest first.

    The first few are marked as best.
    """

    def place(each: Fit) -> tuple[int, int]:
        if each.tokens_per_s >= READABLE_TOKENS_PER_S:
            return 0, -each.bytes
        return (2 if each.runs == "no" else 1), each.bytes

    found = sorted(fits, key=place)
    return [
        msgspec.structs.replace(each, is_best=i < BEST and each.tokens_per_s >= READABLE_TOKENS_PER_S)
        for i, each in enumerate(found)
    ]


def _fit(asked: tuple[str, Question]) -> Fit:
    name, question = asked
    found = _fit_of(name, question)
    sees, hears = (False, False) if question.encoder is None else (question.encoder.sees, question.encoder.hears)
    return msgspec.structs.replace(found, sees=sees, hears=hears)


def _fit_of(name: str, question: Question) -> Fit:
    model, file = question.model, published_file(name)
    hub = "" if file is None else file.hub
    try:
        answer = _best_plan(question)
    except Infeasible as exc:
        return Fit(name=name, model=model.name, bytes=model.size_bytes, runs="no", why=str(exc), hub=hub)
    found = answer.prediction
    streamed = sum(each.streamed_bytes for each in answer.plan.streaming)
    return Fit(
        name=name,
        model=model.name,
        bytes=model.size_bytes,
        runs="disk" if streamed else "memory",
        why=bottleneck(answer.plan, found, answer.question),
        tokens_per_s=1 / found.tpot_s,
        ttft_ms=found.ttft_s * 1e3,
        context_tokens=answer.question.workload.context_tokens,
        streamed_bytes=streamed,
        devices=list(answer.plan.devices),
        hub=hub,
    )


def _best_plan(question: Question) -> Planned:
    """Return the best plan with one of two heads: the device that is best by itself, and the one with most memory.

    Raises ``Infeasible``.
    """
    heads = [question.head] if question.head is not None else _good_heads(question)
    plans, failures = list[Planned](), list[Infeasible]()
    for head in heads:
        try:
            asked = replace(question, head=head, time_limit_s=question.time_limit_s / len(heads))
            plans.append(best_plan(with_room_for_encoder(asked, head)))
        except Infeasible as exc:
            failures.append(exc)
    if not plans:
        raise min(failures, key=lambda failure: failure.short_bytes)
    return min(plans, key=lambda each: each.objective_s)


def _good_heads(question: Question) -> list[str]:
    alone: dict[str, float] = {}
    for device in question.devices:
        with suppress(Infeasible):
            found = best_plan(
                replace(question, devices=(device,), links=(), head=device.device, time_limit_s=HURRIED_S)
            )
            alone[device.device] = found.prediction.tpot_s
    roomiest = max(question.devices, key=_free_bytes).device
    return list(dict.fromkeys([*sorted(alone, key=alone.__getitem__)[:1], roomiest]))


def _free_bytes(device: DeviceProfile) -> int:
    vram = sum(gpu.vram_available_bytes for gpu in device.gpus if not gpu.unified_memory)
    return device.ram_available_bytes + vram


def _help(question: Question, now: Fit, pool: ProcessPoolExecutor) -> str:
    """Find what makes the model fastest: more memory in one device, or a cable between all; empty where nothing helps."""
    tried: list[tuple[str, Question]] = []
    for device in question.devices:
        more = f"ram:{device.device}={device.ram_available_bytes + MORE_RAM_BYTES}B"
        tried.append((f"16 GiB more in {device.device}", change(question, [more], load_profiles)))
    if len(question.devices) > 1:
        tried.append(("a cable of 1 Gbit/s between all devices", change(question, [CABLE], load_profiles)))
    hurried = [(what, replace(each, time_limit_s=min(HURRIED_S, each.time_limit_s))) for what, each in tried]
    quick = dict(zip(dict(tried), (each.tokens_per_s for each in pool.map(_fit, hurried)), strict=True))
    near = [(what, each) for what, each in tried if quick[what] * _NEAR >= max(quick.values())]
    best, what = max(zip(pool.map(_fit, near), dict(near), strict=True), key=lambda pair: pair[0].tokens_per_s)
    if best.tokens_per_s <= now.tokens_per_s * _WORTH:
        return ""
    before = f"instead of {now.tokens_per_s:.2g}" if now.tokens_per_s else "where it does not run now"
    return f"with {what} {now.model} generates {best.tokens_per_s:.2g} tokens/s, {before}"
