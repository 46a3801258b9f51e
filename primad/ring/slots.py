"""Who holds which KV sequence, and what of a prompt is there already: in a sequence that is free, or in another one's.

The cells of a prompt stay when its generation is over. The next generation takes the free sequence with which it has most in
common, and what both have is not computed again. One that comes while another one's prompt begins the same waits until that
much of it is in the step log, and copies it then: a KV cache is copied whole, which costs less than to compute some tokens.
A prompt that is there to its end has nothing computed again, as short ones that come again: its first token is drawn from
the logits that it was drawn from before.
Cells that the devices keep (``keeping.py``) are loaded where they reach further.
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
from primad.ring.messages import Generate, KvCopy, KvForgotten, KvKept, KvLoad, KvOp, KvRemove, StateKeep, StateRestore
from primad.ring.speculation.speculation import Speculation

COPIED_CELLS: Final = 128
"""As many cells of context are copied in less time than a token of a prompt takes, on what was measured."""
MAX_ENDINGS: Final = 4
"""Of so many prompts, the latest, the logits of the last row are there still: 1 MB each with a large vocabulary."""


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
    chain: Chain = field(default_factory=Chain)
    ending: LogitsRow | None = None
    """The logits of the last row of the prompt that its cells are of, where they are known."""
    ahead: dict[int, int] = field(default_factory=dict)
    """By where a draft begins in a step of its own: the number of the state in front of it, where layers have one."""

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
    chunking: Chunking
    """How its prompt is cut."""
    reused: int
    """Tokens of the prompt whose cells were there, until that is told."""
    chunk_end: int = 0
    """Of the chunk that was begun last."""
    since: int = 0
    """How many steps there were when it got its sequence."""
    costs: int = 0
    """What had to be computed for it then, in tokens of an answer."""
    waits_since: int = 0
    """How many steps there were when it had one last, and some that its turn counts for."""
    rows_before: int = 0
    """Rows of other prompts that were computed while its own waited."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    behind: Running | None = None
    """Computes the beginning of its prompt; its own ``sequence`` has nothing of it yet."""
    shared: int = 0
    """Tokens of that beginning."""
    is_foreign: bool = False
    """Chunks of its prompt may have ended elsewhere than this ring's do, in the ring that computed them."""
    ending: LogitsRow | None = None
    """Its prompt was there whole, and its first token is to be drawn from this."""
    mirostat_mu: float | None = None
    """Of its sampler, behind the token that was drawn last."""
    held_back_s: float | None = None
    """How long the step took that it has its next token from, which is not drawn yet; None: none waits for that."""
    speculation: Speculation | None = None
    """What is computed ahead of its tokens; its rows are in ``sequence`` behind those of what is known."""

    @property
    def there(self) -> int:
        """Cells of its tokens, those that it will copy among them."""
        return self.sequence.cells if self.behind is None else self.shared

    @property
    def num_sampled(self) -> int:
        """Tokens that were drawn for it since it has its sequence."""
        return len(self.sampled) - len(self.generate.sampled)

    @property
    def certain(self) -> int:
        """Cells of its tokens, without those of drafts."""
        return min(self.sequence.cells, self.known)

    @property
    def known(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.generate.prompt) + len(self.sampled)

    @property
    def has_step(self) -> bool:
        """Whether there is something to compute without another token."""
        return self.behind is None and self.held_back_s is None and self.sequence.cells < self.known

    @property
    def is_decoding(self) -> bool:
        """Whether its prompt is in the ring."""
        return self.behind is None and self.sequence.cells >= len(self.generate.prompt)

    def goes_on(self, before: Running) -> None:
        """It is the generation that ran as ``before``."""
        self.started_s, self.first_token_s = before.started_s, before.first_token_s
        if self.speculation is not None and before.speculation is not None:
            self.speculation.drafted = before.speculation.drafted
            self.speculation.accepted = before.speculation.accepted

    def tokens(self, first: int, last: int) -> list[int]:
        """Those at positions ``first <= p < last``, all of prompt or all of the answer."""
        begin = len(self.generate.prompt)
        return self.generate.prompt[first:last] if first < begin else self.sampled[first - begin : last - begin]


