"""The state of the scheduler: which generations wait, which run, which steps are in flight; and changes that all parts
share.

Values that are made for each token are msgspec structs: a frozen dataclass takes 2 us longer when the caches are cold
after a pass over the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from primad.ring.chunks import Chunking
from primad.ring.grouping import Batching
from primad.ring.messages import (
    Generate,
    GenerationEvent,
    KvOp,
)
from primad.ring.slots import Running, Slots
from primad.ring.speculation.drafter import Drafting
from primad.ring.speculation.lookup import PromptLookup
from primad.ring.speculation.pace import Losses, Tally
from primad.ring.speculation.row_costs import RowCosts
from primad.ring.speculation.speculation import BeginsDrafter
from primad.ring.speculation.tree import NO_TREE, TreeRows

MAX_OWNERS: Final = 1024
"""Owners whose latest step is remembered: those that asked last."""


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step before it is computed: row ``i`` is ``tokens[i]`` at ``positions[i]`` of ``sequences[i]``.

    ``requests`` are the generations that it is for, ``samples`` the rows that want an output, with their generations.
    Rows of a draft tree may be in several sequences, or in another one, which ``shared`` names. Rows of a picture,
    whose tokens are below 0, have ``content``. ``rope`` is as in ``Step``.
    """

    step: int
    requests: list[int]
    tokens: list[int]
    positions: list[int]
    sequences: list[int]
    samples: dict[int, list[Generate]]
    ops: list[KvOp]
    shared: dict[int, list[int]] = msgspec.field(default_factory=dict)
    content: bytes = b""
    rope: list[int] = msgspec.field(default_factory=list)


class SampledToken(msgspec.Struct, frozen=True, kw_only=True):
    """The token that was sampled for a step: ``ends`` when it ends the generation; ``top`` as in ``Sampled``.

    ``error``: no token could be sampled, and the generation ends with it, for ``reason`` as in ``Finished``.
    ``mirostat_mu`` as in ``Sampled``. ``more`` are the tokens sampled after it, each from the row of an accepted draft.
    """

    token: int
    ends: bool
    error: str | None = None
    reason: str = "refused"
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    mirostat_mu: float | None = None
    more: tuple[SampledToken, ...] = ()


class StepInFlight(msgspec.Struct, frozen=True, kw_only=True):
    """A step in flight: its generations, each with its number of tokens after the step. ``decodes``: it is not prefill.

    ``tree`` has the drafts among its rows, after the first row of its only generation; a step that ``is_draft`` has no
    other row.
    """

    computed: dict[int, int]
    samples: dict[int, list[Generate]]
    decodes: bool
    since_s: float
    tree: TreeRows = NO_TREE
    is_draft: bool = False
    is_discarded: bool = False


