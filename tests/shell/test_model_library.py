"""The library of models: the contents of folders and of other programs' stores, and what is wrong there."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.errors import ConfigError, ModelError
from primad.gguf import header as header_module
from primad.gguf.header import read_beginning
from primad.library import headers, stores
from primad.library import library as library_module
from primad.library.headers import BEGINNING_BYTES, HeaderCache, facts_in, parameters_in
from primad.library.library import read_library
from primad.library.places import ModelPlace, model_places
from tests.fakes.gguf import toy_arrays, write_adapter, write_gguf, write_split
from tests.fakes.model_stores import blob, hub_file, manifest, ollama_model, toy

LIBRARY = "registry.ollama.ai/library"


@pytest.fixture
def library(tmp_path):
    """Reads a library with the one store ``tmp_path / "store"``."""
    (tmp_path / "store").mkdir()

    def read(layout="folder", source="", folder=tmp_path / "store"):
        place = ModelPlace(source=source or layout, layout=layout, folder=folder, named=layout == "folder")
        return read_library([place], HeaderCache(tmp_path / "library.json"))

    return read


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def names(library):
    return [each.name for each in library.models]


def lines(library):
    return [each.line for each in library.problems]


def test_files_of_a_folder_are_listed_by_name_with_their_header_values(library, store):
    toy(store / "Qwen3-8B-Q4_K_M.gguf")
    toy(store / "deep" / "er" / "other.GGUF", general__size_label="1.5B", general__file_type=7)
    (store / "notes.txt").write_text("no model")
    found = library().models
    assert [(each.name, each.parameters, each.quantisation, each.context_tokens) for each in found] == [
        ("other", "1.5B", "Q8_0", 2048),
        ("Qwen3-8B-Q4_K_M", "8B", "Q4_K_M", 2048),
    ]
    assert found[0].size_bytes == (store / "deep" / "er" / "other.GGUF").stat().st_size
    assert found[0].names == ("other", "deep/er/other")


def test_files_of_the_same_name_are_distinguished_by_their_folders(library, store):
    for each in ("v1", "v2"):
        toy(store / each / "model.gguf", each)
    assert names(library()) == ["v1/model", "v2/model"]
    with pytest.raises(ConfigError, match=r"model: may be v1/model \(.*\), v2/model \(.*\); give one of these names"):
        library().find("model")
    assert library().find("v2/model").files == (store / "v2" / "model.gguf",)


def test_a_split_model_is_listed_once_and_a_missing_part_is_named(library, store):
    paths = write_split(store, toy_arrays(), 3)
    [model] = library().models
    assert (model.name, model.files, model.problem) == ("toy", tuple(paths), "")
    assert model.size_bytes == sum(path.stat().st_size for path in paths)
    paths[1].unlink()
    with pytest.raises(ModelError, match="part 2 of 3 of this split model is missing"):
        library().find("toy")


def test_a_projector_belongs_to_the_model_next_to_it_and_an_adapter_is_no_model(library, store):
    toy(store / "gemma-3-4b-it-Q4_K_M.gguf")
    toy(store / "llama.gguf")
    projector = toy(store / "mmproj-gemma-3-4b-it-F16.gguf", general__type="mmproj")
    write_adapter(store / "style.gguf", {"blk.0.attn_q.weight": (8, 5)})
    found = library().models
    assert [(each.name, each.projector) for each in found] == [("gemma-3-4b-it-Q4_K_M", projector), ("llama", None)]


def test_a_file_found_twice_is_one_model_with_several_names(library, store):
    path = toy(store / "a.gguf")
    os.link(path, store / "b.gguf")
    (store / "c.gguf").symlink_to(path)
    [model] = library().models
    assert {"a", "b", "c"} <= set(model.names)
    assert library().find("c") == library().find("a") == model


def test_ollama_names_are_those_of_ollama(library, store):
    whole = toy(store / "x.gguf").read_bytes()
    about = {"model_type": "1.2B", "file_type": "Q8_0"}
    path = ollama_model(store, f"{LIBRARY}/llama3.2/1b", whole, config=about, projector=b"pictures")
    ollama_model(store, f"{LIBRARY}/llama3.2/latest", toy(store / "y.gguf").read_bytes())
    ollama_model(store, "registry.ollama.ai/me/own/latest", toy(store / "z.gguf").read_bytes())
    ollama_model(store, "hf.co/org/repo-GGUF/Q4_K_M", whole)
    found = library("ollama", "Ollama")
    assert not found.problems
    assert {each.names for each in found.models} == {
        ("hf.co/org/repo-GGUF:Q4_K_M", "llama3.2:1b"),
        ("llama3.2:latest", "llama3.2"),
        ("me/own:latest", "me/own"),
    }
    one = found.find("llama3.2:1b")
    assert (one.files, one.parameters, one.quantisation) == ((path,), "1.2B", "Q8_0")
    assert found.find("llama3.2").name == "llama3.2:latest"
    assert one.projector is not None
    assert one.projector.read_bytes() == b"pictures"


def test_the_manifest_with_a_gguf_is_chosen_from_an_ollama_list(library, store):
    path = ollama_model(store, f"{LIBRARY}/toy/latest", toy(store / "x.gguf").read_bytes())
    manifests = store / "manifests" / LIBRARY / "toy" / "latest"
    child = blob(store, manifests.read_bytes())
    other = {"layers": [{"mediaType": "application/vnd.ollama.image.tensor", **child}]}
    content = {"manifests": [other, {"digest": child["digest"], "runner": "ollama"}]}
    whole = blob(store, json.dumps(content).encode())
    manifests.unlink()
    link = store / "manifests-v2" / LIBRARY / "toy" / "latest"
    link.parent.mkdir(parents=True)
    link.symlink_to(store / "blobs" / str(whole["digest"]).replace(":", "-"))
    assert library("ollama").find("toy").files == (path,)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("{", "is not as Ollama writes it"),
        ("[" * 100_000, "is not as Ollama writes it"),
        ({"layers": "all"}, "is not as Ollama writes it"),
        ({"layers": []}, "it has no GGUF file here"),
        (
            {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../etc/passwd"}]},
            "is not the hash of a blob",
        ),
        ("x" * (2 << 20), "is larger than 1 MiB"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_one_line_and_harms_no_other(library, store, content, line):
    manifest(store, f"{LIBRARY}/bad/latest", content)
    ollama_model(store, f"{LIBRARY}/good/latest", toy(store / "x.gguf").read_bytes())
    found = library("ollama")
    assert names(found) == ["good:latest"]
    [reported] = lines(found)
    assert line in reported
    assert "bad:latest" in reported


def test_a_manifest_outside_its_store_is_refused(library, store, tmp_path):
    outside = manifest(tmp_path / "other", f"{LIBRARY}/x/latest", {"layers": []})
    link = manifest(store, f"{LIBRARY}/bad/latest", "")
    link.unlink()
    link.symlink_to(outside)
    assert "is a link to a place outside the store" in lines(library("ollama"))[0]


def test_blobs_may_be_on_a_disk_of_their_own(library, store, tmp_path):
    path = ollama_model(
        store, f"{LIBRARY}/toy/latest", toy(store / "x.gguf").read_bytes(), config={"file_type": "Q2_K"}
    )
    (store / "blobs").rename(tmp_path / "disk")
    (store / "blobs").symlink_to(tmp_path / "disk")
    model = library("ollama").find("toy")
    assert (model.files, model.quantisation) == ((path,), "Q2_K")


def test_a_truncated_or_missing_blob_is_an_error_by_name(library, store):
    path = ollama_model(store, f"{LIBRARY}/toy/latest", toy(store / "x.gguf").read_bytes())
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(ModelError, match=f"has {size - 1} of {size} bytes"):
        library("ollama", "Ollama").find("toy")
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        library("ollama", "Ollama").find("toy")


def test_an_ollama_model_with_an_adapter_is_refused_with_the_option_to_use(library, store):
    ollama_model(store, f"{LIBRARY}/own/latest", toy(store / "x.gguf").read_bytes(), adapter=b"lora")
    with pytest.raises(ModelError, match="--lora"):
        library("ollama").find("own")


def test_a_repository_of_lm_studio_names_its_quantisations_where_it_has_several(library, store):
    toy(store / "org" / "one-GGUF" / "one-Q4_K_M.gguf")
    projector = toy(store / "org" / "one-GGUF" / "mmproj-F16.gguf", general__type="mmproj")
    for kind in ("Q4_K_M", "Q8_0"):
        toy(store / "org" / "two-GGUF" / f"two-{kind}.gguf")
    toy(store / "loose.gguf")
    found = library("repositories", "LM Studio")
    assert names(found) == ["loose", "org/one-GGUF", "org/two-GGUF:Q4_K_M", "org/two-GGUF:Q8_0"]
    assert found.find("org/one-gguf:q4_k_m").projector == projector
    with pytest.raises(ConfigError, match="may be org/two-GGUF:Q4_K_M"):
        found.find("org/two-GGUF")


def test_two_files_of_one_quantisation_are_both_there(library, store):
    for kind in ("a-Q4_K_M", "b-Q4_K_M"):
        toy(store / "org" / "repo" / f"{kind}.gguf")
    assert names(library("repositories")) == ["org/repo/a-Q4_K_M", "org/repo/b-Q4_K_M"]


def test_the_hub_cache_uses_the_current_commit_and_earlier_ones_for_missing_files(library, store, tmp_path):
    old, new = toy(tmp_path / "a-Q8_0.gguf", "old"), toy(tmp_path / "b" / "a-Q8_0.gguf", "new")
    hub_file(store, "org/re--po", old, commit="1" * 40)
    hub_file(store, "org/re--po", toy(tmp_path / "a-Q4_0.gguf"), commit="1" * 40)
    current = hub_file(store, "org/re--po", new)
    (store / "datasets--org--x").mkdir()
    (store / "models--org--pipe" / "refs").mkdir(parents=True)
    os.mkfifo(store / "models--org--pipe" / "refs" / "main")
    found = library("hub", "Hugging Face")
    assert names(found) == ["org/re--po:Q4_0", "org/re--po:Q8_0"]
    assert found.find("org/re--po:Q8_0").files == (current,)


def test_the_flat_cache_of_llama_cpp_has_names_by_its_manifests(library, store):
    toy(store / "ggml-org_gemma-3-4b-it-GGUF_gemma-3-4b-it-Q4_K_M.gguf")
    projector = toy(store / "ggml-org_gemma-3-4b-it-GGUF_mmproj-model-f16.gguf", general__type="mmproj")
    toy(store / "someone_else.gguf")
    (store / "manifest=ggml-org=gemma-3-4b-it-GGUF=latest.json").write_text("{}")
    found = library("llama.cpp")
    assert names(found) == ["ggml-org/gemma-3-4b-it-GGUF", "someone_else"]
    assert [each.projector for each in found.models] == [projector, None]
    assert found.find("gemma-3-4b-it").name == "ggml-org/gemma-3-4b-it-GGUF"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html>", "it may be a web page"),
        (b"GGUF\x03\x00\x00\x00", "cut short or damaged"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "damaged header"),
    ],
)
def test_a_broken_file_is_listed_with_the_reason_and_harms_no_other(library, store, data, line):
    (store / "bad.gguf").write_bytes(data)
    toy(store / "good.gguf")
    found = library()
    assert names(found) == ["bad", "good"]
    assert line in found.models[0].problem
    assert str(store / "bad.gguf") in found.models[0].problem
    assert found.find("good")
    with pytest.raises(ModelError, match=line):
        found.find("bad")


def test_an_entry_that_is_no_file_is_listed_without_being_opened(library, store):
    os.mkfifo(store / "pipe.gguf")
    (store / "gone.gguf").symlink_to(store / "nowhere")
    (store / "loop.gguf").symlink_to(store / "loop.gguf")
    problems = {each.name: each.problem for each in library().models}
    assert "is not a regular file" in problems["pipe"]
    assert "cannot be read: No such file" in problems["gone"]
    assert "cannot be read" in problems["loop"]


def test_an_undecodable_name_is_shown_escaped(library, store, tmp_path):
    for name, data in ((b"\xff\n\x1b[31m", b""), (b"whole\xfe", toy(tmp_path / "x.gguf").read_bytes())):
        (store / os.fsdecode(name + b".gguf")).write_bytes(data)
    for _ in range(2):
        broken, whole = library().models
        assert whole.names == ("whole\\udcfe",)
        assert broken.name == "\\udcff\\n\\x1b[31m"
        assert broken.problem.isprintable()
        assert not whole.problem


def test_folders_that_link_to_each_other_are_listed_once(library, store):
    toy(store / "a" / "model.gguf")
    (store / "a" / "back").symlink_to(store)
    (store / "again").symlink_to(store / "a")
    assert [each.names for each in library().models] == [("model", "a/model")]


def test_a_folder_that_cannot_be_read_is_one_line(library, store, monkeypatch):
    toy(store / "good.gguf")
    (store / "closed").mkdir()
    scan = os.scandir

    def refuse(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = library()
    assert (names(found), lines(found)) == (
        ["good"],
        [f"{store / 'closed'}: cannot be read: Permission denied; its models are not listed"],
    )


def test_a_folder_of_too_many_files_is_reported_and_the_first_are_listed(library, store, monkeypatch):
    monkeypatch.setattr(library_module, "MAX_FILES", 3)
    monkeypatch.setattr(stores, "MAX_ENTRIES", 20)
    for number in range(5):
        toy(store / f"m{number}.gguf")
    found = library()
    assert len(found.models) == 3
    assert "has more than 3 GGUF files" in lines(found)[0]
    for number in range(30):
        (store / f"{number}.txt").touch()
    assert "more than 20 files" in lines(library())[0]


def test_a_missing_named_folder_is_reported(library, tmp_path):
    assert "no such folder" in lines(library(folder=tmp_path / "nowhere"))[0]
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("/\0")):
        assert len(lines(library(folder=folder))) == 1
    assert not lines(library("hub", folder=tmp_path / "nowhere")), "a program that is not here keeps none"


def test_only_the_beginning_of_a_header_is_read_and_only_once(library, store, monkeypatch):
    size = 8 * BEGINNING_BYTES
    path = write_gguf(
        store / "big.gguf",
        toy_arrays(),
        {"llama.context_length": 4096, "tokenizer.chat_template": "x" * size, "general.file_type": 7},
    )
    read = []
    take = header_module.read_beginning
    monkeypatch.setattr(headers, "read_beginning", lambda file, count: read.append((file, count)) or take(file, count))
    first = library().models
    assert [(each.context_tokens, each.quantisation) for each in first] == [(4096, "")]
    assert library().models == first
    assert read == [(path, BEGINNING_BYTES)]
    toy(path, llama__context_length=8192)
    assert library().models[0].context_tokens == 8192
    assert len(read) == 2


def test_a_damaged_header_cache_is_ignored(library, store, tmp_path):
    toy(store / "a.gguf")
    first = library().models
    for content in (b"", b"{}", b'{"version": 2, "files": {}}', b"\xff"):
        (tmp_path / "library.json").write_bytes(content)
        assert library().models == first


def test_a_home_that_cannot_be_written_lists_models_too(store, tmp_path):
    toy(store / "a.gguf")
    (tmp_path / "file").write_text("no folder")
    cache = HeaderCache(tmp_path / "file" / "library.json")
    place = ModelPlace(source="folder", layout="folder", folder=store)
    assert names(read_library([place], cache)) == ["a"]


@given(st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4), st.data())
def test_whatever_is_in_a_file_it_has_facts_or_is_no_model(tmp_path_factory, changes, data):
    path = toy(tmp_path_factory.mktemp("mutated") / "x.gguf", general__file_type=7)
    content = bytearray(path.read_bytes())
    for at, written in changes:
        content[at : at + len(written)] = written
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with suppress(ModelError):
        assert facts_in(read_beginning(path, BEGINNING_BYTES))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen3-30B-A3B-Q4", "30B-A3B"),
        ("llama-2-7b.Q4_0", "7B"),
        ("mixtral-8x7b", "8X7B"),
        ("gemma3:270m", "270M"),
        ("phi-4", ""),
        ("abc1b", ""),
        ("q4_0", ""),
    ],
)
def test_the_number_of_parameters_is_parsed_from_the_name(name, parameters):
    assert parameters_in(name) == parameters


def test_the_places_are_those_of_each_program_and_system(tmp_path):
    user = tmp_path
    (user / ".lmstudio-home-pointer").write_text(f"{user}/elsewhere\n")
    (user / "elsewhere").mkdir()
    (user / "elsewhere" / "settings.json").write_text(json.dumps({"downloadsFolder": f"{user}/big"}))

    def folders(environ, platform="linux"):
        return [each.folder for each in model_places([], user / "own", environ, user, platform)]

    usual = folders({})
    assert usual == [
        user / "own",
        user / ".ollama/models",
        Path("/usr/share/ollama/.ollama/models"),
        *(user / "elsewhere/models", user / "big", user / ".cache/lm-studio/models", user / ".lmstudio/models"),
        user / ".cache/huggingface/hub",
        user / ".cache/llama.cpp",
    ]
    assert folders({}, "darwin")[-1] == user / "Library/Caches/llama.cpp"
    assert folders({"LOCALAPPDATA": "/local"}, "win32")[-1] == Path("/local/llama.cpp")
    assert folders({"OLLAMA_MODELS": "/o"})[1] == Path("/o")
    for environ, hub in (
        ({"HF_HOME": "/h"}, "/h/hub"),
        ({"HF_HOME": "/h", "HF_HUB_CACHE": "/c"}, "/c"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
    ):
        assert Path(hub) in folders(environ)
    layouts = [
        each.layout
        for each in model_places([], user, {"LLAMA_CACHE": "~/l"}, user, "linux")
        if each.folder == user / "l"
    ]
    assert layouts == ["hub", "llama.cpp"]


@pytest.mark.parametrize("content", ["\0", "relative", "", "\xff"])
def test_a_pointer_file_of_lm_studio_that_points_nowhere_is_passed_over(tmp_path, content):
    (tmp_path / ".lmstudio-home-pointer").write_text(content)
    (tmp_path / ".lmstudio").mkdir()
    (tmp_path / ".lmstudio" / "settings.json").write_text("[" * 100_000)
    folders = [each.folder for each in model_places([], tmp_path, {}, tmp_path, sys.platform)]
    assert tmp_path / ".lmstudio" / "models" in folders


def test_two_hundred_models_are_read_with_two_hundred_small_reads(library, store, monkeypatch):
    first = toy(store / "m0.gguf")
    for number in range(1, 200):
        (store / f"m{number}.gguf").write_bytes(first.read_bytes())
    opened = []
    take = header_module.read_beginning
    monkeypatch.setattr(headers, "read_beginning", lambda *at: opened.append(at) or take(*at))
    assert len(library().models) == len(opened) == 200
    assert len(library_module.read_library([], HeaderCache(store / "x")).models) == 0
    library()
    assert len(opened) == 200
