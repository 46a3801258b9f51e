"""Draft trees do not change the text, overwrite no KV entry, and leak no sequence or KV entry."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primad.engine.protocol import Sampling
from primad.ring.messages import KvCopy, KvRemove
from primad.ring.scheduler import admission
from primad.ring.speculation.drafter import Drafting, DraftToken
from primad.ring.speculation.tree import NO_TREE, OPENS_AT, TreeNode, best_tree, child, depth, placed
from tests.core.test_speculation import (
    TOKENS,
    WILD,
    Counting,
    begun,
    bring_back,
    drafting_rings,
    knowing,
    move,
    next_step,
    prompt,
    rows_of,
    run,
    sampled,
)
from tests.fakes.drafter import Nothing
from tests.fakes.engine import VOCABULARY, FakeModel
from tests.fakes.ring import GREEDY, FakeRing, generate
from tests.fakes.timed_ring import TimedRing

COSTS = tuple(1 + 0.02 * rows for rows in range(10))
rings = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def node(token: int, parent: int) -> TreeNode:
    return TreeNode(DraftToken(token=token, sure=0.5), parent)


@st.composite
def trees(draw) -> list[TreeNode]:
    """Any tree of up to nine nodes; siblings have different tokens."""
    nodes: list[TreeNode] = []
    for count in range(draw(st.integers(1, 9))):
        parent = draw(st.integers(-1, count - 1))
        nodes.append(node(10 * (parent + 2) + sum(each.parent == parent for each in nodes), parent))
    return nodes


@given(trees())
def test_each_path_has_one_sequence_and_none_but_the_main_one_is_the_texts(nodes):
    tree = placed(nodes, range(1, 20))
    assert len({number for number, _ in tree.ends}) == len(tree.ends)
    rows: dict[int, list[tuple[int, int]]] = {}
    for at in range(-1, len(nodes)):
        assert tree.sequences(at, 0), "every row lies somewhere"
        for number in tree.sequences(at, 0):
            rows.setdefault(number, []).append((at, depth(nodes, at)))
    for path in rows.values():
        assert [deep for _, deep in path] == list(range(len(path))), "no hole, and no position twice"
        assert all(nodes[b].parent == a for (a, _), (b, _) in pairwise(path))
    for at in range(len(nodes)):
        assert (tree.holder(at) or 0) in tree.sequences(at, 0)
    before = None
    for at in range(-1, len(nodes)):  # llama.cpp requires that rows of a step share ever fewer of the sequences
        assert before is None or set(tree.sequences(at, 0)) <= before
    assert NO_TREE.sequences(-1, 0) == [0]


class Reported:
    """Drafts from a table: for each path, the candidates in order."""

    def __init__(self, table: dict[tuple[int, ...], list[tuple[int, float]]]) -> None:
        self._table = table

    def _at(self, drafts: Sequence[int]) -> list[DraftToken]:
        return [DraftToken(token=token, sure=sure) for token, sure in self._table.get(tuple(drafts), [])]

    def propose(self, drafts: Sequence[int]) -> DraftToken | None:
        return next(iter(self._at(drafts)), None)

    def others(self, drafts: Sequence[int]) -> Sequence[DraftToken]:
        return self._at(drafts)[1:]


UNSURE = Reported(
    {(): [(1, 0.4), (2, 0.35)], (1,): [(3, 0.4), (4, 0.3)], (2,): [(5, 0.9)], (1, 3): [(6, 0.3)], (2, 5): [(7, 0.5)]}
)
SURE = Reported({(1,) * deep: [(1, 0.95), (2, 0.02)] for deep in range(9)})


def tokens_of(nodes: Sequence[TreeNode]) -> list[tuple[int, int]]:
    return [(each.draft_token.token, each.parent) for each in nodes]


def test_the_next_draft_goes_to_the_likeliest_branch():
    flat = (1.0,) * 6
    assert tokens_of(best_tree(UNSURE, flat, 4, 1.1)) == [(1, -1), (2, -1), (5, 1), (3, 0), (7, 2)]
    assert tokens_of(best_tree(UNSURE, flat, 1, 1.1)) == [(1, -1), (2, -1), (5, 1), (3, 0), (7, 2)]
    assert tokens_of(best_tree(UNSURE, flat, 0, 1.1)) == [(1, -1), (3, 0), (6, 1)]


def test_where_drafts_are_sure_or_rows_expensive_the_tree_is_a_chain_or_empty():
    assert tokens_of(best_tree(SURE, (1.0,) * 5, 4, 1.1)) == [(1, -1), (1, 0), (1, 1), (1, 2)]
    assert best_tree(UNSURE, (1.0, 2.0, 3.0), 4, 1.1) == []
    assert OPENS_AT > 0.02


@pytest.mark.parametrize(
    ("costs", "draft", "rows", "looked_for"),
    [
        ((1.0, 1.2, 1.4, 1.6), 0.0, 3, 3),
        ((1.0, 1.2, 1.4, 1.6), 0.1, 3, 3),
        ((1.0, 1.2, 1.8, 2.6), 0.1, 1, 1),
        ((1.0, 1.2, 1.4, 1.6), 0.6, 0, 1),
    ],
)
def test_no_draft_is_looked_for_that_no_row_of_the_step_computes(costs, draft, rows, looked_for):
    """Each draft by the model's layers takes time; the last one pays if the one before it did."""

    class Asked(Reported):
        count = 0

        def propose(self, drafts: Sequence[int]) -> DraftToken | None:
            self.count += 1
            return super().propose(drafts)

    drafter = Asked({(1,) * deep: [(1, 0.8)] for deep in range(9)})
    assert len(best_tree(drafter, costs, 0, 1.1, draft=draft)) == rows
    assert drafter.count == looked_for


