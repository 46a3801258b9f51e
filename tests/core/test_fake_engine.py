"""The fake engine is strict: each possible mistake of a ring fails where it happens."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from primad.engine.protocol import EngineOptions, Rows
from tests.fakes.engine import WIDTH, FakeModel
from tests.fakes.ring import GREEDY

OPTIONS = EngineOptions(context=16, sequences=3, rows=4, threads=1, batch_threads=1, kv_type="f16", lock=False)


def model() -> FakeModel:
    return FakeModel(3, options=OPTIONS)


def rows(content, start=0, sequences=(0,), *, outputs=True) -> Rows:
    count = len(content)
    content = np.array(content, np.int32) if isinstance(content, list) else content
    return Rows(
        content=content,
        positions=list(range(start, start + count)),
        sequences=[list(sequences)] * count,
        outputs=[outputs] * count,
    )


def test_consecutive_windows_are_the_whole_model():
    fake = model()
    first, middle, tail, whole = fake.first(1), fake.middle(1, 2), fake.tail(2), fake.whole()
    tail.forward(rows(middle.forward(rows(first.forward(rows([5, 6]))))))
    whole.forward(rows([5, 6]))
    assert np.array_equal(tail.logits(1), whole.logits(1))
    assert np.array_equal(tail.logits(1), fake.logits([5, 6]))
    assert not np.array_equal(tail.logits(0), tail.logits(1))


def test_a_layer_out_of_order_is_noticed():
    fake = model()
    with pytest.raises(AssertionError, match="a row of layer 1 came to a window of layer 2"):
        fake.tail(2).forward(rows(fake.first(1).forward(rows([5]))))
    hidden = fake.middle(1, 2).forward(rows(fake.first(1).forward(rows([5]))))
    with pytest.raises(AssertionError, match="a row of layer 2 came to a window of layer 1"):
        fake.middle(1, 2).forward(rows(hidden))


def test_a_missing_and_a_repeated_position_are_noticed():
    window = model().whole()
    window.forward(rows([5]))
    with pytest.raises(AssertionError, match="position 1 of sequence 0 is missing before 2"):
        window.forward(rows([5], start=2))
    with pytest.raises(AssertionError, match="position 0 of sequence 0 comes twice"):
        window.forward(rows([5]))


def test_a_cache_of_another_text_is_noticed():
    fake = model()
    first, other, middle = fake.first(1), fake.first(1), fake.middle(1, 2)
    middle.forward(rows(first.forward(rows([5]))))
    other.forward(rows([6]))
    with pytest.raises(AssertionError, match="is another text's"):
        middle.forward(rows(other.forward(rows([7], start=1)), start=1))


def test_a_hidden_state_at_the_wrong_position_or_damaged_is_noticed():
    fake = model()
    hidden = fake.first(1).forward(rows([5, 6]))
    with pytest.raises(AssertionError, match="the hidden state of position 1 came at 0"):
        fake.middle(1, 2).forward(rows(hidden[::-1].copy()))
    hidden[0, 3] += 1
    with pytest.raises(AssertionError, match="damaged"):
        fake.middle(1, 2).forward(rows(hidden))


def test_rows_over_the_limits_are_noticed():
    window = model().whole()
    with pytest.raises(AssertionError, match="5 rows"):
        window.forward(rows([1] * 5))
    with pytest.raises(AssertionError, match="0 rows"):
        window.forward(rows([]))
    with pytest.raises(AssertionError, match="position 16 is outside"):
        window.forward(rows([1], start=16))
    with pytest.raises(AssertionError, match="sequence 3 does not exist"):
        window.forward(rows([1], sequences=[3]))
    with pytest.raises(AssertionError, match="a row of sequences"):
        window.forward(rows([1], sequences=[1, 1]))


def test_content_of_another_kind_is_noticed():
    fake = model()
    with pytest.raises(AssertionError, match="takes int32 tokens"):
        fake.first(1).forward(rows(np.zeros((1, WIDTH), np.float32)))
    with pytest.raises(AssertionError, match="takes float32"):
        fake.middle(1, 2).forward(rows([1]))


def test_sequences_may_share_a_beginning():
    window = model().whole()
    window.forward(rows([1, 2, 3]))
    window.kv_copy(0, 1, 2)
    window.forward(rows([9], start=2, sequences=[1]))
    assert np.array_equal(window.logits(0), model().logits([1, 2, 9]))
    window.kv_remove(0, 0, -1)
    assert (window.held(0), window.held(1)) == (0, 3)


def test_an_operation_that_does_not_fit_the_cache_is_noticed():
    window = model().whole()
    window.forward(rows([1, 2, 3]))
    with pytest.raises(AssertionError, match="a hole"):
        window.kv_remove(0, 0, 2)
    with pytest.raises(AssertionError, match="removal from position 4"):
        window.kv_remove(0, 4, -1)
    with pytest.raises(AssertionError, match="copy of positions"):
        window.kv_copy(0, 1, 4)
    with pytest.raises(AssertionError, match="does not exist"):
        window.kv_remove(3, 0, -1)
    window.kv_remove(0, 2, -1)
    assert window.held(0) == 2


def test_a_state_takes_back_rows_of_its_last_step_alone_of_which_one_stays():
    options = msgspec.structs.replace(model().options, rollback=2)
    window = replace(model(), has_state=True, options=options).whole()
    window.forward(rows([1, 2]))
    window.forward(rows([3, 4, 5, 6], start=2))
    window.forward(rows([9], sequences=(1,)))
    window.kv_remove(0, 4, -1)
    for start in (3, 1):
        with pytest.raises(AssertionError, match=f"cut back to {start}"):
            window.kv_remove(0, start, -1)
    window.forward(rows([3, 4], start=4))
    for start in (4, 3):
        with pytest.raises(AssertionError, match=f"cut back to {start}"):
            window.kv_remove(0, start, -1)


def test_a_state_goes_back_to_where_it_was_kept_of_the_same_text_and_nowhere_else():
    fake = replace(model(), has_state=True)
    window = fake.whole()
    window.forward(rows([1, 2, 3]))
    with pytest.raises(AssertionError, match="cut back to 2"):
        window.kv_remove(0, 2, -1)
    with pytest.raises(AssertionError, match="after 2 of 3 positions"):
        window.state_keep(0, 0, 2)
    window.state_keep(4, 0, 3)
    window.forward(rows([7], start=3))
    for number, sequence, end, why in (
        (3, 0, 3, "not kept"), (4, 1, 3, "another text"), (4, 0, 2, "after 3")
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=why):
            window.state_restore(number, sequence, end)
    window.state_restore(4, 0, 3)
    assert window.held(0) == 3
    window.kv_remove(0, 0, -1)
    window.forward(rows([1, 2, 4, 5]))
    with pytest.raises(AssertionError, match="another text"):
        window.state_restore(4, 0, 3)
    window.state_forget()
    with pytest.raises(AssertionError, match="not kept"):
        window.state_restore(4, 0, 3)


def test_cells_go_into_another_window_of_the_same_layers_in_order_and_nowhere_else():
    fake = model()
    first, middle, other = fake.first(1), fake.middle(1, 3), fake.middle(1, 3)
    middle.forward(rows(first.forward(rows([5, 6, 7]))))
    blocks = [middle.kv_cells(0, 0, 2), middle.kv_cells(0, 2, 3)]
    other.kv_restore(1, blocks)
    assert other.kv_cells(1, 0, 3) == middle.kv_cells(0, 0, 3)
    assert (other.held(0), other.held(1)) == (0, 3)
    for wrong, why in (
        (blocks[:0], "nothing"),
        (blocks[::-1], "come after 0"),
        ([blocks[0], blocks[0]], "come after 2"),
        ([blocks[0][::-1]], "other layers"),
        ([first.kv_cells(0, 0, 2)], "other layers"),
        ([[blocks[0][0], replace(blocks[0][1], values=blocks[0][0].values)]], "another layer"),
    ):
        with pytest.raises(AssertionError, match=why):
            other.kv_restore(1, wrong)
    with pytest.raises(AssertionError, match="cells 1 to 4 of 3"):
        middle.kv_cells(0, 1, 4)


def test_a_released_window_and_a_released_sampler_are_not_used():
    fake = model()
    window = fake.whole()
    window.forward(rows([1]))
    sampler = window.sampler(GREEDY, [1], [])
    sampler.release()
    with pytest.raises(AssertionError, match="after its release"):
        sampler.sample(0)
    window.release()
    assert (fake.open_windows, fake.open_samplers) == (0, 0)
    for use in (lambda: window.forward(rows([2], start=1)), window.release, lambda: window.kv_remove(0, 0, -1)):
        with pytest.raises(AssertionError, match="after its release"):
            use()


def test_only_rows_that_want_logits_have_them():
    window = model().whole()
    window.forward(rows([1], outputs=False))
    with pytest.raises(AssertionError, match="wanted no logits"):
        window.logits(0)
