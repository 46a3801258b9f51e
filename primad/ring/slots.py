"""Who holds which KV sequence, and what of a prompt is there already: in a sequence that is free, or in another one's.

The cells of a prompt stay when its generation is over. The next generation takes the free sequence with which it has most in
common, and what both have is not computed again. One that comes while another one's prompt begins the same waits until that
much of it is in the step log, and copies it then: a KV cache is copied whole, which costs less than to compute some tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from primad.ring.chunks import Chunking, Computed
from primad.ring.messages import Generate, KvCopy, KvOp, KvRemove

COPIED_CELLS: Final = 128
"""As many cells of context are copied in less time than a token of a prompt takes, on what was measured."""


@dataclass(slots=True)
class KvSequence:
    """One KV sequence, and what its cells hold besides an answer."""

    number: int
    computed: Computed = field(default_factory=Computed)
    used: int = 0
    """How many steps there were when it was used last; 0 while its cells are empty."""
    cells: int = 0
    """Rows that were handed out for it, and not forgotten."""
    ops: list[KvOp] = field(default_factory=list)
    """What the next step in which it has a row does to its cells first."""

    def take_ops(self) -> list[KvOp]:
        """Its ``ops``, which a step does now."""
        ops, self.ops = self.ops, []
        return ops


@dataclass(slots=True)
class Running:
    """A generation that holds a sequence."""

    generate: Generate
    sequence: KvSequence
    started_s: float
    sampled: list[int]
    """All tokens after the prompt, those of earlier epochs first."""
    reused: int
    """Tokens of the prompt whose cells were there, until that is told."""
    chunk_end: int = 0
    """Of the chunk that was begun last."""
    waits_since: int = 0
    """How many steps there were when it had one last, and some that its turn counts for."""
    first_token_s: float | None = None
    behind: Running | None = None
    """Computes the beginning of its prompt; its own ``sequence`` has nothing of it yet."""
    shared: int = 0
    """Tokens of that beginning."""

    @property
    def known(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.generate.prompt) + len(self.sampled)

    @property
    def has_step(self) -> bool:
        """Whether there is something to compute without another token."""
        return self.behind is None and self.sequence.cells < self.known

    @property
    def is_decoding(self) -> bool:
        """Whether its prompt is in the ring."""
        return self.behind is None and self.sequence.cells >= len(self.generate.prompt)


class Slots:
    """The ``sequences`` of a ring, each with a context of ``context`` tokens."""

    def __init__(self, count: int, *, context: int, chunking: Chunking) -> None:
        self._least = context // COPIED_CELLS
        self._chunking = chunking
        self.sequences = [KvSequence(number) for number in range(count)]
        self._free = list(self.sequences)
        self._copies: list[KvOp] = []

    def take_copies(self) -> list[KvOp]:
        """What the next step does first, whosever it is: cells that are copied may be gone after it."""
        copies, self._copies = self._copies, []
        return copies

    def begin(self, generate: Generate, now: float, others: Collection[Running]) -> Running:
        """``generate`` in a sequence of its own, beside those that run."""
        running = Running(
            generate=generate, started_s=now, sampled=list(generate.sampled), sequence=self._free[0], reused=0
        )
        self._place(running, others)
        return running

    def release(self, running: Running) -> None:
        """It is over; what its sequence has of its prompt stays."""
        self._free.append(running.sequence)

    def _place(self, running: Running, others: Collection[Running]) -> None:
        """Give it a sequence, with those cells that it would compute the same way; the others are forgotten.

        Where one of the ``others`` has more of its prompt, or will have it, it waits for that.
        """
        generate = running.generate

        def reused(sequence: KvSequence) -> int:
            return self._chunking.reused(generate.prompt, sequence.computed) if generate.reuses else 0

        kept, _, sequence = max(
            ((reused(each), -each.used, each) for each in self._free), key=lambda candidate: candidate[:2]
        )
        leader, shared = self._leader(generate, others)
        if shared - kept > self._least:
            running.behind, running.shared = leader, shared
            running.sequence = min(self._free, key=lambda each: (each.used, each.number))
            self._free.remove(running.sequence)
            return
        self._free.remove(sequence)
        running.behind, running.shared, running.reused, running.sequence = None, 0, kept, sequence
        sequence.computed = Computed(generate.prompt, [end for end in sequence.computed.ends if end <= kept])
        sequence.cells = kept
        sequence.ops = [KvRemove(sequence.number, kept, -1)] if sequence.used or sequence.ops else []

    def _leader(self, generate: Generate, others: Collection[Running]) -> tuple[Running | None, int]:
        """The one of the ``others`` whose prompt has most in common with that of ``generate``, and how much."""
        best: tuple[Running | None, int] = (None, 0)
        for each in others if generate.reuses else ():
            if each.behind is None:
                prompt = each.generate.prompt
                is_same = not each.is_decoding and prompt == generate.prompt
                common = len(prompt) if is_same else self._chunking.common(generate.prompt, prompt)
                best = max(best, (each, common), key=lambda pair: pair[1])
        return best

    def go_on(self, running: Mapping[int, Running], steps: int) -> None:
        """Those that wait for another one's prompt go on once enough of it is in the log, or will not be."""
        for each in running.values():
            leader = each.behind
            if leader is None:
                continue
            if running.get(leader.generate.request) is not leader:
                self._free.append(each.sequence)
                self._place(each, [other for other in running.values() if other is not each])
            elif each.shared <= leader.sequence.cells:
                self.copy(each, steps)

    def copy(self, running: Running, steps: int) -> None:
        """Take over, behind so many ``steps``, what it shares with the one that it waited for."""
        leader, sequence, shared = running.behind, running.sequence, running.shared
        assert leader is not None
        self._copies.append(KvCopy(leader.sequence.number, sequence.number, shared))
        running.behind, running.reused = None, shared
        ends = [end for end in leader.sequence.computed.ends if end <= shared]
        sequence.computed, sequence.cells = Computed(running.generate.prompt, ends), shared
        sequence.ops, sequence.used = [], steps
