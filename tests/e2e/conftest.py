"""Each module of daemons has a network to itself, where one can be made, so that two may run side by side."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from tests.forks import NETWORK as _NETWORK
from tests.forks import executing


@pytest.fixture(scope="module", autouse=True)
def _network_of_its_own() -> Iterator[None]:
    """A loopback that nobody else announces or listens on; processes and threads that start meanwhile have it too.

    Daemons of the same name would be given others, however their clusters are called. Needs Linux and root, with ``ip``;
    elsewhere the machine's network serves, and tests should run one after another.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        yield
        return
    address = uuid.getnode().to_bytes(6, "big").hex(":")  # by which processes know that it is the same machine
    library = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if library.unshare(_NETWORK) != 0:  # a container that may not
            yield
            return
        try:
            for words in (
                "link set lo up",
                f"link add same address {address} type bridge",
                "addr add 192.0.2.1/32 dev same",
                "link set same up",
            ):
                subprocess.run(["ip", *words.split()], check=True)
            yield
        finally:
            assert library.setns(before, _NETWORK) == 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(before)


@pytest.fixture(scope="session", autouse=True)
def _forked(forks: None) -> None:
    """Commands fork, and what they start."""


@pytest.fixture
def started_by_a_shell() -> Iterator[None]:
    """Commands start with all that a start takes, and so does what they start."""
    with executing():
        yield
