"""Files sent like layers, and models without their weights."""

from __future__ import annotations

import pytest

from primad.errors import ModelError
from primad.gguf.layers import CHUNK_BYTES, HEADER_BYTES
from primad.gguf.model import open_model
from primad.gguf.whole_file import cut_file, without_weights, write_file
from tests.fakes.gguf import toy_arrays, write_gguf, write_split


@pytest.mark.parametrize("size", [1, 32, CHUNK_BYTES, CHUNK_BYTES + 5])
def test_a_file_is_the_same_at_the_other_end_whatever_its_size(size, tmp_path):
    content = bytes(i % 251 for i in range(size))
    (tmp_path / "file").write_bytes(content)
    cut = cut_file(tmp_path / "file").hashed()
    (tmp_path / "layer").write_bytes(bytes(HEADER_BYTES) + b"".join(cut.chunks()))
    write_file(cut.ref(), tmp_path / "layer", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == content


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(ModelError, match="gone"):
        cut_file(tmp_path / "gone")


@pytest.mark.parametrize("parts", [1, 3])
def test_a_model_without_weights_is_one_file_with_the_same_tensors_and_facts_however_many_it_was(parts, tmp_path):
    values = {"general.name": "toy"}
    path = (
        write_gguf(tmp_path / "toy.gguf", toy_arrays(), values)
        if parts == 1
        else write_split(tmp_path, toy_arrays(), parts)[0]
    )
    header = open_model(path)
    metadata, hole_bytes = without_weights(header)
    with (tmp_path / "empty.gguf").open("wb") as file:
        file.write(metadata)
        file.truncate(len(metadata) + hole_bytes)
    found = open_model(tmp_path / "empty.gguf")
    assert [(each.name, each.type, each.shape) for each in found.tensors.values()] == [
        (each.name, each.type, each.shape) for each in header.tensors.values()
    ]
    facts = {key: value.raw for key, value in header.values.items() if not key.startswith("split.")}
    assert facts.items() <= {key: value.raw for key, value in found.values.items()}.items()
