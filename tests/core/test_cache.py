"""The layer cache: a file under its final name is whole."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFReader

from primad.errors import ClusterError, DiskError, ModelError
from primad.gguf.header import read_header
from primad.gguf.layers import HEADER_BYTES, LayerCut, cut_layer
from primad.layers import cache as cache_module
from primad.layers.cache import LayerCache
from tests.fakes.gguf import toy_arrays, write_gguf
from tests.fakes.layers import missing, put

full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")


@pytest.fixture
def layers(tmp_path) -> list[LayerCut]:
    model = read_header(write_gguf(tmp_path / "toy.gguf", toy_arrays()))
    return [cut_layer(model, layer) for layer in range(3)]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache" / "layers"


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def damage(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_new_cache_lacks_everything(folder, layers):
    refs = [layer.ref() for layer in layers]
    assert missing(LayerCache(folder), refs) == refs


def test_a_written_layer_is_present_now_and_later(folder, layers):
    cache = LayerCache(folder)
    ref = put(cache, layers[0])
    assert cache.has(ref)
    assert missing(LayerCache(folder), [ref, layers[1].ref()]) == [layers[1].ref()]
    assert files(folder) == [f"{ref.digest}.gguf", f"{ref.digest}.tree"]
    assert cache.path(ref.digest).stat().st_size == ref.file_bytes


@pytest.mark.parametrize("at", [-1, HEADER_BYTES])
def test_a_damaged_file_is_noticed_and_dropped(folder, layers, at):
    ref = put(LayerCache(folder), layers[0])
    path = LayerCache(folder).path(ref.digest)
    damage(path, at)
    assert not LayerCache(folder).has(ref)
    assert files(folder) == []


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, HEADER_BYTES + 5, HEADER_BYTES + 1_000_000])
def test_a_file_of_another_size_is_noticed_and_dropped(folder, layers, size):
    cache = LayerCache(folder)
    ref = put(cache, layers[0])
    with cache.path(ref.digest).open("r+b") as file:
        file.truncate(size)
    assert not cache.has(ref)
    assert files(folder) == []


def test_a_dropped_layer_can_be_fetched_again(folder, layers):
    cache = LayerCache(folder)
    ref = put(cache, layers[0])
    cache.path(ref.digest).write_bytes(b"")
    assert missing(cache, [ref]) == [ref]
    put(cache, layers[0])
    assert missing(cache, [ref]) == []


@pytest.mark.skipif(getattr(os, "geteuid", int)() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_one_clear_error(folder, layers):
    ref = put(LayerCache(folder), layers[0])
    LayerCache(folder).path(ref.digest).chmod(0)
    with pytest.raises(ClusterError, match="cannot be read"):
        LayerCache(folder).has(ref)


def rot(path: Path) -> None:
    """Damage a file without changing its metadata, as a failing disk does."""
    status = path.stat()
    damage(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("is_named", [True, False])
def test_a_doubted_file_is_hashed_again(folder, layers, is_named):
    cache = LayerCache(folder)
    first, second = put(cache, layers[0]), put(cache, layers[1])
    for ref in (first, second):
        rot(cache.path(ref.digest))
    assert missing(cache, [first, second]) == [], "nothing says that they changed"
    cache.doubt(str(cache.path(first.digest)) if is_named else None, [first.digest])
    assert missing(cache, [first, second]) == [first]


def test_a_copy_that_is_doubted_takes_its_layer_with_it(folder, layers):
    cache = LayerCache(folder)
    ref = put(cache, layers[0])
    copy = cache.place(ref, number=0, split=1, copy=1)
    rot(copy)
    cache.doubt(str(copy), [])
    assert cache.damaged(ref.digest, fix=False) == [copy]


def test_a_file_that_is_none_of_the_caches_is_doubted_without_harm(folder, layers):
    cache = LayerCache(folder)
    ref = put(cache, layers[0])
    cache.doubt("/models/llama.gguf", [ref.digest])
    assert cache.has(ref)


def test_files_that_somebody_touched_are_known_without_reading_them(folder, layers, monkeypatch):
    cache = LayerCache(folder)
    cut, gone, same = (put(cache, layer) for layer in layers)
    monkeypatch.setattr(cache_module, "hash_file", None)
    os.truncate(cache.path(cut.digest), 10)
    cache.path(gone.digest).unlink()
    wanted = {cut.digest, gone.digest, same.digest}
    assert cache.touched(wanted) == sorted([cache.path(cut.digest), cache.path(gone.digest)])
    assert cache.touched({same.digest}) == []


def test_a_layer_verified_in_a_thread_does_not_disturb_the_look_for_changes(folder, layers, monkeypatch):
    cache = LayerCache(folder)
    first, second = put(cache, layers[0]), put(cache, layers[1])
    cache.doubt(None, [second.digest])
    look = cache_module.stamp_of

    def look_while_another_is_verified(status: os.stat_result) -> object:
        monkeypatch.setattr(cache_module, "stamp_of", look)
        assert cache.has(second)
        return look(status)

    monkeypatch.setattr(cache_module, "stamp_of", look_while_another_is_verified)
    assert cache.touched({first.digest}) == []


def test_a_layer_that_the_disk_cannot_read_is_dropped_to_be_written_elsewhere(folder, layers, monkeypatch):
    cache = LayerCache(folder)
    ref = put(cache, layers[0])
    cache.doubt(None, [ref.digest])

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "hash_file", fail)
        number = errno.EACCES
        with pytest.raises(DiskError, match="Permission denied"):
            cache.has(ref)
        number = errno.EIO
        assert not cache.has(ref)
    assert files(folder) == []
    put(cache, layers[0])
    assert cache.has(ref)


def test_something_else_under_the_name_of_a_layer_is_one_clear_error(folder, layers):
    cache, ref = LayerCache(folder), layers[0].ref()
    cache.path(ref.digest).mkdir()
    with pytest.raises(ClusterError, match=str(folder)):
        cache.has(ref)


def test_partial_files_that_a_crash_left_are_removed(folder):
    LayerCache(folder)
    (folder / "partial" / "rest").write_bytes(b"x")
    LayerCache(folder)
    assert files(folder) == []


def test_a_model_file_that_changed_since_it_was_hashed_is_refused(folder, layers):
    cache, ref = LayerCache(folder), layers[0].ref()
    with pytest.raises(ModelError, match=f"layer {ref.digest[:12]}: .* changed"):
        put(cache, replace(layers[1], known=layers[0].tree()))
    assert not cache.has(ref)


@pytest.mark.parametrize("in_the_way", ["cache", "cache/layers", "cache/layers/partial"])
def test_a_cache_that_cannot_be_opened_is_one_clear_error(folder, tmp_path, in_the_way):
    obstacle = tmp_path / in_the_way
    obstacle.parent.mkdir(parents=True, exist_ok=True)
    obstacle.write_bytes(b"")
    with pytest.raises(ClusterError, match=rf"{folder}: the layer cache cannot be opened"):
        LayerCache(folder)


# ---- placing --------------------------------------------------------------------------------------------------------


def names(path: Path) -> set[str]:
    return {tensor.name for tensor in GGUFReader(path).tensors}


def test_a_layer_is_placed_by_its_header(folder, layers):
    cache = LayerCache(folder)
    ref = put(cache, layers[1])
    weights = cache.path(ref.digest).read_bytes()[HEADER_BYTES:]
    path = cache.place(ref, number=5, split=6)
    assert path == cache.path(ref.digest)
    assert names(path) == {"blk.5.attn_norm.weight", "blk.5.attn_q.weight"}
    assert GGUFReader(path).fields["split.no"].contents() == 6
    assert path.read_bytes()[HEADER_BYTES:] == weights
    assert LayerCache(folder).has(ref)


def test_a_layer_that_is_in_place_is_not_written_again(folder, layers):
    cache = LayerCache(folder)
    ref = put(cache, layers[1])
    path = cache.place(ref, number=5, split=6)
    path.chmod(0o444)
    before = path.stat().st_mtime_ns
    assert cache.place(ref, number=5, split=6) == path
    assert path.stat().st_mtime_ns == before


def test_two_layers_of_equal_content_are_two_files(folder, layers):
    cache = LayerCache(folder)
    ref = put(cache, layers[0])
    first, second = cache.place(ref, number=0, split=1), cache.place(ref, number=3, split=4, copy=1)
    assert first != second
    assert (names(first), names(second)) == (
        {"blk.0.attn_norm.weight", "blk.0.attn_q.weight"},
        {"blk.3.attn_norm.weight", "blk.3.attn_q.weight"},
    )
    assert first.read_bytes()[HEADER_BYTES:] == second.read_bytes()[HEADER_BYTES:]


def test_a_damaged_copy_is_noticed_and_made_again(folder, layers):
    cache = LayerCache(folder)
    ref = put(cache, layers[0])
    copy = cache.place(ref, number=3, split=4, copy=1)
    whole = copy.read_bytes()
    damage(copy)
    later = LayerCache(folder)
    assert later.has(ref)
    assert later.place(ref, number=3, split=4, copy=1).read_bytes() == whole


def test_a_copy_that_was_cut_is_made_again(folder, layers):
    cache = LayerCache(folder)
    ref = put(cache, layers[0])
    copy = cache.place(ref, number=3, split=4, copy=1)
    whole = copy.read_bytes()
    copy.write_bytes(whole[:-1])
    assert cache.place(ref, number=3, split=4, copy=1).read_bytes() == whole


def test_copies_go_with_a_damaged_layer(folder, layers):
    cache = LayerCache(folder)
    ref = put(cache, layers[0])
    cache.place(ref, number=3, split=4, copy=1)
    damage(cache.path(ref.digest))
    assert not LayerCache(folder).has(ref)
    assert files(folder) == []


@full_device
def test_a_copy_on_a_full_disk_is_one_clear_error(folder, layers):
    cache = LayerCache(folder)
    ref = put(cache, layers[0])
    (folder / "partial" / f"{ref.digest}-1.gguf").symlink_to("/dev/full")
    with pytest.raises(ClusterError, match=r"-1\.gguf: the layer file cannot be prepared: No space left"):
        cache.place(ref, number=3, split=4, copy=1)
    assert files(folder) == [f"{ref.digest}.gguf", f"{ref.digest}.tree"]


def test_a_layer_that_went_away_cannot_be_placed(folder, layers):
    cache = LayerCache(folder)
    ref = put(cache, layers[0])
    cache.path(ref.digest).unlink()
    with pytest.raises(ClusterError, match="cannot be prepared"):
        cache.place(ref, number=0, split=1)
