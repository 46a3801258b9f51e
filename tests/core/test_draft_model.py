"""A draft model: what it knows of a text, which drafts still count, and which tasks it gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.engine.protocol import EngineOptions
from primad.errors import ProtocolError
from primad.ring.speculation.branches import PART_ROWS, POOL, DraftBranches
from primad.ring.speculation.draft_model import ModelDrafter, ModelDrafters
from primad.ring.speculation.drafter import MAX_ROOM, DraftToken
from primad.ring.speculation.messages import Drafted, DraftTask, DraftText, DraftTokens, check_drafted
from primad.ring.speculation.tree import OPENS_AT, TreeNode, behind, first_path
from tests.fakes.engine import VOCABULARY, FakeModel
from tests.fakes.ring import GREEDY

MODEL = FakeModel(2)
BRANCHED = FakeModel(
    2,
    options=EngineOptions(
        context=400, sequences=1, rows=64, threads=1, batch_threads=1, kv_type="f16", lock=False, branches=POOL
    ),
)
tokens = st.integers(0, VOCABULARY - 1)


def right(text: list[int], count: int) -> list[int]:
    """The draft model's continuation of ``text``."""
    return MODEL.answer(text, count, GREEDY)


def nodes_of(printed: Drafted) -> list[TreeNode]:
    pairs = zip(printed.tokens, printed.sures, printed.parents, strict=True)
    return [TreeNode(DraftToken(token=token, sure=sure), parent) for token, sure, parent in pairs]


def main_of(printed: Drafted) -> list[int]:
    """The tokens of the first path through the drafts."""
    nodes = nodes_of(printed)
    return [nodes[node].draft_token.token for node in first_path(nodes)]


def check_drafts(printed: Drafted, text: list[int]) -> None:
    """Check that each draft is the model's output at its place, with the right probability."""
    nodes = nodes_of(printed)
    for place, node in enumerate(nodes):
        path, at = list[int](), node.parent
        while at >= 0:
            path, at = [nodes[at].draft_token.token, *path], nodes[at].parent
        likely = np.exp(MODEL.logits([*text, *path]), dtype=np.float64)
        likely /= likely.sum()
        first, *others = behind(nodes, node.parent)
        assert first.token == int(likely.argmax())
        assert node.draft_token.sure == pytest.approx(likely[node.draft_token.token], rel=1e-4)
        assert all(each.sure >= OPENS_AT for each in others)
        assert place == 0 or node.parent < place


@pytest.mark.parametrize("branches", [0, 1, POOL])
@given(data=st.data())
def test_its_drafts_are_its_own_continuation_of_the_text_however_the_text_continues(branches, data):
    chain = DraftBranches(BRANCHED.whole(), context=200, branches=branches)
    for number in range(data.draw(st.integers(1, 3))):
        text = data.draw(st.lists(tokens, min_size=1, max_size=90))
        chain.begin(number, text)
        for _ in range(data.draw(st.integers(0, 12))):
            printed = None
            for _ in range(data.draw(st.integers(0, 6))):
                printed = (chain.work() if chain.has_work else None) or printed
            if printed is not None:
                assert (printed.number, printed.known) == (number, len(text))
                assert main_of(printed) == right(text, len(main_of(printed)))
                check_drafts(printed, text)
            expected = right(text, 1)[0]
            others = [] if printed is None else [each.token for each in behind(nodes_of(printed), -1)]
            text.append(data.draw(st.sampled_from([expected, expected, *others, (expected + 1) % VOCABULARY])))
            chain.took(text[-1])


def test_a_long_prompt_is_computed_in_parts_and_a_text_that_is_known_not_again():
    window = MODEL.whole()
    chain = DraftBranches(window, context=400)
    text = [i % VOCABULARY for i in range(2 * PART_ROWS + 5)]
    chain.begin(1, text)
    assert [chain.work(), chain.work()] == [None, None], "what came meanwhile can be looked at"
    assert chain.work() is not None
    chain.begin(2, [*text, 3])
    assert chain.work() is not None
    assert [len(step) for step in window.steps] == [PART_ROWS, PART_ROWS, 5, 1]


