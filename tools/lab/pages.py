"""Documents in which tools write the part between two marks; the rest is written by hand."""

from __future__ import annotations

from tools.lab.names import LabError


def between(page: str, begin: str, end: str, text: str) -> str:
    """Return ``page`` with ``text`` between its marks. Raises ``LabError`` if it has none."""
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise LabError(f"the page has no marks {begin.strip()} and {end.strip()}")
    return f"{before}{begin}{text}{end}{after}"
