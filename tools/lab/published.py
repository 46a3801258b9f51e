"""Forecasts next to published measurements: rows of ``profiles/published.json`` as questions to the planner.

A row is usually a table of llama-bench: a number of prompt tokens, and a number of generated tokens, each after
``depth`` tokens in the KV cache. The plan is made for both, as ``primad plan`` makes it, and judged for each
separately.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from halda import DeviceProfile, Infeasible, ModelProfile
from halda.evaluate import Objective, evaluate
from primad.errors import ConfigError
from primad.gguf.shapes import shape, shape_names
from primad.planning.explain import best_plan
from primad.planning.plan import Planned
from primad.planning.question import LinkSpeed, Question
from primad.planning.run_config import ParallelMode, RunConfig
from tools.lab.data_sheets import SHEETS, Sheets, read_sheets, with_gpus_more
from tools.lab.figures import Figure as Judged
from tools.lab.figures import Row as BenchRow
from tools.lab.named_devices import count_of, is_second_gpu, named_device

FIGURES: Final = SHEETS.parent / "published.json"
NEAR: Final = 0.25
"""Maximum relative error of a forecast that counts as right."""
TIME_LIMIT_S: Final = 3.0
_QUANTS: Final = {
    "q4_k_m": "q4_k_m",
    "q4_k": "q4k",
    "q4_0": "q4_0",
    "q40": "q4_0",
    "ud-q4_k_xl": "q4_k_m",
    "q4_k_xl": "q4_k_m",
    "q5_k_m": "q5_k_m",
    "q6_k": "q6_k",
    "q8_0": "q8",
    "ud-q8_k_xl": "q8",
    "f16": "f16",
    "bf16": "f16",
}
"""Quantisation names in file names, and the suffix of the nearest shape."""
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
_WIRE: Final = LinkSpeed(bytes_per_s=117e6, round_trip_s=0.0004)
_WIFI_TRIP_S: Final = 0.005
_SINGLE: Final = 1


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What was run: tokens of the prompt, generated tokens, and tokens already in the KV cache before either."""

    prefill_tokens: int
    depth: int
    generated: int


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One published measurement, with its source; rates in tokens per second, null if not published."""

    id: str
    devices: list[str]
    link: str | None
    model: str
    quant: str
    prefill_tok_s: float | None
    decode_tok_s: float | None
    prompt: Prompt
    source: str
    engine: str
    kind: str
    shape: str

    @property
    def flash(self) -> bool:
        """Whether it was measured with flash attention: llama-bench does without unless ``-fa`` requests it."""
        return "llama-bench" not in self.source or "-fa" in self.source


@dataclass(frozen=True, kw_only=True)
class Row(BenchRow):
    """A figure and its forecast. ``note`` says why there is none."""

    columns: ClassVar[str] = (
        "id=figure, kind, decode_tok_s=decode:.4g, decode_planned_tok_s=planned:.4g, decode_ratio=ratio:.4g, "
        "prefill_tok_s=prefill:.4g, prefill_planned_tok_s=planned prefill:.4g, prefill_ratio=prefill ratio:.4g, note"
    )

    id: str
    kind: str
    is_single: bool
    decode_tok_s: float | None
    decode_planned_tok_s: float | None
    decode_ratio: float | None
    prefill_tok_s: float | None
    prefill_planned_tok_s: float | None
    prefill_ratio: float | None
    note: str

    @classmethod
    def figures(cls, rows: Sequence[Row]) -> Iterator[Judged]:
        for name, its in by_kind(rows):
            for what, ratios in (("decode", decode_ratios(its)), ("prefill", prefill_ratios(its))):
                if ratios:
                    yield Judged(what=f"{name}: {what}, plan / published", values=tuple(ratios))


def by_kind(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return the rows of each kind; first all rows of single devices together."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    return [("single devices, all", [row for row in rows if row.is_single]), *sorted(kinds.items())]


def decode_ratios(rows: Iterable[Row]) -> list[float]:
    """Return the existing ratios of decode rates."""
    return [row.decode_ratio for row in rows if row.decode_ratio is not None]


def prefill_ratios(rows: Iterable[Row]) -> list[float]:
    """Return the existing ratios of prefill rates."""
    return [row.prefill_ratio for row in rows if row.prefill_ratio is not None]


def read_figures(path: Path) -> list[Figure]:
    """Read the figures in a file. Raises ``ConfigError`` that names it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Figure])
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror or exc}; give a file with --figures") from exc
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"{path}: has no figures as {FIGURES.name} has them: {exc}") from exc


def rows(published: Iterable[Figure], parallel: ParallelMode = "pipeline") -> list[Row]:
    """Return each figure with its forecast, for devices in ``parallel`` mode."""
    sheets = read_sheets()
    return [row(figure, sheets, parallel) for figure in published]


def row(figure: Figure, sheets: Sheets, parallel: ParallelMode = "pipeline") -> Row:
    """Return ``figure`` with its forecast, or why there is none."""
    try:
        found = best_plan(_question(figure, _devices(figure, sheets), _model(figure), parallel))
    except (ConfigError, Infeasible) as exc:
        return _row(figure, None, None, str(exc))
    return _row(figure, *_rates(figure, found), "")