def test_it_stops_at_its_room_and_at_its_context():
    chain = DraftBranches(MODEL.whole(), context=100)
    chain.begin(1, [1, 2])
    while chain.has_work:
        printed = chain.work()
    assert printed is not None
    assert len(main_of(printed)) == MAX_ROOM
    small = DraftBranches(MODEL.whole(), context=5)
    small.begin(1, [1, 2, 3])
    while small.has_work:
        printed = small.work()
    assert len(main_of(printed)) == 2
    small.begin(2, [1] * 9)
    assert not small.has_work


# ---- in the head -----------------------------------------------------------------------------------------------------


class Process:
    """Records its tasks."""

    def __init__(self) -> None:
        self.reported: list[DraftTask] = []
        self.drafters = ModelDrafters(self.reported.append)

    def emits(self, number: int, known: int, *draft_tokens: int, sure: float = 0.95) -> None:
        self.drafters.heard(
            Drafted(number=number, known=known, tokens=list(draft_tokens), sures=[sure] * len(draft_tokens))
        )


def chain_of(drafter: ModelDrafter, maximum: int = 9) -> list[int]:
    found: list[int] = []
    while len(found) < maximum and (draft_token := drafter.propose(found)) is not None:
        found.append(draft_token.token)
    return found


def test_nothing_is_sent_until_a_draft_is_requested_and_then_only_the_new_tokens():
    process = Process()
    drafter = process.drafters([1, 2])
    drafter.took(3)
    assert process.reported == []
    assert drafter.propose([]) is None
    assert process.reported == [DraftText(number=1, tokens=[1, 2, 3])]
    drafter.took(4)
    drafter.took(5)
    drafter.propose([])
    drafter.propose([])
    assert process.reported[1:] == [DraftTokens([4, 5], 3)]


def test_drafts_count_as_far_as_the_text_matches_them():
    process = Process()
    drafter = process.drafters([1, 2])
    drafter.propose([])
    drafter.took(10)
    process.emits(1, 2, 10, 11, 12)
    assert chain_of(drafter) == [11, 12]
    drafter.took(11)
    assert chain_of(drafter) == [12]
    drafter.took(50)
    assert chain_of(drafter) == [], "the text went on differently"
    process.emits(1, 3, 11, 12, 13)
    assert chain_of(drafter) == [], "that was drafted before the change"
    process.emits(1, 5, 51)
    assert chain_of(drafter) == [51]


def test_it_follows_the_latest_answer_and_the_others_are_looked_through():
    process = Process()
    first = process.drafters([7, 8, 9, 1, 7, 8])
    process.emits(1, 6, 30)
    second = process.drafters([1, 2])
    assert chain_of(first, 1) == [9]
    process.emits(1, 6, 40)
    assert chain_of(second) == []
    process.emits(2, 2, 50)
    assert chain_of(second) == [50]


def test_where_the_process_is_gone_answers_are_looked_through():
    process = Process()
    begun = process.drafters([7, 8, 9, 1, 7, 8])
    assert chain_of(begun, 1) == [], "a draft may come that is surer"
    process.drafters.end()
    assert chain_of(begun, 1) == [9]
    assert chain_of(process.drafters([7, 8, 9, 1, 7, 8]), 1) == [9]


def test_the_confidence_of_a_draft_follows_from_how_often_such_drafts_held():
    process = Process()
    drafter = process.drafters([1, 2])
    drafter.propose([])
    for known in range(2, 40):
        process.emits(1, known, 5)
        drafter.took(6 + known % 40)
    process.emits(1, 40, 5)
    draft_token = drafter.propose([])
    assert draft_token is not None
    assert draft_token.sure < 0.2, "its stated confidence was 0.95"