class Slots:
    """The ``sequences`` of a ring, each with a context of ``context`` tokens.

    The cells of every ``keep_rows`` rows of an answer are kept, and those of prompts; None: nothing is, and nothing loaded.
    So many ``states`` are kept, to which alone sequences go back; with 0 they do anywhere. So many more of
    them are kept in front of drafts that are ``ahead``. Where cells do not go on without
    a state, it is kept with those of prompts, and behind every ``state_rows`` rows of an answer; None: they do.
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
        """Numbers of states that are free."""
        self._checkpoints = Checkpoints(states)
        self._minimum = context // COPIED_CELLS
        self._chunking = chunking
        self._keep_rows, self._state_rows = keep_rows, state_rows
        self._keeping = Keeping()
        self.sequences = [KvSequence(number) for number in range(count)]
        self._free = list(self.sequences)
        self._first: list[KvOp] = []
        self._back: list[KvOp] = []
        """What takes drafts back from states, before anything is kept or copied."""

    @property
    def keeps(self) -> bool:
        """Whether there is something that the next step is to keep."""
        return self._keeping.is_waiting

    def take_first(self, step: int) -> list[KvOp]:
        """What ``step``, the next one, does first, whosever it is: cells that are kept or copied may be gone after it."""
        back, self._back = self._back, []
        copies, self._first = self._first, []
        return [*back, *self._keeping.hand_out(step), *copies]

    def first(self, *ops: KvOp) -> None:
        """Have the next step do ``ops`` first, whosever it is."""
        self._first += ops

    @property
    def have_states(self) -> bool:
        """Whether layers have one, which cannot be cut anywhere."""
        return self._checkpoints.are_needed

    def take_back(self, sequence: KvSequence, cells: int) -> int:
        """What ``sequence`` has behind so many ``cells`` is forgotten: of a state now, while that can be. How many it has
        then: the last rows of a step are taken back, those of an earlier one with all rows of that.
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
        """Whether a draft in a step of its own can be taken back."""
        return bool(self._ahead) or not self.have_states

    def keep_ahead(self, sequence: KvSequence, cells: int) -> list[KvOp]:
        """What a step does before rows of drafts that it has behind so many ``cells`` of ``sequence``."""
        if not self.have_states:
            return []
        sequence.ahead[cells] = number = self._ahead.pop()
        return [StateKeep(sequence.number, number, cells)]

    def settle(self, sequence: KvSequence, known: int | None = None, *, inside: bool = False) -> None:
        """No draft of ``sequence`` before its ``known`` cells is taken back any more (None: none is); but ``inside`` a step
        whose first rows are known others may be."""
        if inside and known is not None:
            known = max((end for end in sequence.ahead if end < known), default=known)
        for end in [end for end in sequence.ahead if known is None or end < known]:
            self._ahead.append(sequence.ahead.pop(end))

    def back(self, step: int) -> None:
        """``step`` was in all windows."""
        self._keeping.back(step)

    def news(self) -> list[KvKept | KvForgotten]:
        """What is kept, and what nothing needs any more, since this was asked last."""
        return self._keeping.news(each.chain for each in self.sequences) if self._keep_rows is not None else []

    def lease(self, generate: Generate) -> None:
        """The blocks of ``generate`` are held and needed until it is over, whether it runs or waits."""
        if self._keep_rows is not None:
            self._keeping.lease(generate)

    def end_lease(self, generate: Generate) -> None:
        """``generate`` is over."""
        if self._keep_rows is not None:
            self._keeping.end_lease(generate)

    def begin(self, generate: Generate, now: float, others: Collection[Running]) -> Running:
        """``generate`` in a sequence of its own, beside those that run."""
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
        """Its prompt ends with a row of these ``logits``."""
        running.sequence.ending = logits
        known = sorted((each for each in self.sequences if each.ending is not None), key=lambda each: each.used)
        for each in known[:-MAX_ENDINGS]:
            each.ending = None

    def release(self, running: Running) -> None:
        """It is over; what its sequence has of its prompt stays."""
        self._free.append(running.sequence)
        self._keeping.cut(running.sequence.chain, running.sequence.computed.ends)
        self.end_lease(running.generate)

    def kept(self, running: Running) -> list[KvBlock]:
        """The blocks of its cells that every device holds."""
        chain, generate = running.sequence.chain, running.generate
        is_its_own = running.behind is None and chain.root and chain.request == generate.request
        return chain.blocks[: chain.reported] if is_its_own else list(generate.blocks)

    def keep(self, running: Running) -> None:
        """Have kept what is complete of its blocks. Its cells are all in the log."""
        sequence, chain = running.sequence, running.sequence.chain
        if self._keep_rows is None or running.behind is not None or not chain.root:
            return
        certain = min([running.certain, *sequence.ahead])  # it may go back there
        while (ends := self._ends(running)) and ends[-1] <= certain:
            self._keeping.add(chain, sequence.number, running.tokens(chain.end, ends[-1]), ends)
        if self._state_rows is not None and chain.end >= self._state_end(running) + self._state_rows:
            self._add_state(running)

    def keep_certain(self, running: Iterable[Running]) -> None:
        """Have the state kept of those that are where it is to be: with drafts in a step they are there once it is back.

        Not while cells of somebody are still to come.
        """
        if self._state_rows is not None and not self._first:
            for each in running:
                self.keep(each)

    def _state_end(self, running: Running) -> int:
        """Where the last state of its chain is; not before its prompt ends."""
        ends = (each.end for each in reversed(running.sequence.chain.blocks) if each.is_state)
        return max(len(running.generate.prompt), next(ends, 0))

    def _add_state(self, running: Running) -> None:
        """Have its state kept with its cells, if it has just these: it is past none that are to be forgotten."""
        sequence, chain = running.sequence, running.sequence.chain
        is_there = chain.end == sequence.cells == running.certain and not sequence.ops
        if running.behind is None and chain.root and is_there:
            self._keeping.add_state(chain, sequence.number)

    def keep_state(self, running: Running, step: int) -> None:
        """``step`` has a chunk of its prompt, up to its last cell: its state is kept in front of the next one, if it is."""
        sequence, prompt = running.sequence, running.generate.prompt
        if not self._checkpoints.is_place(sequence.number, running.chunking, prompt, sequence.cells):
            return
        self._first += self._checkpoints.keep(
            sequence.number, sequence.cells, step, is_whole=sequence.cells == len(prompt)
        )
        if self._keep_rows is not None and self._state_rows is not None:
            self._add_state(running)

    def keep_rest(self, running: Running) -> None:
        """Have kept the rows of its answer that are in no block, as a shorter one."""
        sequence, chain = running.sequence, running.sequence.chain
        rows = range(chain.end + 1, running.certain + 1)
        is_known = running.is_decoding and chain.end >= max(len(running.generate.prompt), running.chunk_end)
        if self._keep_rows is not None and chain.root and is_known and rows:
            self._keeping.add(chain, sequence.number, running.tokens(chain.end, running.certain), rows)
        if self._keep_rows is not None and self._state_rows is not None:
            self._add_state(running)

    def _ends(self, running: Running) -> Sequence[int]:
        """The ends of the steps that compute its next block; none where these are not known yet."""
        first = running.sequence.chain.end
        if first < len(running.generate.prompt):
            return [end for end in running.sequence.computed.ends if end > first][:1]
        if first < running.chunk_end:
            return [running.chunk_end]
        assert self._keep_rows is not None
        return range(first + 1, first + self._keep_rows + 1)

    def _place(self, running: Running, others: Collection[Running]) -> None:
        """Give it a sequence, with those cells that it would compute the same way; the others are forgotten.

        Where one of the ``others`` has more of its prompt, or will have it, it waits for that.
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
        """It has its first ``kept`` cells. A state is put back with the next step: others may take its place behind that."""
        if self._checkpoints.are_needed and kept:
            self._first.append(self._checkpoints.restore(sequence.number, kept, sequence.used))
            sequence.ops = []
        else:
            sequence.ops = [KvRemove(sequence.number, kept, -1)] if sequence.used or sequence.ops else []
        self._checkpoints.cut(sequence.number, kept)

    def _load(self, running: Running, loaded: Usable) -> None:
        """Fill its sequence with what is kept. With the next step, since who waits for this prompt may copy it then."""
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
        """Its sequence has the first ``cells`` of that of ``source``."""
        root = running.generate.root if self._keep_rows is not None else ""
        if root or running.sequence.chain.root:
            blocks = source.before(cells, root) if root else []
            generate = running.generate
            if self._loses_cells and cells != (blocks[-1].end if blocks else 0):
                generate, blocks = msgspec.structs.replace(generate, root=""), []  # those of before are gone
            self._keeping.begin(running.sequence.chain, generate, blocks, reported=False)

    @property
    def _loses_cells(self) -> bool:
        """Whether a sequence that goes back has no cells of before that could be kept: those of small windows."""
        return self._keep_rows is not None and self._checkpoints.are_needed and self._state_rows is None

    def _leader(self, running: Running, others: Collection[Running]) -> tuple[Running | None, int]:
        """The one of the ``others`` whose prompt has most in common with that of ``running``, and how much."""
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
        """How many of the first ``cells`` of ``source`` can be copied: where it is past them, as many as a state is kept of.

        Where it is not, it will be there exactly: a chunk ends there, and what waits is looked at before each step.
        """
        is_past = self._checkpoints.are_needed and source.cells > cells
        return self._checkpoints.last(source.number, cells) if is_past else cells

    def go_on(self, running: Mapping[int, Running], steps: int) -> None:
        """Those that wait for another one's prompt go on once enough of it is in the log, or will not be."""
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
        """Take over, behind so many ``steps``, what it shares with the one that it waited for."""
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
