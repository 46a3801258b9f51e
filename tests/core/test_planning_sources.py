"""Models and devices from files: the header of a GGUF is enough for a plan."""

from __future__ import annotations

import pytest

from primad.errors import ConfigError, ModelError
from primad.gguf.header import read_header
from primad.gguf.model import open_model
from primad.planning.sources import read_devices, read_model
from tests.fakes.gguf import toy_arrays, write_gguf, write_split

VALUES = {
    "llama.block_count": 3,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.attention.head_count": 2,
}


def cut(path, data_bytes=0):
    """Truncate the file to its header and ``data_bytes`` of weights."""
    end = read_header(path).data_offset + data_bytes
    path.write_bytes(path.read_bytes()[:end])
    return path


@pytest.mark.parametrize("data_bytes", [0, 40])
def test_the_header_of_a_model_is_enough(tmp_path, data_bytes):
    whole = write_gguf(tmp_path / "whole.gguf", toy_arrays(), VALUES)
    header = cut(write_gguf(tmp_path / "cut.gguf", toy_arrays(), VALUES), data_bytes)
    assert read_model(header, None).layers == read_model(whole, None).layers


def test_a_cut_model_is_no_model_elsewhere(tmp_path):
    path = cut(write_gguf(tmp_path / "cut.gguf", toy_arrays(), VALUES))
    with pytest.raises(ModelError, match="cut short or damaged: tensor"):
        open_model(path)


def test_a_cut_header_is_refused(tmp_path):
    path = write_gguf(tmp_path / "cut.gguf", toy_arrays(), VALUES)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        read_model(path, None)


def test_the_headers_of_all_parts_are_enough(tmp_path):
    parts = [cut(path) for path in write_split(tmp_path, toy_arrays(), 2)]
    assert len(open_model(parts[0], header_only=True).tensors) == len(toy_arrays())
    parts[1].unlink()
    with pytest.raises(ModelError, match="part 2 of 2 of this split model is missing"):
        open_model(parts[0], header_only=True)


def test_one_model_is_named():
    assert read_model(None, "llama3-70b-q4k").architecture == "llama"
    with pytest.raises(ConfigError, match="which model"):
        read_model(None, None)
    with pytest.raises(ConfigError, match="give one of them"):
        read_model(open, "llama3-70b")
    with pytest.raises(ConfigError, match="no built-in model shape 'llama9'"):
        read_model(None, "llama9")


def test_devices_of_a_fleet_and_of_files_come_together(tmp_path):
    devices, links = read_devices([], "apple-home")
    assert len(devices) == 2
    assert {(link.source, link.target) for link in links} == {
        (a.device, b.device) for a in devices for b in devices if a is not b
    }
    with pytest.raises(ConfigError, match="no fleet 'nowhere'"):
        read_devices([], "nowhere")
    with pytest.raises(ConfigError, match=r"no \.json file"):
        read_devices([tmp_path], None)
