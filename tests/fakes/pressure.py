"""A machine with memory to spare, whatever this one has left for the tests."""

from __future__ import annotations

from primad.engine.pressure import Reading


def calm() -> Reading:
    """Half of its memory is free, and nobody waits for any."""
    return Reading(
        total_bytes=1 << 40,
        available_bytes=1 << 39,
        counts_mapped=False,
        stalls=(),
        swapped_in_bytes=None,
        major_faults=None,
        verdict=None,
    )
