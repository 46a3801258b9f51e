"""Commands in documents can be typed: options and files exist, and cheap ones are run."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primad.cli import main as cli
from tests.fakes.backend import FakeBackend, replies
from tests.fakes.documents import PAGES, ROOT, Fence, commands, fences, spans
from tests.fakes.http import served

OTHERS = {
    "git",
    "uv",
    "pipx",
    "apt",
    "dnf",
    "systemctl",
    "curl",
    "xcode-select",
    "pre-commit",
    "export",
    "cd",
    "podman",
    "docker",
    "open-webui",
    "claude",
    "aider",
    "llm",
}
"""Third-party programs in documents."""
PATIENCE_S = 540
"""For a client that starts on a busy machine."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def command_of(words: tuple[str, ...]) -> tuple[Any, list[str]]:
    """The command that ``primad`` runs for these words, and the remaining words."""
    command, rest = cli.app.built, list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    return command, rest


def options_of(command: Any) -> set[str]:
    names = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    return names | {"--help", "-h"}


def assert_ours(words: tuple[str, ...]) -> None:
    """Assert that ``primad`` accepts these words."""
    command, rest = command_of(words)
    if "--help" not in rest:
        command.make_context("primad", [word for word in rest if word != "--version"])


def assert_tool(words: tuple[str, ...]) -> None:
    """Assert that the tool exists and knows its options."""
    tool = ROOT / words[0]
    assert os.access(tool, os.X_OK), f"{words[0]}: no such tool"
    sources = "".join(path.read_text() for path in sorted(ROOT.glob(f"{words[0]}*")) if path.is_file())
    for word in words[1:]:
        if word == "primad":
            assert_ours(words[words.index(word) + 1 :])
            break
        if word.startswith("--") and tool.name not in ("test", "faults"):  # these pass their options to pytest
            assert f'"{word}"' in sources or f" {word}" in sources, f"{words[0]}: no option {word}"
        if word.startswith("tests/"):
            assert (ROOT / word).exists(), word


@pages
def test_commands_can_be_typed(page):
    for words in commands(page):
        if words[0] == "sudo":
            words = words[1:]
        if words[:2] == ("podman", "compose") and "primad" in words:
            words = words[words.index("primad") :]
        match words[0].removeprefix("./"):
            case "primad":
                assert_ours(words[1:])
            case tool if tool.startswith(("tools/", "packaging/")):
                assert_tool((tool, *words[1:]))
            case "python":
                assert (ROOT / words[1]).is_file(), words
            case program:
                assert program in OTHERS, words


@pages
def test_options_in_the_text_exist(page):
    for span in spans(page):
        words = tuple(span.split())
        if words[:1] == ("primad",) and "COMMAND" not in words and page.name != "CHANGELOG.md":
            command, rest = command_of(words[1:])
            named = [word.partition("=")[0] for word in rest if word.startswith("--")]
            assert set(named) <= options_of(command), span


def all_commands() -> list[Any]:
    """``primad``, its commands and their subcommands."""
    root = cli.app.built
    first = list(root.commands.values())
    return [root, *first, *(inner for command in first for inner in getattr(command, "commands", {}).values())]


def test_examples_of_help_can_be_typed():
    lines = [line.strip() for command in all_commands() for line in command.help.splitlines() if line[:4] == "    "]
    examples = [shlex.split(line) for line in lines if line.startswith("primad ")]
    assert len(examples) > 30
    for words in examples:
        assert_ours(tuple(words[1:]))


def test_every_option_is_documented():
    text = "".join(page.read_text() for page in PAGES)
    reported = set(re.findall(r"--[a-z][a-z-]*", text))
    unreported = {
        (command.name, name)
        for command in all_commands()
        for name in options_of(command) - reported
        if name.startswith("--") and name != "--show-completion"
    }
    assert unreported == set()


def plans() -> list[tuple[str, ...]]:
    """Plans in documents that need neither a model file nor other devices."""
    found = {words: None for page in PAGES for words in commands(page) if words[:2] == ("primad", "plan")}
    return [words[1:] for words in found if "--model-shape" in words]


@pytest.mark.parametrize("words", plans(), ids=" ".join)
def test_plans_that_need_nothing_are_run(words, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["primad", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    assert "tokens" in out


# ---- clients --------------------------------------------------------------------------------------------------------


async def run_client(script: list[str], model: str = "toy", *, answer: str = "Hello") -> str:
    """The output of the script with an endpoint that always answers ``answer``."""
    backend = FakeBackend(replies(answer))
    assert backend.served is not None
    backend.served = replace(backend.served, id=model)
    async with served(backend, patience_s=PATIENCE_S) as url:
        environment = {**os.environ, "PRIMAD_URL": f"{url}/v1", "PYTHONPATH": ""}
        words = [word.replace("http://127.0.0.1:8080", url) for word in script]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        client = await asyncio.create_subprocess_exec(sys.executable, *words, env=environment, cwd=ROOT, **pipes)
        out, err = await client.communicate()
        assert client.returncode == 0, err.decode()
        return out.decode()


def snippets() -> list[Fence]:
    return [fence for page in PAGES for fence in fences(page, "python") if "import" in fence.text]


@pytest.mark.slow
@pytest.mark.parametrize("fence", snippets(), ids=lambda fence: str(fence.page.relative_to(ROOT)))
async def test_snippets_run(fence):
    named = re.search(r'model="([^"]+)"', fence.text)
    answer = '{"name": "Hello", "masts": 3}' if "BaseModel" in fence.text else "Hello"
    assert "Hello" in await run_client(["-c", fence.text], *([named[1]] if named else []), answer=answer)


def examples() -> list[Path]:
    return sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", examples(), ids=lambda path: path.name)
async def test_examples_run(example):
    assert "Hello" in await run_client([str(example), "a lighthouse"])


def test_every_example_is_documented():
    text = (ROOT / "examples" / "README.md").read_text()
    for example in examples():
        assert f"python examples/{example.name}" in text


def test_tables_that_come_from_the_code_are_current():
    done = subprocess.run(
        [sys.executable, "tools/docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
