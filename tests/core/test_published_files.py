"""Well-known model files: names, sizes, and the names that other programs use for them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from primad.cli.hub import check_path
from primad.errors import ConfigError
from primad.gguf.hub import hub_name
from primad.gguf.published import meant, published_file, published_models, published_profile
from primad.gguf.shapes import shape


def test_a_dozen_models_have_a_name_and_the_size_of_their_file() -> None:
    models = published_models()
    assert len(models) >= 12
    for model in models:
        assert hub_name(model.hub) is not None
        profile, made_up = published_profile(model), shape(model.shape)
        assert profile.size_bytes == pytest.approx(model.file_bytes, rel=1e-6)
        assert 0.75 < profile.size_bytes / made_up.size_bytes < 1.2
        assert [layer.kv_bytes_per_token for layer in profile.layers] == [
            layer.kv_bytes_per_token for layer in made_up.layers
        ]
    assert published_file("qwen3-8b-q8") is None


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("qwen3:8b", ["qwen3-8b"]),
        ("Qwen3:8B-q4_K_M", ["qwen3-8b"]),
        ("library/qwen3:30b", ["qwen3-30b-a3b"]),
        ("llama3.1:8b-instruct-q4_K_M", ["llama3-8b"]),
        ("llama3.3", ["llama3-70b"]),
        ("gpt-oss:latest", ["gpt-oss-20b", "gpt-oss-120b"]),
        ("nosuch:7b", []),
        ("a model", []),
    ],
)
def test_a_name_of_ollamas_means_models_of_that_family_and_size(text: str, shapes: list[str]) -> None:
    assert [model.shape for model in meant(text)] == shapes


@pytest.mark.parametrize(
    ("given", "replies"),
    [
        ("qwen3:8b", "qwen3:8b: no such file; by name, as --model takes it, this is hf:Qwen/Qwen3-8B-GGUF:Q4_K_M"),
        ("nosuch:7b", "a model of Hugging Face's hub such as hf:"),
        ("Qwen/Qwen3-8B-GGUF", "hf:Qwen/Qwen3-8B-GGUF"),
        ("hf.co/Qwen/Qwen3-8B-GGUF:Q8_0", "hf:Qwen/Qwen3-8B-GGUF:Q8_0"),
        ("https://huggingface.co/Qwen/Qwen3-8B-GGUF/tree/main", "hf:Qwen/Qwen3-8B-GGUF"),
    ],
)
def test_a_path_that_is_no_file_is_refused_with_the_name_to_type(given: str, replies: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_path(Path(given))
    assert replies in str(caught.value)


def test_files_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "qwen3").touch()
    for path in (tmp_path / "qwen3", Path("no/such.gguf"), Path("model")):
        check_path(path)


def test_models_by_name_need_no_other_install() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert any(each.startswith("huggingface_hub") for each in project["dependencies"])
