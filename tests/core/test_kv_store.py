"""The store of KV blocks: stored blocks are held, damaged ones count as missing, leased ones are never evicted."""

import math
import os
import shutil
import stat
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.errors import DiskError
from primad.kv import keys
from primad.kv import kv_writer as kv_writer_module
from primad.kv.cells import CellsError, LayerCells, shape_of
from primad.kv.kv_writer import KvWriter
from primad.kv.store import KvStore
from tests.fakes.kv_cache import cells_of

FIRST = keys.block("root", None, [1, 2, 3], [3])
SECOND = keys.block("root", FIRST, [4, 5], [4, 5])
THIRD = keys.block("root", SECOND, [6], [6])
OTHER = keys.block("another", None, [1, 2, 3], [3])
LAYER_BYTES = 100


def cells(block, *layers):
    return cells_of(block, layers, LAYER_BYTES)


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_layers_of_several_windows_are_read_as_one(tmp_path):
    store = KvStore(tmp_path / "cells")
    store.put(FIRST, cells(FIRST, 4, 5))
    store.put(FIRST, cells(FIRST, 0, 1, 6))
    assert store.layers(FIRST.key) == {0, 1, 4, 5, 6}
    assert store.held(FIRST.key, 4, 7, verify=True)
    assert not store.held(FIRST.key, 1, 5)
    assert store.read(FIRST.key, 4, 7) == cells(FIRST, 4, 5, 6)
    assert store.read(FIRST.key, 5, 6) == cells(FIRST, 5)
    assert store.read(FIRST.key, 1, 5) == []
    assert store.read_block(FIRST.key, 0, 1) == (FIRST, cells(FIRST, 0))
    assert store.read_block(OTHER.key, 0, 1) == (None, [])


def part_of(folder, *layers, cell_bytes=LAYER_BYTES):
    """Another device's copy of ``FIRST``, whose bytes differ from this one's."""
    other = KvStore(folder / "other")
    other.put(FIRST, cells_of(FIRST, layers, cell_bytes, salt=1))
    part = other.part(FIRST.key, layers[0], layers[-1] + 1)
    assert part is not None
    return part


@pytest.mark.parametrize("layers", [range(4, 6), range(3, 7), range(0, 5), range(5, 6)])
def test_cells_of_another_device_never_replace_those_computed_here(tmp_path, layers):
    store = KvStore(tmp_path / "cells")
    store.put(FIRST, cells(FIRST, 4, 5))
    assert store.add_part(FIRST, part_of(tmp_path, *layers), range(0, 9)) == layers
    assert store.read(FIRST.key, 4, 6) == cells(FIRST, 4, 5)
    assert store.layers(FIRST.key) == {4, 5, *layers}


def test_cells_computed_here_later_are_read_instead_of_those_of_another_device(tmp_path):
    store = KvStore(tmp_path / "cells")
    store.add_part(FIRST, part_of(tmp_path, 3, 4, 5, 6), range(0, 9))
    store.put(FIRST, cells(FIRST, 4, 5))
    assert store.read(FIRST.key, 4, 6) == cells(FIRST, 4, 5)
    assert store.read(FIRST.key, 3, 4) == cells_of(FIRST, [3], LAYER_BYTES, salt=1)


@pytest.mark.parametrize("asked", [range(0, 3), range(4, 5), range(5, 9), range(7, 9), range(0)])
def test_layers_that_were_not_asked_for_are_not_taken(tmp_path, asked):
    store = KvStore(tmp_path / "cells")
    with pytest.raises(CellsError, match="not asked for"):
        store.add_part(FIRST, part_of(tmp_path, 4, 5), asked)
    assert not store.layers(FIRST.key)


def test_another_process_sees_written_blocks(tmp_path):
    writer, reader = KvStore(tmp_path), KvStore(tmp_path, limit_bytes=1 << 20)
    assert reader.list() == []
    writer.put(FIRST, cells(FIRST, 0))
    assert reader.read(FIRST.key, 0, 1) == cells(FIRST, 0)
    reader.forget([FIRST.key])
    assert writer.read(FIRST.key, 0, 1) == []