@given(st.lists(st.tuples(st.sampled_from(["say", "take", "ask"]), st.booleans()), max_size=60))
def test_whatever_messages_cross_the_drafts_are_those_of_the_model_after_the_text(moves):
    """The process may reply at any later time; messages wait in both directions."""
    process = Process()
    text = [3, 4]
    drafter = process.drafters(text)
    chain = DraftBranches(MODEL.whole(), context=200)
    printed: list[Drafted] = []
    done = 0
    for move, flag in moves:
        if move == "say":
            for task in process.reported[done:]:
                if isinstance(task, DraftText):
                    chain.begin(task.number, task.tokens)
                elif isinstance(task, DraftTokens):
                    for token in task.tokens:
                        chain.took(token)
            done = len(process.reported)
            if chain.has_work and (one := chain.work()) is not None:
                printed.append(one)
            if flag and printed:
                process.drafters.heard(printed[-1])
        elif move == "take":
            expected = right(text, 1)[0]
            text.append(expected if flag else (expected + 1) % VOCABULARY)
            drafter.took(text[-1])
        else:
            draft_tokens = [drafter._nodes[node].draft_token.token for node in first_path(drafter._nodes)]
            assert draft_tokens == right(text, len(draft_tokens))
            drafter.propose([])


def test_drafts_are_awaited_once_the_text_is_read_until_there_are_enough_or_they_are_unsure():
    process = Process()
    drafter = process.drafters([1, 2])
    assert not drafter.awaits(4, 0.01), "it may have a long prompt to read"
    drafter.propose([])
    process.emits(1, 2, 5, 6, sure=0.95)
    assert drafter.awaits(3, 0.01)
    assert not drafter.awaits(2, 0.01), "two are there already"
    assert not drafter.awaits(3, 0.99), "a third one would hardly hold"
    drafter.took(9)
    assert drafter.awaits(3, 0.01)
    assert process.reported[-1] == DraftTokens([9], 2), "the waiting step has sent the new tokens"
    process.drafters.end()
    assert not drafter.awaits(3, 0.01)


def test_another_process_takes_over_in_the_middle_and_gets_the_whole_text():
    process = Process()
    drafter = process.drafters([1, 2])
    drafter.propose([])
    process.emits(1, 2, 5)
    process.drafters.end()
    assert drafter.propose([]) is None
    drafter.took(7)
    process.drafters.move(process.reported.append)
    assert drafter.propose([]) is None, "what the one before drafted is forgotten"
    assert process.reported[1:] == [DraftText(number=1, tokens=[1, 2, 7])]
    process.emits(1, 3, 8)
    assert chain_of(drafter) == [8]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": [VOCABULARY]},
        {"tokens": [-1]},
        {"sures": [0.5, 0.5]},
        {"sures": [1.5]},
        {"sures": [float("nan")]},
        {"tokens": [1] * 200, "sures": [0.5] * 200, "parents": []},
        {"parents": [-1, 0]},
        {"parents": [0]},
        {"parents": [-2]},
        {"known": -1},
        {"draft_s": float("inf")},
        {"draft_s": 1e300},
        {"draft_s": -1.0},
    ],
    ids=lambda wrong: " ".join(f"{name}-{len(str(value))}" for name, value in wrong.items()),
)
def test_drafts_of_another_device_are_validated(wrong):
    good: dict[str, Any] = {
        "number": 1,
        "known": 3,
        "tokens": [1],
        "sures": [0.5],
        "parents": [-1],
        "draft_s": 0.1,
    }
    check_drafted(Drafted(**good), VOCABULARY)
    with pytest.raises(ProtocolError, match="draft"):
        check_drafted(Drafted(**good | wrong), VOCABULARY)


def test_a_process_that_does_not_overlap_gets_new_tokens_only_when_a_step_waits_for_drafts():
    process = Process()
    process.drafters = ModelDrafters(process.reported.append, overlaps=False)
    drafter = process.drafters([1, 2])
    drafter.propose([])
    assert process.reported == [DraftText(number=1, tokens=[1, 2])], "it has a prompt to read"
    process.emits(1, 2, 5)
    drafter.took(9)
    drafter.propose([])
    assert len(process.reported) == 1
    assert drafter.awaits(2, 0.01)
    assert process.reported[1:] == [DraftTokens([9], 2)]


