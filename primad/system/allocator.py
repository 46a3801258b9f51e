"""Keep processes small: load one module of a package without the rest, and give freed memory back to the system.

Every process of primad uses its owner's memory, and some packages import at their top level code that only some users
need: ``llama_cpp`` a template engine and a database (6 MB), ``gguf`` readers and converters (5 MB).
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Final

FREED_BYTES: Final = 512 << 10
ARENAS: Final = 2
_M_MMAP_THRESHOLD: Final = -3
_M_PERTURB: Final = -6
_M_ARENA_MAX: Final = -8
"""``malloc.h`` of glibc."""


@contextmanager
def without_top(package: str) -> Iterator[None]:
    """In the block, imports of modules of ``package`` do not run its ``__init__``; later imports of the package do.

    For the top level of a module, while no other thread imports the package. A missing package fails as usual.
    """
    spec = None if package in sys.modules else find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        yield
        return
    stand_in = ModuleType(package)
    stand_in.__path__ = list(spec.submodule_search_locations)
    stand_in.__spec__ = spec
    sys.modules[package] = stand_in
    try:
        yield
    finally:
        del sys.modules[package]


def keep_little_freed() -> None:
    """From now on, return freed blocks of ``FREED_BYTES`` and more to the system, if the C library can do so (glibc).

    By default glibc raises this threshold to the largest block ever freed, and each of some twenty threads keeps its own
    heap: a head that had sent layers held 45 MB of chunks, a worker 13. All threads share ``ARENAS`` heaps.
    """
    _tell(_M_MMAP_THRESHOLD, FREED_BYTES)
    _tell(_M_ARENA_MAX, ARENAS)


@contextmanager
def zeroed() -> Iterator[None]:
    """In the block, new memory is zeroed in all threads, if the C library supports it (glibc)."""
    _tell(_M_PERTURB, 0xFF)  # the complement of what they are set to
    try:
        yield
    finally:
        _tell(_M_PERTURB, 0)


def _tell(option: int, value: int) -> None:
    if (
        sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None
    ):  # musl has none
        mallopt(option, value)


def give_back_freed() -> None:
    """Return the memory of an ended model to the system: after ``keep_what_is_loaded`` Python hardly ever collects such
    garbage, and glibc keeps freed memory that lies between used blocks."""
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


OLD_EVERY: Final = 1000
"""One in this many collections of younger generations also collects the oldest."""


def keep_what_is_loaded() -> None:
    """Exempt everything loaded by now from garbage collection.

    A collection over all that a head has loaded took 50 ms, 180 on a busy machine, during which the head served no
    request. A thousand connections take as long, so the oldest generation is collected a hundredth as often as by
    default: closed connections leave almost no garbage there.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], OLD_EVERY)
