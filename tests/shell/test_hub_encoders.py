"""``serve`` fetches the encoder together with a model of the hub, and plans leave room for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from primad.engine.pictures.encoder import PictureEncoder
from primad.gguf import hub_download
from primad.gguf.profile import model_profile
from primad.gguf.ranged import RangedModel
from primad.head.model.encoder import encoder_file
from primad.head.model.service import ModelSource
from primad.settings.config import models_folder
from tests.fakes.hub import own_hub
from tests.shell.test_pictures_exact import write_seeing
from tools.lab.mmproj import noise

REPO, FILE, ENCODER = "acme/Eye-GGUF", "Eye-Q8_0.gguf", "mmproj-Eye-F16.gguf"
HEADER, WHOLE = (), ("--alone",)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eye")
    write_seeing(folder / FILE, folder / ENCODER, "qwen3vl_merger of deeper layers", "qwen3vl")
    return {name: (folder / name).read_bytes() for name in (FILE, ENCODER)}


@pytest.fixture
def hub(files, monkeypatch):
    monkeypatch.setattr(hub_download, "TRIES", 1)
    with own_hub(monkeypatch, {REPO: dict(files)}) as fake:
        yield fake


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIMAD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return models_folder(tmp_path / "home") / REPO


@pytest.fixture
def serve(command, place, monkeypatch):
    """Runs ``serve``; returns the source, the options and the error output."""

    def served(*words: str) -> tuple[Any, Any, str]:
        found: list[Any] = []
        monkeypatch.setattr(
            "primad.head.serve.serve", lambda config, source, options, *_: found.extend((source, options))
        )
        code, _, err = command("serve", "--model", f"hf:{REPO}", *words)
        assert code == 0, err
        return (*found, " ".join(err.split()))

    return served


def planned(command) -> dict[str, Any]:
    code, out, err = command("plan", "--model", f"hf:{REPO}", "--fleet", "apple-home", "--json")
    assert code == 0, err
    return json.loads(out)["model"]


def sent(hub, name: str) -> list[str]:
    return [part for method, path, part in hub.asked if method == "GET" and path.endswith(name)]


@pytest.mark.parametrize("words", [HEADER, WHOLE], ids=["header", "whole"])
def test_serve_fetches_the_encoder_once_and_prints_its_size(hub, serve, place, files, words):
    source, options, err = serve(*words)
    assert isinstance(source, RangedModel) == (words == HEADER)
    assert options.projector == place / ENCODER
    assert options.projector.read_bytes() == files[ENCODER]
    assert f"also downloads its encoder {ENCODER} (" in err
    asked = len(hub.asked)
    assert serve(*words)[1].projector == place / ENCODER
    assert len(hub.asked) == asked, "what is here is used without asking"


def test_the_header_alone_is_enough_of_a_model_to_encode_its_pictures(hub, serve, files, tmp_path):
    source, options, _ = serve()
    model = ModelSource(source.header, model_profile(source.header), tmp_path, source, again_s=0.0)
    (tmp_path / FILE).write_bytes(files[FILE])
    found = []
    for path in (model.file_for_encoder(), tmp_path / FILE):
        encoder = PictureEncoder(str(options.projector), str(path), threads=1)
        found.append(encoder.encode(noise(1)))
        encoder.release()
    assert found[0] == found[1]


@pytest.mark.parametrize("words", [HEADER, WHOLE], ids=["header", "whole"])
def test_an_unwanted_encoder_is_not_fetched_and_plans_count_a_wanted_one(hub, serve, command, place, words):
    assert serve("--mmproj", "none", *words)[1].projector is None
    assert not sent(hub, ENCODER)
    found = planned(command)
    assert len(sent(hub, ENCODER)) == 1, "its beginning"
    assert not (place / ENCODER).exists()
    projector = serve(*words)[1].projector
    assert projector == place / ENCODER
    assert found["encoder_bytes"] == encoder_file(projector, projector, None)[0].memory_bytes
    assert planned(command) == found


@pytest.mark.parametrize("words", [HEADER, WHOLE], ids=["header", "whole"])
def test_a_model_is_served_without_an_encoder_that_cannot_be_fetched_until_the_next_start_does(
    hub, serve, command, place, words
):
    hub.after[ENCODER] = 0
    _, options, err = serve(*words)
    assert options.projector is None
    assert f"no images: the encoder is missing: hf:{REPO}" in err
    assert f"'primad pull hf:{REPO}:Q8_0' fetches it, or the next start does" in err
    assert not planned(command)["sees"]
    hub.after.clear()
    assert serve(*words)[1].projector == place / ENCODER


def test_a_model_pulled_without_its_encoder_is_served_without_contacting_the_hub(hub, serve, command):
    assert command("pull", "--no-mmproj", f"hf:{REPO}")[0] == 0
    asked = len(hub.asked)
    assert serve(*WHOLE)[1].projector is None
    assert not planned(command)["sees"]
    assert len(hub.asked) == asked


def test_an_offered_model_gets_its_missing_encoder_when_it_is_loaded(hub, serve, command, place, monkeypatch):
    assert serve("--mmproj", "none", *WHOLE)[1].projector is None
    offers: list[Any] = []
    monkeypatch.setattr("primad.head.serve.serve_library", lambda config, offer, *_: offers.append(offer))
    assert command("serve", "--alone")[0] == 0
    library, lines = offers[0].read(), []
    (model,) = library.models
    assert offers[0].options_of(model, library).projector is None
    assert not sent(hub, ENCODER), "not yet"
    offers[0].bring(model, library, lines.append)
    assert [ENCODER in line for line in lines] == [True]
    (model,) = offers[0].read().models
    assert (model.projector, model.sees) == (place / ENCODER, True)
