"""``primad plan`` as its user sees it: a table, JSON with a stable schema, one clear line for every mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from primad.gguf.constants import GGUFValueType
from primad.gguf.header import read_header, scalar_value
from primad.planning import schema
from primad.planning.schema import Explanation
from primad.profiler.store import save_profile
from tests.fakes.gguf import write_adapter
from tests.fakes.planning import GB, device
from tools.synth import write_model

MODEL = ("--model-shape", "llama3-8b")
FLEET = ("--fleet", "apple-home")
MAC, BOOK = "mac-mini-m4-24gb", "macbook-air-m2-16gb"
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def plan(command):
    """Runs ``primad plan`` with the arguments; returns exit code, output and error output."""
    return lambda *arguments: command("plan", *arguments)


@pytest.fixture
def profiles(tmp_path):
    """A folder with the profiles of desk and laptop."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    for profile in (device("desk", ram=6 * GB, vram=2 * GB), device("laptop", ram=4 * GB)):
        save_profile(folder / f"{profile.device}.json", profile, "made up")
    return folder


def test_a_fleet_and_a_shape_give_a_table(plan):
    code, out, err = plan(*MODEL, *FLEET)
    assert (code, err) == (0, "")
    for words in ("Llama 3-8B", MAC, "tokens/s", "TTFT", "bottleneck", "best single device", "left out"):
        assert words in out


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_name_that_a_model_file_has_steers_no_terminal(plan, tmp_path, form):
    name = "toy\x1b]0;pwned\x07\x9b2J\r\u202egpj.exe"
    write_model(tmp_path / "toy.gguf", values={"general.name": scalar_value(GGUFValueType.STRING, name)})
    code, out, err = plan("--model", tmp_path / "toy.gguf", *FLEET, *form)
    assert (code, err) == (0, "")
    assert "pwned" in out
    assert not set("\x1b\x07\x9b\r\u202e").intersection(out)


def test_json_output_keeps_its_schema(plan):
    code, out, err = plan(*MODEL, *FLEET, "--json")
    assert (code, err) == (0, "")
    answer = msgspec.json.decode(out, type=Explanation)
    assert answer.schema == schema.SCHEMA
    content = json.loads(out)
    assert {"rounds", "devices", "left_out", "predicted"} <= set(content)
    assert {"name", "windows", "layers", "gpu_layers", "resident_layers", "streamed_layers", "read_ahead_bytes"} <= set(
        content["devices"][0]
    )
    assert {"tpot_ms", "ttft_ms", "tokens_per_s", "bottleneck"} <= set(content["predicted"])
    assert {"name", "reason"} <= set(content["left_out"][0])


