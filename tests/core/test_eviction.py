"""Eviction from the layer cache: what goes first, what never goes, and what survives a restart."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primad.errors import DiskError
from primad.gguf.header import read_header
from primad.gguf.layer_file import StoredLayer
from primad.gguf.layers import CHUNK_BYTES, HEADER_BYTES, LayerCut, LayerRef, chunk_size, cut_layer
from primad.layers.cache import STALE_S, LayerCache
from primad.layers.eviction import CachedLayer, Disk, oldest_first
from primad.layers.partial import PartialLayer
from tests.fakes.gguf import array, toy_arrays, write_gguf
from tests.fakes.layers import put

USAGE = type(shutil.disk_usage("."))


@pytest.fixture
def layers(tmp_path) -> list[LayerCut]:
    arrays = toy_arrays() | {"blk.2.big.weight": array(CHUNK_BYTES // 4096 * 2 + 1, 1024)}
    model = read_header(write_gguf(tmp_path / "toy.gguf", arrays))
    return [cut_layer(model, layer).hashed() for layer in range(3)]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "layers"


def store(cache: LayerCache, layer: LayerCut, used_s: float | None = None) -> LayerRef:
    ref = put(cache, layer)
    if used_s is not None:
        os.utime(cache.path(ref.digest).with_suffix(".tree"), (used_s, used_s))
    return ref


def listed(cache: LayerCache) -> list[str]:
    return [layer.digest for layer in cache.layers()]


# ---- parts ----------------------------------------------------------------------------------------------------------


def chunk(layer: LayerCut, number: int) -> bytes:
    return layer.read(number * CHUNK_BYTES, chunk_size(layer.size_bytes, number))


def begin(cache: LayerCache, layer: LayerCut, *numbers: int) -> None:
    """Leave these chunks of ``layer`` in the cache, as an interrupted fetch does."""
    with cache.part(layer.ref()) as part:
        part.begin(layer.tree())
        for number in numbers:
            assert not part.write(number, chunk(layer, number))


def lacking(cache: LayerCache, layer: LayerCut) -> list[int]:
    with cache.part(layer.ref()) as part:
        return part.lacking()


def test_chunks_may_come_in_any_order(folder, layers):
    cache, layer = LayerCache(folder), layers[2]
    with cache.part(layer.ref()) as part:
        part.begin(layer.tree())
        assert [part.write(number, chunk(layer, number)) for number in (2, 0, 1)] == [False, False, True]
        assert not cache.has(layer.ref()), "not under its name before it is finished"
        cache.finish(part)
    assert cache.has(layer.ref())
    assert cache.path(layer.ref().digest).read_bytes()[HEADER_BYTES:] == b"".join(layer.chunks())
    assert list((folder / "partial").iterdir()) == []


def test_chunks_that_arrived_survive_a_restart(folder, layers):
    begin(LayerCache(folder), layers[2], 1)
    again = LayerCache(folder)
    assert lacking(again, layers[2]) == [0, 2]
    with again.part(layers[2].ref()) as part:
        assert part.present_bytes == CHUNK_BYTES
        for number in part.lacking():
            part.write(number, chunk(layers[2], number))
        again.finish(part)
    assert again.has(layers[2].ref())


def test_a_damaged_chunk_of_a_partial_layer_counts_as_missing(folder, layers):
    begin(LayerCache(folder), layers[2], 0, 1)
    path = folder / "partial" / f"{layers[2].ref().digest}.part"
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + CHUNK_BYTES + 5)
        file.write(b"damage")
    assert lacking(LayerCache(folder), layers[2]) == [1, 2]
    assert lacking(LayerCache(folder), layers[2]) == [1, 2], "the journal says so too now"


@pytest.mark.parametrize("journal", [b"", b"x", bytes(32 * 3 + 3), bytes(32 * 3 + 4)])
def test_a_journal_that_is_none_is_not_believed(folder, layers, journal):
    begin(LayerCache(folder), layers[2], 0, 1)
    path = folder / "partial" / f"{layers[2].ref().digest}.journal"
    path.write_bytes(journal)
    assert lacking(LayerCache(folder), layers[2]) == [0, 1, 2]
    assert list((folder / "partial").iterdir()) == []


def test_a_part_of_another_size_is_not_believed(folder, layers):
    begin(LayerCache(folder), layers[2], 0, 1)
    os.truncate(folder / "partial" / f"{layers[2].ref().digest}.part", 100)
    assert lacking(LayerCache(folder), layers[2]) == [0, 1, 2]


def test_parts_that_nobody_resumed_for_long_are_removed_and_younger_ones_are_not(folder, layers):
    begin(LayerCache(folder), layers[2], 0)
    for path in (folder / "partial").iterdir():
        os.utime(path, (time.time() - STALE_S + 3600,) * 2)
    LayerCache(folder)
    assert len(list((folder / "partial").iterdir())) == 2
    for path in (folder / "partial").iterdir():
        os.utime(path, (time.time() - STALE_S - 3600,) * 2)
    LayerCache(folder, owner=False)
    assert len(list((folder / "partial").iterdir())) == 2, "only the owner sweeps"
    LayerCache(folder)
    assert list((folder / "partial").iterdir()) == []


def test_a_copy_resumes_where_it_was_stopped(folder, layers):
    cache, layer = LayerCache(folder), layers[2]
    steps = cache.copying(layer.ref(), layer)
    assert next(steps) == CHUNK_BYTES
    steps.close()
    assert not cache.has(layer.ref())
    assert lacking(cache, layer) == [1, 2]
    assert sum(LayerCache(folder).copying(layer.ref(), layer)) == layer.size_bytes
    assert cache.has(layer.ref())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_refuses_a_chunk_leaves_nothing_half_written(folder, layers, monkeypatch, number):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    cache, layer = LayerCache(folder), layers[2]
    begin(cache, layer, 0)
    monkeypatch.setattr("primad.layers.partial.write_at", refuse)
    with pytest.raises(DiskError, match=os.strerror(number)) as caught, cache.part(layer.ref()) as part:
        cache.write(part, 1, chunk(layer, 1))
    assert str(folder) in str(caught.value)
    assert [path for path in folder.rglob("*") if path.is_file()] == []


# ---- files that change ----------------------------------------------------------------------------------------------


def test_a_file_that_changed_after_it_was_verified_is_hashed_again(folder, layers):
    cache = LayerCache(folder)
    ref = store(cache, layers[0])
    assert cache.has(ref)
    path = cache.path(ref.digest)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    before = path.stat()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert not cache.has(ref)
    assert not path.exists()


def test_placing_a_layer_does_not_hash_it_again(folder, layers, monkeypatch):
    cache = LayerCache(folder)
    ref = store(cache, layers[0])
    cache.place(ref, number=3, split=4)
    monkeypatch.setattr("primad.layers.cache.hash_file", None)
    assert cache.has(ref)


def test_placing_a_layer_that_somebody_changed_does_not_vouch_for_it(folder, layers):
    cache = LayerCache(folder)
    ref = store(cache, layers[0])
    path = cache.path(ref.digest)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    cache.place(ref, number=3, split=4)
    assert not cache.has(ref)


# ---- reading for others ---------------------------------------------------------------------------------------------


def test_a_stored_layer_is_read_as_it_was_cut(folder, layers):
    cache = LayerCache(folder)
    ref = store(cache, layers[2])
    stored = cache.reader(ref.digest)
    assert isinstance(stored, StoredLayer)
    assert (stored.size_bytes, stored.tree()) == (ref.size_bytes, layers[2].tree())
    for offset, size in [(0, 1), (CHUNK_BYTES - 3, 7), (CHUNK_BYTES, CHUNK_BYTES), (ref.size_bytes - 1, 1)]:
        assert stored.read(offset, size) == layers[2].read(offset, size)


def test_a_tree_that_is_lost_or_wrong_is_made_again(folder, layers):
    cache = LayerCache(folder)
    ref = store(cache, layers[0])
    tree = folder / f"{ref.digest}.tree"
    for content in (b"", bytes(32)):
        tree.write_bytes(content)
        stored = cache.reader(ref.digest)
        assert stored is not None
        assert stored.tree() == layers[0].tree() == tree.read_bytes()


def test_a_damaged_chunk_is_given_to_nobody(folder, layers):
    cache = LayerCache(folder)
    ref = store(cache, layers[2])
    with cache.path(ref.digest).open("r+b") as file:
        file.seek(HEADER_BYTES + CHUNK_BYTES)
        file.write(b"damage")
    stored = cache.reader(ref.digest)
    assert stored is not None
    assert stored.read(0, CHUNK_BYTES) == layers[2].read(0, CHUNK_BYTES)
    with pytest.raises(DiskError, match="chunk 1 is damaged"):
        stored.read(CHUNK_BYTES, 1)


@pytest.mark.parametrize("digest", ["", "../toy", "/etc/passwd", "ab" * 31, "ab" * 33, "AB" * 32, "ab" * 32 + "\n"])
def test_nothing_but_a_layer_that_is_here_is_read(folder, digest):
    cache = LayerCache(folder)
    assert cache.reader(digest) is None
    assert cache.reader("ab" * 32) is None


# ---- room -----------------------------------------------------------------------------------------------------------


def disk_of(monkeypatch: pytest.MonkeyPatch, free: int, total: int = 1 << 40) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: USAGE(total, total - free, free))


def test_the_least_recently_used_goes_first(folder, layers):
    cache = LayerCache(folder)
    first, second = store(cache, layers[0], 2000.0), store(cache, layers[1], 1000.0)
    assert listed(cache) == [second.digest, first.digest]
    cache.place(second, number=0, split=1)
    assert listed(cache) == [first.digest, second.digest]


def test_room_within_the_limit_is_made_by_removing_the_least_recently_used(folder, layers):
    cache = LayerCache(folder, 2 * HEADER_BYTES + 1000)
    old, new = store(cache, layers[0], 1000.0), store(cache, layers[1], 2000.0)
    cache.make_room(100)
    assert listed(cache) == [old.digest, new.digest]
    cache.make_room(HEADER_BYTES)
    assert listed(cache) == [new.digest]
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [
        f"{new.digest}.gguf",
        f"{new.digest}.tree",
    ]


def test_leased_layers_stay_and_others_are_evicted(folder, layers):
    cache = LayerCache(folder, 2 * HEADER_BYTES + 1000)
    old, new = store(cache, layers[0], 1000.0), store(cache, layers[1], 2000.0)
    cache.lease("ring", [old.digest])
    os.utime(folder / f"{old.digest}.tree", (1000.0, 1000.0))
    cache.make_room(HEADER_BYTES)
    assert listed(cache) == [old.digest]
    with pytest.raises(DiskError, match=rf"{folder}: {2 * HEADER_BYTES} bytes of layers do not fit.*limit 33768"):
        cache.make_room(2 * HEADER_BYTES)
    assert listed(cache) == [old.digest]
    assert new.digest not in listed(cache)
    cache.end_lease("ring")
    cache.make_room(2 * HEADER_BYTES)
    assert listed(cache) == []


def test_nothing_is_pruned_when_it_would_not_be_enough(folder, layers):
    cache = LayerCache(folder, 2 * HEADER_BYTES)
    ref = store(cache, layers[0])
    with pytest.raises(DiskError, match="do not fit"):
        cache.make_room(1 << 40)
    assert listed(cache) == [ref.digest]


def test_the_disk_keeps_a_reserve(folder, layers, monkeypatch):
    cache = LayerCache(folder)
    ref = store(cache, layers[0])
    disk_of(monkeypatch, free=(1 << 30) + 500)
    cache.make_room(500)
    assert listed(cache) == [ref.digest]
    cache.make_room(501)
    assert listed(cache) == []
    with pytest.raises(DiskError, match=r"1073742324 bytes of disk are free \(1073741824 stay free\)"):
        cache.make_room(501)


def test_a_small_disk_keeps_a_smaller_reserve():
    assert Disk(used_bytes=0, limit_bytes=None, free_bytes=0, total_bytes=1000).reserve_bytes == 20


def test_partial_layers_are_evicted_before_whole_ones_but_not_those_being_fetched(folder, layers):
    cache = LayerCache(folder, 9 * CHUNK_BYTES)
    ref = store(cache, layers[0])
    begin(cache, layers[2], 0, 1)
    with cache.part(layers[2].ref()), pytest.raises(DiskError, match="do not fit"):
        cache.make_room(8 * CHUNK_BYTES)
    begin(cache, layers[2], 0, 1)
    cache.make_room(8 * CHUNK_BYTES)
    assert list((folder / "partial").iterdir()) == []
    assert listed(cache) == [ref.digest]


cached = st.builds(
    CachedLayer,
    digest=st.text("abc", min_size=1, max_size=3),
    size_bytes=st.integers(1, 100),
    used_s=st.floats(0, 10),
    held=st.booleans(),
)


@settings(deadline=None)
@given(st.lists(cached), st.integers(-10, 500))
def test_as_few_layers_as_needed_are_evicted_and_never_leased_ones(layers, excess):
    chosen = oldest_first(layers, excess)
    assert not any(layer.held for layer in chosen)
    gained = sum(layer.size_bytes for layer in chosen)
    free = [layer for layer in layers if not layer.held]
    assert gained >= excess or len(chosen) == len(free)
    assert not chosen or gained - chosen[-1].size_bytes < excess
    assert all(layer.used_s <= other.used_s for layer in chosen for other in free if other not in chosen)


# ---- other processes ------------------------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from primad.layers.cache import LayerCache
LayerCache(Path(sys.argv[1]), owner=False).lease("ring", [sys.argv[2]])
print("held", flush=True)
sys.stdin.read()
"""


