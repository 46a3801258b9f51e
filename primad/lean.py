"""One module of a package without all that the package loads for itself.

Every process of primad is a guest in its owner's memory, and some packages load at their top what only some of their users
need: ``llama_cpp`` a template engine and a database (6 MB), ``gguf`` readers and converters (5 MB).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType


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
