"""Show an explanation to people: a table of devices, a few lines of predictions, and a picture.

The picture shows what takes the time of a token and what fills the memory. It needs matplotlib (``primad[plot]``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from primad.errors import ConfigError
from primad.planning.draft_gain import where_drafted
from primad.planning.question import senses
from primad.planning.schema import (
    DeviceJson,
    DraftJson,
    Explanation,
    GpuJson,
    KeptJson,
    LoadJson,
    ModelJson,
    Predicted,
    Proof,
    RingJson,
    WhatIf,
)
from primad.settings.quantities import show_bytes, show_count, show_gpu, show_ms, show_rate, show_speed

_PLAIN_WIDTH: Final = 160
"""Width used where there is no terminal."""
_WIDE: Final = 130
"""Width of the whole table of devices; on narrower terminals it is split in two."""
_WHERE: Final = ("windows", "GPU", "resident", "streamed", "ahead", "RAM", "VRAM")
_WHEN: Final = ("disk", "compute", "hops", "stall")
_STREAMING: Final = ("ahead", "disk", "stall")
"""Columns that are empty where no layer streams."""
_UNDER: Final = {
    **dict.fromkeys(("windows", "GPU", "resident", "streamed"), "layers"),
    **dict.fromkeys(_WHEN, "per token"),
}
_NOTHING: Final = 0.001
"""Share of the objective that is not worth a line."""
_GOALS: Final = {
    "latency": "the time per token",
    "ttft": "TTFT",
    "throughput": "the time between tokens of all sequences",
    "balanced": "the time of a request",
}
_BARS: Final = (
    ("compute_ms", "computes", "#3b6ea5"),
    ("stall_ms", "waits for its disk", "#c9503f"),
    ("hop_ms", "sends", "#d9a441"),
)
PLOT_SUFFIXES: Final = (".png", ".svg", ".pdf")


def show(answer: Explanation, console: Console) -> None:
    """Print ``answer``."""
    widen(console)
    console.print(render(answer, console.width))


def widen(console: Console) -> None:
    """Give ``console`` the width of a table where there is no terminal."""
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)


def render(answer: Explanation, width: int) -> RenderableType:
    """Render ``answer`` for rich on ``width`` columns."""
    parts: list[RenderableType] = [Text(_title(answer), style="bold")]
    parts += [_devices(answer, names) for names in ((_WHERE, _WHEN) if width < _WIDE else ((*_WHERE, *_WHEN),))]
    if answer.what_if is not None:
        parts += [Text(f"What if {', '.join(answer.what_if.changes)}", style="bold"), _change(answer.what_if, answer)]
    return Group(*parts, _facts(answer))


def _title(answer: Explanation) -> str:
    model, count = answer.model, len(answer.devices)
    how = _how(answer)
    return (
        f"{model.name} ({model.layers} layers, {show_bytes(model.bytes)}) on {show_count(count, 'device')}, "
        f"head {answer.head}, {how}"
    )


def _how(answer: RingJson) -> str:
    if not _has_groups(answer):
        return f"{show_count(answer.rounds, 'round')} per token"
    groups: dict[str, list[str]] = {}
    for device in answer.devices:
        groups.setdefault(device.leader or device.name, []).append(device.name)
    if len(groups) == 1:
        return "each a share of every layer"
    return "; ".join(f"{' and '.join(names)} share layers" for names in groups.values() if len(names) > 1)


def _has_groups(answer: RingJson) -> bool:
    return any(device.leader for device in answer.devices)


def _devices(answer: RingJson, columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("device", overflow="fold")
    shown = [column for column in columns if column not in _STREAMING or _streams(answer)]
    for column in shown:
        justify: Literal["left", "right"] = "left" if column == "windows" else "right"
        table.add_column(f"{column}\n{_UNDER.get(column, '')}", justify=justify, overflow="fold")
    for device in answer.devices:
        cells = _cells(device)
        table.add_row(device.name, *(cells[column] for column in shown))
    return table


def _cells(device: DeviceJson) -> dict[str, str]:
    return {
        "windows": f"{device.share:.0%} of {device.layers}"
        if device.leader
        else _runs(window.layers for window in device.windows),
        "GPU": _runs(window.gpu_layers for window in device.windows) if device.gpu_layers else "-",
        "resident": str(device.resident_layers),
        "streamed": str(device.streamed_layers or "-"),
        "ahead": show_bytes(device.read_ahead_bytes) if device.streamed_layers else "-",
        "RAM": show_bytes(device.ram_bytes),
        "VRAM": show_bytes(device.vram_bytes),
        "disk": show_bytes(device.disk_bytes_per_token),
        "compute": show_ms(device.compute_ms),
        "hops": show_ms(device.hop_ms),
        "stall": show_ms(device.stall_ms),
    }


def _streams(answer: RingJson) -> bool:
    return any(device.streamed_layers for device in answer.devices)


def _facts(answer: Explanation) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    work, found = answer.workload, answer.predicted
    table.add_row("per token", f"{show_ms(found.tpot_ms)}, {_speed(answer)}")
    chunks = f", {answer.chunk_rows} at a time" if work.prompt_tokens > answer.chunk_rows else ""
    prompt = f"a prompt of {show_count(work.prompt_tokens, 'token')}{chunks}"
    table.add_row("TTFT", f"{show_ms(found.ttft_ms)} for {prompt}")
    table.add_row(
        "a request", f"{show_ms(found.exchange_ms)} with a response of {show_count(work.answer_tokens, 'token')}"
    )
    if answer.load is not None:
        why = f" ({work.why_sequences})" if work.why_sequences else ""
        table.add_row("concurrent", f"{_load(answer.load)}{why}")
    elif work.why_sequences:
        table.add_row("concurrent", f"one request ({work.why_sequences})")
    why = f" ({work.why_context})" if work.why_context else ""
    table.add_row("context", f"{show_count(work.context_tokens, 'token')}{why}")
    if work.small_windows:
        table.add_row("sliding layers", "keep the KV cache of their window only, which rules out drafts")
    if work.too_small_for:
        table.add_row("", work.too_small_for)
    if _streams(answer):
        table.add_row("streams", _reading(answer))
    for names in answer.one_disk:
        table.add_row("one disk", f"of {' and '.join(names)}: reads of one delay the others")
    prefill_offload = [device.name for device in answer.devices if device.prefill_offload]
    if prefill_offload:
        table.add_row(
            "prefill offload", f"prompts through layers in RAM are computed by the GPU of {', '.join(prefill_offload)}"
        )
    for device in answer.devices:
        if device.extra_buffers:
            table.add_row("copies", f"{device.name} {device.extra_buffers}")
    for device in answer.devices:
        if len(device.gpus) > 1:
            table.add_row("GPUs", f"{device.name}: {'; '.join(map(_gpu, device.gpus))}")
    experts_on_cpu = [
        f"{show_count(device.cpu_experts, 'layer')} of {device.name}" for device in answer.devices if device.cpu_experts
    ]
    if experts_on_cpu:
        table.add_row("experts", f"in RAM, computed by the CPU, of {', '.join(experts_on_cpu)} on the GPU")
    for i, kept in enumerate(answer.kept):
        table.add_row("replicated" if i == 0 else "", _kept(kept))
    if answer.model.encoder_bytes:
        takes = show_bytes(answer.model.encoder_bytes)
        table.add_row(
            senses(answer.model.sees, answer.model.hears),
            f"with its encoder, which takes {takes} of {answer.head}{_encoding(answer.model)}",
        )
    if answer.draft is not None:
        table.add_row("draft", _draft(answer.draft, answer.devices))
    if answer.parallel:
        table.add_row("parallel", answer.parallel)
    table.add_row("bottleneck", found.bottleneck)
    if answer.tail is not None:
        table.add_row("tail", answer.tail)
    if answer.checked is not None:
        table.add_row("exact", answer.checked)
    if answer.short:
        table.add_row("does not fit", _short(answer))
    if not _has_groups(answer):
        table.add_row("optimality", _proof(answer.proof))
    if given_up := _given_up(answer):
        table.add_row("given up", given_up)
    for i, left in enumerate(answer.left_out):
        table.add_row("left out" if i == 0 else "", f"{left.name}: {left.reason}")
    table.add_row("best single device", _single_device(answer))
    return table


def _encoding(model: ModelJson) -> str:
    """Where a picture is encoded, and how long that takes."""
    if model.picture_ms is None:
        return ""
    where = f"{model.encoder_device} ({model.encoder_gpu})" if model.encoder_gpu else model.encoder_device
    return f"; an image takes about {show_ms(model.picture_ms)} on {where}"


def _gpu(gpu: GpuJson) -> str:
    """What one of several GPUs of a device holds."""
    layers = show_count(gpu.layers, "layer")
    takes = f"{show_bytes(gpu.vram_bytes)} of {show_bytes(gpu.vram_limit_bytes)}" if gpu.vram_bytes else "nothing"
    return f"{layers} on {show_gpu(gpu.name, gpu.id)}, {takes}"


def _load(load: LoadJson) -> str:
    """The forecast for concurrent requests."""
    rows, exact = (
        show_count(load.rows, "token"),
        "bit-identical" if load.is_exact else "not always bit-identical",
    )
    return (
        f"{load.sequences} requests: {show_speed(load.tokens_per_s)}, {show_ms(load.tbt_ms)} per token each, TTFT "
        f"{show_ms(load.ttft_ms)} while others decode; steps of {rows}, {exact}"
    )


def _kept(kept: KeptJson) -> str:
    if kept.replica is None:
        return f"not the KV cache of {kept.device}: {kept.why}"
    size = show_bytes(kept.bytes_per_token)
    return f"{kept.device}'s KV cache by {kept.replica}, {size} per token, {show_rate(kept.bytes_per_s)}"


def _draft(draft: DraftJson, devices: Sequence[DeviceJson]) -> str:
    """What the draft model takes of one of ``devices``, how its drafts are computed, and what they gain."""
    if not draft.device:
        return f"{draft.name} is not used: {draft.why}"
    leader = next((each.leader for each in devices if each.name == draft.device), "")
    where = where_drafted(draft.device, [each.name for each in devices if leader and each.leader == leader])
    takes = f"{draft.name} takes {show_bytes(draft.memory_bytes)} of {where} and {show_ms(draft.token_ms)} per draft"
    if draft.kind == "none":
        return f"{takes}; no drafts: {draft.why}"
    how = (
        f"{draft.rows} tokens of a request at once" if draft.kind == "ahead" else f"up to {draft.rows} tokens per step"
    )
    times = ", ".join(f"{gain.times:.2g}" for gain in draft.gains)
    shares = ", ".join(f"{gain.share:.0%}" for gain in draft.gains)
    return f"{takes}; {how}: {times} times the tokens/s if {shares} of the drafts are accepted"


def _reading(answer: Explanation) -> str:
    """How much streams, what is read per token, and how long a token waits for it."""
    found, layers = answer.predicted, sum(device.streamed_layers for device in answer.devices)
    waits = f"of which it waits {show_ms(found.stall_ms)}" if found.stall_ms else "while others compute"
    return (
        f"{layers} of {answer.model.layers} layers: {show_bytes(found.disk_bytes_per_token)} read per token, "
        f"{show_ms(found.disk_ms)} by the slowest disk, {waits}"
    )


def _speed(answer: Explanation) -> str:
    if answer.load is not None:
        return show_speed(1e3 / answer.predicted.tpot_ms)
    speed = show_speed(answer.predicted.tokens_per_s)
    sequences = answer.workload.sequences
    return speed if sequences == 1 else f"{speed} with {sequences} sequences"


def _short(ring: RingJson) -> str:
    return ", ".join(
        f"{short.what} of {short.where} is short of {show_bytes(short.short_bytes)}" for short in ring.short
    )


def _proof(proof: Proof) -> str:
    goal = _GOALS[proof.objective]
    if proof.gap is None:
        return "set by hand; without --windows the best one is found"
    if proof.proven:
        return f"proven best for {goal}" if not proof.given_up_ms else f"close to the proven best for {goal}"
    return f"within {100 * proof.gap:.3g} % of the best possible for {goal}; more --time-limit may find better"


def _given_up(answer: Explanation) -> str:
    """By how much the plan is slower than the fastest one found, and what it avoids for that; empty for no difference."""
    proof = answer.proof
    if not proof.objective_ms or proof.given_up_ms < _NOTHING * proof.objective_ms:
        return ""
    what = " and ".join(each.what for each in answer.given_up) or "a ring in which one machine computes most"
    share = 100 * proof.given_up_ms / (proof.objective_ms - proof.given_up_ms)
    return f"{show_ms(proof.given_up_ms)} of {_GOALS[proof.objective]} (+{share:.2g} %), without {what}"


def _single_device(answer: Explanation) -> str:
    best = answer.single_device[0]
    if best.predicted is None:
        return f"no single device can hold it; {best.name}: {best.reason}"
    times = best.predicted.tpot_ms / answer.predicted.tpot_ms
    how = "" if len(answer.devices) == 1 and answer.head == best.name else f" ({times:.3g} times as long)"
    return f"{best.name}: {show_ms(best.predicted.tpot_ms)} per token{how}, TTFT {show_ms(best.predicted.ttft_ms)}"


def _change(what_if: WhatIf, after: Explanation) -> RenderableType:
    if what_if.before is None:
        return Text(f"before: no plan: {what_if.reason}\n")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for header in ("", "before", "after", "change"):
        table.add_column(header, justify="right" if header else "left", overflow="fold")
    before = what_if.before
    for row in (*_speeds(before.predicted, after.predicted), *_memory(before.devices, after.devices)):
        table.add_row(*row)
    table.add_row("context", str(what_if.context_tokens), str(after.workload.context_tokens), "")
    table.add_row("rounds", str(before.rounds), str(after.rounds), "")
    table.add_row("head", before.head, after.head, "")
    return table


def _speeds(before: Predicted, after: Predicted) -> list[tuple[str, str, str, str]]:
    rows = (
        ("per token", before.tpot_ms, after.tpot_ms, show_ms),
        ("speed", before.tokens_per_s, after.tokens_per_s, show_speed),
        ("TTFT", before.ttft_ms, after.ttft_ms, show_ms),
    )
    return [(name, show(a), show(b), f"{100 * (b / a - 1):+.1f} %") for name, a, b, show in rows]


def _memory(before: Sequence[DeviceJson], after: Sequence[DeviceJson]) -> list[tuple[str, str, str, str]]:
    olds, news = ({device.name: device for device in devices} for devices in (before, after))
    rows = []
    for name in dict.fromkeys([*olds, *news]):
        old, new = olds.get(name), news.get(name)
        for what, field in (("RAM", "ram_bytes"), ("VRAM", "vram_bytes"), ("disk per token", "disk_bytes_per_token")):
            a, b = (0 if device is None else int(getattr(device, field)) for device in (old, new))
            if a or b:
                change = "" if a == b else ("+" if b > a else "") + show_bytes(b - a)
                rows.append((f"{what}, {name}", show_bytes(a), show_bytes(b), change))
    return rows


def _runs(counts: Iterable[int]) -> str:
    """Format counts as in ``12 x 3, 2``, with equal neighbours merged."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return ", ".join(str(count) if times == 1 else f"{count} x {times}" for count, times in runs)


