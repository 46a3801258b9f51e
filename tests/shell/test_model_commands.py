"""Models by name on the command line, and their settings in ``models.toml``."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from primad.api.answering.backend import SamplingDefaults
from primad.cli import main as cli
from primad.cli import models as models_module
from primad.cli.library import MODEL_OPTIONS
from primad.cli.offered import HeadModel
from primad.cli.run_options import SamplingOptions
from primad.errors import ConfigError
from primad.head import serve as serve_module
from primad.library import places
from tests.fakes.model_stores import hub_file, ollama_model, toy
from tools import synth
from tools.lab.mmproj import write_encoder

OLLAMA = "registry.ollama.ai/library/llama3.2"


@pytest.fixture
def user(tmp_path, monkeypatch):
    """This user's home, without models of other programs, and primad's home in ``primad``."""
    for variable in (
        "OLLAMA_MODELS",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "XDG_CACHE_HOME",
        "LLAMA_CACHE",
    ):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(places, "SYSTEM_OLLAMA", tmp_path / "none")
    monkeypatch.setenv("PRIMAD_HOME", str(tmp_path / "primad"))
    (tmp_path / "primad").mkdir()
    return tmp_path


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A model that can be planned for."""
    path = tmp_path_factory.mktemp("weights") / "x.gguf"
    synth.write_model(path, architecture="llama", quantisation="q8_0")
    return path


@pytest.fixture
def served(monkeypatch):
    """What ``primad serve`` would serve: file and options of each call."""
    found: list[tuple[Any, Any]] = []
    monkeypatch.setattr(
        serve_module, "serve", lambda config, source, options, host, reporter: found.append((source, options))
    )
    return found


@pytest.fixture
def offered(monkeypatch):
    """What ``primad serve`` would offer: the offer and the options of each call."""
    found: list[tuple[Any, Any]] = []
    monkeypatch.setattr(
        serve_module, "serve_library", lambda config, offer, options, host, reporter: found.append((offer, options))
    )
    return found


def settings(user, content):
    (user / "primad" / "models.toml").write_text(content)


def params(user, *words: str, command: str = "serve") -> dict[str, Any]:
    found = cli.app.built.commands[command]
    return found.make_context("primad", ["--home", str(user / "primad"), *words]).params


