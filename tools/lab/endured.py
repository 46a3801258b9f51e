"""One run of ``tools/bench memory --endure`` as a row of figures, and what of it does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

from tools.lab import figures
from tools.lab.figures import mega

Kind = Literal["prompt", "neighbour"]
OF_PLAN: Final = (
    "kv_type rows context prompt_tokens neighbour_bytes streamed_bytes read_ahead_bytes reserved_bytes max_read_bytes "
    "predicted_bytes_per_token predicted_tokens_per_s predicted_prompt_s prompt_tokens_per_s"
)
"""Fields of a row that are None where there is no plan."""
OF_WHOLE: Final = "baseline_tokens_per_s baseline_prompt_tokens_per_s same_tokens first_difference"
"""Those that are None where the whole model answered nothing to compare with."""


class Row(figures.Row):
    """One run; ``broken`` says what must hold and did not. What was not reached before ``error`` is None.

    ``asked_prompt_tokens`` and ``asked_neighbour_bytes`` were asked for; ``prompt_tokens`` and ``neighbour_bytes`` are
    what there was room for, and ``neighbour_takes`` how often the other program took some. ``rows`` are those of a step.

    ``max_read_bytes`` is what a token may read.
    ``bytes_read_per_token`` is counted by the kernel between the first token and the last, for the whole group,
    with ``bytes_read_first`` and ``bytes_read_last`` those of its first and last quarter; ``reported_bytes_per_token`` and
    ``stall_ms_per_token`` are what the ring process counts for itself behind the prompt. ``prompt_...`` are of the prompt.
    ``baseline_...`` are of plain llama.cpp with the whole model in memory.

    ``anonymous_bytes`` of the group (the other program included) at the end, ``max_anonymous_bytes`` and ``swap_bytes``
    the most that a sample each second saw. ``swap_in_bytes`` were swapped in meanwhile by the whole machine, which has
    ``swap_total_bytes`` of swap. ``limit_hits`` counts how often the limit made room, which a full page cache does,
    where the kernel counts it; ``peak_bytes`` says whether the group was ever full.
    ``distinct_tokens``: how many different tokens the answer has.
    """

    columns = (
        "limit_share=limit:g, limit_bytes=limit MB:MB, run, kv_type=KV, rows, prompt_tokens_per_s=prompt tok/s:.1f, "
        "baseline_prompt_tokens_per_s=whole model:.1f, tokens_per_s=tok/s:.2f, baseline_tokens_per_s=its tok/s:.2f, "
        "bytes_read_per_token=MB/token:MB, bytes_read_first=first:MB, bytes_read_last=last:MB, "
        "max_read_bytes=at most MB:MB, stall_ms_per_token=stall ms:.0f, streamed_bytes=streamed MB:MB, "
        "read_ahead_bytes=ahead MB:MB, "
        "anonymous_bytes=anonymous MB:MB, max_anonymous_bytes=peak:MB, oom_kills=OOM, swap_bytes=swap MB:MB, tokens, "
        "same_tokens=same, busy_share=busy:.0%, holds"
    )

    @property
    def run(self) -> str:
        """For a table."""
        if self.kind == "neighbour":
            return f"beside {mega(self.neighbour_bytes)} MB"
        return f"prompt {self.prompt_tokens}"

    @property
    def holds(self) -> str:
        """For a table."""
        return "NO" if self.broken else "yes"

    def failures(self) -> Sequence[str]:
        return [f"{self.kind} at {self.limit_share:g}: {what}" for what in self.broken]


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where the two answers part, be it that one is shorter; None where they are the same."""
    if list(ours) == list(theirs):
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))


def broken(row: Row, refused: str | None) -> Iterator[str]:
    """What must hold and did not."""
    if row.error is not None:
        yield row.error
    if row.prompt_tokens is not None and row.prompt_tokens < row.asked_prompt_tokens:
        yield f"there is a plan for {row.prompt_tokens} of {row.asked_prompt_tokens} tokens of prompt: {refused}"
    if row.neighbour_bytes is not None and row.neighbour_bytes < row.asked_neighbour_bytes:
        yield (
            f"there is room for {row.neighbour_bytes / 1e6:.0f} of {row.asked_neighbour_bytes / 1e6:.0f} MB beside what "
            "the ring cannot do without"
        )
    if row.error is None and row.tokens < row.asked_tokens:
        yield f"the model ended its answer after {row.tokens} of {row.asked_tokens} tokens; choose another --prompt"
    if row.oom_kills:
        yield f"{row.oom_kills} killed for lack of memory"
    if row.swap_bytes or row.swap_in_bytes:
        yield f"{row.swap_bytes} bytes in swap, {row.swap_in_bytes} swapped in"
    if row.same_tokens is False:
        yield f"token {row.first_difference} is not that of the whole model"
    read, maximum = row.bytes_read_per_token, row.max_read_bytes
    if read is not None and maximum is not None and read > maximum:
        yield f"{read / maximum:.2f} times as much read a token as may be"
