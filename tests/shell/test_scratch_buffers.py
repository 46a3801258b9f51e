"""Which buffer of the graph's nodes counts as scratch memory, and when nodes are checked."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import pytest

from primad.engine.streaming import scratch
from primad.engine.streaming.scratch import LARGE_ROWS, Scratch

WEIGHTS, COMPUTE = 1, 2


class Ggml:
    """Nodes with named buffers of a usage; buffer n has 4 KiB at address 4 KiB times n."""

    def __init__(self, *buffers: tuple[bytes, int]) -> None:
        self._buffers = buffers
        self._nodes = [(ctypes.c_void_p * 2)(None, number) for number in range(1, len(buffers) + 1)]

    @property
    def nodes(self) -> list[int]:
        return [ctypes.addressof(node) for node in self._nodes]

    def ggml_backend_buffer_get_usage(self, buffer: int) -> int:
        return self._buffers[buffer - 1][1]

    def ggml_backend_buffer_name(self, buffer: int) -> bytes:
        return self._buffers[buffer - 1][0]

    def ggml_backend_buffer_get_base(self, buffer: int) -> int:
        return buffer << 12

    def ggml_backend_buffer_get_size(self, _: int) -> int:
        return 1 << 12


@pytest.fixture
def discarded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(scratch, "discard", lambda start, size: found.append((start, size)))
    return found


def step(found: Scratch, ggml: Ggml, rows: int) -> bool:
    """Compute a step; returns whether it wanted its nodes reported."""
    reported = found.begin(rows)
    if reported:
        for node in ggml.nodes:
            found.note(node)
    return reported


def test_the_compute_buffer_in_memory_is_released_once(discarded):
    ggml = Ggml((b"CPU", WEIGHTS), (b"CUDA0", COMPUTE), (b"CPU", COMPUTE))
    found = Scratch(cast("Any", ggml))
    assert step(found, ggml, LARGE_ROWS + 1)
    assert step(found, ggml, 1)
    assert found.give_back()
    assert discarded == [(3 << 12, 1 << 12)]
    assert not step(found, ggml, 1)
    assert not found.give_back()
    assert len(discarded) == 1


def test_buffers_that_are_all_on_a_gpu_stop_the_search_in_later_steps(discarded):
    ggml = Ggml((b"CUDA0", COMPUTE), (b"CUDA_Host", COMPUTE))
    found = Scratch(cast("Any", ggml))
    assert step(found, ggml, LARGE_ROWS + 1)
    assert step(found, ggml, 1)
    assert not found.give_back()
    assert not found.is_full
    assert not step(found, ggml, 1), "asking about every node of every step costs time"
    assert step(found, ggml, LARGE_ROWS + 1)
    assert discarded == []


def test_a_node_without_a_buffer_is_skipped(discarded):
    ggml = Ggml((b"CPU", COMPUTE))
    found = Scratch(cast("Any", ggml))
    found.begin(LARGE_ROWS + 1)
    nothing = (ctypes.c_void_p * 2)(None, None)
    found.note(ctypes.addressof(nothing))
    assert not found.give_back()
    assert discarded == []
