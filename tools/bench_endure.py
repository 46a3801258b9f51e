"""What must hold of one device with less memory than its model, for as long as a real question takes.

    tools/bench memory --endure [prompt | neighbour] [--limits SHARE ...] [--tokens N] [--prompt N] [--neighbour MB]
                       [--kv-type TYPE] [--answers FILE] [--model FILE.gguf] [--quick] [--json FILE]

``prompt``: a prompt of 8,192 tokens and 200 tokens behind it. ``neighbour``: a short prompt and 200 tokens, while another
program in the same cgroup takes and frees up to 500 MB at random. Each under 75, 50 and 30 % of the model. The KV cache is
of the first of F16, Q8_0 and Q4_0 with which there is a plan; the plan does not know of the other program.

What must hold, and is judged in each run: nobody is killed, by the limit or otherwise; nothing is swapped; the tokens are
those that plain llama.cpp draws with the whole model in memory, the same KV cache and as many rows a step; and a token
reads from disk at most 1.05 times what the plan says. The other program is added
there with the most that it takes. (Where that is more than the whole model, only reading twice breaks it.) Where not even
the smallest KV cache leaves room for the prompt, or the other program and the ring cannot both be there, the run is made
with less, and what was asked for counts as not held. The exit status says whether all of it held.

Plain llama.cpp's answers are computed once for each prompt, KV type and number of rows; ``--answers`` keeps them for the
next time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from halda import DeviceProfile, Infeasible, ModelProfile, Solution, Workload
from primad.engine.build import build_id
from primad.engine.protocol import KvType
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from tools.lab import LabError
from tools.lab.endurance import DEVICE, Question, Ran, Whole, endure, whole
from tools.lab.endured import Kind, Row, broken, first_difference
from tools.lab.memory import LimitedGroup
from tools.lab.memory_runs import (
    AFTER,
    busy_share,
    device_in,
    max_read_bytes,
    plan_single_device,
    prefetch_rate,
    reserved_bytes,
)

KINDS: Final[dict[str, tuple[Kind, ...]]] = {
    "both": ("prompt", "neighbour"),
    "prompt": ("prompt",),
    "neighbour": ("neighbour",),
}
LIMITS: Final = (0.75, 0.5, 0.3)
TOKENS: Final = 200
CONTEXT_STEP: Final = 256
LESS: Final = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125, 0.0625)
"""Shares of the prompt that was asked for, in the order in which they are tried."""

out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def bench(
    models: Sequence[Path],
    shares: Sequence[float],
    kinds: Sequence[Kind],
    *,
    prompt_tokens: int,
    tokens: int,
    neighbour_bytes: int,
    kv_types: Sequence[KvType],
    threads: int,
    profile: DeviceProfile,
    answers: Path | None,
    keep: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """All runs; each is printed and kept as it comes."""
    if not psutil.swap_memory().total:
        out.print("this machine has no swap: that nothing is swapped is no news")
    rows: list[Row] = []
    for path in models:
        bench_of = _Bench(path, tokens, threads, profile, kv_types, answers)
        for share in shares:
            for kind in kinds:
                asked = (prompt_tokens, 0) if kind == "prompt" else (AFTER, neighbour_bytes)
                rows.append(bench_of.run(kind, share, *asked))
                keep([asdict(row) for row in rows])
                show(rows[-1:])
    show(rows)
    return [asdict(row) for row in rows]


# ---- runs -----------------------------------------------------------------------------------------------------------


class _Bench:
    """The runs of one model."""

    def __init__(
        self,
        path: Path,
        tokens: int,
        threads: int,
        profile: DeviceProfile,
        kv_types: Sequence[KvType],
        answers: Path | None,
    ) -> None:
        self.path = path
        self.size_bytes = path.stat().st_size
        self.model: ModelProfile = model_profile(open_model(path))
        self._tokens = tokens
        self._threads = threads
        self._profile = profile
        self._kv_types = kv_types
        self._rate = prefetch_rate(path)
        self._wholes: dict[str, Whole] = {}
        self._answers = answers

    def run(self, kind: Kind, share: float, prompt_tokens: int, neighbour_bytes: int) -> Row:
        """One run with what there is room for."""
        limit, busy = int(share * self.size_bytes), busy_share()
        ran, question, answer = Ran(), None, None
        try:
            question = self._question(limit, prompt_tokens, neighbour_bytes)
            _report_line(self.path, share, question)
            answer = self._whole(question)
            ran = asyncio.run(endure(self.path, question, limit, threads=self._threads))
        except Infeasible as exc:
            ran.error = str(exc)
        return self._row(kind, share, (prompt_tokens, neighbour_bytes), question, answer, ran, busy)

    def _question(self, limit: int, prompt_tokens: int, neighbour_bytes: int) -> Question:
        """The longest prompt that has a plan, and its plan. Raises ``Infeasible`` where none has one."""
        with LimitedGroup(limit) as group:
            device = device_in(group, self._profile, DEVICE, self._rate)
        refused: Infeasible | None = None
        for share in LESS:
            prompt = max(1, int(share * prompt_tokens))
            context = -(-(prompt + 1 + self._tokens + 1) // CONTEXT_STEP) * CONTEXT_STEP
            try:
                solution, workload = self._planned(device, context, prompt)
            except Infeasible as exc:
                refused = refused or exc
                continue
            room = limit - reserved_bytes(solution, self.model) - 2 * self.model.largest_layer_bytes
            return Question(
                solution=solution,
                workload=workload,
                context=context,
                prompt_tokens=prompt,
                tokens=self._tokens,
                neighbour_bytes=min(neighbour_bytes, max(0, room)),
                refused=None if refused is None else str(refused),
            )
        assert refused is not None
        raise refused

    def _planned(self, device: DeviceProfile, context: int, prompt: int) -> tuple[Solution, Workload]:
        """A plan with the first KV type that has one. Raises ``Infeasible``."""
        failure: Infeasible | None = None
        for kv_type in self._kv_types:
            try:
                return plan_single_device(device, self.model, context, kv_type=kv_type, prompt_tokens=prompt)
            except Infeasible as exc:
                failure = exc
        assert failure is not None
        raise failure

    def _whole(self, question: Question) -> Whole:
        """Computed once for each KV type, number of rows and prompt."""
        work = question.workload
        figures = (question.prompt_tokens, question.tokens, work.chunk_rows, work.kv_type, build_id())
        key = " ".join(map(str, (self.path.name, self.path.stat().st_mtime_ns, *figures)))
        known = self._known()
        if key not in known:
            known[key] = whole(self.path, question, threads=self._threads)
            if self._answers is not None:
                self._answers.write_bytes(msgspec.json.format(msgspec.json.encode(known)))
        else:
            out.print("the answer of the whole model is known")
        return known[key]

    def _known(self) -> dict[str, Whole]:
        """Answers of the whole model, those of earlier commands where they are kept."""
        if self._answers is None or not self._answers.exists():
            return self._wholes
        try:
            return msgspec.json.decode(self._answers.read_bytes(), type=dict[str, Whole])
        except msgspec.MsgspecError as exc:
            raise LabError(f"--answers {self._answers}: {exc}; remove it, or name another file") from exc

    # ---- figures ----------------------------------------------------------------------------------------------------

    def _row(
        self,
        kind: Kind,
        share: float,
        asked: tuple[int, int],
        question: Question | None,
        answer: Whole | None,
        ran: Ran,
        busy: float,
    ) -> Row:
        limit = int(share * self.size_bytes)
        held = ran.counters
        row = Row(
            model=self.path.stem,
            model_bytes=self.size_bytes,
            kind=kind,
            limit_share=share,
            limit_bytes=limit,
            asked_prompt_tokens=asked[0],
            asked_neighbour_bytes=asked[1],
            neighbour_takes=ran.neighbour_takes,
            asked_tokens=self._tokens,
            tokens=max(0, len(ran.tokens) - 1),
            tokens_per_s=ran.tokens_per_s,
            prompt_s=ran.times_s[0] if ran.times_s else None,
            bytes_read_per_token=ran.read_per_token(0.0, 1.0),
            bytes_read_first=ran.read_per_token(0.0, 0.25),
            bytes_read_last=ran.read_per_token(0.75, 1.0),
            prompt_read_bytes=ran.reads[0] if ran.reads else None,
            disk_bytes_per_s=self._rate,
            told_bytes_per_token=ran.told_per_token("read_bytes"),
            stall_ms_per_token=None if (stall := ran.told_per_token("stall_s")) is None else stall * 1e3,
            prompt_stall_s=ran.told_of_prompt("stall_s"),
            private_bytes=ran.statuses[-1].private_bytes if ran.statuses else None,
            anonymous_bytes=ran.anonymous_bytes,
            max_anonymous_bytes=None if held is None else ran.max_anonymous_bytes,
            peak_bytes=None if held is None else held.peak_bytes,
            limit_hits=None if held is None else held.limit_hits,
            oom_kills=None if held is None else held.oom_kills,
            swap_bytes=None if held is None else ran.max_swap_bytes,
            swap_in_bytes=ran.swap_in_bytes,
            swap_total_bytes=psutil.swap_memory().total,
            distinct_tokens=len(set(ran.tokens)) if ran.tokens else None,
            busy_share=busy,
            error=ran.error,
        )
        if question is not None:
            self._add_plan(row, question, ran)
        if answer is not None:
            row.baseline_tokens_per_s = answer.tokens_per_s
            row.baseline_prompt_tokens_per_s = answer.prompt_tokens_per_s
            whole = answer.tokens if ran.error is None else answer.tokens[: len(ran.tokens)]
            if ran.tokens:
                row.first_difference = first_difference(ran.tokens, whole)
                row.same_tokens = row.first_difference is None
        row.broken = list(broken(row, None if question is None else question.refused))
        return row

    def _add_plan(self, row: Row, question: Question, ran: Ran) -> None:
        solution, work = question.solution, question.workload
        prediction, streaming = solution.prediction, solution.plan.streaming_of(DEVICE)
        row.kv_type, row.rows, row.context = work.kv_type, work.chunk_rows, question.context
        row.prompt_tokens, row.neighbour_bytes = question.prompt_tokens, question.neighbour_bytes
        row.predicted_tokens_per_s, row.predicted_prompt_s = prediction.tokens_per_s, prediction.ttft_s
        row.predicted_bytes_per_token = prediction.devices[0].disk_bytes_per_token
        row.reserved_bytes = reserved_bytes(solution, self.model)
        row.streamed_bytes, row.read_ahead_bytes = streaming.streamed_bytes, streaming.read_ahead_bytes
        row.max_read_bytes = max_read_bytes(solution, ran.others_bytes)
        if row.prompt_s is not None:
            row.prompt_tokens_per_s = question.prompt_tokens / row.prompt_s


def _report_line(path: Path, share: float, question: Question) -> None:
    work, prediction = question.workload, question.solution.prediction
    what = f"prompt of {question.prompt_tokens} tokens"
    if question.neighbour_bytes:
        what += f" beside a program of {question.neighbour_bytes / 1e6:.0f} MB"
    streaming = question.solution.plan.streaming_of(DEVICE)
    out.print(
        f"{path.stem} at {share:g}, {what}: KV cache {work.kv_type}, {work.chunk_rows} rows a step, "
        f"{_mega(streaming.streamed_bytes)} MB streamed, {_mega(streaming.read_ahead_bytes)} read ahead; "
        f"the plan forecasts a first token after "
        f"{prediction.ttft_s:.0f} s and {prediction.tokens_per_s:.2f} tokens/s"
    )


def show(rows: Sequence[Row]) -> None:
    """Print the result, and what of it does not hold."""
    table = Table(
        "limit", "run", "KV", "rows", "prompt tok/s (whole model)", "tok/s (whole model)", "MB/token (first, last)"
    )
    for column in (
        "at most MB",
        "stall ms",
        "streamed MB (ahead)",
        "anonymous MB",
        "OOM",
        "swap",
        "tokens",
        "busy",
        "holds",
    ):
        table.add_column(column)
    for row in rows:
        what = f"prompt {row.prompt_tokens}"
        if row.kind == "neighbour":
            what = f"beside {_mega(row.neighbour_bytes)} MB"
        table.add_row(
            f"{row.limit_share:g} ({row.limit_bytes / 1e6:.0f} MB)",
            what,
            row.kv_type or "-",
            str(row.rows or "-"),
            f"{_number(row.prompt_tokens_per_s, 1)} ({_number(row.baseline_prompt_tokens_per_s, 1)})",
            f"{_number(row.tokens_per_s, 2)} ({_number(row.baseline_tokens_per_s, 2)})",
            f"{_mega(row.bytes_read_per_token)} ({_mega(row.bytes_read_first)}, {_mega(row.bytes_read_last)})",
            _mega(row.max_read_bytes),
            _number(row.stall_ms_per_token, 0),
            f"{_mega(row.streamed_bytes)} ({_mega(row.read_ahead_bytes)})",
            f"{_mega(row.anonymous_bytes)} (peak {_mega(row.max_anonymous_bytes)})",
            "-" if row.oom_kills is None else str(row.oom_kills),
            _mega(row.swap_bytes),
            "-" if row.same_tokens is None else f"{row.tokens} {'same' if row.same_tokens else 'DIFFERENT'}",
            f"{row.busy_share:.0%}",
            "NO" if row.broken else "yes",
        )
    out.print(table)
    for row in rows:
        for what in row.broken:
            out.print(f"{row.kind} at {row.limit_share:g}: {what}")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _mega(value: float | None) -> str:
    return _number(None if value is None else value / 1e6, 0)