def test_layers_leased_by_another_process_stay_until_that_process_ends(folder, layers):
    cache = LayerCache(folder)
    ref = store(cache, layers[0])
    command = [sys.executable, "-c", HOLDER, str(folder), ref.digest]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert [layer.held for layer in cache.layers()] == [True]
        begin(cache, layers[2], 0)
        assert cache.drop_partial() == 0, "the other process may be fetching it"
        holder.kill()
        holder.wait(10)
    assert [layer.held for layer in cache.layers()] == [False]
    assert list(folder.glob("in-use-*")) == []
    assert cache.drop_partial() > CHUNK_BYTES


def test_a_process_that_took_over_the_id_of_another_holds_nothing(folder, layers):
    cache = LayerCache(folder)
    ref = store(cache, layers[0])
    stale = {"pid": os.getppid(), "started": 12.0, "since_boot": 12.0, "holds": {"ring": [ref.digest]}}
    (folder / f"in-use-{os.getppid()}.json").write_bytes(msgspec.json.encode(stale))
    assert [layer.held for layer in cache.layers()] == [False]


def test_a_damaged_lease_file_is_logged_and_protects_nothing(folder, layers, caplog):
    cache = LayerCache(folder)
    store(cache, layers[0])
    (folder / "in-use-1.json").write_bytes(b"{")
    assert [layer.held for layer in cache.layers()] == [False]
    assert "in-use-1.json: cannot be read" in caplog.text


def test_an_owner_holds_what_it_named_last_and_nothing_is_left_when_all_let_go(folder, layers):
    cache = LayerCache(folder)
    first, second = store(cache, layers[0]), store(cache, layers[1])
    cache.lease("epoch 1", [first.digest])
    cache.lease("epoch 2", [second.digest])
    cache.lease("epoch 1", [])
    assert {layer.digest for layer in cache.layers() if layer.held} == {second.digest}
    cache.end_lease("epoch 1")
    cache.end_lease("epoch 2")
    cache.end_lease("never held")
    assert list(folder.glob("in-use-*")) == []


def test_a_partial_layer_reports_its_chunks(tmp_path, layers):
    part = PartialLayer(tmp_path, layers[2].ref())
    part.resume()
    assert (part.tree, part.present_bytes, part.lacking()) == (None, 0, [0, 1, 2])
