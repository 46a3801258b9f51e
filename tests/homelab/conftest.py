"""Labs for tests. Where none can be built, tests that need one are skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

import pytest

from tests.forks import executing
from tests.homelab.running import MakeLab
from tools.lab import DeviceSpec, Fleet, Homelab, missing


@pytest.fixture(scope="session", autouse=True)
def _forked(forks: None) -> None:
    """Commands on devices are forked, and so are their children."""


@pytest.fixture(scope="module")
def is_matrix(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the fault matrix runs; its times are published, so its processes start as users start them."""
    found = any(item.get_closest_marker("matrix") for item in request.session.items)
    with executing() if found else nullcontext():
        yield found


@pytest.fixture
def make_lab(request: pytest.FixtureRequest) -> Iterator[MakeLab]:
    if (reason := missing()) is not None:
        pytest.skip(f"{request.node.name}: {reason}")
    with ExitStack() as stack:
        yield lambda *specs: stack.enter_context(Homelab(Fleet(specs)))


@pytest.fixture
def pair(make_lab: MakeLab) -> Homelab:
    """A lab of two devices, ``a`` and ``b``, without limits."""
    return make_lab(DeviceSpec(name="a"), DeviceSpec(name="b"))
