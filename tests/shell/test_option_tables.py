"""Options of ``serve`` and ``plan`` in the configuration file act as if typed, and typed ones win."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from primad.cli import main as cli
from primad.cli.options import DeviceOptions, OwnerOptions
from primad.errors import ConfigError
from primad.settings.config import KEYS, load_config


def params(home, content: str, *words: str, command: str = "serve") -> dict[str, Any]:
    (home / "config.toml").write_text(content)
    found = cli.app.built.commands[command]
    return found.make_context("primad", ["--home", str(home), *words]).params


def test_a_table_is_as_if_its_options_were_typed(tmp_path):
    content = (
        'name = "desk"\n[serve]\nmodel = "toy.gguf"\ncontext = 8192\nany_model = true\nsequences = 4\nlora = "a.gguf"\n'
    )
    found = params(tmp_path, content, "--context", "512")
    assert (str(found["model"]), found["any_model"], found["sequences"]) == ("toy.gguf", True, "4")
    assert found["lora"] == ["a.gguf"]
    assert found["context"] == 512, "what is typed wins"
    assert load_config({"home": tmp_path}, {}).name == "desk"


@pytest.mark.parametrize("content", ["[serve]\nsingle_device = true", "[serve]\nalone = true"])
@pytest.mark.parametrize("words", [["--single-device"], ["--alone"]])
def test_the_earlier_name_of_an_option_still_counts(content, words, tmp_path):
    assert params(tmp_path, content)["single_device"] is True
    assert params(tmp_path, "", *words)["single_device"] is True


def test_each_command_reads_its_own_table(tmp_path):
    content = '[plan]\nmodel_shape = "llama3-8b"\n[serve]\ncontext = 8192\n'
    found = params(tmp_path, content, command="plan")
    assert (found["model_shape"], found["context"]) == ("llama3-8b", None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[serve]\ncontex = 8192", "'contex' in [serve] of {file}: no option of primad serve; did you mean 'context'?"),
        ("[serve]\ncontext = 3", "'context' in [serve] of {file}: "),
        ("[serve]\nmax_ram = '8GB'", "'max_ram' in [serve] of {file}: is a key of this device; put it above all"),
        ("serve = 3", "{file}: 'serve' must be a table; write [serve] above its options"),
    ],
)
def test_an_invalid_option_is_refused_with_its_file_and_key(content, message, tmp_path):
    with pytest.raises(ConfigError) as caught:
        params(tmp_path, content, "--model", "toy.gguf")
    assert str(caught.value).startswith(message.format(file=tmp_path / "config.toml"))


def test_every_option_can_stand_in_the_file():
    """It stands in its command's table, or as a key of the device."""
    own = {field.name for kind in (DeviceOptions, OwnerOptions) for field in fields(kind)} - {"home"}
    own |= {"host", "port", "pause_on_battery"}
    elsewhere = {"listen": "host", "interface": "interface", "device": "devices", "models": "models"}
    once = {"serve": {"home", "help_all"}, "join": {"home", "help_all", "code", "device"}}
    once["plan"] = once["serve"] | {"files"}
    for name in ("serve", "join", "plan"):
        command = cli.app.built.commands[name]
        for param in command.params:
            if param.name in once[name] or param.name in command.table:
                continue
            assert param.name in own | set(elsewhere), param.name
            assert elsewhere.get(param.name, param.name) in KEYS
