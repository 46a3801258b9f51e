"""Documents that tools write a part of, between two marks; what stands around it is written by hand."""

from __future__ import annotations

from tools.lab.names import LabError


def between(page: str, begin: str, end: str, text: str) -> str:
    """``page`` with ``text`` in place of what stood between its marks. Raises ``LabError`` where it has none."""
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise LabError(f"the page has no marks {begin.strip()} and {end.strip()}")
    return f"{before}{begin}{text}{end}{after}"
