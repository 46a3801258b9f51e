"""Child processes that get one task at a time, a line of JSON."""

from __future__ import annotations

import _thread
import os
from pathlib import Path

import msgspec
import pytest

from primad.system.children import task_child
from primad.system.children.child import begin_piped
from primad.system.children.task_child import TaskChild

CHILD = """
import os

import msgspec

from primad.system.children.reply_stream import answer_lines
from tests.shell.test_task_child import Doubled, Number


def answer(number):
    if number.value < 0:
        raise ValueError("below zero")
    print("a library")
    os.write(1, b"without a newline")
    return Doubled(2 * number.value)


answer_lines(msgspec.json.Decoder(Number), answer)
"""


class Number(msgspec.Struct):
    value: int


class Doubled(msgspec.Struct):
    value: int


@pytest.fixture
def child(tmp_path):
    (tmp_path / "doubling.py").write_text(CHILD)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    child = TaskChild("doubling", "the child", os.environ | {"PYTHONPATH": path}, timeout_s=60)
    yield child
    child.close()


def test_what_a_library_prints_is_no_part_of_a_reply(child):
    assert [child.ask(Number(each), Doubled) for each in (1, 2)] == [Doubled(2), Doubled(4)]


def test_the_end_of_a_child_is_explained_and_the_next_task_gets_another(child):
    assert child.ask(Number(-1), Doubled) == "the child ended with code 1: ValueError: below zero"
    assert child.ask(Number(3), Doubled) == Doubled(6)


def test_ctrl_c_while_a_child_begins_leaves_none(child, monkeypatch):
    begun = []

    def begin(*arguments):
        begun.append(begin_piped(*arguments))
        _thread.interrupt_main()
        return begun[-1]

    monkeypatch.setattr(task_child, "begin_piped", begin)
    with pytest.raises(KeyboardInterrupt):
        child.ask(Number(1), Doubled)
    child.close()
    assert begun[0].returncode is not None


def test_a_child_that_ended_between_two_tasks_costs_none_of_them(child):
    child.ask(Number(1), Doubled)
    child._child.kill()
    child._child.wait()
    assert child.ask(Number(2), Doubled) == Doubled(4)