def refusal(user, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        params(user, *words)
    return str(caught.value)


def test_models_of_every_place_are_listed(command, user, weights):
    toy(user / "mine" / "smollm2-135m-Q8_0.gguf", "a")
    toy(user / "marked" / "[bold] x.gguf")
    (user / "marked" / "no text \udcff.gguf").touch()
    (user / "mine" / "broken.gguf").write_bytes(b"GGUF")
    ollama_model(user / ".ollama" / "models", f"{OLLAMA}/1b", weights.read_bytes())
    toy(user / ".lmstudio" / "models" / "org" / "repo" / "x-Q4_0.gguf", "b")
    hub_file(user / ".cache" / "huggingface" / "hub", "org/hub-GGUF", toy(user / "y-Q6_K.gguf", "c"))
    settings(user, '["llama3.2"]\npinned = true\n')
    code, out, err = command("models", "--models", user / "mine", "--json")
    listed = json.loads(out)
    assert (code, err) == (0, "")
    assert [(each["name"], each["from"], each["pinned"]) for each in listed] == [
        ("broken", ["folder"], False),
        ("llama3.2:1b", ["Ollama"], True),
        ("org/hub-GGUF", ["Hugging Face"], False),
        ("org/repo", ["LM Studio"], False),
        ("smollm2-135m-Q8_0", ["folder"], False),
    ]
    assert listed[4]["parameters"] == "135M"
    assert "cut short" in listed[0]["problem"]
    code, out, err = command("models", "--models", user / "marked", "--models", user / "nowhere")
    assert code == 0
    assert "[bold] x " in out
    assert r"no text \udcff.gguf: is empty" in err
    listed = json.loads(command("models", "--models", user / "marked", "--json")[1])
    assert any(r"no text \udcff.gguf" in each["files"][0] for each in listed)
    assert "llama3.2:1b" in out
    assert f"{user}/nowhere: no such folder" in err
    (user / "primad" / "config.toml").write_text(f'models = ["{user}/mine"]\n')
    assert "smollm2-135m-Q8_0" in command("models")[1]


def test_a_model_with_a_picture_encoder_is_listed_with_vision(command, user, served):
    model = toy(user / "mine" / "x-Q8_0.gguf", "a")
    encoder = user / "mine" / "mmproj-x.gguf"
    write_encoder(encoder, "gemma3", 64)
    assert "folder; vision\n" in command("models", "--models", user / "mine")[1]
    for words, expected in ((("--mmproj", encoder), encoder), (("--mmproj", "none"), Path("none")), ((), Path("auto"))):
        assert command("serve", "--models", user / "mine", "--model", "x", *words)[0] == 0
        ((source, options),) = served
        assert (source, options.mmproj, options.projector) == (model, expected, encoder)
        served.clear()


def test_a_name_is_planned_for_as_its_file_is(command, user, weights):
    path = ollama_model(user / ".ollama" / "models", f"{OLLAMA}/latest", weights.read_bytes())
    fleet = ("--fleet", "apple-home", "--context", 512, "--json")
    named, at_path = (command("plan", "--model", each, *fleet) for each in ("llama3.2", path))
    assert named[0] == at_path[0] == 0, named[2]
    plans = [json.loads(each[1]) for each in (named, at_path)]
    assert plans[0]["model"] == plans[1]["model"]


def test_a_name_is_served_under_it_with_a_draft_model_by_name(command, user, served, weights):
    path = ollama_model(user / ".ollama" / "models", f"{OLLAMA}/1b", weights.read_bytes())
    small = toy(user / "mine" / "small.gguf")
    words = ("serve", "--alone", "--models", user / "mine", "--temperature", 0.5, "--top-k", 7)
    command(*words, "--model", "LLAMA3.2", "--draft", "small", "--embedding", "smal")
    assert not served
    command(*words, "--model", "LLAMA3.2", "--draft", "small", "--embedding", "SMALL")
    command(*words, "--model", path, "--draft", "auto")
    [(file, options), (at_path, plain)] = served
    assert (file, options.name, options.draft) == (path, "llama3.2:1b", small)
    assert (options.embedding, options.embedding_name) == (small, "small")
    assert options.aliases == ("LLAMA3.2",), "what was typed is a name for clients too"
    assert options.sampling == {"temperature": 0.5, "top_k": 7}
    assert (at_path, plain.name, str(plain.draft)) == (path, None, "auto")


def test_a_model_of_the_hub_that_another_program_has_is_not_downloaded(command, user, served, weights):
    path = hub_file(user / ".cache" / "huggingface" / "hub", "acme/tiny-GGUF", weights, name="tiny-Q8_0.gguf")
    for name in ("hf:acme/tiny-GGUF:Q8_0", "hf:acme/tiny-GGUF"):
        command("serve", "--model", name)
        command("serve", "--alone", "--model", name)
    assert [file for file, _ in served] == 4 * [path]
    assert "not downloaded" in command("plan", "--model", "hf:acme/tiny-GGUF:Q4_K_M", "--fleet", "apple-home")[2]


def test_an_unknown_or_ambiguous_name_is_refused_with_the_candidates(command, user):
    for each in ("v1", "v2"):
        toy(user / "mine" / each / "model.gguf", each)
    words = ("plan", "--models", user / "mine", "--model")
    code, _, err = command(*words, "modle")
    assert code == 2
    assert "modle: no such file, nor a model of this name here; similar names: v1/model, v2/model" in err
    code, _, err = command(*words, "model")
    assert code == 2
    assert "model: may be v1/model" in err
    assert "no such file, nor a model" in command("check", "nosuch")[2]
    assert "mistral" not in command(*words, "./nosuch.gguf")[2]


def test_an_ollama_name_is_refused_with_similar_local_names(command, user):
    toy(user / "mine" / "qwen3-8b-Q4_0.gguf")
    code, _, err = command("plan", "--models", user / "mine", "--model", "qwen3:8b")
    assert code == 2
    assert "by name, as --model takes it, this is hf:" in err
    assert "similar names: qwen3-8b-Q4_0" in err


def test_settings_of_a_model_win_over_defaults_and_options_over_both(user):
    ollama_model(user / ".ollama" / "models", f"{OLLAMA}/1b", toy(user / "x.gguf").read_bytes())
    (user / "primad" / "config.toml").write_text('[serve]\ncontext = 1024\nprompt = 100\nobjective = "ttft"\n')
    settings(
        user,
        '[defaults]\ncontext = 2048\nkv_type = "q8_0"\nsequences = 2\n'
        '["Llama3.2"]\ncontext = 4096\nalias = ["small", "quick"]\nlora = "a.gguf"\ntemperature = 0.6\npinned = true\n'
        '["other"]\ncontext = 512\n',
    )
    found = params(user, "--model", "llama3.2:1b", "--sequences", "4")
    assert (found["context"], found["kv_type"], found["sequences"]) == (4096, "q8_0", "4")
    assert (found["prompt"], found["objective"], found["temperature"]) == (100, "ttft", 0.6)
    assert (found["alias"], found["lora"]) == ("small,quick", ["a.gguf"])
    assert params(user, "--model=quick")["context"] == 4096, "an alias is a name too"
    assert params(user, "--model", "other.gguf")["context"] == 512, "a file is known by its name"
    assert params(user, "--model", "third.gguf")["context"] == 2048
    assert params(user, "--model", "llama3.2", command="plan")["context"] == 4096
    assert params(user, command="plan")["context"] is None


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('["x"]\ncontex = 1', "'contex' in [x] of {file}: is no setting of a model; did you mean 'context'?"),
        (
            "[other]\nzzz = 1",
            "'zzz' in [other] of {file}: is no setting of a model; there are alias, answer, any_model,",
        ),
        ("context = 3", "{file}: 'context' is above all tables; write [defaults]"),
        ("[defaults]\ncontext = 3", "'context' in [defaults] of {file}: "),
        ("[defaults]\nalias = 'a'", "'alias' in [defaults] of {file}: is a name of one model"),
        ("[x]\nalias = [3]", "'alias' in [x] of {file}: is a name of one model, or a list of them"),
        ("[x]\npinned = 'often'", "'pinned' in [x] of {file}: "),
        ("[x]\ntemperature = 3", "'temperature' in [x] of {file}: "),
        ("[x", "{file}: cannot be read as TOML: "),
    ],
)
def test_a_wrong_setting_names_file_table_and_key(user, content, line):
    settings(user, content)
    assert refusal(user, "--model", "x.gguf").startswith(line.format(file=user / "primad" / "models.toml"))


