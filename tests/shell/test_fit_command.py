"""``primad fit`` as its user sees it."""

from __future__ import annotations

import json

import pytest

from primad.gguf.shapes import popular_shapes
from primad.profiler.store import save_profile
from tests.fakes.planning import GB, device
from tools.synth import write_model


@pytest.fixture
def fit(command):
    """Runs ``primad fit`` with the arguments; returns exit code, output and error output."""
    return lambda *arguments: command("fit", "--time-limit", "60", *arguments)


@pytest.fixture
def profiles_folder(tmp_path):
    """A folder with the profiles of desk and laptop."""
    for profile in (device("desk", ram=12 * GB), device("laptop", ram=4 * GB)):
        save_profile(tmp_path / f"{profile.device}.json", profile, "made up")
    return tmp_path


def test_a_table_shows_which_models_run_how_fast_and_the_best_upgrade(fit, profiles_folder):
    code, out, err = fit("--devices", profiles_folder, "--only", "llama3")
    assert (code, err) == (0, "")
    rows = [line for line in out.splitlines() if "llama3" in line and "-q4k" in line and "primad" not in line]
    assert len(rows) == len([name for name in popular_shapes() if "llama3" in name])
    assert rows[-1].lstrip().startswith("*")
    assert "  primad serve --model hf:" in out
    assert out.splitlines()[-1].startswith("  primad ")
    assert any("streams" in row for row in rows)
    assert "What would help most: with 16 GiB more in" in out


def test_fit_and_plan_report_the_same_figures(fit, profiles_folder, command):
    _, out, _ = fit("--devices", profiles_folder, "--only", "mistral-nemo", "--json")
    for each in json.loads(out)["models"]:
        _, whole, _ = command(
            "plan", "--model-shape", each["name"], "--devices", profiles_folder, "--objective", "latency", "--json"
        )
        predicted = json.loads(whole)["predicted"]
        assert each["tokens_per_s"] == pytest.approx(1e3 / predicted["tpot_ms"])
        assert each["ttft_ms"] == pytest.approx(predicted["ttft_ms"])


def test_a_model_that_does_not_run_has_its_reason(fit, profiles_folder):
    code, out, _ = fit(
        "--devices", profiles_folder, "--only", "qwen3-235b", "--max-ram", "desk=200MB", "--max-ram", "laptop=200MB"
    )
    assert code == 0
    (row,) = [line for line in out.splitlines() if "qwen3-235b" in line]
    assert " no " in row
    assert "no plan for Qwen3 235B-A22B" in row


def test_json_has_every_model_and_quantisation(fit, profiles_folder):
    code, out, _ = fit("--devices", profiles_folder, "--only", "llama3.2", "--quant", "q8", "--quant", "F16", "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["schema"] == 1
    assert sorted(each["name"] for each in answer["models"]) == [
        "llama3.2-1b-f16",
        "llama3.2-1b-q8",
        "llama3.2-3b-f16",
        "llama3.2-3b-q8",
    ]
    assert all(each["tokens_per_s"] > 0 and each["devices"] for each in answer["models"])


def test_models_of_the_library_are_planned_for_by_name_and_served_by_it(fit, profiles_folder, tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    write_model(folder / "toy.gguf")
    code, out, err = fit("--devices", profiles_folder, "--models", folder, "--model", "toy")
    assert (code, err) == (0, "")
    assert "each name is a --model of primad serve" in out
    assert out.splitlines()[-1] == "  primad serve --model toy"
    code, out, _ = fit(
        "--devices", profiles_folder, "--models", folder, "--model", "toy", "--model", folder / "toy.gguf", "--json"
    )
    one, other = json.loads(out)["models"]
    assert {one["name"], other["name"]} == {"toy", str(folder / "toy.gguf")}
    assert one["tokens_per_s"] == pytest.approx(other["tokens_per_s"])


@pytest.mark.parametrize(
    ("arguments", "replies"),
    [
        (("--model", "nosuch"), "nosuch: no such file, nor a model of this name here"),
        (("--model", "toy", "--only", "qwen3"), "--model: contradicts --only and --quant"),
        (("--only", "nosuch"), "--only nosuch: no model has that in its name"),
        (("--quant", "q5"), "--quant"),
        (("--kv-type", "q9"), "--kv-type"),
        (("--head", "nobody"), "--head: no device is called 'nobody'"),
    ],
)
def test_mistakes_are_named(fit, profiles_folder, arguments, replies):
    code, out, err = fit("--devices", profiles_folder, *arguments)
    assert (code, out) == (2, "")
    assert replies in err
    assert err.count("\n") == 1
