"""Grouped options: each is an option of the command, shown under its group's title, and reassembled into the group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer
from typer.main import get_command

from primad.cli.grouped import flags, grouped

Name = Annotated[str | None, typer.Option(help="A name.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    PANEL: ClassVar[str] = "Who"

    name: Name = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedPerson(Person):
    number: Annotated[int, typer.Option("--no", min=0)] = 7


def command_of(function):
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return get_command(app)


def panels_of(command):
    return {param.name: param.rich_help_panel for param in command.params}


def test_groups_become_options_and_options_become_groups():
    called = []

    @grouped
    def greet(text: Annotated[str, typer.Argument()], person: NumberedPerson) -> None:
        """Greet."""
        called.append((text, person))

    command = command_of(greet)
    assert command.main(["hello", "--name", "desk", "--no", "9"], standalone_mode=False) is None
    assert command.main(["hello"], standalone_mode=False) is None
    assert called == [("hello", NumberedPerson(name="desk", number=9)), ("hello", NumberedPerson())]
    assert panels_of(command) == {"text": None, "name": "Who", "number": "Who"}
    assert command.help == "Greet."


def test_a_title_stays_in_its_command():
    @grouped
    def one(person: Person) -> None: ...

    def other(name: Name = None) -> None: ...

    assert panels_of(command_of(one)) == {"name": "Who"}
    assert panels_of(command_of(other)) == {"name": None}


def test_flags_are_by_name():
    assert flags(Person(name="desk"), NumberedPerson(name="mini")) == {"name": "mini", "number": 7}
