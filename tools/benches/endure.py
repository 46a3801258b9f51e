"""``memory --endure``: what must hold of one device with less memory than its model, for as long as a real question takes.

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
from pathlib import Path
from typing import Final

import msgspec
import psutil

from halda import KV_TYPES, DeviceProfile, Infeasible, ModelProfile, Solution, Workload
from primad.engine.build import build_id
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from tools.lab import LabError
from tools.lab.endurance import DEVICE, Question, Ran, Whole, endure, whole
from tools.lab.endured import OF_PLAN, OF_WHOLE, Kind, Row, broken, first_difference
from tools.lab.figures import mega
from tools.lab.harness import Run
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


async def measure(run: Run, path: Path, profile: DeviceProfile) -> None:
    """All runs of one model."""
    options = run.options
    if not psutil.swap_memory().total:
        run.say("this machine has no swap: that nothing is swapped is no news")
    bench = _Bench(run, path, profile)
    for share in options.limits or LIMITS:
        for kind in KINDS[options.endure]:
            asked = (options.prompt, 0) if kind == "prompt" else (AFTER, int(options.neighbour * 1e6))
            run.add(await bench.measure(kind, share, *asked))


class _Bench:
    """The runs of one model."""

    def __init__(self, run: Run, path: Path, profile: DeviceProfile) -> None:
        self._run, self._path, self._profile = run, path, profile
        self._size_bytes = path.stat().st_size
        self._model: ModelProfile = model_profile(open_model(path))
        self._tokens = run.options.tokens or TOKENS
        self._kv_types = (run.options.kv_type,) if run.options.kv_type else KV_TYPES
        self._rate = prefetch_rate(path)
        self._wholes: dict[str, Whole] = {}
        self._answers: Path | None = run.options.answers

    async def measure(self, kind: Kind, share: float, prompt_tokens: int, neighbour_bytes: int) -> Row:
        """One run with what there is room for."""
        limit, busy = int(share * self._size_bytes), busy_share()
        ran, question, answer = Ran(), None, None
        try:
            question = self._question(limit, prompt_tokens, neighbour_bytes)
            self._run.say(f"{self._path.stem} at {share:g}, {_plan_line(question)}")
            answer = await asyncio.to_thread(self._whole, question)
            ran = await endure(self._path, question, limit, threads=self._run.options.threads)
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
            room = limit - reserved_bytes(solution, self._model) - 2 * self._model.largest_layer_bytes
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
                return plan_single_device(device, self._model, context, kv_type=kv_type, prompt_tokens=prompt)
            except Infeasible as exc:
                failure = exc
        assert failure is not None
        raise failure

    def _whole(self, question: Question) -> Whole:
        """Computed once for each KV type, number of rows and prompt."""
        work = question.workload
        figures = (question.prompt_tokens, question.tokens, work.chunk_rows, work.kv_type, build_id())
        key = " ".join(map(str, (self._path.name, self._path.stat().st_mtime_ns, *figures)))
        known = self._known()
        if key not in known:
            known[key] = whole(self._path, question, threads=self._run.options.threads)
            if self._answers is not None:
                self._answers.write_bytes(msgspec.json.format(msgspec.json.encode(known)))
        else:
            self._run.say("the answer of the whole model is known")
        return known[key]

    def _known(self) -> dict[str, Whole]:
        """Answers of the whole model, those of earlier commands where they are kept."""
        if self._answers is None or not self._answers.exists():
            return self._wholes
        try:
            return msgspec.json.decode(self._answers.read_bytes(), type=dict[str, Whole])
        except msgspec.MsgspecError as exc:
            raise LabError(f"--answers {self._answers}: {exc}; remove it, or name another file") from exc

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
        limit = int(share * self._size_bytes)
        held = ran.counters
        row = Row(
            **dict.fromkeys(f"{OF_PLAN} {OF_WHOLE}".split()),
            broken=[],
            model=self._path.stem,
            model_bytes=self._size_bytes,
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
            reported_bytes_per_token=ran.reported_per_token("read_bytes"),
            stall_ms_per_token=None if (stall := ran.reported_per_token("stall_s")) is None else stall * 1e3,
            prompt_stall_s=ran.reported_of_prompt("stall_s"),
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
        row.reserved_bytes = reserved_bytes(solution, self._model)
        row.streamed_bytes, row.read_ahead_bytes = streaming.streamed_bytes, streaming.read_ahead_bytes
        row.max_read_bytes = max_read_bytes(solution, ran.others_bytes)
        if row.prompt_s is not None:
            row.prompt_tokens_per_s = question.prompt_tokens / row.prompt_s


def _plan_line(question: Question) -> str:
    work, prediction = question.workload, question.solution.prediction
    what = f"prompt of {question.prompt_tokens} tokens"
    if question.neighbour_bytes:
        what += f" beside a program of {mega(question.neighbour_bytes)} MB"
    streaming = question.solution.plan.streaming_of(DEVICE)
    return (
        f"{what}: KV cache {work.kv_type}, {work.chunk_rows} rows a step, {mega(streaming.streamed_bytes)} MB streamed, "
        f"{mega(streaming.read_ahead_bytes)} read ahead; the plan forecasts a first token after {prediction.ttft_s:.0f} s "
        f"and {prediction.tokens_per_s:.2f} tokens/s"
    )
