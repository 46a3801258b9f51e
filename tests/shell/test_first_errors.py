"""Errors that newcomers meet: one line with the cause and the remedy."""

from __future__ import annotations

import msgspec
import pytest

from primad.cli.fit import what_is_marked
from primad.errors import ModelError
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Header, scalar_value
from primad.gguf.model import open_model
from primad.head.model.checked import NO_TEMPLATE, template_of
from primad.head.model.vocabulary import CHAT_TEMPLATE, MAX_TEMPLATE_BYTES
from primad.planning.fit import Fit, FitResult


class Printed(list[str]):
    def report_line(self, line: str) -> None:
        self.append(line)


def test_a_missing_chat_template_is_reported(smollm2, gemma3):
    printed = Printed()
    assert template_of(None, open_model(smollm2, header_only=True), printed)
    assert printed == []
    assert template_of(None, open_model(gemma3, header_only=True), printed) is None
    assert printed == [NO_TEMPLATE]
    assert template_of("{{ messages }}", open_model(gemma3, header_only=True), printed)
    assert printed == [NO_TEMPLATE]


def test_a_star_in_the_table_is_explained_and_so_is_a_table_without_one():
    fit = Fit(name="toy-q4k", model="Toy", bytes=1, runs="memory", why="", tokens_per_s=9.0, is_best=True)
    answer = FitResult(schema=1, devices=["desk"], models=[fit], help="")
    assert what_is_marked(answer).startswith("* the largest with at least 5 tokens/s")
    slow = FitResult(schema=1, devices=["desk"], models=[msgspec.structs.replace(fit, is_best=False)], help="")
    assert what_is_marked(slow).startswith("none reaches 5 tokens/s here")
    assert "primad profile --remeasure" in what_is_marked(slow)


def test_a_template_that_is_too_long_is_refused_and_may_be_replaced(tmp_path):
    values = {CHAT_TEMPLATE: scalar_value(GGUFValueType.STRING, "x" * (MAX_TEMPLATE_BYTES + 1))}
    header = Header(path=tmp_path / "toy.gguf", values=values, tensors={}, data_offset=0)
    with pytest.raises(ModelError, match=r"toy\.gguf: its chat template is larger than 1 MiB; .*--chat-template"):
        template_of(None, header, Printed())
    assert template_of("{{ messages }}", header, Printed()) == "{{ messages }}"
