"""Models by name: fetched from a hub on loopback into the home folder, listed, used without the hub, removed."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from primad.errors import ConfigError
from primad.gguf import hub_download
from primad.gguf.hub import HubName, by_quantisation, choose, hub_name
from primad.settings.config import models_folder
from primad.system import files
from tests.fakes.hub import own_hub
from tools import synth

REPO = "acme/Tiny-GGUF"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Two quantisations of a tiny model."""
    folder = tmp_path_factory.mktemp("weights")
    for kind in ("q8_0", "f16"):
        synth.write_model(folder / kind, architecture="llama", quantisation=kind)
    return {kind: (folder / kind).read_bytes() for kind in ("q8_0", "f16")}


@pytest.fixture
def hub(weights, monkeypatch):
    files = {
        "Tiny-Q8_0.gguf": weights["q8_0"],
        "Tiny-F16.gguf": weights["f16"],
        "mmproj-Tiny-F32.gguf": b"GGUF more of pictures",
        "mmproj-Tiny-F16.gguf": b"GGUF pictures",
        "README.md": b"# Tiny",
        "big/Tiny-Q6_K-00001-of-00002.gguf": b"GGUF one",
        "big/Tiny-Q6_K-00002-of-00002.gguf": b"GGUF two",
        "Tiny-Q5_K_M-00002-of-00002.gguf": b"the first is missing",
    }
    repositories = {REPO: files, "acme/Empty": {"README.md": b""}, "acme/Gated": files}
    with own_hub(monkeypatch, repositories) as fake:
        fake.gated = frozenset(("acme/Gated",))
        yield fake


@pytest.fixture
def primad(command, monkeypatch, tmp_path):
    """Runs ``primad`` with its home in ``tmp_path``; returns exit code, output and error output."""
    monkeypatch.setenv("PRIMAD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))  # hide models of other programs
    return command


def test_a_model_is_fetched_listed_planned_for_and_removed(primad, hub, weights, tmp_path):
    code, out, _ = primad("pull", f"hf:{REPO}")
    assert code == 0
    assert f"hf:{REPO}:Q8_0" in out, "of what is preferred the first that there is"
    place = models_folder(tmp_path / "home") / REPO
    assert (place / "Tiny-Q8_0.gguf").read_bytes() == weights["q8_0"]
    assert not (place / "Tiny-F16.gguf").exists()
    assert [each.name for each in place.glob("mmproj*")] == ["mmproj-Tiny-F16.gguf"]
    asked = len(hub.asked)
    code, out, err = primad("plan", "--model", f"hf:{REPO}", "--fleet", "apple-home")
    assert (code, len(hub.asked)) == (0, asked), err
    assert "synthetic" in out
    assert primad("pull", f"hf:{REPO}:f16")[0] == 0
    listed = json.loads(primad("models", "--json")[1])
    assert [each["name"] for each in listed] == [f"hf:{REPO}:F16", f"hf:{REPO}:Q8_0"]
    assert [each["bytes"] for each in listed] == [len(weights["f16"]), len(weights["q8_0"])]
    assert f"hf:{REPO}:F16" in primad("models")[1]
    assert "removed" in primad("rm", f"hf:{REPO}:f16")[1]
    assert not (place / "Tiny-F16.gguf").exists()
    assert primad("rm", f"hf:{REPO}")[0] == 0
    assert not place.exists()
    assert "no models yet" in primad("models")[2]


def test_the_encoder_is_not_pulled_if_unwanted(primad, hub, tmp_path):
    assert primad("pull", "--no-mmproj", f"hf:{REPO}")[0] == 0
    assert not [*(models_folder(tmp_path / "home") / REPO).glob("mmproj*")]


def test_a_split_model_comes_with_all_its_parts(primad, hub, tmp_path):
    code, out, _ = primad("pull", f"hf:{REPO}:Q6_K")
    assert code == 0
    assert "00001-of-00002" in out
    place = models_folder(tmp_path / "home") / REPO / "big"
    assert sorted(path.read_bytes() for path in place.glob("*.gguf")) == [b"GGUF one", b"GGUF two"]


def test_a_connection_that_ends_costs_no_more_than_its_range(primad, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_download, "PAUSE_S", 0.0)
    large = hub.repositories[REPO]["Tiny-Q5_0.gguf"] = b"GGUF" + bytes(range(256)) * (3 << 12)
    hub.cut["Tiny-Q5_0.gguf"] = 1000
    code, _, err = primad("pull", "--no-mmproj", f"hf:{REPO}:Q5_0")
    assert code == 0, err
    assert (models_folder(tmp_path / "home") / REPO / "Tiny-Q5_0.gguf").read_bytes() == large
    assert hub.given_bytes == len(large) + hub_download.MIN_RANGE_BYTES


def test_an_interrupted_download_is_resumed_by_the_next_pull(primad, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_download, "TRIES", 1)
    large = hub.repositories[REPO]["Tiny-Q5_0.gguf"] = b"GGUF" + bytes(range(256)) * (3 << 12)
    hub.after["Tiny-Q5_0.gguf"] = hub_download.MIN_RANGE_BYTES
    code, _, err = primad("pull", "--no-mmproj", f"hf:{REPO}:Q5_0")
    assert code == 2
    assert "the next try resumes it" in err
    assert err.count("\n") == 1
    [part] = (models_folder(tmp_path / "home") / REPO).rglob("*.part")
    assert part.read_bytes() == large[: hub_download.MIN_RANGE_BYTES]
    assert "no models yet" in primad("models")[2]
    hub.after.clear()
    hub.asked.clear()
    assert primad("pull", "--no-mmproj", f"hf:{REPO}:Q5_0")[0] == 0
    assert (models_folder(tmp_path / "home") / REPO / "Tiny-Q5_0.gguf").read_bytes() == large
    resumed = {*hub.given_ranges}  # the first call may have asked for some of them after it ended
    assert sum(map(len, resumed)) == len(large) - hub_download.MIN_RANGE_BYTES
    assert not part.exists()


def test_a_hub_without_ranges_gives_whole_files(primad, hub, weights, tmp_path):
    hub.ranges = False
    code, _, err = primad("pull", f"hf:{REPO}:F16")
    assert code == 0, err
    assert (models_folder(tmp_path / "home") / REPO / "Tiny-F16.gguf").read_bytes() == weights["f16"]


def test_a_download_that_is_no_gguf_is_removed(primad, hub, tmp_path):
    hub.repositories[REPO]["Tiny-Q5_0.gguf"] = b"<html>"
    code, _, err = primad("pull", f"hf:{REPO}:Q5_0")
    assert code == 2
    assert "is not a GGUF file" in err
    assert not (models_folder(tmp_path / "home") / REPO / "Tiny-Q5_0.gguf").exists()


def test_a_download_that_differs_from_the_hubs_checksum_is_removed(primad, hub, tmp_path):
    hub.stated["Tiny-F16.gguf"] = "0" * 64
    code, _, err = primad("pull", f"hf:{REPO}:F16")
    assert code == 2
    assert "not the hub's file" in err
    assert not (models_folder(tmp_path / "home") / REPO / "Tiny-F16.gguf").exists()


@pytest.mark.parametrize(
    ("arguments", "replies"),
    [
        (("pull", "hf:acme/Nosuch"), "the hub has no such repository"),
        (("pull", "hf:acme/Empty"), "the repository has no GGUF file"),
        (("pull", "hf:acme/Gated:F16"), "requires consent"),
        (("pull", f"hf:{REPO}:Q2_K"), "the repository has, Q8_0, F16, Q5_K_M, Q6_K"),
        (("pull", f"hf:{REPO}:Q5_K_M"), "lacks part 1"),
        (("pull", "hf:acme"), "not a model of the hub"),
        (("pull", "llama.gguf"), "not a model of the hub"),
        (("rm", f"hf:{REPO}"), "not downloaded"),
        (("plan", "--model", f"hf:{REPO}", "--fleet", "apple-home"), "primad pull"),
        (("serve", "--model", "hf:acme/../x", "--alone"), "not a model of the hub"),
    ],
)
def test_mistakes_are_named(primad, hub, arguments, replies):
    code, out, err = primad(*arguments)
    assert (code, out) == (2, "")
    assert all(word in err for word in replies.split(", "))
    assert err.count("\n") == 1


def test_a_disk_without_room_is_an_error_before_the_download(primad, hub, monkeypatch):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 100, 100))
    code, _, err = primad("pull", f"hf:{REPO}")
    assert code == 2
    assert "bytes of disk are free" in err
    assert not any("resolve" in path for _, path, _ in hub.asked)