@given(trees(), st.data())
def test_a_tree_makes_no_fewer_tokens_than_the_best_chain(nodes, data):
    table: dict[tuple[int, ...], list[tuple[int, float]]] = {}
    for at in range(-1, len(nodes)):
        path, up = [], at
        while up >= 0:
            path, up = [nodes[up].draft_token.token, *path], nodes[up].parent
        children = [each.draft_token.token for each in nodes if each.parent == at]
        left = 1.0
        for token in children:
            sure = data.draw(st.floats(0.05, 1)) * left
            left -= sure
            table.setdefault(tuple(path), []).append((token, sure))
    drafter = Reported(table)

    def rate(found: list[TreeNode]) -> float:
        shares: list[float] = []
        for each in found:
            shares.append(each.draft_token.sure * (shares[each.parent] if each.parent >= 0 else 1.0))
        return (1 + sum(shares)) / COSTS[len(found)]

    tree, chain = (best_tree(drafter, COSTS, branches, 1.0) for branches in (9, 0))
    assert rate(tree) >= rate(chain) - 1e-9
    assert all(each.parent < at for at, each in enumerate(tree))
    assert len(tree) < len(COSTS)


# ---- in a ring -------------------------------------------------------------------------------------------------------


class Doubting(Counting):
    """Drafts the number after the last token, or alternatively the one after that, and continues from there."""

    sure = 0.5

    def others(self, drafts: Sequence[int]) -> Sequence[DraftToken]:
        first = (drafts[-1] if drafts else self._last) + 2
        return [DraftToken(token=first, sure=0.3)]


def with_tree():
    """A scheduler whose generation has sampled 10 to 13, and its next step, which has a draft tree."""
    made = begun([1, 2], drafting=Drafting(rows=5, costs=(1.0,) * 5, branches=3), drafter=Doubting, sequences=1)
    return made, next_step(made)


def test_a_tree_is_one_step_whose_branches_are_copies_of_the_text():
    _, step = with_tree()
    assert rows_of(step) == [(13, 5), (14, 6), (15, 6), (15, 7), (16, 7)]
    assert step.ops == [KvCopy(0, 1, 5), KvCopy(0, 2, 5)]
    assert step.shared == {0: [0, 1, 2], 1: [0, 2], 2: [1], 3: [0], 4: [2]}
    assert sorted(step.samples) == [0, 1, 2, 3, 4]


def test_the_cells_of_the_longest_right_path_become_the_texts():
    made, step = with_tree()
    assert bring_back(made, step, 15, 40) == [15, 40], "15 is a branch of its own"
    following = next_step(made)
    holder = step.shared[2][0]
    assert following.ops[:3] == [KvCopy(holder, 0, 7), *(KvRemove(number, 0, -1) for number in (1, 2))]
    assert rows_of(following)[0] == (40, 7)


