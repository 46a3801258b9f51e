"""Help and completion: every word of help can be typed, and Tab completes what exists."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.emoji import Emoji

from primad.cli import main as cli
from primad.cli.progress import RichReporter
from primad.trust.identity import load_identity, new_identity
from primad.trust.trust import TrustStore, trusted_now


def all_commands(command: Any = None) -> Iterator[Any]:
    command = cli.app.built if command is None else command
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from all_commands(inner)


def test_help_shows_its_text_unchanged_and_no_type_after_a_flag():
    """Text between two colons would become an emoji, and ``<bool>`` cannot be typed."""
    for command in all_commands():
        context = command.make_context("primad", ["--help"], resilient_parsing=True)
        texts = [command.help or "", *(param.help or "" for param in command.get_params(context))]
        assert [text for text in texts if Emoji.replace(text) != text] == []
        assert {param.metavar for param in command.get_params(context) if getattr(param, "is_flag", False)} <= {""}


def help_of(name: str, option: str, capsys: Any) -> str:
    with pytest.raises(SystemExit):
        cli.app.built([name, option], prog_name="primad")
    return capsys.readouterr().out


@pytest.mark.parametrize(("name", "maximum"), [("serve", 15), ("join", 11), ("plan", 14)])
def test_help_shows_the_options_that_a_home_needs_and_help_all_every_one(name, maximum, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (command,) = [each for each in all_commands() if each.name == name]
    every = {param.opts[0] for param in command.params if param.opts[0].startswith("--")}
    brief, full = help_of(name, "--help", capsys), help_of(name, "--help-all", capsys)
    listed = "".join(line for line in brief.splitlines(keepends=True) if re.match(r"\W+--", line))
    shown = {option for option in every if re.search(f"{option}[ ,]", listed)}
    assert command.shown <= {param.name for param in command.params}
    assert "--help-all" in shown
    assert len(shown) <= maximum < len(every)
    assert {option for option in every if not re.search(f"{option}[ ,]", full)} == set()
    assert command.table <= {param.name for param in command.params}


def test_tab_offers_options_that_help_does_not_show():
    command = cli.app.built.commands["serve"]
    context = command.make_context("primad", [], resilient_parsing=True)
    assert "--tool-parser" in {item.value for item in command.shell_complete(context, "--tool")}


def test_an_option_of_prune_has_its_own_help():
    (prune,) = [command for command in all_commands() if command.name == "prune"]
    (folder,) = [param for param in prune.params if param.name == "kv_cache"]
    assert (folder.metavar, "Keep" in folder.help) == ("DIR", False)


def offered(*words: str) -> list[str]:
    """Completions for the last of ``words``."""
    *before, option, incomplete = words
    command = cli.app.built
    while before and before[0] in getattr(command, "commands", {}):
        command = command.commands[before.pop(0)]
    context = command.make_context("primad", before, resilient_parsing=True)
    (param,) = [each for each in command.params if option in (*each.opts, each.name)]
    return [item.value for item in param.shell_complete(context, incomplete)]


@pytest.mark.parametrize(
    ("words", "some"),
    [
        (("plan", "--fleet", "apple"), ["apple-home"]),
        (("fit", "--fleet", "mixed"), ["mixed-home"]),
        (("plan", "--model-shape", "llama3-8b-q4_k"), ["llama3-8b-q4_k_m"]),
        (("plan", "--objective", "t"), ["ttft", "throughput"]),
        (("serve", "--objective", "lat"), ["latency"]),
        (("plan", "--fleet", "apple-home", "--head", "mac-"), ["mac-mini-m4-24gb"]),
        (("plan", "--fleet", "apple-home", "--max-ram", "mac-"), ["mac-mini-m4-24gb="]),
        (("plan", "--fleet", "no-such-fleet", "--head", ""), []),
        (("devices", "revoke", "device", ""), ["attic"]),
        (("serve", "--draft-on", "at"), ["attic"]),
    ],
    ids=" ".join,
)
def test_tab_offers_fleets_shapes_objectives_and_devices(words, some, tmp_path, monkeypatch):
    monkeypatch.setenv("PRIMAD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PRIMAD_LOCAL_TRUST", str(tmp_path / "local"))
    store = TrustStore(tmp_path / "home", load_identity(tmp_path / "home"))
    store.add(trusted_now("attic", new_identity().public, "paired"))
    assert offered(*words) == some


def test_tab_makes_nothing_and_shows_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIMAD_HOME", str(tmp_path / "home"))
    assert offered("devices", "revoke", "device", "") == []
    assert not (tmp_path / "home").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text("no = [toml")
    assert offered("plan", "--head", "") == offered("chat", "--head", "") == []


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_wait_is_shown_on_a_terminal_with_its_seconds_and_nowhere_else(is_terminal):
    shown = io.StringIO()
    reporter = RichReporter(Console(file=shown, force_terminal=is_terminal, width=80))
    reporter.wait("looking for devices")
    with reporter.waiting("planning") as show:
        reporter.progress("desk", "links", 1, 2)
        show("planned for 3 models")
    reporter.wait("loading")
    reporter.resolve()
    assert ("loading" in shown.getvalue()) is is_terminal
    assert ("planned for 3 models" in shown.getvalue() and "0:00:00" in shown.getvalue()) is is_terminal
    assert is_terminal or shown.getvalue() == ""
