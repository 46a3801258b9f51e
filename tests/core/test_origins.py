"""Layer origins, as a head sends and a device validates them; unhashed layers being fetched."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.errors import ProtocolError
from primad.gguf.header import read_header
from primad.gguf.layers import CHUNK_BYTES, LayerRef, LayerTensor, chunk_size, layer_digest, tree_of
from primad.gguf.origins import LayerOrigin, RemoteFile, check_origins, origin_name, runs_of_chunk
from primad.gguf.ranged_cutter import RangedCutter, read_chunk
from primad.gguf.share_rules import ShareRules
from primad.gguf.shares import share_header
from primad.gguf.slices import TensorCut
from primad.layers.cache import LayerCache
from tools import synth

FILES = [RemoteFile("https://hub.test/a", 1 << 30, "ab" * 32), RemoteFile("https://hub.test/b", 1 << 20, "cd" * 32)]


def a_layer(*sizes: int) -> LayerRef:
    """Tensors of these sizes, one after the other."""
    tensors, at = [], 0
    for number, size in enumerate(sizes):
        tensors.append(LayerTensor(f"blk.*.t{number}.weight", 0, (size // 4,), at, size))
        at += -(-size // 32) * 32
    return LayerRef("", at, tuple(tensors))


def named(ref: LayerRef, places: tuple[tuple[int, int], ...]) -> tuple[LayerRef, LayerOrigin]:
    """``ref`` as named before its first fetch."""
    name = origin_name(FILES, places, ref)
    return LayerRef(name, ref.size_bytes, ref.tensors), LayerOrigin(name, name, places)


@dataclass
class File:
    """A file instead of a hub; ``reads`` counts the requests."""

    data: bytes
    reads: int = 0

    def read(self, file: RemoteFile, offset: int, size: int) -> bytes:
        self.reads += 1
        assert 0 <= offset <= offset + size <= len(self.data)
        return self.data[offset : offset + size]


@given(st.lists(st.tuples(st.integers(1, 300), st.sampled_from((0, 8, 5000))), min_size=1, max_size=6))
def test_a_chunk_has_every_tensor_at_its_place_and_zeros_between(shapes):
    ref = a_layer(*(4 * count for count, _ in shapes))
    places, at = [], 7
    for (_, gap), tensor in zip(shapes, ref.tensors, strict=True):
        places.append((0, at))
        at += tensor.size_bytes + gap
    file = File(bytes(1 + number % 255 for number in range(at)))
    _, origin = named(ref, tuple(places))
    expected = bytearray(ref.size_bytes)
    for (_, offset), tensor in zip(places, ref.tensors, strict=True):
        expected[tensor.offset : tensor.offset + tensor.size_bytes] = file.data[offset : offset + tensor.size_bytes]
    assert read_chunk(file, FILES, origin, ref, 0) == expected
    assert file.reads == 1 + sum(gap == 5000 for _, gap in shapes[:-1]), "neighbours come together"


def test_a_tensor_longer_than_a_chunk_is_read_in_several():
    ref = a_layer(CHUNK_BYTES + 64)
    ref, origin = named(ref, ((0, 100),))
    first, last = (runs_of_chunk(ref, origin, number) for number in range(2))
    assert [(run.offset, run.size) for run in first] == [(100, CHUNK_BYTES)]
    assert [(run.offset, run.size) for run in last] == [(100 + CHUNK_BYTES, 64)]


@pytest.mark.parametrize(
    ("change", "replies"),
    [
        ({"files": [RemoteFile("file:///etc/passwd", 9, "ab" * 32)]}, "file of a hub at"),
        ({"files": [RemoteFile("https://hub.test/a b", 9, "ab" * 32)]}, "file of a hub at"),
        ({"files": [RemoteFile("https://hub.test/a\r\nX: y", 9, "ab" * 32)]}, "file of a hub at"),
        ({"files": [RemoteFile("https://hub.test/a", 9, "AB" * 32)]}, "file of a hub at"),
        ({"files": [RemoteFile("https://hub.test/a", -1, "ab" * 32)]}, "of -1 bytes"),
        ({"files": [RemoteFile("https://hub.test/a", 1 << 50, "ab" * 32)]}, "bytes"),
        ({"places": ((2, 0),)}, "outside of its file"),
        ({"places": ((-1, 0),)}, "outside of its file"),
        ({"places": ((0, -4),)}, "outside of its file"),
        ({"places": ((1, (1 << 20) - 32),)}, "outside of its file"),
        ({"places": ()}, "that no window has"),
        ({"places": ((0, 128),)}, "not called by where it comes from"),
        ({"layer": "0" * 64}, "that no window has"),
        ({"name": "0" * 64}, "not called by where it comes from"),
    ],
)
def test_an_origin_that_cannot_be_is_refused(change, replies):
    ref, origin = named(a_layer(64), ((0, 96),))
    check_origins(FILES, [origin], [ref])
    changed = LayerOrigin(*(change.get(field, getattr(origin, field)) for field in ("layer", "name", "places")))
    with pytest.raises(ProtocolError, match=replies):
        check_origins(change.get("files", FILES), [changed], [ref])


def test_a_share_is_read_by_ranges_that_come_together_and_is_no_other_origin_by_another_cut(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="gpt-oss", layers=2, heads_kv=4, expert_feed_forward=128)
    header, file = read_header(path), RemoteFile("https://hub.test/a", path.stat().st_size, "ab" * 32)
    names = set()
    for weights, rank in (([1, 1], 0), ([1, 1], 1), ([3, 1], 1)):
        cutter = RangedCutter(share_header(ShareRules(header), weights, rank), files=(file,), parts=(path,))
        refs = [cutter.ref(layer) for layer in range(3)]
        origins = cutter.origins_of([refs])
        check_origins([file], origins, refs)
        names |= {origin.name for origin in origins}
        for layer, (ref, origin) in enumerate(zip(refs, origins, strict=True)):
            hub = File(path.read_bytes())
            assert read_chunk(hub, [file], origin, ref, 0) == cutter.cut(layer).read(0, ref.size_bytes)
            assert hub.reads <= len(ref.tensors)
    assert len(names) == 9


@pytest.mark.parametrize(
    ("cut", "replies"),
    [
        (TensorCut(4, 16, ((0, 2), (8, 16))), "outside of its file"),
        (TensorCut(4, 4, ((0, 8),)), "outside of its file"),
        (TensorCut(4, 16, ((8, 16), (0, 8))), "outside of its file"),
        (TensorCut(4, 1 << 30, ((0, 8),)), "outside of its file"),
        (TensorCut(4, 16, ((8, 8),)), "outside of its file"),
        (TensorCut(4, 1 << 20, ((0, 16384),)), "outside of its file"),
    ],
)
def test_a_cut_that_no_slice_has_is_refused(cut, replies):
    ref, places = a_layer(1 << 16), ((1, 0),)
    right = TensorCut(4, 16, ((0, 8),))
    for each, fails in ((right, False), (cut, True)):
        name = origin_name(FILES, places, ref, (each,))
        named_ref, origin = LayerRef(name, ref.size_bytes, ref.tensors), LayerOrigin(name, name, places, (each,))
        if not fails:
            check_origins(FILES, [origin], [named_ref])
            continue
        with pytest.raises(ProtocolError, match=replies):
            check_origins(FILES, [origin], [named_ref])


def test_another_revision_of_a_file_is_another_origin():
    ref, places = a_layer(64), ((0, 96),)
    before = origin_name(FILES, places, ref)
    assert origin_name([RemoteFile(FILES[0].url, FILES[0].size_bytes, "ef" * 32)], places, ref) != before
    assert origin_name([RemoteFile("https://mirror.test/a", 1 << 30, "ab" * 32)], places, ref) == before


def test_arrived_chunks_of_an_unknown_layer_stay_and_damaged_ones_are_requested_again(tmp_path):
    ref, _ = named(a_layer(2 * CHUNK_BYTES + 32), ((0, 0),))
    chunks = [bytes([number + 1]) * chunk_size(ref.size_bytes, number) for number in range(3)]
    cache = LayerCache(tmp_path)
    with cache.part(ref, hashed=False) as part:
        cache.begin(part)
        assert not cache.write(part, 2, chunks[2])
        assert not cache.write(part, 0, chunks[0])
    with LayerCache(tmp_path).part(ref, hashed=False) as part:
        assert part.lacking() == [1]
    with part.path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    cache = LayerCache(tmp_path)
    with cache.part(ref, hashed=False) as part:
        assert part.lacking() == [1, 2]
        cache.write(part, 1, chunks[1])
        assert cache.write(part, 2, chunks[2])
        cache.finish(part)
    digest = layer_digest(ref.size_bytes, tree_of(chunks))
    assert cache.has(LayerRef(digest, ref.size_bytes, ref.tensors))
    assert not cache.partial_bytes()
    stored = LayerCache(tmp_path).reader(digest)
    assert stored is not None
    assert stored.read(0, ref.size_bytes) == b"".join(chunks)


def test_digests_of_origins_are_known_after_a_restart_and_a_damaged_file_is_ignored(tmp_path):
    LayerCache(tmp_path).origins.put("a", "b")
    assert LayerCache(tmp_path).origins.get("a") == "b"
    (tmp_path / "origins.json").write_bytes(b"{")
    assert LayerCache(tmp_path).origins.get("a") is None