def test_every_field_is_documented():
    text = (ROOT / "docs" / "reference" / "plan-json.md").read_text()
    documented = set(re.findall(r"`([a-z0-9_]+)", text))
    structs = [kind for kind in vars(schema).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    fields = {field for kind in structs for field in kind.__struct_fields__}
    assert len(fields) > 50
    assert fields <= documented


def test_profile_files_and_folders(plan, profiles):
    for given in (("--devices", profiles), ("--devices", profiles / "desk.json", profiles / "laptop.json")):
        code, out, _ = plan("--model-shape", "llama3-8b", *given, "--json")
        answer = msgspec.json.decode(out, type=Explanation)
        assert code == 0
        assert {part.name for part in answer.single_device} == {"desk", "laptop"}


def test_the_header_of_a_gguf_is_enough(plan, smollm2, tmp_path):
    header = tmp_path / "header.gguf"
    with smollm2.open("rb") as file:
        header.write_bytes(file.read(read_header(smollm2).data_offset))
    whole, cut = (json.loads(plan("--model", path, *FLEET, "--json")[1]) for path in (smollm2, header))
    for answer in (whole, cut):  # the cost of another device is the best plan found within a time limit
        answer["left_out"] = [device["name"] for device in answer["left_out"]]
    assert cut == whole


def test_what_if_shows_before_and_after(plan, profiles):
    extra = profiles.parent / "pi.json"
    save_profile(extra, device("pi", ram=4 * GB), "made up")
    changes = ("--what-if", f"add={extra}", "--what-if", "drop=laptop", "--what-if", "ram:desk=8GB")
    code, out, _ = plan("--model-shape", "llama3-8b", "--devices", profiles, *changes)
    assert code == 0
    assert re.search(r"What if add=.*pi\.json, drop=laptop, ram:desk=8GB", out)
    assert "before" in out
    code, out, _ = plan("--model-shape", "llama3-8b", "--devices", profiles, *changes, "--json")
    answer = msgspec.json.decode(out, type=Explanation)
    assert answer.what_if is not None
    assert answer.what_if.before is not None
    assert {part.name for part in answer.single_device} == {"desk", "pi"}


def test_a_memory_limit_is_respected(plan):
    code, out, _ = plan(*MODEL, *FLEET, "--max-ram", f"{MAC}=6GiB", "--json")
    answer = msgspec.json.decode(out, type=Explanation)
    assert code == 0
    assert all(part.ram_bytes <= 6 << 30 for part in answer.devices if part.name == MAC)


def test_a_picture_is_drawn(plan, tmp_path):
    code, _, _ = plan(*MODEL, *FLEET, "--plot", tmp_path / "plan.png")
    assert code == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (FLEET, "which model?"),
        ((*MODEL, "--model", "x.gguf", *FLEET), "--model and --model-shape: give one of them"),
        (("--model-shape", "llama9", *FLEET), "no built-in model shape 'llama9'"),
        (("--model", "/nowhere/x.gguf", *FLEET), "/nowhere/x.gguf: no such file"),
        (("--model", __file__, *FLEET), "is not a GGUF file"),
        (("--model", str(ROOT), *FLEET), "is a directory"),
        ((*MODEL, "--fleet", "nowhere"), "no fleet 'nowhere'"),
        ((*MODEL, "--fleet", "/nowhere/x.json"), "/nowhere/x.json: cannot be read"),
        ((*MODEL, "--devices", "/nowhere/x.json"), "/nowhere/x.json: cannot be read"),
        ((*MODEL, "--devices", __file__), "the file is not JSON"),
        (("llama.gguf", *FLEET), "which model?"),
        ((*MODEL, "llama.gguf"), "llama.gguf: is a model, not the profile of a device; give it with --model"),
        ((*MODEL, *FLEET, "--head", "pi"), f"--head: no device is called 'pi'; there are {BOOK}, {MAC}"),
        ((*MODEL, *FLEET, "--max-ram", "pi=1GiB"), "--max-ram: no device is called 'pi'"),
        ((*MODEL, *FLEET, "--max-ram", f"{MAC}=lots"), "'lots' is not a size"),
        ((*MODEL, *FLEET, "--what-if", "ram:pi=16GiB"), "--what-if ram:pi=16GiB: no device is called 'pi'"),
        ((*MODEL, *FLEET, "--what-if", f"ram:{MAC}=16"), "'16' is not a size"),
        ((*MODEL, *FLEET, "--what-if", "drop=pi"), "--what-if drop=pi: no device is called 'pi'"),
        ((*MODEL, *FLEET, "--what-if", "add=/nowhere/x.json"), "/nowhere/x.json: cannot be read"),
        ((*MODEL, *FLEET, "--what-if", "magic"), "link:A:B=300Mbit/s"),
        ((*MODEL, *FLEET, "--link", "fast"), "--link: 'fast' is not a rate"),
        ((*MODEL, *FLEET, "--objective", "fast"), "--objective fast: choose"),
        ((*MODEL, *FLEET, "--context", "100000"), "was trained for 8192 tokens"),
        ((*MODEL, *FLEET, "--context", "some"), "--context"),
        ((*MODEL, *FLEET, "--sequences", "0"), "--sequences"),
        ((*MODEL, *FLEET, "--time-limit", "0"), "--time-limit"),
        ((*MODEL, *FLEET, "--plot", "/nowhere/x.png"), "there is no folder /nowhere"),
        ((*MODEL, *FLEET, "--plot", "x.gif"), "end the name in"),
        ((*MODEL, *FLEET, "--max-ram", f"{MAC}=1MB", "--max-ram", f"{BOOK}=1MB"), "short of"),
        ((*MODEL, "--bogus"), "--bogus"),
    ],
)
def test_a_mistake_gets_one_clear_line(plan, arguments, message):
    code, out, err = plan(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("primad: error: ")
    assert message in err


def test_devices_of_one_name_are_refused(plan, profiles):
    save_profile(profiles / "other.json", device("desk"), "made up")
    code, _, err = plan(*MODEL, "--devices", profiles)
    assert code == 2
    assert "desk" in err


def test_a_damaged_profile_is_named(plan, profiles):
    path = profiles / "desk.json"
    path.write_text(path.read_text().replace('"ram_available_bytes": 6000000000', '"ram_available_bytes": -1'))
    code, _, err = plan(*MODEL, "--devices", profiles)
    assert code == 2
    assert "desk.json" in err
    assert "ram_available_bytes" in err


def test_a_plan_includes_the_draft_model(plan, tmp_path):
    served, small = tmp_path / "served.gguf", tmp_path / "small.gguf"
    write_model(served, width=256, layers=12)
    write_model(small, layers=2)
    for given in (small, "auto"):
        code, out, err = plan("--model", served, *FLEET, "--draft", given, "--json")
        assert code == 0, err
        answer = msgspec.json.decode(out, type=Explanation)
        assert answer.draft is not None
        assert answer.draft.path == str(small)
    assert f"--draft auto: draft model {small}: it has the tokens of served.gguf" in err
    code, out, _ = plan("--model", served, *FLEET, "--draft", small)
    assert f"per draft; no drafts: {answer.draft.why}"[:60] in " ".join(out.split())


def test_a_model_that_cannot_draft_is_refused(plan, tmp_path):
    code, _, err = plan(*MODEL, *FLEET, "--draft", "auto")
    assert code != 0
    assert "--draft auto: needs --model, since it must have the same tokens" in err


def test_adapters_that_no_window_has_and_that_llama_cpp_cannot_compute_are_named(plan, profiles, tmp_path):
    path, tied = tmp_path / "model.gguf", tmp_path / "tied.gguf"
    write_model(path, architecture="llama4")
    write_model(tied, tied=True)
    strange = write_adapter(tmp_path / "strange.gguf", {"rope_freqs.weight": (8, 1)}, architecture="llama4")
    common = write_adapter(tmp_path / "common.gguf", {"token_embd.weight": (64, 320)})
    code, out, err = plan("--model", path, "--lora", strange, "--devices", profiles, "--json")
    assert code == 0
    assert " ".join(err.split()).endswith(  # after llama.cpp's own lines about the model that was written
        f"--lora {strange}: changes 'rope_freqs.weight', which no window has; one device serves the model whole"
    )
    assert len(json.loads(out)["devices"]) == 1
    code, out, err = plan("--model", tied, "--lora", common, "--devices", profiles)
    assert (code, out) == (2, "")
    assert "changes the token embedding, which is the output matrix of tied.gguf too" in " ".join(err.split())
