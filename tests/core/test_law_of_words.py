"""``tools/laws.py`` refuses names made of home-made words for which the field has a term, and private phrases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def broken(root: Path) -> list[str]:
    """The law's findings in the sources under ``root``."""
    argv = [sys.executable, str(ROOT / "tools" / "laws.py"), str(root)]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stderr.splitlines()


@pytest.mark.parametrize(
    "text",
    [
        "guess = 1",
        "class GuessAt: ...",
        "def forget_guesses(): ...",
        "def f(keeper): ...",
        "self.most_rows = 3",
        "MOST_ROWS = 3",
    ],
)
@pytest.mark.parametrize("folder", ["primad", "tests"])
def test_a_name_made_of_an_old_word_is_reported_with_its_line_and_the_new_word(
    tmp_path: Path, folder: str, text: str
) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "a.py").write_text(text)
    (line,) = broken(tmp_path)
    assert line.startswith(f"{folder}/a.py:1: ")
    assert ": say " in line


@pytest.mark.parametrize(
    "text", ["desk = 1", "lap = 1", "def test_the_least_used_model_is_unloaded_by_most_devices(): ..."]
)
def test_plain_words_of_tests_are_free_there_and_not_in_the_product(tmp_path: Path, text: str) -> None:
    for folder, written in (("tests", text), ("primad", text.replace("test_", ""))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(written)
    lines = broken(tmp_path)
    assert lines
    assert all(line.startswith("primad/a.py:1: ") for line in lines)


@pytest.mark.parametrize("folder", ["primad", "tests"])
def test_a_private_phrase_is_reported_with_its_line(tmp_path: Path, folder: str) -> None:
    phrase = " ".join(("hangs", "on"))
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "a.py").write_text(f"a = 1  # it {phrase} the plan")
    assert broken(tmp_path) == [f"{folder}/a.py:1: say depends on, not {phrase}"]


@pytest.mark.parametrize(
    ("text", "rooms"),
    [
        ("def answered(): ...", ["api", "head", "ring"]),
        ("cells = 1", ["api", "daemon", "head"]),
        ("rows = 1", ["head"]),
    ],
)
def test_some_words_are_refused_in_some_rooms(tmp_path: Path, text: str, rooms: list[str]) -> None:
    for room in ("api", "daemon", "engine", "head", "ring"):
        (tmp_path / "primad" / room).mkdir(parents=True)
        (tmp_path / "primad" / room / "a.py").write_text(text)
    assert [line.split("/")[1] for line in broken(tmp_path)] == rooms


@pytest.mark.parametrize("text", ["at_most = 1", "almost = 1", "from primad.head import promise", "laptop = 2"])
def test_plain_english_parts_of_other_words_and_imports_are_free(tmp_path: Path, text: str) -> None:
    (tmp_path / "primad").mkdir()
    (tmp_path / "primad" / "a.py").write_text(text)
    assert broken(tmp_path) == []
