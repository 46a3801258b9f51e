"""With ``--lock``, exactly the resident experts are pinned to memory; those that leave the pool are unlocked."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from primad.engine.streaming import pages as pages_module
from primad.engine.streaming.expert_loader import ExpertFiles, ExpertLoader, ExpertTensor
from primad.engine.streaming.expert_usage import UsageFolder
from primad.engine.streaming.pages import FileRange, Slices
from primad.errors import EngineError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="where pages are is told on Linux only")

PAGE = mmap.PAGESIZE
COUNT, LAYERS = 8, 2
EXPERT = 16 * PAGE + PAGE // 2
"""Neighbouring experts share a page, as in model files."""


class Model:
    """A memory-mapped file of ``LAYERS`` expert tensors, as llama.cpp maps it, and its loader."""

    def __init__(self, path: Path, pool_experts: int, *, lock: bool) -> None:
        path.write_bytes(os.urandom(EXPERT * COUNT * LAYERS))
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            self.map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self.address = np.frombuffer(self.map, np.uint8).ctypes.data
        whole = EXPERT * COUNT
        layers = {
            layer: ExpertFiles(f"layer-{layer}", (ExpertTensor(FileRange(str(path), layer * whole, whole), COUNT),))
            for layer in range(LAYERS)
        }
        self.loader = ExpertLoader(layers, pool_experts * EXPERT, UsageFolder(None), lock=lock)
        for pages in self.loader.loaded_pages():
            pages.find()
            pages.release()

    def locked(self) -> set[int]:
        """The numbers of the file's locked pages."""
        found: set[int] = set()
        start, inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                start, end = (int(part, 16) for part in words[0].split("-"))
                inside = self.address <= start < self.address + len(self.map)
            elif inside and words[0] == "VmFlags:" and "lo" in words[1:]:
                found |= set(range((start - self.address) // PAGE, (end - self.address) // PAGE))
        return found

    def pages_of(self, layer: int, number: int, *, inner: bool = False) -> set[int]:
        """The pages that an expert touches or, with ``inner``, fills."""
        first = (layer * COUNT + number) * EXPERT
        last = first + EXPERT
        if inner:
            return set(range(-(-first // PAGE), last // PAGE))
        return set(range(first // PAGE, -(-last // PAGE)))

    def in_pool(self) -> set[tuple[int, int]]:
        return {(layer, int(n)) for layer in range(LAYERS) for n in np.flatnonzero(self.loader.pool.held(layer))}

    def check(self) -> None:
        """Assert that held experts are locked to their last page and others are not."""
        with self.loader._condition:
            locked, held = self.locked(), self.in_pool()
            for layer in range(LAYERS):
                for number in range(COUNT):
                    if (layer, number) in held and (layer, number) not in self.loader._arriving:
                        assert self.pages_of(layer, number) <= locked, f"expert {number} of layer {layer} may leave"
                    elif (layer, number) not in held:
                        assert not self.pages_of(layer, number, inner=True) & locked, (
                            f"{number} of {layer} cannot leave"
                        )


@contextlib.contextmanager
def running(path: Path, pool_experts: int, *, lock: bool = True) -> Iterator[Model]:
    model = Model(path, pool_experts, lock=lock)
    try:
        model.loader.start()
        yield model
    finally:
        model.loader.close()


def picks(*numbers: int) -> np.ndarray:
    return np.array([numbers], np.int32)


def test_experts_in_the_pool_are_locked_and_those_that_leave_it_are_not(tmp_path):
    with running(tmp_path / "w", 6) as model:
        assert len(model.in_pool()) == 6
        model.check()
        for numbers in ((0, 1), (6, 7), (3, 4), (6, 7), (2, 5)):
            for layer in range(LAYERS):
                model.loader.pick(layer, picks(*numbers))
                assert {(layer, n) for n in numbers} <= model.in_pool()
                model.check()
            model.loader.depart(range(LAYERS))
            model.check()
        model.loader.resize(2 * EXPERT)
        assert len(model.in_pool()) <= 2
        model.check()


def test_the_system_does_not_evict_locked_experts(tmp_path):
    with running(tmp_path / "w", 6) as model, (tmp_path / "w").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(model.address), ctypes.c_size_t(len(model.map)), 4)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for layer, number in model.in_pool():
            slices = model.loader._slices[layer][0]
            assert slices.missing()[number] == 0


def test_nothing_is_locked_without_the_option(tmp_path):
    with running(tmp_path / "w", 6, lock=False) as model:
        model.loader.pick(0, picks(6, 7))
        assert model.in_pool()
        assert model.locked() == set()


def test_a_system_that_does_not_allow_it_is_named_at_the_start(tmp_path, monkeypatch):
    def refuse(_: Slices, number: int) -> None:
        raise EngineError(f"expert {number} cannot be locked")

    monkeypatch.setattr(pages_module.Slices, "lock", refuse)
    with pytest.raises(EngineError, match="cannot be locked"), running(tmp_path / "w", 6):
        raise AssertionError


def test_a_request_continues_if_no_more_can_be_locked(tmp_path, monkeypatch, caplog):
    with running(tmp_path / "w", 6) as model:

        def refuse(_: Slices, number: int) -> None:
            raise EngineError(f"expert {number} cannot be locked")

        monkeypatch.setattr(pages_module.Slices, "lock", refuse)
        for layer in range(LAYERS):
            model.loader.pick(layer, picks(5, 6, 7))
        model.loader.pick(0, picks(0, 1, 2))
        assert model.loader._error is None
        assert sum("not locked from now on" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("stays", [True, False])
def test_an_expert_that_must_leave_while_it_is_read_is_released_after_the_read(tmp_path, monkeypatch, stays):
    model = Model(tmp_path / "w", 4, lock=False)
    loader = model.loader
    for layer in loader._slices:
        for tensor in layer:
            tensor.find()
    leaving = next(iter(model.in_pool()))
    loader.resize(4 * EXPERT if stays else 0)
    done: list[object] = []
    monkeypatch.setattr(loader, "_read_at_once", lambda experts: done.append(("read", *experts)) or EXPERT)
    monkeypatch.setattr(pages_module.Slices, "release", lambda _, number, held: done.append(("release", number)))
    assert loader._read_ahead(leaving, None)
    assert done == [("read", leaving), *([] if stays else [("release", leaving[1])])]
    loader.close()
