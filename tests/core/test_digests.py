"""Cached hash trees of layers, and which are rejected."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from primad.gguf.digests import LayerDigests
from primad.gguf.header import Header, read_header
from primad.gguf.layers import cut_layer
from tests.fakes.gguf import toy_arrays, write_gguf


@pytest.fixture
def model(tmp_path) -> Header:
    return read_header(write_gguf(tmp_path / "toy.gguf", toy_arrays()))


@pytest.fixture
def memory(tmp_path) -> Path:
    return tmp_path / "digests.json"


def remember(model: Header, memory: Path) -> bytes:
    tree = cut_layer(model, 1).tree()
    digests = LayerDigests(model, memory)
    digests.put(1, tree)
    digests.save()
    return tree


def test_a_tree_is_known_the_next_time(model, memory):
    tree = remember(model, memory)
    later = LayerDigests(model, memory)
    assert later.get(1) == tree
    assert later.get(0) is None


def test_nothing_is_known_of_a_file_that_was_written_since(model, memory):
    remember(model, memory)
    os.utime(model.path, ns=(1, 1))
    assert LayerDigests(model, memory).get(1) is None


def test_entries_of_the_old_kind_are_not_taken_for_new_ones(model, memory):
    remember(model, memory)
    stored = msgspec.json.decode(memory.read_bytes())
    (key,) = stored
    old = {key.partition(":")[2]: {"1": "ab" * 32}}
    memory.write_bytes(msgspec.json.encode(old))
    assert LayerDigests(model, memory).get(1) is None
    tree = remember(model, memory)
    assert LayerDigests(model, memory).get(1) == tree
    assert list(msgspec.json.decode(memory.read_bytes())) == [key], "the old ones go"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"2:x": 3}', b'{"2:x": {"1": "no base64!"}}', b"\xff"])
def test_a_damaged_memory_is_as_none(model, memory, content):
    memory.write_bytes(content)
    assert LayerDigests(model, memory).get(1) is None
    assert LayerDigests(model, memory).get(1) is None
    tree = remember(model, memory)
    assert LayerDigests(model, memory).get(1) == tree
