"""A split model is one model if all its parts are present, and one clear error otherwise."""

from __future__ import annotations

import os

import numpy as np
import pytest

from primad.errors import ModelError
from primad.gguf.layers import cut_layer
from primad.gguf.model import check_unchanged, open_model, parts, stamps_of
from tests.fakes.gguf import toy_arrays, write_gguf, write_split


def refusal(path) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(path)
    return str(caught.value)


def test_one_file_is_one_model(tmp_path):
    header = open_model(write_gguf(tmp_path / "toy.gguf", toy_arrays()))
    assert set(header.tensors) == set(toy_arrays())


@pytest.mark.parametrize("count", [2, 3, 8])
def test_all_parts_are_the_whole_model(tmp_path, count):
    whole = open_model(write_gguf(tmp_path / "toy.gguf", toy_arrays()))
    paths = write_split(tmp_path, toy_arrays(), count)
    header = open_model(paths[0])
    assert set(header.tensors) == set(whole.tensors)
    assert {tensor.path for tensor in header.tensors.values()} == set(paths)
    for layer in range(3):
        split, expected = cut_layer(header, layer), cut_layer(whole, layer)
        weights = {tensor.name: split.read(tensor.offset, tensor.size_bytes) for tensor in split.tensors}
        assert weights == {t.name: expected.read(t.offset, t.size_bytes) for t in expected.tensors}


def test_a_split_count_of_one_is_one_file(tmp_path):
    path = write_gguf(tmp_path / "any name.gguf", toy_arrays(), {"split.count": 1, "split.no": 0})
    assert len(open_model(path).tensors) == len(toy_arrays())


@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_part_is_named(tmp_path, missing):
    paths = write_split(tmp_path, toy_arrays(), 3)
    paths[missing].unlink()
    assert refusal(paths[0]) == (
        f"{paths[missing]}: part {missing + 1} of 3 of this split model is missing; fetch it as well"
    )


@pytest.mark.parametrize("number", [1, 2])
def test_a_later_part_names_the_first(tmp_path, number):
    paths = write_split(tmp_path, toy_arrays(), 3)
    assert f"is part {number + 1} of a split model; give the first part, {paths[0]}" in refusal(paths[number])


@pytest.mark.parametrize("name", ["toy.gguf", "toy-00001-of-00004.gguf", "toy-1-of-3.gguf", "toy-00001-of-00003.bin"])
def test_a_name_that_hides_the_parts_is_refused(tmp_path, name):
    paths = write_split(tmp_path, toy_arrays(), 3)
    renamed = paths[0].rename(tmp_path / name)
    text = refusal(renamed)
    assert text.startswith(f"{renamed}: ")
    assert "does not end in -00001-of-00003.gguf; restore the original names" in text


def test_parts_in_the_wrong_order_are_refused(tmp_path):
    first, second, third = write_split(tmp_path, toy_arrays(), 3)
    between = second.rename(tmp_path / "between")
    third.rename(second)
    between.rename(third)
    assert "is not part 2 of 3" in refusal(first)


def test_the_first_two_parts_exchanged_are_refused(tmp_path):
    first, second = write_split(tmp_path, toy_arrays(), 2)
    between = first.rename(tmp_path / "between")
    second.rename(first)
    between.rename(second)
    assert "is not part 1 of 2" in refusal(first)


def test_the_last_part_twice_is_refused(tmp_path):
    first, second = write_split(tmp_path, toy_arrays(), 2)
    first.write_bytes(second.read_bytes())
    assert "is not part 1 of 2" in refusal(first)


def test_a_part_of_another_split_is_refused(tmp_path):
    paths = write_split(tmp_path, toy_arrays(), 3)
    write_gguf(paths[1], {"x": np.zeros(4, np.float32)}, {"split.no": 1, "split.count": 2})
    assert "is not part 2 of 3" in refusal(paths[0])


def test_a_part_without_split_metadata_is_refused(tmp_path):
    paths = write_split(tmp_path, toy_arrays(), 2)
    write_gguf(paths[1], {"x": np.zeros(4, np.float32)})
    assert "is not part 2 of 2" in refusal(paths[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    paths = write_split(tmp_path, toy_arrays(), 2)
    write_gguf(paths[1], toy_arrays(), {"split.no": 1, "split.count": 2})
    assert "repeats tensor 'token_embd.weight' of an earlier part" in refusal(paths[0])


def test_parts_of_models_of_another_size_are_refused(tmp_path):
    paths = write_split(tmp_path, toy_arrays(), 2)
    write_gguf(paths[1], {"x": np.zeros(4, np.float32)}, {"split.no": 1, "split.count": 2})
    assert "the parts hold 5 tensors, 8 expected" in refusal(paths[0])


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all"])
def test_a_damaged_part_is_named(tmp_path, content):
    paths = write_split(tmp_path, toy_arrays(), 2)
    paths[1].write_bytes(content)
    assert refusal(paths[0]).startswith(f"{paths[1]}: ")


def test_a_model_without_tensors_is_refused(tmp_path):
    assert "holds no tensors" in refusal(write_gguf(tmp_path / "empty.gguf", {}))


def test_an_absurd_number_of_parts_is_refused(tmp_path):
    path = write_gguf(tmp_path / "toy-00001-of-65535.gguf", toy_arrays(), {"split.count": 65_535})
    assert "part 2 of 65535 of this split model is missing" in refusal(path)


def test_the_names_of_the_parts(tmp_path):
    assert [path.name for path in parts(tmp_path / "a-b-00001-of-00002.gguf", 2)] == [
        "a-b-00001-of-00002.gguf",
        "a-b-00002-of-00002.gguf",
    ]


def test_a_model_with_the_same_files_is_unchanged(tmp_path):
    stamps = stamps_of(open_model(write_split(tmp_path, toy_arrays(), 3)[0]))
    assert len(stamps) == 3
    check_unchanged(stamps, "wait")


@pytest.mark.parametrize("part", [0, 2])
def test_a_model_that_changes_is_refused_with_the_file_and_the_remedy(tmp_path, part):
    paths = write_split(tmp_path, toy_arrays(), 3)
    stamps = stamps_of(open_model(paths[0]))
    before = paths[part].read_bytes()
    status = paths[part].stat()
    with paths[part].open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ModelError, match="put the old one back, or wait") as caught:
        check_unchanged(stamps, "wait")
    assert str(paths[part]) in str(caught.value)
    with paths[part].open("r+b") as file:
        file.write(before)
    os.utime(paths[part], ns=(status.st_atime_ns, status.st_mtime_ns))
    check_unchanged(stamps, "wait")
    paths[part].unlink()
    with pytest.raises(ModelError, match="cannot be read any more: No such file"):
        check_unchanged(stamps, "wait")
