"""Keep processes small: load one module of a package without the rest, and give freed memory back to the system.

Every process of primad is a guest in its owner's memory, and some packages load at their top what only some of their users
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
    """In the block, imports of modules of ``package`` do not run its top; who imports the package later gets it whole.

    For the top of a module, where no other thread imports it as well. A package that is not there is missed as ever.
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
    """From now on freed blocks of ``FREED_BYTES`` and more are the system's again, where the C library can be told (glibc).

    Left to itself glibc raises its bound to the largest block that was ever freed, and each of some twenty threads keeps
    its own: a head that had shipped layers held 45 MB of chunks, a worker 13. All threads share ``ARENAS`` heaps.
    """
    _tell(_M_MMAP_THRESHOLD, FREED_BYTES)
    _tell(_M_ARENA_MAX, ARENAS)


@contextmanager
def zeroed() -> Iterator[None]:
    """In the block, new blocks of memory are zeros in all threads, where the C library can be told (glibc)."""
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
    """What a model that has ended leaves behind is the system's again: after ``keep_what_is_loaded`` Python looks for such
    garbage next to never, and glibc keeps what is freed between blocks that are in use."""
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


OLD_EVERY: Final = 1000
"""Collections of the young generations per collection of the oldest."""


def keep_what_is_loaded() -> None:
    """Exempt everything loaded by now from garbage collection.

    Collecting over all that a head has loaded took 50 ms, 180 on a busy machine, during which it answered no request. A
    thousand connections take as long, so the oldest generation is collected a hundredth as often as Python would:
    ending connections leaves next to nothing there.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], OLD_EVERY)