def _row(figure: Figure, decode: float | None, prefill: float | None, note: str) -> Row:
    def ratio(planned: float | None, published: float | None) -> float | None:
        return round(planned / published, 3) if planned is not None and published else None

    return Row(
        id=figure.id,
        kind=figure.kind,
        is_single=len(figure.devices) == _SINGLE and count_of(figure.devices[0])[0] == _SINGLE,
        decode_tok_s=figure.decode_tok_s,
        decode_planned_tok_s=decode,
        decode_ratio=ratio(decode, figure.decode_tok_s),
        prefill_tok_s=figure.prefill_tok_s,
        prefill_planned_tok_s=prefill,
        prefill_ratio=ratio(prefill, figure.prefill_tok_s),
        note=note,
    )


def _devices(figure: Figure, sheets: Sheets) -> list[DeviceProfile]:
    """Return the devices of a figure; several GPUs in one PC belong to one device."""
    found = list[DeviceProfile]()
    for name in figure.devices:
        count, one = count_of(name)
        profile = named_device(one, sheets, f"device{len(found)}")
        discrete = [gpu for gpu in profile.gpus if not gpu.unified_memory]
        if is_second_gpu(name) and found:
            found[-1] = with_gpus_more(found[-1], discrete * count)
        elif discrete:
            found.append(with_gpus_more(profile, discrete * (count - 1)))
        else:
            names = [f"device{len(found) + i}" for i in range(count)]
            found += [replace(profile, device=each, host=each) for each in names]
    return found


def _model(figure: Figure) -> ModelProfile:
    """Return the model of a figure; its file allows any requested context. Raises ``ConfigError``."""
    known = {_joined(name): name for name in shape_names()}
    stem, _, last = figure.shape.rpartition("-")
    tried = (figure.shape, figure.shape.removesuffix("-like"), stem, figure.model)
    name = next((known[_joined(each)] for each in tried if _joined(each) in known), figure.shape)
    suffix = _QUANTS.get(figure.quant.lower().split("/")[0], last if last in ("q8", "f16") else "")
    return replace(shape(f"{name}-{suffix}" if suffix else name), context_tokens=0)


def _joined(name: str) -> str:
    """Return a name without its word separators."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def _question(
    figure: Figure, devices: Sequence[DeviceProfile], model: ModelProfile, parallel: ParallelMode
) -> Question:
    prompt = figure.prompt
    run = RunConfig(
        objective=_objective(figure),
        context_tokens=prompt.depth + prompt.prefill_tokens + prompt.generated + 1,
        sequences=1,
        prompt_tokens=prompt.depth + prompt.prefill_tokens,
        answer_tokens=prompt.generated,
        parallel=parallel if len(devices) > _SINGLE else "pipeline",
    )
    return Question(
        devices=tuple(devices),
        links=(),
        default_link=link_speed(figure.link),
        model=model,
        run=run,
        limits={},
        head=None,
        time_limit_s=TIME_LIMIT_S,
    )


def _objective(figure: Figure) -> Objective:
    """Return the objective that matches the measurement."""
    if figure.decode_tok_s is None:
        return "ttft"
    return "latency" if figure.prefill_tok_s is None else "balanced"


def link_speed(text: str | None) -> LinkSpeed:
    """Return a link from its usual name: the middle of its rates, in Mbit or Gbit per second, and of its round
    trips."""
    if text is None:
        return _WIRE
    rates, _, trips = text.partition(",")
    found, waits = ([float(number) for number in _NUMBER.findall(part)] for part in (rates, trips))
    unit = 1e6 if "mbit" in rates.lower() else 1e9
    trip_s = _WIFI_TRIP_S if "wi-fi" in text.lower() else _WIRE.round_trip_s
    return LinkSpeed(
        bytes_per_s=statistics.mean(found) * unit / 8 if found else _WIRE.bytes_per_s,
        round_trip_s=statistics.mean(waits) / 1000 if waits else trip_s,
    )


def _rates(figure: Figure, found: Planned) -> tuple[float, float]:
    """Return tokens per second, with the measured context: generated after ``depth`` tokens, and of a prompt after as
    many."""
    prompt, asked = figure.prompt, found.question
    asked = replace(asked, workload=replace(asked.workload, flash=figure.flash))

    def ttft_s(tokens: int) -> float:
        work = replace(asked.workload, prompt_tokens=tokens)
        return evaluate(found.plan, replace(asked, workload=work)).ttft_s

    before_s = ttft_s(prompt.depth) if prompt.depth else 0.0
    prefill = prompt.prefill_tokens / (ttft_s(prompt.depth + prompt.prefill_tokens) - before_s)
    work = replace(asked.workload, prompt_tokens=max(1, prompt.depth), answer_tokens=prompt.generated)
    return 1 / evaluate(found.plan, replace(asked, workload=work)).tpot_s, prefill
