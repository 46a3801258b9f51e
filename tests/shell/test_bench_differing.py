"""What the bench of drafts counts where rows are not exact."""

from __future__ import annotations

from tools.lab.drafted import Differing, DraftedCompletion


def test_an_answer_differs_from_its_first_other_token_on_or_where_it_ends_earlier():
    found = Differing(model="small", rows=8)
    for tokens in ([1, 2, 3, 4], [1, 2, 7, 4], [1, 2, 3]):
        on = DraftedCompletion(tokens=tokens, first_s=0.1, next_s=0.1, late_s=0.1, drafted=3, accepted=2)
        found.count([1, 2, 3, 4], on)
    assert (found.answers, found.tokens, found.drafted, found.accepted) == (3, 11, 9, 6)
    assert found.first_at == [2, 3]
    assert "2 of 3 answers differ" in str(found)
