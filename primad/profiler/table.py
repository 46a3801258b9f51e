"""A device profile for its owner to read: SI units with prefixes, measured figures and what is free now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from halda import DeviceProfile, OffloadSpeed, TypeSpeed
from primad.settings.quantities import show_bytes, show_gpu, show_rate


def profile_table(profile: DeviceProfile) -> Iterator[Table]:
    """The tables to print, one after another."""
    cpu, disk = profile.cpu, profile.disk
    called = f"{disk.disk_id}, " if disk.disk_id else ""
    facts = Table("", "", show_header=False, box=None, pad_edge=False)
    rows = [
        ("device", f"{profile.device} ({profile.system} {profile.machine})"),
        ("CPU", f"{cpu.name}, {cpu.cores} cores; {cpu.threads} threads decode, {cpu.batch_threads} prefill"),
        ("fixed cost", f"{cpu.step_s * 1e6:.0f} us per window, {cpu.layer_s * 1e6:.0f} us a layer"),
        (
            "memory",
            f"{show_bytes(profile.ram_available_bytes)} free of {show_bytes(profile.ram_total_bytes)}, read at "
            f"{show_rate(profile.ram_read_bytes_per_s)}",
        ),
        (
            "disk",
            f"{called}{show_bytes(disk.free_bytes)} free, prefetched at {show_rate(disk.prefetch_bytes_per_s)}, by page "
            f"faults at {show_rate(disk.fault_bytes_per_s)}, 4 kB at random at {show_rate(disk.random_bytes_per_s)}",
        ),
    ]
    if not profile.gpus:
        rows.append(("GPU", "none that the installed llama.cpp can use"))
    for gpu in profile.gpus:
        called = show_gpu(gpu.name, gpu.id if len(profile.gpus) > 1 else "")
        context = f", its driver takes {show_bytes(gpu.context_bytes)}" if gpu.context_bytes else ""
        memory = "shared with the CPU" if gpu.unified_memory else "its own"
        rows.append(
            (
                "GPU",
                f"{called} ({gpu.backend}), {show_bytes(gpu.vram_available_bytes)} free of "
                f"{show_bytes(gpu.vram_total_bytes)}, {memory}{context}, read at {show_rate(gpu.vram_read_bytes_per_s)}; "
                f"{gpu.step_s * 1e6:.0f} us per window, {gpu.layer_s * 1e6:.0f} us a layer",
            )
        )
    if profile.wireless:
        rows.append(("network", "Wi-Fi, whose air it shares with the other devices on it"))
    for label, text in rows:
        facts.add_row(label, Text(text))
    yield facts
    first = profile.gpu
    yield _speeds(cpu.speeds, () if first is None else first.speeds, () if first is None else first.prefill_offload)


def _speeds(cpu: Sequence[TypeSpeed], gpu: Sequence[TypeSpeed], prefill_offload: Sequence[OffloadSpeed]) -> Table:
    """The processor's speed with each type, with prefill offload to the GPU if there is one, and next to it the GPU's."""
    columns = ("decode", "8 rows", "prefill")
    beside = [f"GPU {column}" for column in columns] * bool(gpu)
    with_offload, rates = (
        ["GPU helps"] * bool(prefill_offload),
        {speed.type: speed.prefill_flop_per_s for speed in prefill_offload},
    )
    table = Table("CPU", *columns, *with_offload, "extra buffers", "spread", *beside, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    on_gpu = {speed.type: speed for speed in gpu}
    for speed in cpu:
        other = on_gpu.get(speed.type)
        table.add_row(
            Text(speed.type),
            *_rates(speed),
            *[_flop(rates[speed.type]) if speed.type in rates else "-" for _ in with_offload],
            "on" if speed.extra_buffers else "off",
            f"{speed.decode_spread:.0%} / {speed.prefill_spread:.0%}",
            *(_rates(other) if other is not None else ["-"] * len(beside)),
        )
    return table


def _rates(speed: TypeSpeed) -> tuple[str, str, str]:
    return (
        show_rate(speed.decode_bytes_per_s),
        show_rate(speed.batch_bytes_per_s),
        _flop(speed.prefill_flop_per_s),
    )


def _flop(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"