def test_a_tree_without_an_accepted_draft_leaves_the_text_unchanged():
    made, step = with_tree()
    assert bring_back(made, step, 40) == [40]
    following = next_step(made)
    assert following.ops[:2] == [KvRemove(1, 0, -1), KvRemove(2, 0, -1)]
    assert KvRemove(0, 6, -1) in following.ops
    assert rows_of(following)[0] == (40, 6)


@pytest.fixture(autouse=True, scope="module")
def short_turns():
    """Short turns, so that owners often preempt each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "MIN_TURN", 3)
        yield


@st.composite
def tree_rings(draw, sampling=GREEDY, **options):
    devices, rounds = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    sizes = st.lists(st.integers(1, 2), min_size=devices, max_size=devices)
    drafter = knowing(
        sampling,
        draw(st.sampled_from([0.0, 0.3, 0.6, 0.9])),
        sure=draw(st.sampled_from([0.4, 0.6])),
        seed=draw(st.integers(0, 99)),
        late=draw(st.sampled_from([0.0, 0.5])),
    )
    drafting = Drafting(
        room=draw(st.integers(1, 3)),
        rows=draw(st.integers(2, 10)),
        costs=COSTS,
        branches=draw(st.integers(0, 4)),
        adapts=draw(st.booleans()),
    )
    return FakeRing(
        draw(st.lists(sizes, min_size=rounds, max_size=rounds)) if devices > 1 else [],
        1,
        context=draw(st.sampled_from([40, 256])),
        seed=draw(st.integers(0, 2**32)),
        drafter=drafter,
        drafting=drafting,
        **options,
    )


def check_nothing_is_left(ring: FakeRing, sampling: Sampling = GREEDY) -> None:
    """Check that after one more request no branch holds a KV entry, and the text's own sequence only what it needs."""
    tokens, _ = ring.ask(generate(99, [1], tokens=1, sampling=sampling))
    assert tokens == ring.model.answer([1], 1, sampling)
    for window in ring.windows:
        assert [window.held(number) for number in range(ring.model.options.numbers)] == [
            1,
            *(0 for _ in range(ring.model.options.branches)),
        ]
    assert len(ring.scheduler._state.slots._free) == 1