def test_two_stores_of_a_process_write_the_same_block_at_once(tmp_path, monkeypatch):
    one, other = KvStore(tmp_path), KvStore(tmp_path)
    rename = Path.replace

    def write_meanwhile(path, target):
        monkeypatch.setattr(Path, "replace", rename)
        other.put(FIRST, cells(FIRST, 0))
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", write_meanwhile)
    one.put(FIRST, cells(FIRST, 0))
    assert one.read(FIRST.key, 0, 1) == cells(FIRST, 0)
    assert len(files(tmp_path)) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no mode bits")
def test_nobody_else_may_read_it(tmp_path):
    umask = os.umask(0)
    try:
        KvStore(tmp_path / "cells").put(FIRST, cells(FIRST, 0))
    finally:
        os.umask(umask)
    (path,) = files(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "cells").stat().st_mode) == 0o700


@given(place=st.integers(0), flips=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_block_counts_as_missing_and_is_removed(tmp_path_factory, place, flips, cut):
    folder = tmp_path_factory.mktemp("cells")
    store = KvStore(folder)
    store.put(FIRST, cells(FIRST, 0, 1))
    (path,) = files(folder)
    data = bytearray(path.read_bytes())
    place %= len(data)
    data[place] ^= flips
    path.write_bytes(data[:place] if cut else data)
    assert not store.held(FIRST.key, 0, 2, verify=True)
    assert store.read(FIRST.key, 0, 2) == []
    assert files(folder) == []


def test_layers_that_another_file_holds_whole_are_still_there(tmp_path):
    store = KvStore(tmp_path)
    store.put(FIRST, cells(FIRST, 0, 1, 2))
    path = files(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    store.put(FIRST, cells(FIRST, 2))
    assert store.read(FIRST.key, 2, 3) == cells(FIRST, 2)
    assert store.layers(FIRST.key) == {2}, "the damaged file is gone, with layers 0 and 1"


def test_a_file_under_another_name_is_not_believed(tmp_path):
    store = KvStore(tmp_path)
    store.put(FIRST, cells(FIRST, 0))
    (tmp_path / OTHER.key).mkdir()
    (tmp_path / FIRST.key / "0-1.cells").rename(tmp_path / OTHER.key / "0-1.cells")
    assert store.read(OTHER.key, 0, 1) == []
    store.put(FIRST, cells(FIRST, 0))
    (tmp_path / FIRST.key / "0-1.cells").rename(tmp_path / FIRST.key / "1-2.cells")
    assert store.read(FIRST.key, 1, 2) == []
    assert files(tmp_path) == []


@pytest.mark.parametrize("key", ["", "..", "../" + "a" * 29, "A" * 32, "a" * 31, "a" * 32 + "\n"])
def test_a_key_that_is_none_names_no_file(tmp_path, key):
    store = KvStore(tmp_path / "cells")
    outside = tmp_path / "a"
    outside.mkdir()
    store.forget([key])
    store.touch([key])
    assert not store.held(key, 0, 1)
    assert store.part(key, 0, 1) is None
    assert outside.exists()


def test_a_part_goes_to_another_device_whole_or_not_at_all(tmp_path):
    here, there = KvStore(tmp_path / "here"), KvStore(tmp_path / "there")
    here.put(FIRST, cells(FIRST, 0, 1, 2))
    whole = here.part(FIRST.key, 1, 5)
    there.add_part(FIRST, whole, range(5))
    assert there.read(FIRST.key, 1, 3) == cells(FIRST, 1, 2)
    assert here.part(FIRST.key, 3, 5) is None
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    for part in (bytes(damaged), whole[:-1], b"", b"x" * 100):
        with pytest.raises(CellsError):
            there.add_part(FIRST, part, range(5))
    here.put(OTHER, cells(OTHER, 0))
    with pytest.raises(CellsError, match="in place of"):
        there.add_part(FIRST, here.part(OTHER.key, 0, 1), range(5))
    assert there.layers(FIRST.key) == {1, 2}
    assert there.list()[0].key == FIRST.key
    assert len(there.list()) == 1


def test_the_end_of_the_least_recently_used_chain_is_evicted_first_and_never_a_leased_one(tmp_path):
    size = sum(path.stat().st_size for path in _put(tmp_path / "one", FIRST))
    store = KvStore(tmp_path / "cells", limit_bytes=3 * size)
    for block in (FIRST, SECOND, OTHER):
        store.put(block, cells(block, 0))
    for used, keys_ in enumerate(([OTHER.key], [FIRST.key, SECOND.key])):
        store.touch(keys_)
        for key in keys_:
            moved = (tmp_path / "cells" / key).stat().st_mtime_ns - (2 - used) * 10**9
            os.utime(tmp_path / "cells" / key, ns=(moved, moved))
    assert [block.key for block in store.list()] == [OTHER.key, SECOND.key, FIRST.key]
    store.lease("answer", [OTHER.key])
    store.put(THIRD, cells(THIRD, 0, 1, 2, 3))
    assert [block.key for block in store.list() if block.leased] == [OTHER.key]
    assert store.layers(SECOND.key) == set()
    store.forget([OTHER.key])
    store.clear()
    assert [block.key for block in store.list()] == [OTHER.key]
    store.lease("answer", [])
    store.clear()
    assert store.list() == []


def test_a_block_that_two_processes_forget_at_once_is_gone_when_either_returns(tmp_path, monkeypatch):
    store, removing = KvStore(tmp_path / "cells"), shutil.rmtree
    store.put(FIRST, cells(FIRST, 0))

    def remove_meanwhile(folder):
        monkeypatch.setattr(shutil, "rmtree", removing)
        raise FileNotFoundError(folder / "taken-meanwhile")

    monkeypatch.setattr(shutil, "rmtree", remove_meanwhile)
    store.forget([FIRST.key])
    assert store.list() == []


def _put(folder, block):
    KvStore(folder).put(block, cells(block, 0))
    return files(folder)


def test_an_eviction_makes_room_for_a_while(tmp_path):
    chain = [keys.block(str(i), None, [1], [1]) for i in range(40)]
    store = KvStore(tmp_path, limit_bytes=16 * 330)
    for block in chain:
        store.put(block, cells(block, 0))
        assert sum(each.size_bytes for each in store.list()) <= 16 * 330
    assert chain[-1].key in {block.key for block in store.list()}
    KvStore(tmp_path).put(FIRST, cells(FIRST, 0, 1))
    store.evict()
    assert sum(each.size_bytes for each in store.list()) <= 15 * 330


def test_blocks_written_by_others_count_at_the_next_eviction(tmp_path):
    store, other = KvStore(tmp_path, limit_bytes=1), KvStore(tmp_path)
    other.put(FIRST, cells(FIRST, 0))
    store.evict()
    assert store.list() == []


def test_a_disk_that_is_nearly_full_takes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Usage)
    with pytest.raises(DiskError, match="do not fit"):
        KvStore(tmp_path).put(FIRST, cells(FIRST, 0))
    assert files(tmp_path) == []


def test_a_disk_too_small_for_the_limit_is_reported_beforehand(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Usage)
    assert "bytes of disk are free" in KvStore(tmp_path, limit_bytes=11).lacking()
    assert KvStore(tmp_path, limit_bytes=10).lacking() == ""
    assert KvStore(tmp_path).lacking() == ""


class _Usage:
    total, free = 1 << 40, (1 << 30) + 10


def test_a_block_that_is_forgotten_while_it_is_written_is_no_error(tmp_path, monkeypatch):
    store, replacing = KvStore(tmp_path / "cells"), Path.replace

    def replace_late(partial, path):
        KvStore(store.folder).forget([FIRST.key])
        return replacing(partial, path)

    monkeypatch.setattr(Path, "replace", replace_late)
    store.put(FIRST, cells(FIRST, 0))
    assert not store.layers(FIRST.key)


def test_a_folder_that_refuses_is_one_clear_error(tmp_path):
    (tmp_path / "cells").write_bytes(b"")
    store = KvStore(tmp_path / "cells")
    with pytest.raises(DiskError, match="make room or the folder writable"):
        store.put(FIRST, cells(FIRST, 0))
    assert store.read(FIRST.key, 0, 1) == []


# ---- the KV writer -----------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path):
    made = KvWriter(KvStore(tmp_path))
    yield made
    made.close()


def test_a_chain_comes_back_from_its_beginning(kept):
    chain = [FIRST, SECOND, THIRD]
    for block in chain:
        kept.keep(block, cells(block, 2, 3))
    assert kept.chain(THIRD.key, 2, 4) == [cells(block, 2, 3) for block in chain]
    assert kept.chain(SECOND.key, 2, 4) == [cells(block, 2, 3) for block in chain[:2]]
    assert kept.chain(THIRD.key, 1, 4) == []
    assert kept.chain(OTHER.key, 2, 4) == []
    assert kept.chain("", 2, 4) == []


def test_a_chain_with_a_hole_is_none(kept, tmp_path):
    for block in (FIRST, SECOND, THIRD):
        kept.keep(block, cells(block, 0))
    assert kept.flush()
    KvStore(tmp_path).forget([SECOND.key])
    assert kept.chain(THIRD.key, 0, 1) == []
    assert len(kept.chain(FIRST.key, 0, 1)) == 1


class _Slow(KvStore):
    """Writes when it is allowed to."""

    def __init__(self, folder):
        super().__init__(folder)
        self.let = threading.Semaphore(0)

    def put(self, block, cells):
        assert self.let.acquire(timeout=60)
        super().put(block, cells)


def test_a_writer_with_more_than_may_wait_waits_for_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_writer_module, "MAX_WAITING_BYTES", 1000)
    monkeypatch.setattr(kv_writer_module, "PATIENCE_S", 600)
    store = _Slow(tmp_path)
    kept = KvWriter(store)
    kept.keep(FIRST, cells(FIRST, 0))
    second = threading.Thread(target=kept.keep, args=(SECOND, cells(SECOND, 0)))
    third = threading.Thread(target=kept.keep, args=(OTHER, cells(OTHER, 0)))
    second.start()
    second.join(60)  # 600 and 400 bytes
    third.start()
    third.join(0.05)
    assert third.is_alive(), "more than 1,000 bytes wait"
    store.let.release(3)
    third.join(60)
    assert kept.flush()
    kept.close()
    assert {block.key for block in store.list()} == {FIRST.key, SECOND.key, OTHER.key}


