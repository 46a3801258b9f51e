"""Which file encodes a model's pictures: the one that is named, the library's, one beside the model, or none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from primad.errors import ConfigError
from primad.head.model.encoder import AUTO, BESIDE_BYTES, NONE, encoder_file, projector_beside
from tools.lab.mmproj import Eye, write_encoder
from tools.synth import write_model


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "Tiny-3B-Q4_K_M.gguf"
    write_model(path, architecture="gemma3")
    return path


def encoder(folder: Path, name: str) -> Path:
    write_encoder(folder / name, "gemma3", 64)
    return folder / name


def test_the_only_encoder_beside_the_only_model_is_taken(model, tmp_path):
    only = encoder(tmp_path, "mmproj-model-f16.gguf")
    found, line = encoder_file(AUTO, model, None)
    assert found.path == only
    assert f"may have pictures, which {only} encodes" in line
    assert found.memory_bytes > only.stat().st_size + BESIDE_BYTES


def test_one_model_in_two_quantisations_is_the_only_one(model, tmp_path):
    model.with_name("Tiny-3B-Q8_0.gguf").write_bytes(model.read_bytes())
    found = encoder(tmp_path, "mmproj-F16.gguf")
    assert projector_beside(model) == found


def test_among_several_models_the_encoder_with_the_models_name_is_taken(model, tmp_path):
    other = tmp_path / "Other-7B-Q4_K_M.gguf"
    other.write_bytes(model.read_bytes())
    encoder(tmp_path, "mmproj-F16.gguf")
    assert projector_beside(model) is None
    found = encoder(tmp_path, "mmproj-Tiny-3B-F16.gguf")
    assert projector_beside(model) == found
    assert projector_beside(other) is None


def test_what_is_named_wins_and_the_librarys_choice_comes_before_a_neighbour(model, tmp_path):
    encoder(tmp_path, "mmproj-F16.gguf")
    (tmp_path / "store").mkdir()
    known = encoder(tmp_path / "store", "blob")
    assert encoder_file(AUTO, model, known)[0].path == known
    named = encoder(tmp_path, "mmproj-own.gguf")
    assert encoder_file(named, model, known)[0].path == named


def test_without_an_encoder_clients_hear_what_is_missing_and_how_to_get_it(model, tmp_path):
    found, line = encoder_file(AUTO, model, None)
    assert (found.path, line, found.memory_bytes) == (None, "", 0)
    assert "mmproj-….gguf, which 'primad pull' fetches too" in found.lacks
    assert f"put it beside {model.name}" in found.lacks
    encoder(tmp_path, "mmproj-F16.gguf")
    assert "--mmproj none" in encoder_file(NONE, model, None)[0].lacks


def test_a_file_that_is_no_encoder_of_pictures_is_refused_where_it_is_named_and_left_out_where_it_is_found(
    model, tmp_path
):
    bad = tmp_path / "mmproj-F16.gguf"
    for write in (lambda: bad.write_bytes(b"GGUF"), lambda: bad.write_bytes(model.read_bytes()), lambda: odd(bad)):
        write()
        with pytest.raises(ConfigError, match=r"--mmproj .*mmproj-F16\.gguf"):
            encoder_file(bad, model, None)
        found, line = encoder_file(AUTO, model, None)
        assert found.path is None
        assert "cannot be used" in found.lacks
        assert "no pictures" in line


def test_plan_fit_and_models_say_that_a_model_sees(command, model, tmp_path):
    encoder(tmp_path, "mmproj-F16.gguf")
    fleet = ("--fleet", "apple-home", "--json")
    planned = json.loads(command("plan", "--model", model, *fleet)[1])["model"]
    assert (planned["sees"], planned["hears"]) == (True, False)
    assert planned["encoder_bytes"] == encoder_file(AUTO, model, None)[0].memory_bytes
    assert not json.loads(command("plan", "--model", model, "--mmproj", "none", *fleet)[1])["model"]["sees"]
    assert json.loads(command("fit", "--model", model, *fleet)[1])["models"][0]["sees"]
    (listed,) = json.loads(command("models", "--models", tmp_path, "--json")[1])
    assert (listed["sees"], listed["hears"]) == (True, False)


def odd(path: Path) -> None:
    writer = GGUFWriter(str(path), "clip")
    writer.add_array("clip.has_vision_encoder", [1])
    writer.add_tensor("a", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_how_many_tokens_of_a_picture_belong_in_one_step_is_known_before_it_is_loaded(tmp_path):
    for kind, eye, tokens, at_most_999 in (
        ("gemma3", Eye(side=128), 64, 64),
        ("gemma4v", None, 280, 999),
        ("lfm2", None, 0, 0),
    ):
        write_encoder(tmp_path / "encoder.gguf", kind, 64, eye)
        files = tmp_path / "encoder.gguf", tmp_path / "model.gguf"
        assert encoder_file(*files, None)[0].whole_tokens == tokens
        assert encoder_file(*files, None, 999)[0].whole_tokens == at_most_999
