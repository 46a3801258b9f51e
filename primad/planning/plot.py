"""A picture of a plan: what takes the time of a token, and what fills the memory. Needs matplotlib (``primad[plot]``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from primad.errors import ConfigError
from primad.planning.schema import Explanation
from primad.settings.quantities import show_bytes, show_ms, show_speed

_TIMES: Final = (
    ("compute_ms", "computes", "#3b6ea5"),
    ("stall_ms", "waits for its disk", "#c9503f"),
    ("hop_ms", "sends", "#d9a441"),
)
SUFFIXES: Final = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raises ``ConfigError`` when no picture can be written to ``path``, before anything is computed."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: end the name in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.absolute().parent}; make it first")
    _figure_class()


def plot(answer: Explanation, path: Path) -> None:
    """Write the picture of ``answer`` to ``path``. Raises ``ConfigError`` when that cannot be done."""
    height = 2.2 + 0.9 * len(answer.devices)
    figure = _figure_class()(figsize=(11, height), layout="constrained")
    times, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    _token(times, answer)
    _memory(memory, answer)
    found = answer.predicted
    figure.suptitle(f"{answer.model.name}: {show_ms(found.tpot_ms)} a token, {show_speed(found.tokens_per_s)}")
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


def _token(axes: Any, answer: Explanation) -> None:
    """One bar a device: a token is computed by one after another, so all the bars together are its time."""
    rows = range(len(answer.devices))
    begins = [0.0 for _ in rows]
    for field, word, colour in _TIMES:
        widths = [float(getattr(device, field)) for device in answer.devices]
        axes.barh(rows, widths, left=begins, height=0.5, color=colour, label=word)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    axes.set_yticks(rows, [device.name for device in answer.devices])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a token")
    _legend(axes)


def _memory(axes: Any, answer: Explanation) -> None:
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
