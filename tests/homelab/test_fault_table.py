"""The table of ``docs/faults.md`` matches the fault matrix, cell by cell."""

from __future__ import annotations

from tools.lab import group_matrix
from tools.lab.matrix import CELLS, FAULTS, PAGE, PHASES, Outcome, pages_seconds, table, with_table


def test_the_matrix_is_complete() -> None:
    assert [(cell.phase, cell.fault) for cell in CELLS] == [(phase, fault) for phase in PHASES for fault in FAULTS]
    assert all(cell.what for cell in CELLS)
    assert len({cell.id for cell in CELLS}) == len(CELLS)


def test_the_page_has_every_cell_of_the_matrix() -> None:
    page = PAGE.read_text(encoding="utf-8")
    seconds = pages_seconds(page)
    assert with_table(page, seconds) == page, "the page is not what the matrix says; run tools/faults"
    assert set(seconds) <= {cell.id for cell in CELLS if cell.outcome is not Outcome.NONE}
    assert seconds["kill -9 in decode"] <= 5.0, "after the death of one worker of three the next token takes longer"


def test_times_are_read_back_as_they_were_written() -> None:
    seconds = {cell.id: number / 10 for number, cell in enumerate(CELLS) if cell.outcome is not Outcome.NONE}
    assert pages_seconds(table(seconds)) == seconds
    assert pages_seconds(table({})) == {}


def test_the_page_has_the_table_of_groups() -> None:
    page = PAGE.read_text(encoding="utf-8")
    seconds = group_matrix.pages_seconds(page)
    assert group_matrix.with_table(page, seconds) == page, "the page is not what the matrix says; run tools/faults"
    ids = [cell.id for cell in group_matrix.CELLS]
    assert len({*ids}) == len(ids)
    assert {*seconds} == {*ids}, "not all cells are measured; run tools/faults"
    made = {cell: number / 10 for number, cell in enumerate(ids)}
    rebuilt = group_matrix.with_table(page, made, "1970-01-01, commit 0")
    assert group_matrix.pages_seconds(rebuilt) == made
    assert group_matrix.pages_measured(group_matrix.with_table(rebuilt, made)) == "1970-01-01, commit 0"
