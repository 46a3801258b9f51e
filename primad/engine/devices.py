"""Lists the GPUs that the installed llama.cpp can use. Calls load llama.cpp, so only child processes may make them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from primad.errors import EngineError
from primad.system.allocator import without_top
from primad.system.gpus import free_vram

CPU: Final = 0
_GPU: Final = 1
_INTEGRATED_GPU: Final = 2
"""``enum ggml_backend_dev_type`` (ggml-backend.h); 3 is an accelerator of the CPU (BLAS, AMX)."""
_RESERVE_BYTES: Final = 256 << 20


class GpuDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as its backend reports it; ``backend`` is CUDA, Metal, Vulkan, ... and memory is in bytes.

    ``id`` is llama.cpp's name, such as ``CUDA0``: two of one kind share a ``name``. ``pci`` is its address, if it has
    one.
    """

    id: str
    name: str
    backend: str
    vram_total_bytes: int
    vram_available_bytes: int
    unified_memory: bool
    pci: str = ""


def list_gpus(library: Any = None) -> Iterator[GpuDevice]:
    """Yield the GPUs in llama.cpp's order. ``library`` has ggml's calls; the default is the installed one."""
    ggml = library if library is not None else _library()
    for number in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(number)
        kind = ggml.ggml_backend_dev_type(device)
        if kind not in (_GPU, _INTEGRATED_GPU):
            continue
        free_bytes, total_bytes = _memory(ggml, device)
        backend = _backend(ggml, device)
        yield GpuDevice(
            id=_text(ggml.ggml_backend_dev_name(device)),
            name=_text(ggml.ggml_backend_dev_description(device)) or _text(ggml.ggml_backend_dev_name(device)),
            backend="Metal" if backend == "MTL" else backend,
            vram_total_bytes=total_bytes,
            vram_available_bytes=free_bytes,
            unified_memory=_is_unified(ggml, device),
            pci=_pci(ggml, device),
        )


def find_gpu(wanted: str, library: Any = None) -> int:
    """Return the handle of the GPU that llama.cpp calls ``wanted``, or with "" the first one's. Raises
    ``EngineError``."""
    ggml = library if library is not None else _library()
    for number in range(ggml.ggml_backend_dev_count()):
        device: int = ggml.ggml_backend_dev_get(number)
        if ggml.ggml_backend_dev_type(device) not in (_GPU, _INTEGRATED_GPU):
            continue
        if wanted in ("", _text(ggml.ggml_backend_dev_name(device))):
            return device
    raise EngineError(
        f"llama.cpp does not see the GPU {wanted or 'of the plan'} any more; 'primad profile --remeasure' plans without it"
    )


def free_bytes(wanted: str) -> int:
    """Return the free memory of the GPU that llama.cpp calls ``wanted``. Raises ``EngineError``."""
    ggml = _library()
    return _memory(ggml, find_gpu(wanted, ggml))[0]


def own_memory_of(wanted: str, library: Any = None) -> tuple[Callable[[], int], int] | None:
    """Return a function for the free memory of the GPU that llama.cpp calls ``wanted``, and its total memory.

    None if it shares the CPU's memory. Raises ``EngineError``.
    """
    ggml = library if library is not None else _library()
    device = find_gpu(wanted, ggml)
    if _is_unified(ggml, device):
        return None
    return (lambda: _memory(ggml, device)[0]), _memory(ggml, device)[1]


def reserve_bytes(total_bytes: int) -> int:
    """Return the bytes of a GPU's own memory that plans leave free, more on a large one: for what other programs take
    between two readings, and for memory of a driver that was not measured."""
    return max(min(_RESERVE_BYTES, total_bytes // 32), total_bytes // 64)


def _memory(ggml: Any, device: int) -> tuple[int, int]:
    """Return the free bytes, the lower of the backend's and the system's figure, and the total."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    pci = _pci(ggml, device)
    by_system = free_vram(pci) if pci else None
    known = free.value if by_system is None else min(free.value, by_system)
    return min(known, total.value), total.value


def _pci(ggml: Any, device: int) -> str:
    props = _Props()
    ggml.ggml_backend_dev_get_props(device, ctypes.byref(props))
    return _text(props.device_id)


def _backend(ggml: Any, device: int) -> str:
    registry = ggml.ggml_backend_dev_backend_reg(device)
    return _text(ggml.ggml_backend_reg_name(registry)) if registry else "GPU"


def _is_unified(ggml: Any, device: int) -> bool:
    return ggml.ggml_backend_dev_type(device) == _INTEGRATED_GPU or _backend(ggml, device) in ("MTL", "Metal")


def _text(data: bytes | None) -> str:
    text = (data or b"").decode("utf-8", errors="replace")
    return "".join(char for char in text if char.isprintable()).strip()[:100]


class _Props(ctypes.Structure):
    """``struct ggml_backend_dev_props`` (ggml-backend.h) up to the last field read, with more room than the rest
    takes."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("rest", ctypes.c_byte * 256),
    )


class _Calls:
    """ggml's calls about devices, bound from the library that exports each."""

    def __init__(self, libraries: list[ctypes.CDLL]) -> None:
        pointer = ctypes.c_void_p
        text = ctypes.c_char_p
        size = ctypes.POINTER(ctypes.c_size_t)
        self.ggml_backend_dev_count = bind_call(libraries, "ggml_backend_dev_count", ctypes.c_size_t)
        self.ggml_backend_dev_get = bind_call(libraries, "ggml_backend_dev_get", pointer, ctypes.c_size_t)
        self.ggml_backend_dev_type = bind_call(libraries, "ggml_backend_dev_type", ctypes.c_int, pointer)
        self.ggml_backend_dev_memory = bind_call(libraries, "ggml_backend_dev_memory", None, pointer, size, size)
        props = ctypes.POINTER(_Props)
        self.ggml_backend_dev_get_props = bind_call(libraries, "ggml_backend_dev_get_props", None, pointer, props)
        self.ggml_backend_dev_backend_reg = bind_call(libraries, "ggml_backend_dev_backend_reg", pointer, pointer)
        self.ggml_backend_reg_name = bind_call(libraries, "ggml_backend_reg_name", text, pointer)
        self.ggml_backend_dev_name = bind_call(libraries, "ggml_backend_dev_name", text, pointer)
        self.ggml_backend_dev_description = bind_call(libraries, "ggml_backend_dev_description", text, pointer)


def bind_call(libraries: list[ctypes.CDLL], name: str, result: Any, *arguments: Any) -> Any:
    """Return the call ``name`` with these types, from the library that exports it."""
    for library in libraries:
        if hasattr(library, name):
            call = getattr(library, name)
            call.restype, call.argtypes = result, list(arguments)
            return call
    raise AttributeError(name)


def ggml_libraries() -> list[ctypes.CDLL]:
    """Return ggml's libraries, with their backends registered."""
    with without_top("llama_cpp"):  # its top-level module would also redirect llama.cpp's log
        from llama_cpp import llama_cpp as llama

    llama.llama_backend_init()  # registers the backends
    folder = Path(llama.__file__).parent / "lib"
    paths = [
        folder / f"{prefix}{name}.{suffix}"
        for name in ("ggml", "ggml-base")
        for prefix, suffix in (("lib", "so"), ("lib", "dylib"), ("", "dll"), ("lib", "dll"))
    ]
    return [ctypes.CDLL(str(path)) for path in paths if path.exists()]


def _library() -> _Calls:
    return _Calls(ggml_libraries())
