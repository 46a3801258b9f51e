"""No text from a file, a device or a completion controls the terminal or forges a log line."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
import unicodedata
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from primad.cli.output import _SafeConsole, print_json
from primad.errors import printable
from primad.system import terminal
from primad.system.terminal import LineFormatter, safe, safe_json

OBEYED = [char for char in map(chr, range(0x10000)) if unicodedata.category(char) in ("Cc", "Zl", "Zp", "Cs")]
BIDI = list("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
HOSTILE = "\x1b[2J\x1b]0;pwned\x07\r\x9b2J\x85\u2028\u202eexe.gpj\u2066\x7f\x00"
TEXTS = st.text(st.sampled_from([*OBEYED[:66], *BIDI, "\n", "\t", "a", "ü", "字", "\u200d"]), max_size=30)


def obeyed(text: str) -> set[str]:
    return {char for char in text if char in BIDI or (char in OBEYED and char not in "\n\t")}


def test_every_character_that_a_terminal_obeys_is_written_out():
    for char in [*OBEYED, *BIDI]:
        assert not obeyed(safe(char)), f"{ord(char):x}"
        assert not obeyed(printable(char)), f"{ord(char):x}"
        assert "\n" not in printable(char)


@given(TEXTS)
def test_text_is_made_harmless_once(text):
    assert not obeyed(safe(text))
    assert safe(safe(text)) == safe(text)


@pytest.mark.parametrize("text", ["a\n\tb", "Ünïcödé", "字", "👩‍💻", "א\u200fב", "[bold]x[/]", ":smile:"])
def test_what_people_write_stays(text):
    assert safe(text) == text


@given(st.recursive(TEXTS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2)))
def test_json_means_the_same(value):
    text = json.dumps(value, ensure_ascii=False)
    assert json.loads(safe_json(text)) == value
    assert not obeyed(safe_json(text))


def drawings(text):
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    return text, Text(text, style="red"), Panel(text, title=text), table


@pytest.mark.parametrize("number", range(4))
def test_only_codes_of_our_own_reach_the_terminal(number):
    file = io.StringIO()
    console = _SafeConsole(file=file, force_terminal=True, width=200, highlight=False, color_system="standard")
    console.print(drawings(HOSTILE)[number], style="bold")
    assert "\\x1b[2J" in file.getvalue()
    assert not obeyed(re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()))


def test_json_for_programs_is_harmless_too(capsys):
    print_json({"name": HOSTILE})
    out = capsys.readouterr().out
    assert not obeyed(out)
    assert json.loads(out) == {"name": HOSTILE}


def test_a_log_record_is_one_harmless_line():
    file = io.StringIO()
    handler = logging.StreamHandler(file)
    handler.setFormatter(LineFormatter("%(levelname)s %(message)s"))
    record = logging.LogRecord("n", logging.WARNING, "f", 1, "from %s", (f"x{HOSTILE}\nERROR forged",), None)
    handler.handle(record)
    try:
        raise ValueError(HOSTILE)
    except ValueError as exc:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "failed", (), (ValueError, exc, exc.__traceback__))
    handler.handle(record)
    first, second, *rest = file.getvalue().splitlines()
    assert "\\x1b[2J" in first
    assert (first[:7], second) == ("WARNING", "ERROR failed")
    assert rest[0].startswith("Traceback")
    assert not obeyed(file.getvalue())


def test_an_error_that_nobody_caught_is_written_harmlessly(monkeypatch, capsys):
    for owner, name in ((sys, "excepthook"), (threading, "excepthook"), (sys, "unraisablehook")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    terminal.escape_uncaught()
    error = ValueError(HOSTILE)
    uncaught = SimpleNamespace(exc_type=ValueError, exc_value=error, exc_traceback=None, object=None, thread=None)
    sys.excepthook(ValueError, error, None)
    threading.excepthook(uncaught)
    sys.unraisablehook(uncaught)
    printed = capsys.readouterr().err
    assert printed.count("ValueError: \\x1b[2J") == 3
    assert not obeyed(printed)