def test_it_drafts_no_more_tokens_than_requested():
    chain = DraftBranches(MODEL.whole(), context=100, maximum=2)
    chain.begin(1, [1, 2])
    while chain.has_work:
        printed = chain.work()
    assert printed is not None
    assert len(main_of(printed)) == 2


def all_drafted(chain: DraftBranches) -> Drafted:
    """The drafts once no work is left."""
    printed = None
    while chain.has_work:
        printed = chain.work() or printed
    assert printed is not None
    return printed


def test_the_next_row_goes_to_the_likeliest_draft_and_the_first_path_has_its_room():
    window = BRANCHED.whole()
    chain = DraftBranches(window, context=300, branches=POOL)
    chain.begin(1, [1, 2, 3])
    printed = all_drafted(chain)
    check_drafts(printed, [1, 2, 3])
    nodes = nodes_of(printed)
    assert len(first_path(nodes)) == MAX_ROOM
    assert len(window.steps) <= 1 + MAX_ROOM + MAX_ROOM // 2
    computed = {node.parent for node in nodes} - {-1}
    aside = computed - set(first_path(nodes))
    assert aside, "other drafts have drafts after them"
    assert len(window.steps) == 1 + len(computed)


def test_the_first_path_comes_before_other_drafts_on_request():
    window = BRANCHED.whole()
    chain = DraftBranches(window, context=300, branches=POOL, first=6)
    chain.begin(1, [1, 2, 3])
    for count in range(1, 7):
        printed = chain.work()
        assert printed is not None
        assert len(main_of(printed)) == count
    printed = all_drafted(chain)
    check_drafts(printed, [1, 2, 3])
    assert len(window.steps) > MAX_ROOM


def test_all_drafts_after_an_alternative_that_turns_out_right_are_kept():
    window = BRANCHED.whole()
    chain = DraftBranches(window, context=300, branches=POOL)
    chain.begin(1, [1, 2, 3])
    nodes = nodes_of(all_drafted(chain))
    after_others = [
        place for place, node in enumerate(nodes) if node.parent == -1 and place > 0 and behind(nodes, place)
    ]
    assert after_others, "the fake model is unsure of its first token"
    token = nodes[after_others[0]].draft_token.token
    rows = len(window.steps)
    chain.took(token)
    printed = all_drafted(chain)
    check_drafts(printed, [1, 2, 3, token])
    assert all(min(step) > 3 for step in window.steps[rows:]), "the text itself is computed"
    chain.took((right([1, 2, 3, token], 1)[0] + 1) % VOCABULARY)
    assert window.held(chain._root.sequence or 0) == 4
    assert sum(window.held(number) for number in range(1 + POOL)) == 4, "no cell of a branch is left"
    assert len(chain._free) == POOL


def test_a_tree_continues_after_alternatives_to_the_first_draft():
    process = Process()
    drafter = process.drafters([1, 2])
    drafter.propose([])
    process.drafters.heard(
        Drafted(number=1, known=2, tokens=[10, 11, 20, 21], sures=[0.5, 0.6, 0.4, 0.9], parents=[-1, 0, -1, 2])
    )
    found = [drafter.propose([]), drafter.propose([10]), drafter.propose([20])]
    assert [each.token for each in found if each is not None] == [10, 11, 21]
    drafter.took(20)
    assert chain_of(drafter) == [21], "the second draft was right, and drafts after it count"


def test_alternative_drafts_count_as_far_as_the_text_matches_them():
    process = Process()
    drafter = process.drafters([1, 2])
    drafter.propose([])
    process.drafters.heard(
        Drafted(
            number=1,
            known=2,
            tokens=[10, 11, 21, 22, 20],
            sures=[0.6, 0.7, 0.2, 0.1, 0.3],
            parents=[-1, 0, 0, 0, -1],
        )
    )
    assert [each.token for each in drafter.others([])] == [10, 20]
    assert [each.token for each in drafter.others([10])] == [11, 21, 22]
    assert drafter.others([20]) == []
    drafter.took(10)
    assert [each.token for each in drafter.others([])] == [11, 21, 22]
    drafter.took(21)
    assert drafter.others([]) == []