def test_a_value_that_its_option_refuses_names_file_table_and_key_unless_it_was_typed(command, user):
    settings(user, '["x"]\nkv_type = "q9"\n')
    place = f"'kv_type' in [x] of {user / 'primad' / 'models.toml'}"
    refused = "--kv-type q9: choose f16, q8_0 or q4_0"
    assert f"{place}: {refused}" in command("serve", "--model", "x.gguf")[2]
    err = command("serve", "--model", "x.gguf", "--kv-type", "q7")[2]
    assert "--kv-type q7" in err
    assert "models.toml" not in err


def test_a_broken_library_harms_no_file(command, user, served, weights):
    settings(user, '["gone"]\ncontext = 512\n')
    (user / ".ollama").write_text("a file where a folder is expected")
    command("serve", "--alone", "--model", weights)
    assert [file for file, _ in served] == [weights]


def test_settings_of_a_model_are_options_of_serve():
    command = cli.app.built.commands["serve"]
    assert command.table >= MODEL_OPTIONS
    assert {field.name for field in fields(SamplingOptions)} <= {field.name for field in fields(SamplingDefaults)}


def test_models_in_folders_of_the_head_that_runs_here_are_listed_too(command, user, monkeypatch):
    toy(user / "mine" / "a.gguf", "a")
    offered = [HeadModel(id="a"), HeadModel(id="elsewhere", meta={"size": 1000}, status={"value": "unloaded"})]
    monkeypatch.setattr(models_module, "states_here", lambda home: offered)
    code, out, _ = command("models")
    assert code == 0
    assert "elsewhere" in out
    assert "unloaded" in out
    listed = json.loads(command("models", "--models", user / "mine", "--json")[1])
    assert [(each["name"], each["state"]) for each in listed] == [("a", "loaded"), ("elsewhere", "unloaded")]


