"""Which file encodes a model's pictures: the named one, the library's, one next to the model, or none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter

from primad.doctor.pictures import gather_pictures
from primad.errors import ConfigError
from primad.gguf import hub
from primad.gguf.header import Header, scalar_value
from primad.gguf.projectors import BESIDE_BYTES, TAKEN, projector_facts
from primad.head.model.encoder import AUTO, NONE, encoder_file, projector_beside
from primad.library.headers import HeaderCache
from primad.library.library import read_library
from primad.library.places import ModelPlace
from tests.fakes.model_stores import toy
from tools.lab.encoders import FAMILIES
from tools.lab.mmproj import Eye, write_encoder
from tools.synth import write_model


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "Tiny-3B-Q4_K_M.gguf"
    write_model(path, architecture="gemma3")
    return path


def encoder(folder: Path, name: str, projector: str = "") -> Path:
    write_encoder(folder / name, "gemma3", 64, projector=projector)
    return folder / name


def test_the_only_encoder_next_to_the_only_model_is_chosen(model, tmp_path):
    only = encoder(tmp_path, "mmproj-model-f16.gguf")
    found, line = encoder_file(AUTO, model, None)
    assert found.path == only
    assert f"may have images, which {only} encodes" in line
    assert found.memory_bytes > only.stat().st_size + BESIDE_BYTES


def test_one_model_in_two_quantisations_is_the_only_one(model, tmp_path):
    model.with_name("Tiny-3B-Q8_0.gguf").write_bytes(model.read_bytes())
    found = encoder(tmp_path, "mmproj-F16.gguf")
    assert projector_beside(model) == found


def test_among_several_models_the_encoder_with_the_models_name_is_chosen(model, tmp_path):
    other = tmp_path / "Other-7B-Q4_K_M.gguf"
    other.write_bytes(model.read_bytes())
    encoder(tmp_path, "mmproj-F16.gguf")
    assert projector_beside(model) is None
    found = encoder(tmp_path, "mmproj-Tiny-3B-F16.gguf")
    assert projector_beside(model) == found
    assert projector_beside(other) is None
    encoder(tmp_path, "mmproj-Tiny-F16.gguf")
    assert projector_beside(model) == found, "the longest name that is the model's"


MODEL, ENCODERS = "Tiny-3B-UD-Q4_K_XL.gguf", ("mmproj-BF16.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf")


def test_the_library_serve_and_the_hub_choose_the_same_encoder(tmp_path, monkeypatch):
    """In a repository with a folder for each quantisation, F16 comes first; other models' encoders are ignored."""
    files = [f"UD-Q4_K_XL/{MODEL}", "Tiny-3B-Q8_0.gguf", "Odd-1B-Q8_0.gguf", "mmproj-Odd-1B-F16.gguf", *ENCODERS]
    for name in files:
        path = tmp_path / "models" / "acme" / "Tiny-GGUF" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if "mmproj" in name:
            write_encoder(path, "gemma3", 64)
        else:
            toy(path, name)
    listed = [hub.HubFile(name=name, size_bytes=1) for name in files]
    monkeypatch.setattr(hub, "repository", lambda name: ("commit", listed))
    place = ModelPlace(folder=tmp_path / "models", layout="repositories", source="primad")
    found = {each.files[0]: each for each in read_library([place], HeaderCache(tmp_path / "library.json")).models}
    for name, expected in ((files[0], ENCODERS[2]), (files[1], ENCODERS[2]), (files[2], "mmproj-Odd-1B-F16.gguf")):
        path = tmp_path / "models" / "acme" / "Tiny-GGUF" / name
        chosen = found[path].projector
        assert chosen is not None
        assert chosen == projector_beside(path, is_repository=True)
        assert (chosen.name, found[path].sees) == (expected, True)
    fetched = hub.wanted_files(hub.HubName("acme", "Tiny-GGUF", "Q4_K_XL"))[3]
    assert fetched is not None
    assert fetched.name == ENCODERS[2]