@rings
@given(st.data(), st.sampled_from([GREEDY, WILD]))
def test_no_tree_changes_a_completion_or_leaves_anything_in_the_cache(data, sampling):
    ring = data.draw(tree_rings(sampling))
    texts = data.draw(st.lists(st.builds(prompt, st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=3))
    for request, text in enumerate(texts):
        asked = generate(request, text, tokens=TOKENS, sampling=sampling)
        ring.head.submit(msgspec.structs.replace(asked, owner=data.draw(st.sampled_from("ab"))))
        for _ in range(data.draw(st.integers(0, 99))):
            move(ring)
    run(ring)
    for request, text in enumerate(texts):
        assert ring.answer(request)[0] == ring.model.answer(text, TOKENS, sampling)
    check_nothing_is_left(ring, sampling)


@rings
@given(st.data())
def test_a_cancel_at_any_moment_leaves_no_branch_in_the_cache(data):
    ring = data.draw(tree_rings())
    text = prompt(7)
    ring.head.submit(generate(1, prompt(5), tokens=TOKENS))
    ring.head.submit(generate(2, text, tokens=TOKENS))
    for _ in range(data.draw(st.integers(0, 200))):
        move(ring)
    ring.cancel(1)
    run(ring)
    assert ring.answer(2)[0] == ring.model.answer(text, TOKENS, GREEDY)
    check_nothing_is_left(ring)


@rings
@given(st.data(), st.sampled_from([GREEDY, WILD]))
def test_a_completion_resumes_in_another_ring_whatever_drafts_were_in_flight(data, sampling):
    first, second = (data.draw(st.one_of(tree_rings(sampling), drafting_rings(sampling))) for _ in range(2))
    text = prompt(6, data.draw(st.integers(0, 3)))
    first.head.submit(generate(1, text, tokens=TOKENS, sampling=sampling))
    for _ in range(data.draw(st.integers(0, 250))):
        move(first)
    reported = sampled(first, 1)
    second.head.submit(generate(1, text, sampled=reported, tokens=TOKENS, sampling=sampling))
    run(second)
    assert reported + sampled(second, 1) == first.model.answer(text, TOKENS, sampling)


@rings
@given(st.data())
def test_an_end_token_in_a_branch_ends_the_answer_where_it_would_without(data):
    text = prompt(8, data.draw(st.integers(0, 9)))
    answer = FakeModel(1).answer(text, TOKENS, GREEDY)
    ends = frozenset([answer[data.draw(st.integers(0, TOKENS - 1))]])
    ring = data.draw(tree_rings(ends=ends))
    tokens, finished = ring.ask(generate(1, text, tokens=TOKENS))
    assert tokens == FakeModel(1, ends).answer(text, TOKENS, GREEDY)
    assert finished.reason == "stop"


def test_where_the_first_draft_is_often_wrong_and_the_second_right_a_tree_takes_fewer_steps():
    def steps(branches: int) -> int:
        ring = FakeRing(
            [],
            1,
            context=256,
            drafting=Drafting(rows=6, costs=(1.0,) * 6, branches=branches, adapts=False),
            drafter=knowing(GREEDY, 0.5, sure=0.5, seed=3),
        )
        ring.head.submit(generate(1, [1, 2], tokens=3 * TOKENS))
        run(ring)
        assert ring.answer(1)[0] == ring.model.answer([1, 2], 3 * TOKENS, GREEDY)
        return len(ring.windows[0].steps)

    assert steps(4) < steps(0) < 3 * TOKENS


def test_branches_need_a_single_sequence_without_kept_blocks():
    for options in ({"sequences": 2}, {"keep_rows": 4}):
        with pytest.raises(AssertionError):
            FakeRing([], 1, drafting=Drafting(rows=4, costs=COSTS, branches=2), **options)


def test_a_node_is_found_only_after_its_own_parent():
    nodes = [node(1, -1), node(2, 0), node(2, -1)]
    assert [child(nodes, -1, 2), child(nodes, 0, 2), child(nodes, 1, 2)] == [2, 1, None]


# ---- under a simulated clock -----------------------------------------------------------------------------------------

LONG = 300
ANSWER = FakeModel(1).answer([1, 2, 3], LONG + 20, GREEDY)


class Calibrated(Nothing):
    """The first draft is right with probability ``first``, the second with ``second``; both are calibrated."""

    def __init__(self, first: float, second: float) -> None:
        self._first, self._second, self._taken = first, second, 0
        self._random = np.random.default_rng(4).random(LONG + 40)

    def took(self, token: int) -> None:
        self._taken += 1

    def propose(self, drafts: Sequence[int]) -> DraftToken | None:
        return self._at(drafts, 0.0, self._first, 1)

    def others(self, drafts: Sequence[int]) -> Sequence[DraftToken]:
        found = self._at(drafts, self._first, self._second, 2)
        return () if found is None else (found,)

    def _at(self, drafts: Sequence[int], low: float, share: float, more: int) -> DraftToken | None:
        at = self._taken + len(drafts)
        if at >= len(ANSWER):
            return None
        holds = list(drafts) == ANSWER[self._taken : at] and low <= self._random[at] < low + share
        return DraftToken(token=ANSWER[at] if holds else (ANSWER[at] + more) % VOCABULARY, sure=share)


def seconds(first: float, second: float, branches: int, more: float) -> float:
    """The time of a request if each further row of a step costs ``more`` of the first."""
    costs = tuple(1 + more * rows for rows in range(8))
    ring = TimedRing(
        1,
        context=1024,
        depth=1,
        costs=costs,
        drafting=Drafting(rows=8, costs=costs, branches=branches),
        drafter=lambda _: Calibrated(first, second),
    )
    ring.head.submit(generate(1, [1, 2, 3], tokens=LONG))
    took_s = ring.finish()
    assert ring.answer(1)[0] == ANSWER[:LONG]
    return took_s


@pytest.mark.parametrize(
    ("first", "second", "more", "wins"),
    [
        (0.4, 0.2, 0.02, 1.05),
        (0.5, 0.2, 0.02, 1.05),
        (0.5, 0.2, 0.1, 0.99),
        (0.8, 0.1, 0.02, 0.99),
        (0.9, 0.05, 0.1, 0.99),
    ],
)
def test_trees_win_where_drafts_are_unsure_and_rows_cheap_and_are_chains_elsewhere(first, second, more, wins):
    assert seconds(first, second, 0, more) >= wins * seconds(first, second, 4, more)