def test_without_the_hub_local_models_are_used_and_others_refused(primad, hub, monkeypatch):
    assert primad("pull", f"hf:{REPO}")[0] == 0
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert primad("plan", "--model", f"hf:{REPO}", "--fleet", "apple-home")[0] == 0
    code, _, err = primad("pull", f"hf:{REPO}:F16")
    assert code == 2
    assert "the hub cannot be reached" in err
    assert err.count("\n") == 1


def test_without_the_library_it_is_named(primad, hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    code, _, err = primad("pull", f"hf:{REPO}")
    assert code == 2
    assert "huggingface_hub: is not installed" in err
    assert err.count("\n") == 1


def test_names_and_files():
    assert hub_name("model.gguf") is None
    assert hub_name("hf:Qwen/Qwen3-8B-GGUF:Q4_K_M") == HubName("Qwen", "Qwen3-8B-GGUF", "Q4_K_M")
    for text in ("hf:", "hf:a/b/c", "hf:a/b:", "hf:a/b:c:d", "hf:../b", "hf:a b/c"):
        with pytest.raises(ConfigError):
            hub_name(text)
    names = [
        "M-Q4_K_M.gguf",
        "UD/M-UD-Q4_K_XL.gguf",
        "M.IQ2_XXS.gguf",
        "m-bf16.gguf",
        "m.gguf",
        "m-Q4_K_M-imatrix.gguf",
    ]
    kinds = by_quantisation(names)
    assert kinds == {
        "Q4_K_M": ["M-Q4_K_M.gguf"],
        "Q4_K_XL": ["UD/M-UD-Q4_K_XL.gguf"],
        "IQ2_XXS": ["M.IQ2_XXS.gguf"],
        "BF16": ["m-bf16.gguf"],
        "": ["m.gguf"],
    }
    assert choose(list(kinds), "") == "Q4_K_M"
    assert choose(list(kinds), "bf16") == "BF16"
    assert choose(list(kinds), "Q3_K") is None
    assert choose(["IQ1_S"], "") == "IQ1_S"
