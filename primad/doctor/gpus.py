"""Which backends llama.cpp was built with, and whether a GPU of this machine stays unused because of that."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from primad.doctor.findings import Finding, Severity, finding, output_of
from primad.engine.build import PACKAGE
from primad.errors import EngineError, printable
from primad.profiler.device import unused_gpus
from primad.profiler.trials import child_trials

_LIST_TIMEOUT_S: Final = 7.0
_LIBRARIES: Final = {
    "cuda": "CUDA",
    "metal": "Metal",
    "vulkan": "Vulkan",
    "hip": "HIP",
    "sycl": "SYCL",
    "opencl": "OpenCL",
    "musa": "MUSA",
    "cann": "CANN",
}
"""Parts of library names, and the backends' names."""
_VENDORS: Final = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_SUITED: Final = {
    "NVIDIA": ("CUDA", "Vulkan"),
    "AMD": ("HIP", "Vulkan"),
    "Intel": ("SYCL", "Vulkan"),
    "Apple": ("Metal",),
}
"""For each vendor the backends that can use its GPUs, best first."""
_INSTALLED: Final = {"NVIDIA": "CUDA", "AMD": "VULKAN", "Intel": "VULKAN", "Apple": "METAL"}
"""For each vendor the backend to build: Vulkan where the vendor's own needs a large toolkit."""
_ROCM: Final = (Path("/opt/rocm/bin/hipcc"), Path("/usr/bin/hipcc"))
_LOOK: Final = "vulkaninfo --summary"
_LOOK_BY_BACKEND: Final = {"CUDA": "nvidia-smi", "HIP": "rocminfo", "Metal": "system_profiler SPDisplaysDataType"}
"""Commands that show GPUs without llama.cpp."""

_OTHER_NAMES: Final = {"AMD": ("ROCm",)}
"""ggml's names of a backend's devices, where they differ from the backend's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A GPU that the system knows; ``usable`` is False if its driver does not respond."""

    vendor: str
    name: str
    usable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """``package`` is the version of llama-cpp-python ("" when missing), ``backends`` those whose libraries it has.

    ``devices`` are the GPUs that llama.cpp lists as (backend, name), or the reason why it could not be asked; ``runs``
    says whether it works without looking for GPUs. ``left_out`` are GPUs that could not be used when this device was
    measured, as (name, why). ``has_rocm``: AMD's toolkit is available for building.
    """

    package: str
    backends: tuple[str, ...]
    devices: tuple[tuple[str, str], ...] | str
    runs: bool
    hardware: tuple[Hardware, ...]
    left_out: tuple[tuple[str, str], ...]
    has_rocm: bool


def gather_engine(home: Path, threads: int | None, timeout_s: float = _LIST_TIMEOUT_S) -> EngineFacts:
    """Look at the libraries' names, and ask llama.cpp for its devices in child processes (a second or two)."""
    try:
        package = version(PACKAGE)
    except PackageNotFoundError:
        package = ""
    devices: tuple[tuple[str, str], ...] | str = ()
    runs = False
    left_out: tuple[tuple[str, str], ...] = ()
    if package:
        with ThreadPoolExecutor(2) as both:
            seen, without = (both.submit(_devices, timeout_s, gpu=gpu) for gpu in (True, False))
            devices, runs = seen.result(), not isinstance(without.result(), str)
        with contextlib.suppress(EngineError):  # a damaged package; another finding reports it
            left_out = tuple((gpu.name, gpu.why) for gpu in unused_gpus(home, threads))
    return EngineFacts(
        package=package,
        backends=_backends(),
        devices=devices,
        runs=runs,
        hardware=tuple(_hardware()),
        left_out=left_out,
        has_rocm=any(map(Path.exists, _ROCM)),
    )


def judge_engine(facts: EngineFacts, system: str, python: str) -> list[Finding]:
    """Judge the engine; ``python`` is the interpreter to install with. An unused GPU is the most valuable finding."""
    if not facts.package:
        text = f"{PACKAGE} is not installed: this device cannot compute"
        return [finding("llama.cpp", "error", text, f"{python} -m pip install {PACKAGE}")]
    if isinstance(facts.devices, str) and not facts.runs:
        text = f"{PACKAGE} {facts.package} does not run here: {printable(facts.devices, 160)}"
        return [finding("llama.cpp", "error", text, _install(facts.package, None, system, python))]
    built = ", ".join(("CPU", *facts.backends))
    found = [finding("llama.cpp", "ok", f"{PACKAGE} {facts.package} with {built}")]
    if isinstance(facts.devices, str):
        text = f"GPUs stay unused: where llama.cpp looks for them {printable(facts.devices, 160)}; the CPU computes"
        return [*found, finding("gpu", "warning", text, _LOOK_BY_BACKEND.get("".join(facts.backends[:1]), _LOOK))]
    found += [finding("gpu", "ok", f"{name} by {backend}") for backend, name in facts.devices]
    used = {backend for backend, _ in facts.devices}
    for gpu in facts.hardware:
        if used.isdisjoint((*_SUITED[gpu.vendor], *_OTHER_NAMES.get(gpu.vendor, ()))):
            found.append(_judge_unused(gpu, facts, system, python))
    found += [
        finding(
            "gpu", "warning", f"{name or 'GPUs'} could not be used: {printable(why, 160)}", "primad profile --remeasure"
        )
        for name, why in facts.left_out
    ]
    if not facts.hardware and not facts.devices and not facts.left_out:
        found.append(finding("gpu", "ok", "this machine has no GPU that the system knows; the CPU computes"))
    return found