class SchedulerState:
    """The state of one ``Scheduler``, whose parts read and change it.

    ``context`` is the context of each of the ring's ``sequences``. At most ``chunks`` chunks of prompts are computed at
    the same time (None: one on each of ``depth`` devices). KV blocks of prompts, and of every ``keep_rows`` tokens of a
    completion, are kept (``keeping.py``); None: no blocks. Where sequences can only go back to a state, ``states`` is
    how many are kept; where blocks need a state to resume, one is also kept with them after every ``state_rows`` tokens
    of a completion. ``drafting`` says how drafts are computed, and a ``drafter`` makes them; None: no drafts.
    """

    def __init__(
        self,
        *,
        context: int,
        chunking: Chunking,
        depth: int,
        chunks: int | None = None,
        sequences: int = 1,
        at_once: int | None = None,
        batching: Batching | None = None,
        keep_rows: int | None = None,
        states: int = 0,
        state_rows: int | None = None,
        drafting: Drafting | None = None,
        drafter: BeginsDrafter = PromptLookup,
    ) -> None:
        self.context = context
        self.step_rows = max(chunking.rows, chunking.step_rows)
        branches = drafting.branches if drafting is not None else 0
        assert not states or not branches, "branches go back to no state"
        ahead = drafting.states if drafting is not None and states else 0
        assert not branches or (sequences == 1 and keep_rows is None), "branches share the cells of one sequence"
        self.pool = range(sequences, sequences + branches)
        self.drafting, self.drafter = drafting, drafter
        self.losses = Losses()
        self.costs = RowCosts(drafting.costs if drafting is not None else ())
        self.discarded: list[int] = []
        self.tally = Tally()
        self.batching = batching or Batching()
        self.depth = depth
        self.chunks = min(depth, chunks or depth)
        self.at_once = min(sequences, at_once or sequences)
        self.sequences = sequences
        self.waiting: dict[str, list[Generate]] = {}
        """By owner, the longest waiting first; per owner in the order in which they begin."""
        self.running: dict[int, Running] = {}
        self.set_back: dict[int, Running] = {}
        """Preempted generations, as they were."""
        self.slots = Slots(
            sequences,
            context=context,
            chunking=chunking,
            keep_rows=keep_rows,
            states=states - ahead,
            ahead=ahead,
            state_rows=state_rows,
        )
        self.in_flight: dict[int, StepInFlight] = {}
        self.begun: list[GenerationEvent] = []
        self.steps = 0
        self.owners: dict[str, int] = {}
        """The latest step of each owner, counted as for ``waits_since``; the most recent comes last."""
        self.drains = False
        self.now_s = 0.0
        self.waits_until_s: float | None = None
        """The time until which no step is handed out because drafts are about to arrive."""

    def hand_out(
        self,
        step: PlannedStep,
        of: Sequence[Running],
        *,
        decodes: bool,
        tree: TreeRows = NO_TREE,
        is_draft: bool = False,
    ) -> PlannedStep:
        step.ops[:0] = self.slots.take_first(step.step)
        for running in self.running.values():
            self.slots.keep(running)
        self.in_flight[step.step] = StepInFlight(
            computed={each.generate.request: each.sequence.cells for each in of},
            samples=step.samples,
            decodes=decodes,
            since_s=self.now_s,
            tree=tree,
            is_draft=is_draft,
        )
        self.steps += 1
        for running in of:
            running.sequence.used = self.steps
            if is_draft:
                continue  # it takes no turn
            running.waits_since = self.steps
            if not running.is_decoding:
                running.waits_since += max(0, math.ceil(self.decoding / self.batching.rows) - 1)
            self.owners.pop(running.generate.owner, None)
            self.owners[running.generate.owner] = running.waits_since
        if len(self.owners) > MAX_OWNERS:
            del self.owners[next(iter(self.owners))]
        return step

    @property
    def decoding(self) -> int:
        return sum(running.is_decoding for running in self.running.values())

    @property
    def is_full_of_steps(self) -> bool:
        """Whether the maximum number of steps is in flight, not counting drafts. While no generation decodes one more
        chunk is in flight: the head has both the beginning of a chunk and the end of an earlier one, and no device
        idles until it comes to either.
        """
        if len(self.in_flight) < self.depth:
            return False
        return sum(not step.is_draft for step in self.in_flight.values()) >= self.depth + self._chunks_that_wait

    @property
    def may_have_chunk(self) -> bool:
        """Whether one more chunk may be in flight: where devices share cores each chunk would only take longer."""
        under_way = sum(
            bool(step.computed) and not step.decodes and not step.is_draft for step in self.in_flight.values()
        )
        return under_way < self.chunks + self._chunks_that_wait

    @property
    def _chunks_that_wait(self) -> int:
        return int(self.chunks > 1 and not self.decoding)

    @property
    def may_take_back(self) -> bool:
        """Whether drafts are in flight that may have to be taken back from a state."""
        return self.slots.have_states and any(step.tree.nodes for step in self.in_flight.values())

    def is_full(self, generate: Generate, sampled: int) -> bool:
        """Whether ``generate`` may have no more than ``sampled`` tokens."""
        return sampled >= generate.max_tokens or len(generate.prompt) + sampled >= self.context

    @property
    def has_blocks(self) -> bool:
        """Whether speculative steps may have several tokens."""
        return self.drafting is not None and self.drafting.block > 1

    def take_back(self, running: Running, cells: int) -> None:
        """Discard everything ahead of it: rows after the first ``cells`` are dropped with its next row."""
        speculation, sequence = running.speculation, running.sequence
        if speculation is None or not (speculation.tokens or (self.has_blocks and sequence.cells > cells)):
            return
        for number in sorted(speculation.steps):
            step = self.in_flight.get(number)
            if step is not None and step.is_draft:
                self.in_flight[number] = msgspec.structs.replace(step, samples={}, is_discarded=True)
                self.discarded.append(number)
        speculation.take_back()
        sequence.cells = self.slots.take_back(sequence, cells)

    def release(self, request: int) -> None:
        self.take_back(self.running[request], self.running[request].certain)
        self.slots.release(self.running.pop(request))
