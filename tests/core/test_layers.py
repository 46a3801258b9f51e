"""Layer files: a header of fixed size that llama.cpp can read, and weights known by their digest."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from hypothesis import given
from hypothesis import strategies as st

from primad.errors import ModelError
from primad.gguf.header import read_header, scalar_value
from primad.gguf.layers import (
    ALIGNMENT,
    CHUNK_BYTES,
    HEADER_BYTES,
    LayerTensor,
    SmallTensor,
    check_ref,
    chunk_count,
    chunk_size,
    cut,
    cut_layer,
    is_chunk_of,
    is_tree_of,
    layer_header,
    metadata_split,
)
from tests.fakes.gguf import array, toy_arrays, write_gguf


@pytest.fixture
def model(tmp_path):
    return read_header(write_gguf(tmp_path / "toy.gguf", toy_arrays()))


def weights_of(layer) -> bytes:
    return b"".join(layer.chunks())


def test_a_layer_is_the_tensors_of_its_number_under_names_without_it(model):
    layer = cut_layer(model, 1)
    assert [(tensor.name, tensor.offset, tensor.size_bytes) for tensor in layer.tensors] == [
        ("blk.*.attn_norm.weight", 0, 36),
        ("blk.*.attn_q.weight", 64, 160),
    ]
    assert layer.size_bytes == 64 + 160


def test_weights_are_those_of_the_model_with_zeros_between_tensors(model):
    norm, query = toy_arrays()["blk.1.attn_norm.weight"], toy_arrays()["blk.1.attn_q.weight"]
    assert weights_of(cut_layer(model, 1)) == norm.tobytes() + bytes(28) + query.tobytes()


def test_the_digest_is_that_of_the_size_and_the_digests_of_the_chunks(model):
    layer = cut_layer(model, 2)
    tree = blake2b(weights_of(layer), digest_size=32).digest()
    top = blake2b(b"primad layer tree 2" + layer.size_bytes.to_bytes(8, "little") + tree, digest_size=32)
    assert layer.ref().digest == top.hexdigest()
    assert layer.ref().size_bytes == layer.size_bytes
    assert layer.ref().file_bytes == HEADER_BYTES + layer.size_bytes
    check_ref(layer.ref())


def test_layers_of_equal_content_are_one_ref(tmp_path):
    model = read_header(write_gguf(tmp_path / "same.gguf", toy_arrays(same=True)))
    assert cut_layer(model, 0).ref() == cut_layer(model, 2).ref()


def test_layers_of_other_content_have_other_digests(model):
    assert len({cut_layer(model, layer).ref().digest for layer in range(3)}) == 3


def test_a_layer_that_the_model_does_not_have(model):
    with pytest.raises(ModelError, match=r"toy\.gguf: has no tensors of layer 3"):
        cut_layer(model, 3)


def test_layer_1_does_not_take_tensors_of_layer_10(tmp_path):
    arrays = {"blk.1.a.weight": array(8), "blk.10.a.weight": array(8, seed=1)}
    model = read_header(write_gguf(tmp_path / "many.gguf", arrays))
    assert weights_of(cut_layer(model, 1)) == arrays["blk.1.a.weight"].tobytes()


@given(st.integers(0, 224), st.integers(0, 224))
def test_any_range_of_the_weights_can_be_read(tmp_path_factory, first, second):
    path = tmp_path_factory.getbasetemp() / "ranges.gguf"
    if not path.exists():
        write_gguf(path, toy_arrays())
    layer = cut_layer(read_header(path), 0)
    start, end = sorted((first, second))
    assert layer.read(start, end - start) == weights_of(layer)[start:end]


def test_chunks_are_of_bounded_size(tmp_path):
    rows = CHUNK_BYTES // 4096 + 3
    model = read_header(write_gguf(tmp_path / "big.gguf", {"blk.0.w.weight": np.zeros((rows, 1024), np.float32)}))
    sizes = [len(chunk) for chunk in cut_layer(model, 0).chunks()]
    assert sizes == [CHUNK_BYTES, rows * 4096 - CHUNK_BYTES]


def test_every_chunk_is_verified_by_itself(tmp_path):
    rows = 2 * CHUNK_BYTES // 4096 + 3
    layer = cut_layer(read_header(write_gguf(tmp_path / "big.gguf", {"blk.0.w.weight": array(rows, 1024)})), 0)
    tree = layer.tree()
    chunks = list(layer.chunks())
    assert is_tree_of(tree, layer.ref().digest, layer.size_bytes)
    assert [len(chunk) for chunk in chunks] == [chunk_size(layer.size_bytes, number) for number in range(3)]
    assert chunk_count(layer.size_bytes) == 3
    for number, chunk in enumerate(chunks):
        assert [is_chunk_of(chunk, tree, other) for other in range(3)] == [other == number for other in range(3)]
        assert not is_chunk_of(chunk[:-1], tree, number)


def test_a_tree_of_another_layer_or_size_is_refused(model):
    first, second = cut_layer(model, 0), cut_layer(model, 1)
    digest = first.ref().digest
    assert not is_tree_of(second.tree(), digest, first.size_bytes)
    assert not is_tree_of(first.tree(), digest, first.size_bytes + 32)
    assert not is_tree_of(first.tree() * 2, digest, first.size_bytes)
    assert not is_tree_of(b"", digest, first.size_bytes)


def test_a_known_tree_is_believed_without_reading_and_one_of_another_length_is_not(model):
    layer = cut_layer(model, 0)
    ref = layer.ref()
    assert layer.hashed(bytes(31)).ref() == layer.hashed().ref() == ref
    known = layer.hashed(layer.tree())
    model.path.unlink()
    assert known.ref() == ref


def test_a_model_file_that_became_shorter_is_noticed(model):
    with model.path.open("r+b") as file:
        file.truncate(model.path.stat().st_size - 100)
    with pytest.raises(ModelError, match=r"toy\.gguf: became shorter while it was read"):
        cut_layer(model, 2).ref()


def test_a_model_file_that_went_away_is_noticed(model):
    model.path.unlink()
    with pytest.raises(ModelError, match=r"toy\.gguf: cannot be read: No such file"):
        cut_layer(model, 0).ref()


# ---- headers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 9, 10, 511])
@pytest.mark.parametrize("split", [1, 65_535])
def test_a_layer_file_is_a_gguf_of_its_layer(model, tmp_path, number, split):
    layer = cut_layer(model, 1)
    header = layer_header(layer.tensors, number=number, split=split)
    assert len(header) == HEADER_BYTES
    path = tmp_path / "layer.gguf"
    path.write_bytes(header + weights_of(layer))
    read = GGUFReader(path)
    assert read.fields["split.no"].contents() == split
    tensors = {tensor.name: tensor for tensor in read.tensors}
    assert set(tensors) == {f"blk.{number}.attn_norm.weight", f"blk.{number}.attn_q.weight"}
    for name, tensor in tensors.items():
        expected = toy_arrays()[name.replace(f"blk.{number}.", "blk.1.")]
        assert np.array_equal(tensor.data, expected)
    ours = read_header(path)
    assert ours.data_offset == HEADER_BYTES
    assert [weights_of(cut({tensor.name: tensor})) for tensor in ours.tensors.values()] != []


@given(
    st.lists(
        st.tuples(st.text("abcdefgh._", min_size=1, max_size=50), st.lists(st.integers(1, 9), min_size=1, max_size=4)),
        min_size=1,
        max_size=100,
        unique_by=lambda item: item[0],
    ),
    st.integers(0, 511),
)
def test_a_header_has_one_size_whatever_the_layer_holds(sampled, number):
    tensors = [LayerTensor(f"blk.*.{name}", 0, tuple(shape), 0, 4) for name, shape in sampled]
    assert len(layer_header(tensors, number=number, split=1)) == HEADER_BYTES


def test_moving_a_layer_changes_its_header_only(model):
    layer = cut_layer(model, 0)
    first, second = (layer_header(layer.tensors, number=number, split=number + 1) for number in (0, 7))
    assert first != second
    assert layer.ref().digest == cut_layer(model, 0).ref().digest


def test_a_layer_of_too_many_tensors_is_our_mistake():
    tensors = [LayerTensor(f"blk.*.{i:0>50}", 0, (1, 1, 1, 1), 0, 4) for i in range(200)]
    with pytest.raises(AssertionError, match="200 tensors does not fit"):
        layer_header(tensors, number=0, split=1)


def test_a_metadata_split_is_a_gguf_of_values_and_small_tensors(tmp_path):
    norm = array(9)
    small = SmallTensor(name="output_norm.weight", type=GGMLQuantizationType.F32, shape=(9,), data=norm.tobytes())
    values = {"general.architecture": scalar_value(GGUFValueType.STRING, "llama")}
    path = tmp_path / "window.gguf"
    path.write_bytes(metadata_split(values, [small], splits=3, tensors=11))
    read = GGUFReader(path)
    assert read.fields["general.architecture"].contents() == "llama"
    assert [read.fields[f"split.{key}"].contents() for key in ("no", "count", "tensors.count")] == [0, 3, 11]
    assert np.array_equal(read.tensors[0].data, norm)
    assert path.stat().st_size % ALIGNMENT == 0


def test_a_metadata_split_without_tensors_is_a_gguf(tmp_path):
    path = tmp_path / "window.gguf"
    path.write_bytes(metadata_split({}, [], splits=2, tensors=0))
    assert GGUFReader(path).tensors == []
