"""Which generation holds which KV sequence, and how much of its prompt is cached, in a free sequence or in one in use.

The KV cache of a prompt stays when its generation is over. The next generation takes the free sequence with the longest
common prefix, and the prefix is not computed again. A generation whose prompt begins like that of a running one waits
until that prefix is in the step log, and copies it then: copying the whole KV cache costs less than computing some
tokens. If the whole prompt is cached, as with short prompts that are repeated, nothing is computed: the first token is
sampled from the same logits as before. Blocks that the devices keep (``keeping.py``) are loaded where they reach
further.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from primad.engine.protocol import LogitsRow
from primad.kv.keys import KvBlock
from primad.ring.checkpoints import Checkpoints
from primad.ring.chunks import Chunking, Computed
from primad.ring.keeping import Chain, Keeping, Usable, usable
from primad.ring.messages import Generate, KvCopy, KvLoad, KvNews, KvOp, KvRemove, StateKeep, StateRestore
from primad.ring.speculation.speculation import Speculation

COPIED_CELLS: Final = 128
"""Tokens of context that are copied in less time than computing one token of a prompt takes, as measured."""
MAX_ENDINGS: Final = 4
"""Number of prompts, the latest, whose last logits are kept: 1 MB each with a large vocabulary."""


@dataclass(slots=True)
class KvSequence:
    """One KV sequence, and what its cells hold besides sampled tokens."""

    number: int
    computed: Computed = field(default_factory=Computed)
    used: int = 0
    """The number of steps there had been when it was last used; 0 while its cells are empty."""
    cells: int = 0
    """Tokens that were handed out for it and not forgotten."""
    ops: list[KvOp] = field(default_factory=list)
    """Operations on its KV cache at the start of the next step in which it has a row."""
    chain: Chain = field(default_factory=Chain)
    ending: LogitsRow | None = None
    """The logits of the last row of the prompt in its cells, if known."""
    ahead: dict[int, int] = field(default_factory=dict)
    """By the position where a speculative step's drafts begin: the number of the state saved before it, where layers
    have states."""

    def take_ops(self) -> list[KvOp]:
        """Return its ``ops`` and clear them: a step does them now."""
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
    chunking: Chunking
    """How its prompt is split into chunks."""
    reused: int
    """Tokens of the prompt that were cached; 0 once that is reported."""
    chunk_end: int = 0
    """The end of the chunk that was begun last."""
    since: int = 0
    """The number of steps there had been when it got its sequence."""
    costs: int = 0
    """What had to be computed to resume then, in decoded tokens."""
    waits_since: int = 0
    """The number of steps there had been at its last step, plus some that its turn counts for."""
    rows_before: int = 0
    """Tokens of other prompts that were computed while its own waited."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    behind: Running | None = None
    """The generation that computes the beginning of its prompt; its own ``sequence`` has none of it yet."""
    shared: int = 0
    """Number of tokens of that beginning."""
    is_foreign: bool = False
    """Whether chunks of its prompt may have other ends than this ring's, having been computed in another ring."""
    ending: LogitsRow | None = None
    """The logits to sample its first token from, if its whole prompt was cached."""
    mirostat_mu: float | None = None
    """State of its sampler after the token sampled last."""
    held_back_s: float | None = None
    """Duration of the step from which its next token is yet to be sampled; None: it is not held back."""
    speculation: Speculation | None = None
    """Tokens computed ahead; their rows follow those of the known tokens in ``sequence``."""

    @property
    def there(self) -> int:
        """Cells of its tokens, including those that it will copy."""
        return self.sequence.cells if self.behind is None else self.shared

    @property
    def num_sampled(self) -> int:
        """Tokens sampled since it got its sequence."""
        return len(self.sampled) - len(self.generate.sampled)

    @property
    def certain(self) -> int:
        """Cells of its tokens, without those of drafts."""
        return min(self.sequence.cells, self.known)

    @property
    def known(self) -> int:
        """Number of tokens of prompt and completion."""
        return len(self.generate.prompt) + len(self.sampled)

    @property
    def has_step(self) -> bool:
        """Whether it has something to compute without another token being sampled."""
        return self.behind is None and self.held_back_s is None and self.sequence.cells < self.known

    @property
    def is_decoding(self) -> bool:
        """Whether its whole prompt was handed out."""
        return self.behind is None and self.sequence.cells >= len(self.generate.prompt)

    def goes_on(self, before: Running) -> None:
        """Continue the timings and draft counts of ``before``, the same generation before it was preempted."""
        self.started_s, self.first_token_s = before.started_s, before.first_token_s
        if self.speculation is not None and before.speculation is not None:
            self.speculation.drafted = before.speculation.drafted
            self.speculation.accepted = before.speculation.accepted

    def tokens(self, first: int, last: int) -> list[int]:
        """The tokens at positions ``first <= p < last``, all of the prompt or all of the completion."""
        begin = len(self.generate.prompt)
        return self.generate.prompt[first:last] if first < begin else self.sampled[first - begin : last - begin]


