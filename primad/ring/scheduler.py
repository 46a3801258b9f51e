"""Decides what each step computes: whose prompt rows, whose next token, which KV cells are forgotten.

``schedule -> the ring computes -> commit``. The scheduler sees no ring: it hands out ``PlannedStep`` steps in order (the
step log) and takes back what was sampled for each. Time is passed in.

Each generation has a KV sequence of its own, and a step computes a chunk of one prompt, or the next tokens of generations
that are computed together (``grouping.py``). As many run ``at_once`` as may; of those that wait the owner who has the
fewest running is next, or had a step longest ago, and of theirs the first one of the lowest priority, behind what was begun
before. Of those that run it is the owner who waited longest for a step, and of theirs the one that did: so the devices of a
ring compute for different ones, neither a long prompt nor a long answer keeps the others from going on, and who asks for
more at once has no larger share.

An owner who waits while others have all sequences gets one: of whoever has several the newest generation is set back, and
where each has one the generation that had its sequence longest, once it has drawn as many tokens as it costs to come back.
What is set back waits and goes on later as after the end of an epoch.

Prompts are fed in chunks or pieces of them (``chunks.py``). They follow each other into the ring without waiting (up to
``depth`` in flight), since only the last one's output is needed; decode steps wait for the tokens before them. Behind each
the others that write have their turn, for it takes as long as a round of theirs. What of a prompt is there already is not
computed again (``slots.py``); generations with the same whole prompt, as the choices of one request, have their first
tokens drawn from the same logits.

A generation that an earlier epoch began comes with the tokens it has sampled already. They are fed one by one, as they were
fed then: llama.cpp computes several rows of a sequence in another order than single rows, and its sums would differ in the
last bits. Where it is known that they do not, a step has some (``Batching.replays``), and where they may, a whole chunk
(``Generate.replays_rows``). Like chunks they do not wait for each other. What of a generation is kept on every device
(``keeping.py``) is not computed again at all.

Where nobody has a row for it a place of the ring is given to a draft (``drafting/``): a token that may come next is computed
in a step of its own behind its generation's last row, or some with that row in one step. If another token is drawn before
it, its cells are forgotten with the generation's next row, and the steps that are for it alone are void: nothing is drawn
from them, and devices that have not computed them need not.

A generation whose next token cannot be drawn yet, since its grammar's mask is late, is held back: it has no row until
then, and the others go on without it. Its drafts are taken back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import msgspec

from primad.engine.protocol import LogitsRow
from primad.errors import RingError
from primad.ring.chunks import Chunking
from primad.ring.grouping import Batching, Candidate
from primad.ring.messages import (
    Cancel,
    Finished,
    Generate,
    GenerationEvent,
    KvCopy,
    KvForgotten,
    KvKept,
    KvOp,
    KvRemove,
    PromptProgress,
    Sampled,
)
from primad.ring.slots import KvSequence, Running, Slots
from primad.ring.speculation.drafter import Drafting, Guess
from primad.ring.speculation.lookup import PromptLookup
from primad.ring.speculation.pace import Losses, Tally
from primad.ring.speculation.speculation import BeginsDrafter, Speculation
from primad.ring.speculation.tree import NO_TREE, TreeNode, TreeRows, child, depth, placed


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One step before it is computed: row ``i`` is ``tokens[i]`` at ``positions[i]`` of ``sequences[i]``.

    ``requests`` are the generations that it is for, ``draws`` the rows that want an output, with those that do. Rows of a
    tree of drafts may be in several sequences, or in another one, which ``shared`` names.
    """

    step: int
    requests: list[int]
    tokens: list[int]
    positions: list[int]
    sequences: list[int]
    draws: dict[int, list[Generate]]
    ops: list[KvOp]
    shared: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The token that was sampled for a step: ``ends`` when it ends the generation; ``top`` as in ``Sampled``.

    ``error``: none could be sampled, and the generation ends with it, for ``reason`` as in ``Finished``. ``mirostat_mu``
    as in ``Sampled``. ``more`` were sampled behind it, each from the row of a draft that held.
    """

    token: int
    ends: bool
    error: str | None = None
    reason: str = "refused"
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    mirostat_mu: float | None = None
    more: tuple[Draw, ...] = ()


MOST_DRAFTS: Final = 64
"""Steps of drafts on their way, those that became void among them."""
LEAST_TURN: Final = 256
"""So many tokens are drawn for the only generation of an owner before it is set back for another's."""
PROMPT_SHARE: Final = 16
"""As many tokens of a prompt are computed in the time of one of an answer, where they are few."""
MOST_OWNERS: Final = 1024
"""Whose latest step is known, of those who asked last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """A step on its way: whose rows it has, with how many tokens each will have behind it. ``decodes``: no prompt's.

    ``tree`` has the drafts among its rows, behind the first of its only generation; one that ``is_draft`` has no other row.
    """

    computed: dict[int, int]
    draws: dict[int, list[Generate]]
    decodes: bool
    since_s: float
    tree: TreeRows = NO_TREE
    is_draft: bool = False
    is_void: bool = False


class Scheduler:
    """The queue of generations and those that run. ``context`` is that of each of the ring's ``sequences``.

    Of prompts, and of every ``keep_rows`` rows of an answer, the cells are kept (``keeping.py``); None: of nothing.
    ``drafting`` says how drafts are computed, which a ``drafter`` makes; None: there are none.
    """

    def __init__(
        self,
        *,
        context: int,
        chunking: Chunking,
        depth: int,
        sequences: int = 1,
        at_once: int | None = None,
        batching: Batching | None = None,
        keep_rows: int | None = None,
        drafting: Drafting | None = None,
        drafter: BeginsDrafter = PromptLookup,
    ) -> None:
        self._context = context
        branches = drafting.branches if drafting is not None else 0
        assert not branches or (sequences == 1 and keep_rows is None), "branches share the cells of one sequence"
        self._pool = range(sequences, sequences + branches)
        self._drafting, self._drafter = drafting, drafter
        self._losses = Losses()
        self._void: list[int] = []
        self.tally = Tally()
        self._chunking = chunking
        self._batching = batching or Batching()
        self._depth = depth
        self._at_once = min(sequences, at_once or sequences)
        self._sequences = sequences
        self._waiting: dict[str, list[Generate]] = {}
        """By owner, who began to wait first; of each in the order in which they begin."""
        self._running: dict[int, Running] = {}
        self._set_back: dict[int, Running] = {}
        """Those that wait again, as they were."""
        self._slots = Slots(sequences, context=context, chunking=chunking, keep_rows=keep_rows)
        self._in_flight: dict[int, _InFlight] = {}
        self._begun: list[GenerationEvent] = []
        self._steps = 0
        self._owners: dict[str, int] = {}
        """Who asks, and the latest step for them, counted as for ``waits_since``; who had one last comes last."""
        self._drains = False
        self._now_s = 0.0
        self.waits_until_s: float | None = None
        """Until when there is no next step since guesses come soon."""

    @property
    def in_flight(self) -> int:
        """Steps handed out and not yet committed."""
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute, to keep or to wait for."""
        return not (self._running or self._waiting or self._in_flight or self._slots.keeps)

    @property
    def is_drained(self) -> bool:
        """Whether ``drain`` was called and every step is back."""
        return self._drains and not self._in_flight and not self._slots.keeps

    @property
    def running(self) -> int:
        """How many generations hold a sequence."""
        return len(self._running)

    @property
    def drafts_anything(self) -> bool:
        """Whether drafts are computed here."""
        return self._drafting is not None

    @property
    def is_ahead(self) -> bool:
        """Whether a draft is on its way."""
        return any(step.is_draft or step.tree.nodes for step in self._in_flight.values())

    def runs(self, request: int) -> bool:
        """Whether generation ``request`` holds a sequence."""
        return request in self._running

    def is_held_back(self, request: int) -> bool:
        """Whether generation ``request`` has no step until its next token is drawn with ``draw_held_back``."""
        running = self._running.get(request)
        return running is not None and running.held_back_s is not None

    def ends_prompt(self, request: int) -> bool:
        """Whether generation ``request`` waits for its first token."""
        running = self._running.get(request)
        return running is not None and not running.sampled

    def keep_ending(self, request: int, logits: LogitsRow) -> None:
        """The first token of ``request`` is drawn from ``logits``, and so is that of its prompt when that comes again."""
        self._slots.keep_ending(self._running[request], logits)

    def take_found(self) -> list[tuple[Generate, LogitsRow]]:
        """Those whose prompt was there whole, since this was asked last, with what their first token is drawn from: with
        ``draw_held_back``."""
        found = []
        for running in self._running.values():
            if running.ending is not None:
                found.append((running.generate, running.ending))
                running.ending, running.held_back_s = None, 0.0
        return found

    def submit(self, generate: Generate) -> Finished | None:
        """Queue a generation; its end, when the tokens of earlier epochs are all that it may have.

        Its prompt has at least one token and fits the context with one token to spare. Raises ``RingError`` after
        ``drain``.
        """
        assert 0 < len(generate.prompt) < self._context
        assert generate.max_tokens > 0
        assert all(each.before == before.key for before, each in pairwise(generate.blocks))
        if self._drains:
            raise RingError(f"request {generate.request} was given to a ring that drains; give it to the next one")
        self._slots.lease(generate)
        if self._is_full(generate, len(generate.sampled)):
            self._slots.end_lease(generate)
            return _finished(generate, len(generate.sampled), "length", prompt_s=0.0, decode_s=0.0)
        self._wait(generate)
        return None

    def _wait(self, generate: Generate) -> None:
        """It waits among those of its owner, behind those that were begun and those of its priority."""
        waiting = self._waiting.setdefault(generate.owner, [])
        waiting.append(generate)
        waiting.sort(key=self._place)

    def _place(self, generate: Generate) -> tuple[float, int]:
        if generate.request in self._set_back:
            return -math.inf, generate.request
        return (-math.inf, 0) if generate.sampled else (generate.priority, 0)

    def drain(self) -> None:
        """Hand out no row from now on; one more step keeps those of answers that are in no block."""
        self._drains = True
        for running in self._running.values():
            self._slots.keep_rest(running)

    def cancel(self, cancel: Cancel) -> None:
        """Forget a generation, wherever it is; what is in flight for it is dropped when it comes back."""
        if cancel.request in self._running:
            self._release(cancel.request)
        for waiting in [each for of in self._waiting.values() for each in of if each.request == cancel.request]:
            self._waits_no_longer(waiting)
            self._set_back.pop(cancel.request, None)
            self._slots.end_lease(waiting)

    def _waits_no_longer(self, generate: Generate) -> None:
        waiting = self._waiting[generate.owner]
        waiting.remove(generate)
        if not waiting:
            del self._waiting[generate.owner]

    def next_step(self, now: float) -> PlannedStep | None:
        """The next step of the log, or None when the ring must answer first or there is nothing to do."""
        self._now_s, self.waits_until_s = now, None
        if self._drains:
            return self._without_rows()
        if sum(not step.is_draft for step in self._in_flight.values()) >= self._depth:
            return None
        leaving = self._share(now) if self._waiting else None
        self._slots.go_on(self._running, self._steps)
        ready = sorted(
            (running for running in self._running.values() if running.has_step and running is not leaving),
            key=lambda each: (self._owners.get(each.generate.owner, 0), each.waits_since),
        )
        for running in ready:
            if not running.is_decoding:
                return self._chunk(running)
            of_earlier_epoch = running.sequence.cells < running.known - 1
            if of_earlier_epoch and (self._batching.replays > 1 or not running.generate.replays_rows):
                return self._replay(running)
            if of_earlier_epoch or self._may_decode():
                if self._waits(running):
                    return None
                return self._decode([each for each in ready if each.is_decoding], running)
        if not ready and (step := self._draft()) is not None:
            return step
        return None if self._in_flight else self._without_rows()

    def _share(self, now: float) -> Running | None:
        """Begin what may begin; who is to give its sequence to another owner as soon as nothing is under way for it."""
        while True:
            held = Counter(running.generate.owner for running in self._running.values())
            owner = min(self._waiting, key=lambda each: (held[each], self._owners.get(each, 0)))
            if len(self._running) < (self._at_once if held[owner] else self._sequences):
                generate = self._waiting[owner][0]
                self._waits_no_longer(generate)
                self._begin(generate, now)
                if not self._waiting:
                    return None
                continue
            leaving = None if held[owner] else self._leaving(held)
            if leaving is None:
                return None
            request = leaving.generate.request
            if any(request in step.computed and not step.is_draft for step in self._in_flight.values()):
                return leaving
            self._let_wait(leaving)

    def _leaving(self, held: Mapping[str, int]) -> Running | None:
        """Whose sequence an owner gets who has none; ``held`` says how many each has."""
        several = [each for each in self._running.values() if held[each.generate.owner] > 1]
        if several:
            return max(several, key=lambda each: (held[each.generate.owner], each.generate.request))
        had_a_turn = [each for each in self._running.values() if each.drawn >= max(LEAST_TURN, each.costs)]
        return min(had_a_turn, key=lambda each: each.since, default=None)

    def _let_wait(self, running: Running) -> None:
        """It waits again; nothing is under way for it but drafts."""
        before = running.generate
        generate = msgspec.structs.replace(
            before,
            sampled=list(running.sampled),
            sampling=msgspec.structs.replace(before.sampling, mirostat_mu=running.mirostat_mu),
            blocks=self._slots.kept(running),
            tells_begin=False,
        )
        self._slots.lease(generate)
        self._release(before.request)
        self._set_back[before.request] = running
        self._wait(generate)

    def refill(self, now: float) -> PlannedStep | None:
        """A draft, if nobody waits for a step: it keeps the ring full while the head computes what came back."""
        if self._drains or self._waiting or any(running.has_step for running in self._running.values()):
            return None
        self._now_s = now
        return self._draft()

    def _without_rows(self) -> PlannedStep | None:
        """A step that only keeps what is to be kept."""
        if not self._slots.keeps:
            return None
        step = PlannedStep(step=self._steps, requests=[], tokens=[], positions=[], sequences=[], draws={}, ops=[])
        return self._hand_out(step, [], decodes=False)

    def take_begun(self) -> list[GenerationEvent]:
        """What is to be told of those that hold a sequence since it was asked last."""
        begun, self._begun = self._begun, []
        return begun

    def _may_decode(self) -> bool:
        """Whether a step of next tokens may be handed out, or is worth waiting for others to come with it."""
        under_way = sum(step.decodes and bool(step.draws) and not step.is_draft for step in self._in_flight.values())
        return under_way < self._batching.most_steps(self._decoding)

    def _draft(self) -> PlannedStep | None:
        """A step for the surest draft, where no row of anybody waits for its place in the ring."""
        steps = self._in_flight.values()
        if self._drafting is None or not all(step.decodes for step in steps):
            return None
        drafts = sum(step.is_draft for step in steps)
        if sum(bool(step.draws) for step in steps) >= self._drafting.room or drafts >= MOST_DRAFTS:
            return None
        best: tuple[float, Running, Guess] | None = None
        for running in self._running.values():
            guess = self._guess(running)
            if guess is not None and (best is None or guess.sure > best[0]):
                best = guess.sure, running, guess
        return self._ahead(best[1], best[2]) if best is not None else None

    def _guess(self, running: Running) -> Guess | None:
        """What may follow all that is on its way for it, if the token behind that is wanted."""
        speculation = running.speculation
        if speculation is None or not running.sampled or not running.is_decoding or running.has_step:
            return None
        if running.held_back_s is not None:
            return None
        return speculation.next() if self._drafts_wanted(running) else None

    def _drafts_wanted(self, running: Running) -> int:
        """How many more drafts of it would have a token behind them that it may have."""
        ahead = running.sequence.cells - running.certain
        room = min(running.generate.max_tokens, self._context - len(running.generate.prompt)) - len(running.sampled)
        return max(0, room - ahead - 1)

    def _ahead(self, running: Running, guess: Guess) -> PlannedStep:
        """A step with the row of ``guess`` alone."""
        sequence, generate = running.sequence, running.generate
        step = PlannedStep(
            step=self._steps,
            requests=[generate.request],
            tokens=[guess.token],
            positions=[sequence.cells],
            sequences=[sequence.number],
            draws={0: [generate]},
            ops=sequence.take_ops(),
        )
        sequence.cells += 1
        assert running.speculation is not None
        running.speculation.handed_out([guess], step.step)
        self.tally.drafted += 1
        return self._hand_out(step, [running], decodes=True, is_draft=True)

    def _take_back(self, running: Running, cells: int) -> None:
        """Nothing that is ahead of it counts: what is behind so many ``cells`` is forgotten with its next row."""
        speculation, sequence = running.speculation, running.sequence
        if speculation is None or not speculation.tokens:
            return
        for number in sorted(speculation.steps):
            step = self._in_flight.get(number)
            if step is not None and step.is_draft:
                self._in_flight[number] = replace(step, draws={}, is_void=True)
                self._void.append(number)
        speculation.take_back()
        sequence.cells = cells
        sequence.ops.append(KvRemove(sequence.number, cells, -1))

    def take_void(self) -> list[int]:
        """The steps that became void since this was asked last; none where the ring does not skip them."""
        void, self._void = self._void, []
        return void if self._drafting is not None and self._drafting.skips else []

    def is_void(self, step: int) -> bool:
        """Whether nothing that step ``step`` computes is of use."""
        return self._in_flight[step].is_void

    def skips(self, step: int) -> bool:
        """Whether step ``step`` is not computed any further."""
        return self._drafting is not None and self._drafting.skips and self.is_void(step)

    @property
    def _decoding(self) -> int:
        return sum(running.is_decoding for running in self._running.values())

    def _chunk(self, running: Running) -> PlannedStep:
        """The next chunk of its prompt, or the next piece of it."""
        prompt, sequence = running.generate.prompt, running.sequence
        first = sequence.cells
        if first >= running.chunk_end:
            running.chunk_end = self._chunking.end(prompt, first)
        last = self._chunking.piece(first, running.chunk_end, len(prompt), self._decoding)
        if last == running.chunk_end:
            sequence.computed.ends.append(last)
        sequence.cells = last
        step = PlannedStep(
            step=self._steps,
            requests=[running.generate.request],
            tokens=prompt[first:last],
            positions=list(range(first, last)),
            sequences=[sequence.number] * (last - first),
            draws={} if running.has_step else {last - first - 1: [running.generate]},
            ops=sequence.take_ops(),
        )
        handed_out = self._hand_out(step, [running], decodes=False)
        if running.is_decoding:
            self._join(running, step)
        return handed_out

    def _join(self, leader: Running, step: PlannedStep) -> None:
        """Those with the prompt that ``step`` ends go on behind it; their first tokens are drawn from its last row."""
        for running in self._running.values():
            if running.behind is leader:
                self._slots.copy(running, self._steps)
                self._in_flight[step.step].computed[running.generate.request] = running.sequence.cells
                if not running.has_step:
                    step.draws.setdefault(len(step.tokens) - 1, []).append(running.generate)

    def _replay(self, running: Running) -> PlannedStep:
        """Tokens that an earlier epoch sampled for it, but for the last one, behind which another one is drawn."""
        sequence, known = running.sequence, running.known - 1
        first = sequence.cells
        if running.generate.replays_rows:
            last = self._batching.replayed(first, known)
        else:
            if first >= running.chunk_end:
                running.chunk_end = min(first + self._chunking.rows, known)
            last = self._chunking.piece(first, running.chunk_end, known, self._decoding - 1)
        sequence.cells = last
        step = PlannedStep(
            step=self._steps,
            requests=[running.generate.request],
            tokens=running.tokens(first, last),
            positions=list(range(first, last)),
            sequences=[sequence.number] * (last - first),
            draws={},
            ops=sequence.take_ops(),
        )
        return self._hand_out(step, [running], decodes=True)

    def _decode(self, ready: Sequence[Running], first: Running) -> PlannedStep:
        """The next token of ``first`` and of those among ``ready`` that come with it."""
        by_number = {each.sequence.number: each for each in ready}
        candidates = [
            Candidate(sequence=each.sequence.number, owner=each.generate.owner, cells=each.sequence.cells)
            for each in (first, *(other for other in ready if other is not first))
        ]
        step = PlannedStep(step=self._steps, requests=[], tokens=[], positions=[], sequences=[], draws={}, ops=[])
        chosen: list[Running] = []
        numbers = self._batching.together(candidates, self._decoding)
        for number in numbers:
            running, sequence = by_number.get(number), self._slots.sequences[number]
            if running is None:
                self._bridge(step, sequence)
                continue
            step.ops.extend(sequence.take_ops())
            step.requests.append(running.generate.request)
            step.tokens.extend(running.tokens(sequence.cells, sequence.cells + 1))
            step.positions.append(sequence.cells)
            step.sequences.append(number)
            sequence.cells += 1
            if not running.has_step:
                step.draws[len(step.tokens) - 1] = [running.generate]
            chosen.append(running)
        tree = self._drafts_with(step, first) if len(numbers) == 1 else NO_TREE
        return self._hand_out(step, chosen, decodes=True, tree=tree)

    def _drafts_with(self, step: PlannedStep, running: Running) -> TreeRows:
        """Drafts of ``running`` whose rows ``step``, which has its next token, computes as well."""
        speculation, sequence = running.speculation, running.sequence
        if speculation is None or not step.draws:
            return NO_TREE
        nodes, text = speculation.together(self._most_with(running, sequence.cells - 1)), sequence.cells
        tree = placed(nodes, self._pool)
        step.ops.extend(KvCopy(sequence.number, number, text - 1) for number, _ in tree.ends)
        if tree.ends:
            step.shared[0] = tree.sequences(-1, sequence.number)
        for node, each in enumerate(nodes):
            row = len(step.tokens)
            step.tokens.append(each.guess.token)
            step.positions.append(text + depth(nodes, node) - 1)
            step.sequences.append(sequence.number)
            step.draws[row] = [running.generate]
            if tree.ends:
                step.shared[row] = tree.sequences(node, sequence.number)
        sequence.cells = text + len(tree.main)
        if nodes:
            speculation.handed_out_tree(nodes)
        self.tally.drafted += len(nodes)
        return tree

    def _settle(self, running: Running | None, tree: TreeRows, draw: Draw | None) -> None:
        """A step with ``tree`` is back: of its cells those of the path that held stay, in its text's own sequence.

        Behind the token that was drawn last nothing is: had its own row been drawn from, there would be another one.
        """
        if not tree.nodes:
            return
        removes = [KvRemove(number, 0, -1) for number, _ in tree.ends]
        if running is None:
            self._slots.first(*removes)
            return
        if running.speculation is not None:
            running.speculation.take_back()
        at = -1
        for token in [each.token for each in (draw, *draw.more)][:-1] if draw is not None else []:
            found = child(tree.nodes, at, token)
            if found is None:
                break
            at = found
        sequence, holder = running.sequence, tree.holder(at)
        text = sequence.cells - len(tree.main)
        cells = text + depth(tree.nodes, at)
        if holder is not None:
            self._slots.first(KvCopy(holder, sequence.number, cells))
        elif cells < sequence.cells:
            sequence.ops.append(KvRemove(sequence.number, cells, -1))
        sequence.cells = cells
        self._slots.first(*removes)

    def _most_with(self, running: Running, cells: int) -> int:
        """How many drafts of ``running`` a step may have with its next token, which is behind so many ``cells``."""
        if self._drafting is None or self._waiting or len(self._running) > 1:
            return 0
        room = min(running.generate.max_tokens, self._context - len(running.generate.prompt)) - len(running.sampled)
        rows = min(self._batching.in_one_step(cells, self._drafting.rows), self._context - cells)
        return max(0, min(rows, room) - 1)

    def _waits(self, running: Running) -> bool:
        """Whether its next step waits for guesses."""
        speculation, cells = running.speculation, running.sequence.cells
        if speculation is None or self._in_flight or cells != running.known - 1:
            return False
        self.waits_until_s = speculation.waits(self._most_with(running, cells), self._now_s)
        return self.waits_until_s is not None

    def _bridge(self, step: PlannedStep, sequence: KvSequence) -> None:
        """A row of nobody behind the cells of ``sequence``, forgotten with the next step in which it has a row.

        Drafts there may be skipped, and would leave a hole before it.
        """
        for running in self._running.values():
            if running.sequence is sequence:
                self._take_back(running, running.certain)
        step.ops.extend(sequence.take_ops())
        step.tokens.append(0)
        step.positions.append(sequence.cells)
        step.sequences.append(sequence.number)
        sequence.ops.append(KvRemove(sequence.number, sequence.cells, -1))

    def _hand_out(
        self,
        step: PlannedStep,
        of: Sequence[Running],
        *,
        decodes: bool,
        tree: TreeRows = NO_TREE,
        is_draft: bool = False,
    ) -> PlannedStep:
        step.ops[:0] = self._slots.take_first(step.step)
        for running in self._running.values():
            self._slots.keep(running)
        self._in_flight[step.step] = _InFlight(
            computed={each.generate.request: each.sequence.cells for each in of},
            draws=step.draws,
            decodes=decodes,
            since_s=self._now_s,
            tree=tree,
            is_draft=is_draft,
        )
        self._steps += 1
        more = max(0, math.ceil(self._decoding / self._batching.rows) - 1)
        for running in of:
            running.sequence.used = self._steps
            if is_draft:
                continue  # it takes nobody's turn
            running.waits_since = self._steps + (0 if running.is_decoding else more)
            self._owners.pop(running.generate.owner, None)
            self._owners[running.generate.owner] = running.waits_since
        if len(self._owners) > MOST_OWNERS:
            del self._owners[next(iter(self._owners))]
        return step

    def _begin(self, generate: Generate, now: float) -> None:
        running = self._slots.begin(generate, now, self._running.values())
        running.since = self._steps
        again = len(generate.prompt) - running.there
        running.costs = max(0, again) // PROMPT_SHARE + len(generate.sampled) + min(0, again)
        if self._drafting is not None and generate.speculates:
            running.speculation = Speculation(
                self._drafter(generate.prompt), self._drafting, generate.sampled, self._losses
            )
        if (before := self._set_back.pop(generate.request, None)) is not None:
            running.goes_on(before)
        self._running[generate.request] = running
        if generate.tells_begin:
            self._begun.append(PromptProgress(request=generate.request, tokens=0))

    def _release(self, request: int) -> None:
        self._take_back(self._running[request], self._running[request].certain)
        self._slots.release(self._running.pop(request))

    def commit(self, step: int, drawn: Mapping[int, Draw | None], now: float) -> list[GenerationEvent]:
        """Take back step ``step`` with what was ``drawn`` for its requests, as far as somebody wanted it still.

        None: it is drawn later, and the generation held back until then.
        """
        back = self._in_flight.pop(step)
        self._slots.back(step)
        told: list[GenerationEvent] = []
        settled = False
        for request, computed in back.computed.items():
            running = self._running.get(request)
            if running is None:
                continue
            told += _reused(running)
            if request in drawn:
                draw, lap_s = drawn[request], now - back.since_s
                if draw is None:
                    running.held_back_s = lap_s
                    self._take_back(running, running.certain)
                else:
                    told += self._drawn(running, draw, now, lap_s)
                self._settle(running, back.tree, draw)
                settled = True
            elif computed < len(running.generate.prompt):
                told.append(PromptProgress(request=request, tokens=computed))
        if not settled:
            self._settle(None, back.tree, None)
        return told

    def fail(self, step: int, error: str, now: float) -> list[GenerationEvent]:
        """End the generations that step ``step`` is for with ``error``. The ring ends with them."""
        found = [self._running[request] for request in self._in_flight[step].computed if request in self._running]
        return [self._finish(running, "error", now, error=error) for running in found]

    def draw_held_back(self, request: int, draw: Draw, now: float) -> list[GenerationEvent]:
        """The next token of ``request`` was drawn, which was held back for it."""
        running = self._running[request]
        lap_s, running.held_back_s = running.held_back_s, None
        assert lap_s is not None
        return [*_reused(running), *self._drawn(running, draw, now, lap_s)]

    def _drawn(self, running: Running, draw: Draw, now: float, lap_s: float) -> list[GenerationEvent]:
        told: list[GenerationEvent] = []
        for each in (draw, *draw.more):
            if running.last_token_s is not None:
                self.tally.count(lap_s, now - running.last_token_s)
            running.last_token_s = now
            told += self._one_drawn(running, each, now)
        return told

    def _one_drawn(self, running: Running, draw: Draw, now: float) -> list[GenerationEvent]:
        request = running.generate.request
        if running.first_token_s is None:
            running.first_token_s = now
        if draw.error is not None:
            return [self._finish(running, draw.reason, now, error=draw.error)]
        if draw.ends:
            return [self._finish(running, "stop", now)]
        running.sampled.append(draw.token)
        running.mirostat_mu = draw.mirostat_mu
        if running.speculation is not None:
            accepted = running.speculation.accepted
            if not running.speculation.took(draw.token, now):
                self._take_back(running, running.known - 1)
            self.tally.accepted += running.speculation.accepted - accepted
        sampled = Sampled(
            request=request, token=draw.token, logprob=draw.logprob, top=draw.top, mirostat_mu=draw.mirostat_mu
        )
        if self._is_full(running.generate, len(running.sampled)):
            return [sampled, self._finish(running, "length", now)]
        return [sampled]

    def kv_news(self) -> list[KvKept | KvForgotten]:
        """What is kept, and what nothing needs any more, since this was asked last."""
        return self._slots.news()

    def wants_draws(self, step: int) -> list[tuple[int, Generate]]:
        """The rows of step ``step`` from which a token is wanted still, each with the generation that wants it.

        The rows behind one for each of ``drafts`` are not among them.
        """
        found = self._in_flight[step]
        rows = list(found.draws.items())[: len(found.draws) - len(found.tree.nodes)]
        return [(row, each) for row, of in rows for each in of if each.request in self._running]

    def drafts(self, step: int) -> Sequence[TreeNode]:
        """The drafts that step ``step`` has behind its first row: from the row of one that held another token is drawn."""
        return self._in_flight[step].tree.nodes

    def _is_full(self, generate: Generate, sampled: int) -> bool:
        """Whether ``sampled`` tokens are all that ``generate`` may have."""
        return sampled >= generate.max_tokens or len(generate.prompt) + sampled >= self._context

    def _finish(self, running: Running, reason: str, now: float, *, error: str | None = None) -> Finished:
        first_token_s = running.first_token_s if running.first_token_s is not None else now
        self._release(running.generate.request)
        speculation = running.speculation
        return _finished(
            running.generate,
            len(running.sampled),
            reason,
            error=error,
            prompt_s=first_token_s - running.started_s,
            decode_s=now - first_token_s,
            drafted=speculation.drafted if speculation is not None else 0,
            accepted=speculation.accepted if speculation is not None else 0,
        )


def _reused(running: Running) -> list[GenerationEvent]:
    """What was there of its prompt, unless that was told."""
    reused, running.reused = running.reused, 0
    return [PromptProgress(request=running.generate.request, tokens=reused, reused=reused)] if reused else []


def _finished(
    generate: Generate,
    sampled: int,
    reason: str,
    *,
    prompt_s: float,
    decode_s: float,
    error: str | None = None,
    drafted: int = 0,
    accepted: int = 0,
) -> Finished:
    return Finished(
        request=generate.request,
        reason=reason,
        error=error,
        prompt_tokens=len(generate.prompt),
        completion_tokens=sampled,
        prompt_s=prompt_s,
        decode_s=decode_s,
        drafted=drafted,
        accepted=accepted,
    )
