"""Check that a device profile is plausible, for files and peers alike, before the solver uses it.

Each figure has bounds that span phones to servers with several H200. Related figures are compared with each other, so
that a unit that is wrong by a factor of 1,000 stands out: no device computes weights three times as fast as its memory
can be read, or at a hundredth of that rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Final, TypeVar, get_args

from halda import (
    CacheCost,
    CpuProfile,
    DeviceProfile,
    DiskProfile,
    GpuProfile,
    OffloadSpeed,
    RoutingCost,
    RowSpeed,
    StateKind,
    TypeRows,
    TypeSpeed,
    WidthCost,
)
from halda.assignment import MAX_GPUS
from halda.quantisation import BYTES_PER_WEIGHT, bytes_per_weight
from primad.errors import printable
from primad.settings.config import NAME

_BYTES: Final = (0, 1e18)
_RATE: Final = (1e6, 2e13)
_BOUNDS: Final[dict[type, dict[str, tuple[float, float]]]] = {
    DeviceProfile: {
        "ram_total_bytes": (64e6, 1e14),
        "ram_available_bytes": (0, 1e14),
        "ram_read_bytes_per_s": (1e8, 2e13),
    },
    CpuProfile: {
        "cores": (1, 4096),
        "threads": (1, 1024),
        "batch_threads": (1, 1024),
        "step_s": (1e-6, 0.05),
        "layer_s": (2e-7, 0.01),
        "token_s": (1e-7, 0.05),
        "value_s": (1e-13, 1e-6),
        "wake_s": (0, 0.05),
        "row_s": (0, 1e-5),
        "attention_s": (0, 1e-6),
        "plain_attention_s": (0, 1e-6),
        "rows_attention_s": (0, 1e-6),
    },
    RowSpeed: {"rows": (2, 511), "bytes_per_s": _RATE},
    WidthCost: {"weights": (1, 1e12), "ratio": (0.1, 10), "many_ratio": (0.1, 10)},
    CacheCost: {"bytes": (1, 1e12), "ratio": (0.02, 1)},
    TypeRows: {"rows": (1, 65_536), "piece_rows": (0, 65_536), "replay_rows": (1, 65_536)},
    GpuProfile: {
        "vram_total_bytes": (1e6, 1e14),
        "vram_available_bytes": (0, 1e14),
        "vram_read_bytes_per_s": (1e8, 1e14),
        "step_s": (1e-6, 0.05),
        "layer_s": (2e-7, 0.05),
        "attention_flop_per_s": (0, 1e16),
        "context_bytes": (0, 1e11),
    },
    RoutingCost: {"layer_s": (0, 0.05), "row_s": (0, 0.01), "many_ratio": (0.1, 20)},
    DiskProfile: {
        "prefetch_bytes_per_s": (1e6, 2e11),
        "fault_bytes_per_s": (1e5, 2e11),
        "random_bytes_per_s": (1e4, 1e11),
        "free_bytes": _BYTES,
        "slows_s_per_byte": (0, 1e-6),
    },
    OffloadSpeed: {"few_bytes_per_s": _RATE, "prefill_flop_per_s": (1e8, 1e16)},
    TypeSpeed: {
        "decode_bytes_per_s": _RATE,
        "batch_bytes_per_s": _RATE,
        "prefill_flop_per_s": (1e8, 1e16),
        "decode_spread": (0, 1000),
        "prefill_spread": (0, 1000),
    },
}
"""Minimum and maximum of every figure."""
_MAX_CORES: Final = 4096
_COSTS: Final = ("step_s", "layer_s", "token_s", "wake_s")
_Measured = TypeVar("_Measured", CpuProfile, GpuProfile)
_MAX_ENTRIES: Final = 256
_MAX_READ_ALL_S: Final = 100.0
"""Longest time to read all of the RAM of a machine; most need about a second."""
_DECODE_OF_READ: Final = (1 / 100, 3.0)
_BATCH_OF_DECODE: Final = (1 / 40, 4.0)
_PREFILL_OF_DECODE: Final = (0.4, 400.0)
_FAULT_OF_PREFETCH: Final = (1 / 100, 5.0)
_PREFETCH_OF_RANDOM: Final = (0.5, 5000.0)


class Implausible(Exception):  # noqa: N818
    """An impossible figure: ``path`` (dotted) names it, ``what`` is its value, ``why`` one clause about it."""

    def __init__(self, path: str, what: str, why: str) -> None:
        super().__init__(f"{path} is {what}; {why}")


def shown(value: object) -> str:
    """Format a value of a profile for a message."""
    return f"'{printable(value, 70)}'" if isinstance(value, str) else printable(value, 70)


def with_speeds(profile: DeviceProfile, better: DeviceProfile) -> DeviceProfile:
    """Return ``profile`` with the speeds of ``better``, a later measurement of the same device.

    Free memory and disk stay as they were, except for the GPU, whose usable memory is that of ``better``.
    """
    return replace(
        profile,
        cpu=better.cpu,
        ram_read_bytes_per_s=better.ram_read_bytes_per_s,
        disk=replace(better.disk, free_bytes=profile.disk.free_bytes, disk_id=profile.disk.disk_id),
        gpu=better.gpu,
        other_gpus=better.other_gpus,
    )


def check_profile(profile: DeviceProfile) -> None:
    """Check a profile whose types are right. Raises ``Implausible`` for the first impossible figure."""
    if not NAME.fullmatch(profile.device):
        raise Implausible("device", shown(profile.device), "no device name: up to 62 letters, digits, '.', '_' and '-'")
    _check_bounds(profile, "")
    _at_most(profile, "ram_available_bytes", "ram_total_bytes", "")
    if profile.ram_total_bytes > _MAX_READ_ALL_S * profile.ram_read_bytes_per_s:
        raise Implausible(
            "ram_total_bytes",
            shown(profile.ram_total_bytes),
            f"more than {_MAX_READ_ALL_S:g} s at ram_read_bytes_per_s, which is {profile.ram_read_bytes_per_s:g}; "
            "check the units of both",
        )
    if len(profile.cores) > _MAX_CORES or not all(0 <= core < _MAX_CORES for core in profile.cores):
        raise Implausible("cores", shown(profile.cores), f"expected numbers of CPUs below {_MAX_CORES}")
    check_cpu(profile.cpu, profile.ram_read_bytes_per_s)
    check_disk(profile.disk)
    if profile.gpu is None and profile.other_gpus:
        raise Implausible("other_gpus", f"a list of {len(profile.other_gpus)}", "a device without a gpu has no others")
    if len(profile.other_gpus) > MAX_GPUS:
        raise Implausible("other_gpus", f"a list of {len(profile.other_gpus)}", f"expected {MAX_GPUS} at most")
    for number, gpu in enumerate(profile.gpus):
        check_gpu(gpu, f"other_gpus[{number - 1}]." if number else "gpu.")


def with_bounded_costs(measured: _Measured) -> _Measured:
    """Limit each cost in ``measured``, taken on this device, to the maximum of a profile.

    Higher costs are measured while other programs use the CPU; such a device is slow, not broken.
    """
    bounds = _BOUNDS[type(measured)]
    maximum = {name: min(getattr(measured, name), bounds[name][1]) for name in _COSTS if name in bounds}
    return replace(measured, **maximum)


def with_bounded_rates(disk: DiskProfile) -> DiskProfile:
    """Limit the rates of ``disk``, just measured, to the ratios to its prefetch rate that a profile may have.

    Other programs may use the disk in one of the trials and not in the next; such a device is slow, not broken.
    """
    rate, (min_fault, max_fault) = disk.prefetch_bytes_per_s, _FAULT_OF_PREFETCH
    minimum, maximum = _PREFETCH_OF_RANDOM
    return replace(
        disk,
        fault_bytes_per_s=min(rate * max_fault, max(rate * min_fault, disk.fault_bytes_per_s)),
        random_bytes_per_s=min(rate / minimum, max(rate / maximum, disk.random_bytes_per_s)),
    )


def check_cpu(cpu: CpuProfile, ram_read_bytes_per_s: float) -> None:
    """Check a CPU and the memory it reads. Raises ``Implausible``."""
    _check_bounds(cpu, "cpu.")
    for number, width in enumerate(cpu.widths):
        _check_bounds(width, f"cpu.widths[{number}].")
    for number, cache in enumerate(cpu.caches):
        _check_bounds(cache, f"cpu.caches[{number}].")
    _check_types(cpu.exact_rows, "cpu.exact_rows")
    for number, exact in enumerate(cpu.exact_rows):
        _check_bounds(exact, f"cpu.exact_rows[{number}].")
    for number, exact in enumerate(cpu.exact_states):
        if exact.type not in get_args(StateKind):
            raise Implausible(f"cpu.exact_states[{number}].type", shown(exact.type), "no kind of state")
        _check_bounds(exact, f"cpu.exact_states[{number}].")
    _check_bounds(cpu.routing, "cpu.routing.")
    _check_speeds(cpu.speeds, "cpu.speeds", ram_read_bytes_per_s, "ram_read_bytes_per_s")


def check_gpu(gpu: GpuProfile, path: str = "gpu.") -> None:
    """Check a GPU, whose figures are at ``path``. Raises ``Implausible``."""
    _check_bounds(gpu, path)
    _at_most(gpu, "vram_available_bytes", "vram_total_bytes", path)
    _check_speeds(gpu.speeds, f"{path}speeds", gpu.vram_read_bytes_per_s, f"{path}vram_read_bytes_per_s")
    _check_bounds(gpu.routing, f"{path}routing.")
    _check_types(gpu.prefill_offload, f"{path}prefill_offload")
    for number, speed in enumerate(gpu.prefill_offload):
        _check_bounds(speed, f"{path}prefill_offload[{number}].")


def check_disk(disk: DiskProfile) -> None:
    """Check a disk. Raises ``Implausible``."""
    _check_bounds(disk, "disk.")
    prefetch, path = disk.prefetch_bytes_per_s, "disk.prefetch_bytes_per_s"
    _ratio("disk.fault_bytes_per_s", disk.fault_bytes_per_s, path, prefetch, _FAULT_OF_PREFETCH)
    _ratio(path, prefetch, "disk.random_bytes_per_s", disk.random_bytes_per_s, _PREFETCH_OF_RANDOM)


def _check_bounds(values: Any, prefix: str) -> None:
    """Check that every number is within its bounds (so none is NaN or infinite) and every text is one line."""
    bounds = _BOUNDS[type(values)]
    for field in fields(values):
        value = getattr(values, field.name)
        if field.name in bounds:
            minimum, maximum = bounds[field.name]
            if not minimum <= value <= maximum:
                raise Implausible(
                    f"{prefix}{field.name}", shown(value), f"expected {minimum:g} to {maximum:g}; check its unit"
                )
        elif isinstance(value, tuple) and len(value) > _MAX_ENTRIES:
            raise Implausible(f"{prefix}{field.name}", f"a list of {len(value)}", f"expected {_MAX_ENTRIES} at most")
        elif isinstance(value, str) and value != field.default and not (value.isprintable() and 1 <= len(value) <= 200):
            raise Implausible(f"{prefix}{field.name}", shown(value), "expected one line of 1 to 200 characters")


def _at_most(values: Any, name: str, limit: str, prefix: str) -> None:
    if getattr(values, name) > getattr(values, limit):
        raise Implausible(
            f"{prefix}{name}",
            shown(getattr(values, name)),
            f"more than {prefix}{limit}, which is {getattr(values, limit)}",
        )


def _check_speeds(speeds: Sequence[TypeSpeed], path: str, read: float, read_path: str) -> None:
    if not speeds:
        raise Implausible(path, "empty", "at least one quantisation type must be measured")
    _check_types(speeds, path)
    for number, speed in enumerate(speeds):
        at = f"{path}[{number}]."
        _check_speed(speed, at, read, read_path)
        if (plain := speed.plain) is None:
            continue
        if plain.type != speed.type or plain.plain is not None:
            raise Implausible(f"{at}plain.type", shown(plain.type), f"expected one speed of {shown(speed.type)}")
        _check_speed(plain, f"{at}plain.", read, read_path)


def _check_speed(speed: TypeSpeed, at: str, read: float, read_path: str) -> None:
    _check_bounds(speed, at)
    for place, each in enumerate(speed.rows):
        _check_bounds(each, f"{at}rows[{place}].")
    decode = speed.decode_bytes_per_s
    _ratio(f"{at}decode_bytes_per_s", decode, read_path, read, _DECODE_OF_READ)
    _ratio(
        f"{at}batch_bytes_per_s",
        speed.batch_bytes_per_s,
        f"{at}decode_bytes_per_s",
        decode,
        _BATCH_OF_DECODE,
    )
    one_row = 2 * decode / bytes_per_weight(speed.type)
    _ratio(
        f"{at}prefill_flop_per_s",
        speed.prefill_flop_per_s,
        f"the FLOP/s of {at}decode_bytes_per_s",
        one_row,
        _PREFILL_OF_DECODE,
    )


def _check_types(speeds: Sequence[TypeSpeed | OffloadSpeed | TypeRows], path: str) -> None:
    seen = set()
    for number, speed in enumerate(speeds):
        at = f"{path}[{number}].type"
        if speed.type not in BYTES_PER_WEIGHT:
            raise Implausible(at, shown(speed.type), "no quantisation type of GGUF, such as Q4_K")
        if speed.type in seen:
            raise Implausible(at, shown(speed.type), "this type is listed twice; keep one of them")
        seen.add(speed.type)


def _ratio(path: str, value: float, other_path: str, other: float, bounds: tuple[float, float]) -> None:
    minimum, maximum = bounds
    if not other > 0 or not minimum <= value / other <= maximum:
        raise Implausible(
            path,
            shown(value),
            f"expected {minimum:g} to {maximum:g} times {other_path}, which is {other:g}; check the units of both",
        )