def _judge_unused(gpu: Hardware, facts: EngineFacts, system: str, python: str) -> Finding:
    """Return why llama.cpp has no device by any backend that suits ``gpu``."""
    suited = _SUITED[gpu.vendor]
    look = "nvidia-smi" if gpu.vendor == "NVIDIA" else _LOOK
    if not gpu.usable:
        text = f"{gpu.name}: its driver does not respond, so it stays unused; install or repair the driver"
        return finding("gpu", "warning", text, look)
    if set(facts.backends).isdisjoint(suited):
        text = f"{gpu.name} stays unused: llama.cpp was built without {' or '.join(suited)}"
        level: Severity = "note" if gpu.vendor == "Intel" else "warning"  # most are no faster than the CPU next to them
        backend = "HIP" if gpu.vendor == "AMD" and facts.has_rocm else _INSTALLED[gpu.vendor]
        return finding("gpu", level, text, _install(facts.package, backend, system, python))
    text = f"{gpu.name} stays unused: llama.cpp was built with {', '.join(facts.backends)}, but sees no device by it"
    return finding("gpu", "warning", text, look)


def _install(package: str, backend: str | None, system: str, python: str) -> str:
    """Return the command that rebuilds llama-cpp-python, with ``backend`` of ggml's options."""
    pip = (
        f"{python} -m pip install --force-reinstall --no-cache-dir --no-deps --no-binary {PACKAGE} {PACKAGE}=={package}"
    )
    if backend is None:
        return pip
    if system == "Windows":
        return f"$env:CMAKE_ARGS='-DGGML_{backend}=on'; {pip}"
    return f'CMAKE_ARGS="-DGGML_{backend}=on" {pip}'


def _devices(timeout_s: float, *, gpu: bool) -> tuple[tuple[str, str], ...] | str:
    """Return the GPUs that the installed llama.cpp lists in a child that sees GPUs or not; a crash is a result too."""
    with child_trials(1, timeout_s=timeout_s, gpu=gpu) as trials:
        answer = trials.gpus()
    return answer if isinstance(answer, str) else tuple((gpu.backend, gpu.name) for gpu in answer)


def _backends() -> tuple[str, ...]:
    """Return the backends whose libraries are in the package; nothing is loaded."""
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return ()
    names = [path.name.lower() for path in (Path(spec.origin).parent / "lib").glob("*ggml-*")]
    return tuple(name for part, name in _LIBRARIES.items() if any(f"ggml-{part}" in library for library in names))


def _hardware() -> list[Hardware]:
    if platform.system() == "Darwin":
        return [Hardware(vendor="Apple", name="Apple GPU", usable=True)] if platform.machine() == "arm64" else []
    listed = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    found = [
        Hardware(vendor="NVIDIA", name=printable(line.strip(), 80), usable=True) for line in (listed or "").splitlines()
    ]
    return found + [gpu for gpu in _cards() if gpu.vendor != "NVIDIA" or not found]


def _cards(folder: Path = Path("/sys/class/drm")) -> list[Hardware]:
    """Return the GPUs that Linux's kernel knows; NVIDIA's are usable only with the vendor's own driver."""
    found: Sequence[Path] = sorted(folder.glob("card[0-9]*/device/vendor"))
    vendors = []
    for path in found:
        if "-" in path.parts[-3]:
            continue  # a connector of a card
        try:
            vendor = _VENDORS.get(path.read_text().strip())
        except OSError:
            continue
        if vendor is not None:
            vendors.append(vendor)
    if "NVIDIA" not in vendors and sys.platform == "linux" and Path("/proc/driver/nvidia/version").exists():
        vendors.append("NVIDIA")
    return [Hardware(vendor=vendor, name=f"{vendor} GPU", usable=vendor != "NVIDIA") for vendor in vendors]