def test_without_a_model_all_are_offered_each_with_its_settings(command, user, offered, weights, capsys):
    ollama_model(user / ".ollama" / "models", f"{OLLAMA}/1b", weights.read_bytes())
    template = user / "mine" / "chat.jinja"
    toy(user / "mine" / "small.gguf")
    template.write_text("{{ messages }}")
    settings(
        user,
        f"""
        [defaults]
        context = 2048
        kv_type = "q8_0"
        [small]
        alias = ["tiny", "quick"]
        chat_template = "{template}"
        context = 4096
        temperature = 0.25
        lora = "style.gguf=0.5"
        pinned = true
        [nothing]
        pinned = true
        """,
    )
    words = ("--kv-type", "f16", "--idle-unload", 60)
    assert command("serve", "--alone", "--models", user / "mine", *words)[0] == 0
    ((offer, options),) = offered
    library = offer.read()
    small, other = (library.find(name) for name in ("tiny", "llama3.2"))
    assert (offer.keep_s, offer.pinned(library)) == (60, {"small"})
    assert "nothing in models.toml is to stay loaded, but matches no model" in capsys.readouterr().err
    own = offer.options_of(small, library)
    assert (own.run.context_tokens, own.run.kv_type, own.chat_template) == (4096, "f16", "{{ messages }}")
    assert (own.sampling, [scale for _, scale in own.lora]) == ({"temperature": 0.25}, [0.5])
    assert offer.options_of(other, library).run.context_tokens == 2048
    assert offer.options_of(other, library).sampling == options.sampling == {}


def test_offered_models_see_as_they_will_be_served(command, user, offered):
    for name in ("eye", "blind", "wrong"):
        toy(user / "mine" / name / f"{name}.gguf", name)
        write_encoder(user / "mine" / name / "mmproj-F16.gguf", "gemma3", 64)
    settings(user, '[blind]\nmmproj = "none"\n[wrong]\nmmproj = "no.gguf"\n')
    for words, seeing in (
        ((), {"eye"}),
        (("--mmproj", "none"), set()),
        (("--mmproj", "auto"), {"eye", "blind", "wrong"}),
    ):
        assert command("serve", "--alone", "--models", user / "mine", *words)[0] == 0
        assert {each.name for each in offered.pop()[0].read().models if each.sees} == seeing


@pytest.mark.parametrize("word", ["--alias", "--lora", "--draft", "--windows", "--chat-template"])
def test_options_of_one_model_need_one(command, user, offered, word):
    path = user / "x"
    path.write_text("x")
    code, _, err = command("serve", "--alone", word, path)
    assert code == 2
    assert f"{word}: is for one model; add --model, or write it into models.toml" in err
    assert not offered


def test_a_wrong_setting_of_a_model_is_named_when_it_is_loaded(command, user, offered):
    toy(user / "mine" / "small.gguf")
    settings(user, '[small]\nkv_type = "q9"\n')
    command("serve", "--alone", "--models", user / "mine")
    ((offer, _),) = offered
    with pytest.raises(ConfigError, match=r"q9"):
        offer.options_of(offer.read().find("small"), offer.read())