def check_plot(path: Path) -> None:
    """Raise ``ConfigError`` when no picture can be written to ``path``, before anything is computed."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {path}: end the name in {', '.join(PLOT_SUFFIXES[:-1])} or {PLOT_SUFFIXES[-1]}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.absolute().parent}; make it first")
    _figure_class()


def plot(answer: Explanation, path: Path) -> None:
    """Write the picture of ``answer`` to ``path``. Raises ``ConfigError`` when that cannot be done."""
    height = 2.2 + 0.9 * len(answer.devices)
    figure = _figure_class()(figsize=(11, height), layout="constrained")
    times, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    _time_bars(times, answer)
    _memory_bars(memory, answer)
    found = answer.predicted
    figure.suptitle(f"{answer.model.name}: {show_ms(found.tpot_ms)} per token, {show_speed(found.tokens_per_s)}")
    try:
        figure.savefig(path, dpi=150)
    except OSError as exc:
        raise ConfigError(f"--plot {path}: cannot be written: {exc.strerror or exc}") from exc


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigError("--plot: needs matplotlib; install it with: pip install 'primad[plot]'") from exc
    return Figure


def _time_bars(axes: Any, answer: Explanation) -> None:
    """Draw one bar per device: devices compute a token one after another, so the bars add up to its time."""
    rows = range(len(answer.devices))
    begins = [0.0 for _ in rows]
    for field, word, colour in _BARS:
        widths = [float(getattr(device, field)) for device in answer.devices]
        axes.barh(rows, widths, left=begins, height=0.5, color=colour, label=word)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    axes.set_yticks(rows, [device.name for device in answer.devices])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per token")
    _legend(axes)


def _memory_bars(axes: Any, answer: Explanation) -> None:
    rows: list[tuple[str, int, int]] = []
    for device in answer.devices:
        rows.append((f"{device.name} RAM", device.ram_bytes, device.ram_limit_bytes))
        if device.vram_limit_bytes:
            rows.append((f"{device.name} VRAM", device.vram_bytes, device.vram_limit_bytes))
    for i, (_, used, limit) in enumerate(rows):
        axes.barh(i, used / 1e9, height=0.6, color="#3b6ea5", label="used" if i == 0 else None)
        free = max(0, limit - used)
        axes.barh(i, free / 1e9, left=used / 1e9, height=0.6, color="#d5dde6", label="free" if i == 0 else None)
        axes.text(max(used, limit) / 1e9, i, f" {show_bytes(used)} of {show_bytes(limit)}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(max(used, limit) for _, used, limit in rows) / 1e9)
    axes.set_xlabel("GB")
    _legend(axes)


def _legend(axes: Any) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=8)