def test_a_disk_that_refuses_is_logged_once_and_stops_nobody(tmp_path, caplog):
    (tmp_path / "cells").write_bytes(b"")
    kept = KvWriter(KvStore(tmp_path / "cells"))
    with caplog.at_level("WARNING"):
        for block in (FIRST, SECOND):
            kept.keep(block, cells(block, 0))
        assert kept.flush()
    assert sum("not kept" in line for line in caplog.messages) == 1
    assert kept.chain(SECOND.key, 0, 1) == []
    kept.close()


def test_waiting_blocks_are_written_before_the_end(tmp_path):
    kept = KvWriter(KvStore(tmp_path))
    for block in (FIRST, SECOND, THIRD):
        kept.keep(block, cells(block, 0))
    kept.close()
    assert len(KvStore(tmp_path).list()) == 3


def odd(**changes):
    """KV data of layer 5 in another format than this device's."""
    (cell,) = cells(FIRST, 5)
    return replace(cell, **changes)


ODD = [
    odd(key_type=8),
    odd(value_type=0),
    odd(keys=b"", values=b""),
    *(odd(keys=bytes(3 * size)) for size in (2, LAYER_BYTES - 2, LAYER_BYTES + 2)),
    odd(values=bytes(3 * LAYER_BYTES // 2)),
    odd(keys=bytes(3 * LAYER_BYTES * 2), values=b""),
]


def copied(folder, *cells):
    other = KvStore(folder)
    other.put(FIRST, cells)
    part = other.part(FIRST.key, 0, 9)
    assert part is not None
    return part


@pytest.mark.parametrize("strange", ODD)
def test_copies_of_another_form_than_this_devices_cells_are_not_taken_and_go(tmp_path, strange):
    """A ring that started with them would fail when loading them."""
    part = copied(tmp_path / "other", *cells(FIRST, 4), strange)
    replica = KvStore(tmp_path / "cells")
    assert replica.add_part(FIRST, part, range(0, 9)) == range(4, 6), "a replica knows no form"
    mine = KvStore(tmp_path / "mine")
    mine.expect([shape_of(each) for each in cells(FIRST, 5, 6)])
    with pytest.raises(CellsError, match="layer 5 have other types or sizes"):
        mine.add_part(FIRST, part, range(0, 9))
    for store in (mine, replica):  # the device now computes these layers
        writer = KvWriter(store, [shape_of(each) for each in cells(FIRST, 5, 6)])
        assert not store.layers(FIRST.key)
        assert not writer.chain(FIRST.key, 5, 6)
        writer.close()
    replica.add_part(FIRST, copied(tmp_path / "good", *cells(FIRST, 4, 5, 6)), range(0, 9))
    assert replica.layers(FIRST.key) == {4, 5, 6}


def numbers(kind: int, *values: float) -> bytes:
    """Values as ggml type ``kind`` stores them; for quantised blocks they are the scales."""
    match kind:
        case 0:
            return np.array(values, "<f4").tobytes()
        case 1:
            return np.array(values, "<f2").tobytes()
        case 30:
            return (np.array(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    rest = b"\xff" * {2: 16, 8: 32}[kind]
    return b"".join(np.array([value], "<f2").tobytes() + rest for value in values)


@pytest.mark.parametrize("kind", [0, 1, 2, 8, 30])
def test_copies_with_values_that_are_no_numbers_are_not_taken(tmp_path, kind):
    good = numbers(kind, 65504.0, -65504.0, -1e-7)
    for number, value in enumerate([math.nan, -math.nan, math.inf, -math.inf, 1.5]):
        for place in range(3):
            bad = numbers(kind, *(value if i == place else 0.5 for i in range(3)))
            for changes in ({"keys": bad, "values": good}, {"keys": good, "values": bad}):
                part = copied(tmp_path / "other", odd(key_type=kind, value_type=kind, **changes))
                store = KvStore(tmp_path / f"{number}-{place}")
                if math.isfinite(value):
                    assert store.add_part(FIRST, part, range(0, 9)) == range(5, 6)
                    continue
                with pytest.raises(CellsError, match="not numbers"):
                    store.add_part(FIRST, part, range(0, 9))
                assert not store.layers(FIRST.key)


STATE = keys.state_behind(SECOND)


def state(size: int = 1000) -> list[LayerCells]:
    """The state of layer 5 after two blocks."""
    (none,) = cells(STATE, 5)
    return [replace(none, keys=b"r" * size, values=b"s" * 3 * size)]


def test_a_state_ends_a_chain_and_has_a_form_of_its_own(tmp_path):
    store = KvStore(tmp_path / "cells", limit_bytes=10_000)
    writer = KvWriter(store, [shape_of(each) for each in (*cells(FIRST, 5), *state())])
    kept = [(FIRST, cells(FIRST, 5)), (SECOND, cells(SECOND, 5)), (STATE, state())]
    for block, each in kept:
        writer.keep(block, each)
    assert writer.chain(STATE.key, 5, 6) == [each for _, each in kept]
    assert writer.chain(SECOND.key, 5, 6) == [each for _, each in kept[:2]]
    writer.close()
    assert next(each for each in store.list() if each.key == STATE.key).size_bytes > 4000
    mine, source = KvStore(tmp_path / "mine"), KvStore(tmp_path / "source")
    mine.expect(shape_of(each) for each in (*cells(FIRST, 5), *state(999)))
    source.put(STATE, state())
    with pytest.raises(CellsError, match="layer 5 have other types or sizes"):
        mine.add_part(STATE, source.part(STATE.key, 5, 6), range(9))
    mine.expect(shape_of(each) for each in state())
    assert mine.add_part(STATE, source.part(STATE.key, 5, 6), range(9)) == range(5, 6)


def test_states_count_for_the_limit(tmp_path):
    store = KvStore(tmp_path / "cells", limit_bytes=10_000)
    store.put(FIRST, cells(FIRST, 5))
    store.put(STATE, state(3000))
    assert [each.key for each in store.list()] == []