class Slots:
    """The ``sequences`` of a ring, each with a context of ``context`` tokens.

    KV blocks of prompts, and of every ``keep_rows`` tokens of a completion, are kept; None: nothing is kept or loaded.
    ``states`` is how many states are kept, where sequences can only go back to one; with 0 they can go back to any
    token. ``ahead`` more are kept before drafts. Where blocks need a state to resume, it is kept with those of prompts,
    and after every ``state_rows`` tokens of a completion; None: they need none.
    """

    def __init__(
        self,
        count: int,
        *,
        context: int,
        chunking: Chunking,
        keep_rows: int | None = None,
        states: int = 0,
        state_rows: int | None = None,
        ahead: int = 0,
    ) -> None:
        assert keep_rows is None or keep_rows > 0
        assert state_rows is None or (states + ahead and state_rows > 0)
        self._ahead = list(range(states, states + ahead))
        """Numbers of free states."""
        self._checkpoints = Checkpoints(states)
        self._minimum = context // COPIED_CELLS
        self._chunking = chunking
        self._keep_rows, self._state_rows = keep_rows, state_rows
        self._keeping = Keeping()
        self.sequences = [KvSequence(number) for number in range(count)]
        self._free = list(self.sequences)
        self._first: list[KvOp] = []
        self._back: list[KvOp] = []
        """Operations that roll drafts back to states, before anything is kept or copied."""

    @property
    def keeps(self) -> bool:
        """Whether the next step has something to save."""
        return self._keeping.is_waiting

    def take_first(self, step: int) -> list[KvOp]:
        """Operations that ``step``, the next one, does first, whichever generation it is for: what they keep or copy
        may be gone after it."""
        back, self._back = self._back, []
        copies, self._first = self._first, []
        return [*back, *self._keeping.hand_out(step), *copies]

    def first(self, *ops: KvOp) -> None:
        """Have the next step do ``ops`` first, whichever generation it serves."""
        self._first += ops

    @property
    def have_states(self) -> bool:
        """Whether layers have states, which cannot be cut at any position."""
        return self._checkpoints.are_needed

    def take_back(self, sequence: KvSequence, cells: int) -> int:
        """Drop what ``sequence`` has after its first ``cells``: a state now, while that is possible. Return how many it
        has then: the last rows of a step are rolled back, but rows of an earlier step only with all rows of that step.
        """
        before = max((end for end in sequence.ahead if end <= cells), default=None)
        is_last = before is None or (before < cells and before == max(sequence.ahead))
        if before is not None and not is_last:
            self._back.append(StateRestore(sequence.number, sequence.ahead[before], before))
            cells = before
        else:
            ops = self._back if self.have_states else sequence.ops
            ops.append(KvRemove(sequence.number, cells, -1))
        self.settle(sequence)
        return cells

    @property
    def may_be_ahead(self) -> bool:
        """Whether drafts of a speculative step can be taken back."""
        return bool(self._ahead) or not self.have_states

    def keep_ahead(self, sequence: KvSequence, cells: int) -> list[KvOp]:
        """Operations of a step before rows of drafts that follow the first ``cells`` of ``sequence``."""
        if not self.have_states:
            return []
        sequence.ahead[cells] = number = self._ahead.pop()
        return [StateKeep(sequence.number, number, cells)]

    def settle(self, sequence: KvSequence, known: int | None = None, *, inside: bool = False) -> None:
        """Free the states before drafts that are final: those of ``sequence`` before its ``known`` cells (None: all).
        With ``inside`` a step is only partly known, so the latest of these states is still needed."""
        if inside and known is not None:
            known = max((end for end in sequence.ahead if end < known), default=known)
        for end in [end for end in sequence.ahead if known is None or end < known]:
            self._ahead.append(sequence.ahead.pop(end))

    def back(self, step: int) -> None:
        """Note that ``step`` passed all windows."""
        self._keeping.back(step)

    def news(self) -> list[KvNews]:
        """Blocks that are being kept, that are kept, and that are no longer needed, since the last call."""
        return self._keeping.news(each.chain for each in self.sequences) if self._keep_rows is not None else []

    def lease(self, generate: Generate) -> None:
        """Mark the blocks of ``generate`` as held and needed until it is over, whether it runs or waits."""
        if self._keep_rows is not None:
            self._keeping.lease(generate)

    def end_lease(self, generate: Generate) -> None:
        """Release the blocks of ``generate``, which is over."""
        if self._keep_rows is not None:
            self._keeping.end_lease(generate)

    def begin(self, generate: Generate, now: float, others: Collection[Running]) -> Running:
        """Give ``generate`` a sequence of its own, next to those that run."""
        running = Running(
            generate=generate,
            started_s=now,
            sampled=list(generate.sampled),
            sequence=self._free[0],
            chunking=self._chunking.of(generate.chunks),
            reused=0,
            mirostat_mu=generate.sampling.mirostat_mu,
        )
        self._place(running, others)
        return running

    def keep_ending(self, running: Running, logits: LogitsRow) -> None:
        """Save ``logits``, the last row of its prompt."""
        running.sequence.ending = logits
        known = sorted((each for each in self.sequences if each.ending is not None), key=lambda each: each.used)
        for each in known[:-MAX_ENDINGS]:
            each.ending = None

    def release(self, running: Running) -> None:
        """End ``running``; its sequence keeps the prompt's KV cache."""
        self._free.append(running.sequence)
        self._keeping.cut(running.sequence.chain, running.sequence.computed.ends)
        self.end_lease(running.generate)

    def kept(self, running: Running) -> list[KvBlock]:
        """The blocks of its cells that every device holds."""
        chain, generate = running.sequence.chain, running.generate
        is_its_own = running.behind is None and chain.root and chain.request == generate.request
        return chain.blocks[: chain.reported] if is_its_own else list(generate.blocks)

    def keep(self, running: Running) -> None:
        """Have its complete blocks saved. Its cells are all in the log."""
        sequence, chain = running.sequence, running.sequence.chain
        if self._keep_rows is None or running.behind is not None or not chain.root:
            return
        certain = min([running.certain, *sequence.ahead])  # it may go back to a state
        while (ends := self._ends(running)) and ends[-1] <= certain:
            self._keeping.add(chain, sequence.number, running.tokens(chain.end, ends[-1]), ends)
        if self._state_rows is not None and chain.end >= self._state_end(running) + self._state_rows:
            self._add_state(running)

    def keep_certain(self, running: Iterable[Running]) -> None:
        """Keep the state of generations that are where a state is due: with drafts in a step they get there once it is
        back.

        Not while blocks of any generation are still being received.
        """
        if self._state_rows is not None and not self._first:
            for each in running:
                self.keep(each)

    def _state_end(self, running: Running) -> int:
        """Position of the last state of its chain; not before its prompt ends."""
        ends = (each.end for each in reversed(running.sequence.chain.blocks) if each.is_state)
        return max(len(running.generate.prompt), next(ends, 0))

    def _add_state(self, running: Running) -> None:
        """Have its state saved with its cells, if it ends exactly there: no cells past them are yet to be forgotten."""
        sequence, chain = running.sequence, running.sequence.chain
        is_there = chain.end == sequence.cells == running.certain and not sequence.ops
        if running.behind is None and chain.root and is_there:
            self._keeping.add_state(chain, sequence.number)

    def keep_state(self, running: Running, step: int) -> None:
        """Save its state before the next step if ``step``, a chunk that ends at its last cell, ends where one is
        kept."""
        sequence, prompt = running.sequence, running.generate.prompt
        if not self._checkpoints.is_place(sequence.number, running.chunking, prompt, sequence.cells):
            return
        self._first += self._checkpoints.keep(
            sequence.number, sequence.cells, step, is_whole=sequence.cells == len(prompt)
        )
        if self._keep_rows is not None and self._state_rows is not None:
            self._add_state(running)

    def keep_rest(self, running: Running) -> None:
        """Have the sampled tokens that are in no block saved, as a shorter block."""
        sequence, chain = running.sequence, running.sequence.chain
        rows = range(chain.end + 1, running.certain + 1)
        is_known = running.is_decoding and chain.end >= max(len(running.generate.prompt), running.chunk_end)
        if self._keep_rows is not None and chain.root and is_known and rows:
            self._keeping.add(chain, sequence.number, running.tokens(chain.end, running.certain), rows)
        if self._keep_rows is not None and self._state_rows is not None:
            self._add_state(running)

    def _ends(self, running: Running) -> Sequence[int]:
        """The ends of the steps that compute its next block; empty while these are not known yet."""
        first = running.sequence.chain.end
        if first < len(running.generate.prompt):
            return [end for end in running.sequence.computed.ends if end > first][:1]
        if first < running.chunk_end:
            return [running.chunk_end]
        assert self._keep_rows is not None
        return range(first + 1, first + self._keep_rows + 1)

    def _place(self, running: Running, others: Collection[Running]) -> None:
        """Give it a sequence with the tokens that it would compute the same way; drop the others.

        If one of ``others`` has more of its prompt, or will have it, it waits for that.
        """
        generate = running.generate

        def reused(sequence: KvSequence) -> int:
            if not generate.reuses:
                return 0
            is_whole = sequence.ending is not None and not generate.sampled
            found = running.chunking.reused(generate.prompt, sequence.computed, is_whole=is_whole)
            return self._checkpoints.last(sequence.number, found) if self._checkpoints.are_needed else found

        kept, _, sequence = max(
            ((reused(each), -each.used, each) for each in self._free), key=lambda candidate: candidate[:2]
        )
        loaded = None
        if self._keep_rows is not None and generate.blocks:
            loaded = usable(running.chunking, generate, needs_state=self._state_rows is not None)
        leader, shared = self._leader(running, others)
        if shared - max(kept, loaded.end if loaded is not None else 0) > self._minimum:
            running.behind, running.shared = leader, shared
            running.sequence = min(self._free, key=lambda each: (each.used, each.number))
            self._free.remove(running.sequence)
            running.sequence.ending = None
            return
        self._free.remove(sequence)
        running.behind, running.shared, running.sequence = None, 0, sequence
        if loaded is not None and loaded.end > kept:
            self._load(running, loaded)
            sequence.ending = None
            return
        if kept < len(generate.prompt):
            sequence.ending = None
        running.ending, running.reused = sequence.ending, min(kept, len(generate.prompt) - 1)
        self._begin_chain(running, sequence.chain, kept)
        ends = [end for end in sequence.computed.ends if end <= kept]
        sequence.computed, sequence.cells = Computed(generate.prompt, ends), kept
        running.chunk_end = running.chunking.begun(generate.prompt, ends, kept)
        self._go_back(sequence, kept)

    def _go_back(self, sequence: KvSequence, kept: int) -> None:
        """Keep its first ``kept`` tokens. A state is restored with the next step: after that other states may take its
        place."""
        if self._checkpoints.are_needed and kept:
            self._first.append(self._checkpoints.restore(sequence.number, kept, sequence.used))
            sequence.ops = []
        else:
            sequence.ops = [KvRemove(sequence.number, kept, -1)] if sequence.used or sequence.ops else []
        self._checkpoints.cut(sequence.number, kept)

    def _load(self, running: Running, loaded: Usable) -> None:
        """Fill its sequence with kept blocks, with the next step: a generation that waits for this prompt may copy it
        then."""
        generate, sequence = running.generate, running.sequence
        running.reused = 0 if generate.sampled else loaded.end
        self._keeping.begin(sequence.chain, generate, loaded.blocks, reported=True)
        ends = [each.end for each in loaded.blocks if not each.is_state]
        running.is_foreign = any(end <= len(generate.prompt) for end in ends[loaded.chunks :])
        sequence.computed = Computed(generate.prompt, ends[: loaded.chunks])
        self._first.append(KvLoad(sequence.number, loaded.blocks[-1].key, loaded.end))
        sequence.cells, sequence.ops, sequence.used = loaded.end, [], max(sequence.used, 1)
        self._checkpoints.cut(sequence.number, 0)

    def _begin_chain(self, running: Running, source: Chain, cells: int) -> None:
        """Begin its chain with the first ``cells`` tokens of that of ``source``."""
        root = running.generate.root if self._keep_rows is not None else ""
        if root or running.sequence.chain.root:
            blocks = source.before(cells, root) if root else []
            generate = running.generate
            if self._loses_cells and cells != (blocks[-1].end if blocks else 0):
                generate, blocks = msgspec.structs.replace(generate, root=""), []  # earlier cells are gone
            self._keeping.begin(running.sequence.chain, generate, blocks, reported=False)

    @property
    def _loses_cells(self) -> bool:
        """Whether a sequence that goes back has no earlier cells left to save: so with small sliding windows."""
        return self._keep_rows is not None and self._checkpoints.are_needed and self._state_rows is None

    def _leader(self, running: Running, others: Collection[Running]) -> tuple[Running | None, int]:
        """The one of ``others`` whose prompt has the longest common prefix with that of ``running``, and its length."""
        generate, chunking = running.generate, running.chunking
        best: tuple[Running | None, int] = (None, 0)
        for each in others if generate.reuses else ():
            is_kept = not self._loses_cells or each.sequence.chain.root == generate.root
            if each.behind is None and not each.is_foreign and each.chunking == chunking and is_kept:
                prompt = each.generate.prompt
                is_same = not each.is_decoding and prompt == generate.prompt
                common = len(prompt) if is_same else chunking.common(generate.prompt, prompt)
                best = max(best, (each, self._copied(each.sequence, common)), key=lambda pair: pair[1])
        return best

    def _copied(self, source: KvSequence, cells: int) -> int:
        """Number of the first ``cells`` cells of ``source`` that can be copied: if it is past them, only up to a saved
        state.

        If it is not past them it will end exactly there: a chunk ends there, and waiting generations are checked before
        each step.
        """
        is_past = self._checkpoints.are_needed and source.cells > cells
        return self._checkpoints.last(source.number, cells) if is_past else cells

    def go_on(self, running: Mapping[int, Running], steps: int) -> None:
        """Let generations that wait for another one's prompt continue once enough of it is in the log, or never will
        be."""
        for each in running.values():
            leader = each.behind
            if leader is None:
                continue
            if (
                running.get(leader.generate.request) is not leader
                or self._copied(leader.sequence, each.shared) < each.shared
            ):
                self._free.append(each.sequence)
                self._place(each, [other for other in running.values() if other is not each])
            elif each.shared <= leader.sequence.cells:
                self.copy(each, steps)

    def copy(self, running: Running, steps: int) -> None:
        """Copy, after ``steps`` steps, the prefix shared with the generation it waited for."""
        leader, sequence, shared = running.behind, running.sequence, running.shared
        assert leader is not None
        source = leader.sequence
        self._first.append(KvCopy(source.number, sequence.number, shared))
        self._checkpoints.cut(sequence.number, 0)
        if self._checkpoints.are_needed and source.cells > shared:
            self._first.append(self._checkpoints.restore(source.number, shared, steps, target=sequence.number))
        running.behind, running.reused = None, shared
        self._begin_chain(running, source.chain, shared)
        ends = [end for end in source.computed.ends if end <= shared]
        sequence.computed, sequence.cells = Computed(running.generate.prompt, ends), shared
        sequence.ops, sequence.used = [], steps
