"""Each module has its own network where possible, so that modules with daemons can run in parallel."""

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
    """A loopback of this module's own, inherited by the processes and threads that start meanwhile.

    On a shared one daemons of the same name are renamed, even in different clusters. Needs Linux, root and ``ip``;
    otherwise tests use the machine's network and should run one after another.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        yield
        return
    address = uuid.getnode().to_bytes(6, "big").hex(":")  # by which processes recognise the machine
    library = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if library.unshare(_NETWORK) != 0:  # not permitted in this container
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
    """Commands are forked, and so are their children."""


@pytest.fixture
def started_by_a_shell() -> Iterator[None]:
    """Commands and their children start by ``exec``, as users start them."""
    with executing():
        yield
