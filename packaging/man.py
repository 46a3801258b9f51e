"""Makes the manual page of ``primad`` from its commands: ``packaging/man.py`` prints it as roff.

It has the words of ``--help``. The page's date is that of SOURCE_DATE_EPOCH, or today.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

sys.path[1:1] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "solver")]

from primad import __version__  # noqa: E402
from primad.cli.main import app  # noqa: E402
from primad.settings import config  # noqa: E402

_BOLD: Final = re.compile(r"\*\*(.+?)\*\*|`(.+?)`")
_END: Final = r"""
.SH EXIT STATUS
0: done.
1: the command has done its work, and the answer is no.
2: an error, told in one line on standard error.
130: ended by Ctrl-C or a termination signal; a serve or join that is ended so is done, with 0.
.SH FILES
.TP
.I ~/.local/share/primad
The home folder: config.toml, this device's keys, whom it trusts, its profile and its layers.
On macOS it is ~/Library/Application Support/primad.
\-\-home or PRIMAD_HOME names another one.
.SH SEE ALSO
What primad doctor says of this machine.
"""


def page() -> str:
    """The whole page."""
    root: Any = app.built
    context = root.make_context("primad", ["--help"], resilient_parsing=True)
    parts = [
        f'.TH PRIMAD 1 "{_day()}" "primad {__version__}" "User Commands"',
        f".SH NAME\nprimad \\- {_text(_first_sentence(root.help))}",
        ".SH SYNOPSIS\n.B primad\n[OPTIONS] COMMAND [ARGS]",
        ".SH DESCRIPTION",
        _prose(root.help),
        ".SH OPTIONS",
        *_options(root, context),
        ".SH COMMANDS",
        *_commands(root, context),
        ".SH ENVIRONMENT",
        *_environment(),
    ]
    return "\n".join(parts) + _END


def _day() -> str:
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    when = datetime.fromtimestamp(int(seconds), UTC) if seconds else datetime.now(UTC)
    return when.strftime("%Y-%m-%d")


def _first_sentence(text: str) -> str:
    return text.partition(".")[0]


def _commands(group: Any, context: Any) -> Iterator[str]:
    """Yield a part for each command of the group, and for the commands below them."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        own = command.context_class(command, info_name=name, parent=context)
        usage = command.get_usage(own).partition(": ")[2]
        yield f".SS {_text(usage)}"
        yield _prose(command.help or "")
        yield from _options(command, own)
        if hasattr(command, "commands"):
            yield from _commands(command, own)


def _options(command: Any, context: Any) -> Iterator[str]:
    for param in command.params:
        record = param.get_help_record(context)
        if record is not None:
            names, described = record
            yield f".TP\n.B {_text(names, literal=True)}\n{_text(described)}"


def _environment() -> Iterator[str]:
    keys = ", ".join(f"PRIMAD_{key.upper()}" for key in config.KEYS)
    described = {
        keys: "The keys of config.toml: flags win over these, these over the file.",
        "PRIMAD_HOME": "The home folder.",
        "PRIMAD_LOG": "The log level: DEBUG, INFO, WARNING or ERROR.",
        "PRIMAD_API_KEY": "The key that serve demands, and that chat and status send.",
    }
    for names, meaning in described.items():
        yield f".TP\n.B {_text(names, literal=True)}\n{_text(meaning)}"


def _prose(text: str) -> str:
    """Format paragraphs; text indented by four spaces is an example and stays as it is."""
    parts = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("    "):
            parts.append(f".PP\n.RS 4\n.nf\n{_text(paragraph.strip(), literal=True)}\n.fi\n.RE")
        elif paragraph.strip():
            parts.append(f".PP\n{_text(' '.join(paragraph.split()))}")
    return "\n".join(parts)


def _text(text: str, *, literal: bool = False) -> str:
    """Return text as roff: nothing in it is a roff command, and `code` is bold."""
    text = " ".join(text.split()) if not literal else text
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("~", "\\(ti").replace("^", "\\(ha")
    if not literal:
        escaped = _BOLD.sub(lambda found: f"\\fB{found[1] or found[2]}\\fP", escaped)
    return re.sub(r"^(?=[.'])", r"\\&", escaped, flags=re.MULTILINE)


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(page())