def test_the_doctor_names_encoders_and_models_without_one_and_writes_nothing(command, model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    toy(tmp_path / "alone" / "Eye-2B-Q8_0.gguf", general__architecture="qwen3vl")
    found = encoder(tmp_path, "mmproj-Tiny-3B-F16.gguf")
    facts = gather_pictures(tmp_path / "home", [tmp_path])
    assert facts.has_mtmd
    lacking, seeing = facts.models
    assert (lacking.name, lacking.lacks_encoder) == ("Eye-2B-Q8_0", True)
    assert (seeing.projector, seeing.sees) == (found, True)
    assert seeing.encoder_bytes == encoder_file(AUTO, model, None)[0].memory_bytes
    assert not (tmp_path / "home").exists()
    assert "without its mmproj" in command("models", "--models", tmp_path)[1]


def test_supported_encoder_types_are_those_compared_with_libmtmd():
    assert {family.projector or kind for kind, family in FAMILIES.items()} == TAKEN


def test_an_encoder_of_an_unsupported_type_is_refused_by_name_everywhere(command, model, tmp_path):
    """The owner gets one line before anything starts; the model serves as one without an encoder."""
    unknown = encoder(tmp_path, "mmproj-F16.gguf", projector="cogvlm")
    with pytest.raises(ConfigError, match=r"mmproj-F16\.gguf: it has the type 'cogvlm', which .* \(--mmproj none\)"):
        encoder_file(unknown, model, None)
    found, line = encoder_file(AUTO, model, None)
    assert (found.path, line.startswith(f"no images: {unknown}: it has the type 'cogvlm'")) == (None, True)
    assert f"cannot be used: {unknown.name}: it has the type 'cogvlm'" in found.lacks, "clients get no folders"
    code, out, err = command("models", "--models", tmp_path, "--json")
    assert code == 0
    (listed,) = json.loads(out)
    assert (listed["sees"], listed["hears"], listed["problem"]) == (False, False, None)
    assert f"{unknown}: is of no use for {model.stem}: it has the type 'cogvlm'" in err
    assert not json.loads(command("fit", "--model", model, "--fleet", "apple-home", "--json")[1])["models"][0]["sees"]
    code, _, err = command("plan", "--model", model, "--mmproj", unknown, "--fleet", "apple-home")
    assert (code, err.count("\n"), "'cogvlm'" in err) == (2, 1, True)


def test_a_model_with_audio_input_only_is_not_listed_with_vision(command, model, tmp_path):
    write_encoder(tmp_path / "mmproj-F16.gguf", "ultravox", 64)
    (listed,) = json.loads(command("models", "--models", tmp_path, "--json")[1])
    assert (listed["sees"], listed["hears"]) == (False, True)


def test_a_type_that_stands_for_one_of_each_sense_is_known_by_both():
    keys = {"clip.has_vision_encoder": True, "clip.has_audio_encoder": True}
    values = {key: scalar_value(GGUFValueType.BOOL, value) for key, value in keys.items()}
    values["clip.projector_type"] = scalar_value(GGUFValueType.STRING, "qwen2.5o")
    found = projector_facts(Header(path=Path(__file__), values=values, tensors={}, data_offset=0))
    assert (found.sees, found.hears, found.problem) == (True, True, "")
    assert found.types == ("qwen2.5vl_merger", "qwen2a")


def test_a_named_encoder_wins_and_the_librarys_choice_comes_before_a_neighbouring_file(model, tmp_path):
    encoder(tmp_path, "mmproj-F16.gguf")
    (tmp_path / "store").mkdir()
    known = encoder(tmp_path / "store", "blob")
    assert encoder_file(AUTO, model, known)[0].path == known
    named = encoder(tmp_path, "mmproj-own.gguf")
    assert encoder_file(named, model, known)[0].path == named


def test_without_an_encoder_clients_get_the_missing_file_and_how_to_get_it(model, tmp_path):
    found, line = encoder_file(AUTO, model, None)
    assert (found.path, line, found.memory_bytes) == (None, "", 0)
    assert "mmproj-….gguf, which 'primad pull' fetches too" in found.lacks
    assert f"put it next to {model.name}" in found.lacks
    encoder(tmp_path, "mmproj-F16.gguf")
    assert "--mmproj none" in encoder_file(NONE, model, None)[0].lacks


def test_a_file_that_is_no_encoder_is_refused_if_named_and_skipped_if_found(model, tmp_path):
    bad = tmp_path / "mmproj-F16.gguf"
    for write in (lambda: bad.write_bytes(b"GGUF"), lambda: bad.write_bytes(model.read_bytes()), lambda: odd(bad)):
        write()
        with pytest.raises(ConfigError, match=r"--mmproj .*mmproj-F16\.gguf"):
            encoder_file(bad, model, None)
        found, line = encoder_file(AUTO, model, None)
        assert found.path is None
        assert "cannot be used" in found.lacks
        assert "no images" in line


def test_plan_fit_and_models_report_vision(command, model, tmp_path):
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
    for kind, eye, tokens, limited_to_999 in (
        ("gemma3", Eye(side=128), 64, 64),
        ("gemma4v", None, 280, 999),
        ("lfm2", None, 0, 0),
    ):
        write_encoder(tmp_path / "encoder.gguf", kind, 64, eye)
        files = tmp_path / "encoder.gguf", tmp_path / "model.gguf"
        assert encoder_file(*files, None)[0].whole_tokens == tokens
        assert encoder_file(*files, None, 999)[0].whole_tokens == limited_to_999
