"""The verdict of a window check, derived from its child's results, and what is cached."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count, pairwise
from types import SimpleNamespace

import msgspec
import pytest
from gguf import GGUFValueType
from hypothesis import given
from hypothesis import strategies as st

from primad.certify import check as checking
from primad.certify.check import Wanted, check
from primad.certify.child import MakeTiny, Tried, TryCuts, TryShares, TryWhole
from primad.certify.cuts import failing_cuts, in_two
from primad.certify.keys import made_wrong, rewritten
from primad.certify.tiny import WAYS, tiny_values
from primad.certify.verdict import (
    VERSION,
    ForbiddenCut,
    allowed,
    load_verdict,
    save_verdict,
    verdict_key,
    verdict_line,
    why_not_shared,
    windows_line,
)
from primad.errors import ConfigError, DiskError, EngineError, ModelError
from primad.gguf.architectures.cuts import cut_points
from primad.gguf.header import array_value, scalar_value
from primad.gguf.windows import window_metadata
from tests.core.test_architectures import model

SLIDING = {"attention__sliding_window": 512, "attention__key_length": 256, "attention__value_length": 256}
ABORTED = "the child was ended by SIGABRT: GGML_ASSERT(hparams.is_swa_any()) failed"


class FakeChild:
    """Answers ``TryCuts`` by a model's faults: windows that fail at ``bad`` layers, keys that nothing reads."""

    bad: frozenset[int] = frozenset()
    bad_pairs: frozenset[tuple[int, int]] = frozenset()
    unseen: frozenset[str] = frozenset()
    ways: frozenset[str] = frozenset(WAYS)
    dies: str | Tried | None = None
    header = None
    shares = Tried("equal")

    def __init__(self, module, what, variables, *, timeout_s):
        self.timeout_s, self.tasks, self.closed = timeout_s, [], False
        type(self).latest = self

    def ask(self, task, kind):
        assert not self.closed
        self.tasks.append(task)
        match task:
            case MakeTiny():
                return Tried("equal") if task.way in self.ways else "the child was ended by SIGABRT"
            case TryWhole():
                return Tried("equal") if task.kv_type != "q4_0" else Tried("refused", "no such cache")
            case TryCuts() if task.wrong:
                return Tried("equal") if task.wrong in self.unseen else Tried("different", "logits differ")
            case TryCuts() if self.dies is not None:
                return self.dies
            case TryCuts() if self.bad & set(task.cuts) or self.bad_pairs & set(pairwise(task.cuts)):
                return Tried("different", "logits differ by 1")
            case TryShares():
                return self.shares
        return Tried("equal")

    def close(self):
        self.closed = True


@pytest.fixture
def child(monkeypatch):
    """The child class of a check; attributes set on it apply to the next child."""
    kind = type("Child", (FakeChild,), {})
    monkeypatch.setattr(checking, "TaskChild", kind)
    monkeypatch.setattr(checking, "open_model", lambda path: kind.header)
    return kind


def checked(child, header, **wanted):
    child.header = header
    return check(header, Wanted(**wanted), lambda what: None)


def test_a_model_that_is_equal_in_every_check_is_certified(child):
    verdict = checked(child, model("gemma3", 12, **SLIDING))
    assert (verdict.result, verdict.why, verdict.left) == ("certified", "", ())
    assert verdict.routes[0].cuts == tuple(range(13))
    assert {route.kv_type for route in verdict.routes if route.outcome == "equal"} == {"f16", "q8_0"}
    assert [route.kv_type for route in verdict.routes if route.outcome == "not opened"] == ["q4_0"]
    assert {len(route.cuts) for route in verdict.routes} == {13, 3}
    assert "gemma3.attention.sliding_window_pattern" in {key.key for key in verdict.keys}
    assert child.latest.closed


def test_whether_shares_of_layers_add_up_is_kept_and_is_no_part_of_what_windows_are(child, tmp_path):
    header = model("llama", 12)
    assert checked(child, header).shares == why_not_shared(tmp_path, header) == ""
    child.shares = Tried("different", "logits differ by 0.1")
    verdict = checked(child, header)
    assert (verdict.result, verdict.shares) == ("certified", "logits differ by 0.1")
    save_verdict(tmp_path, header, verdict)
    assert why_not_shared(tmp_path, header) == "logits differ by 0.1"


def test_shares_of_an_architecture_that_nobody_knows_are_taken_only_where_they_were_checked(tmp_path):
    assert "add up was not checked: primad check" in why_not_shared(tmp_path, model("nobody-knows", 4))


@pytest.mark.parametrize("bad", [{5}, {1}, {11}, {3, 4}, {2, 7, 9}])
def test_exactly_the_cuts_that_are_not_exact_are_reported_by_layer(child, bad):
    child.bad = frozenset(bad)
    verdict = checked(child, model("llama", 12))
    assert verdict.result == "not certified"
    assert {layer for each in verdict.forbidden for layer in each.layers} == bad
    for layer in bad:
        assert f"layer {layer}" in verdict.why


def test_a_window_that_is_not_exact_is_reported_with_both_its_ends(child):
    child.bad_pairs = frozenset([(3, 4)])
    verdict = checked(child, model("llama", 12))
    assert [each.layers for each in verdict.forbidden] == [(3, 4)]


@pytest.mark.parametrize(
    ("end", "replies"),
    [(ABORTED, ABORTED), ("the child was ended by SIGPROF", "did not end within 60 s of CPU time")],
    ids=["aborts", "hangs"],
)
def test_a_child_that_aborts_or_hangs_over_windows_forbids_them(child, end, replies):
    child.dies = end
    verdict = checked(child, model("llama", 2))
    assert (verdict.result, [each.layers for each in verdict.forbidden]) == ("not certified", [(1,)])
    assert replies in verdict.forbidden[0].why


def test_a_child_that_was_killed_from_outside_is_no_verdict(child):
    child.dies = "the child was ended by SIGKILL"
    with pytest.raises(EngineError, match="memory is short"):
        checked(child, model("llama", 4))
    assert child.latest.closed


def test_a_full_disk_is_no_verdict(child):
    child.dies = Tried("broken", "No space left on device")
    with pytest.raises(DiskError, match=r"No space left on device.*TMPDIR"):
        checked(child, model("llama", 4))


def test_a_key_that_nothing_computed_with_is_named(child):
    child.unseen = frozenset(["gemma3.attention.sliding_window_pattern"])
    verdict = checked(child, model("gemma3", 12, **SLIDING))
    assert (verdict.result, verdict.forbidden) == ("not certified", ())
    assert verdict.why == "gemma3.attention.sliding_window_pattern not exercised"


def test_a_key_that_windows_do_without_may_be_ignored(child):
    child.unseen = frozenset(["phi3.attention.sliding_window"])
    verdict = checked(child, model("phi3", attention__sliding_window=2047))
    assert verdict.result == "certified"
    assert [key.outcome for key in verdict.keys if key.key == "phi3.attention.sliding_window"] == ["ignored"]


def test_a_second_route_is_tried_if_the_first_cannot_be_computed(child):
    child.ways = frozenset(WAYS[1:])
    assert checked(child, model("llama")).result == "certified"
    child.ways = frozenset()
    verdict = checked(child, model("llama"))
    assert (verdict.result, verdict.routes) == ("not certified", ())
    assert "no tiny model of it" in verdict.why


def test_checks_that_did_not_run_in_time_are_reported(child, monkeypatch):
    ticks = count(0, 10)
    clock = SimpleNamespace(monotonic=lambda: next(ticks), strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(checking, "time", clock)
    verdict = checked(child, model("llama", 12), time_limit_s=35)
    assert verdict.result == "not finished"
    assert verdict.left
    assert verdict.left[-1] == "the model cut in two"


def test_only_the_cuts_that_were_asked_for_are_tried(child):
    verdict = checked(child, model("llama", 12), cuts=(4, 8))
    assert {route.cuts for route in verdict.routes} == {(0, 4, 8, 12)}
    assert verdict.cuts == (4, 8)


@pytest.mark.parametrize("cuts", [(0,), (12,), (4, 4), (8, 4)])
def test_cuts_that_cannot_be_are_refused(child, cuts):
    with pytest.raises(ConfigError, match="from 1 to 11"):
        checked(child, model("llama", 12), cuts=cuts)


def test_cuts_that_the_rules_refuse_are_refused_by_them(child):
    with pytest.raises(ModelError, match="multiple of 4 layers"):
        checked(child, model("smollm3", 12), cuts=(3,))
    with pytest.raises(ModelError, match="cannot be cut"):
        checked(child, model("rwkv7", 12))


@given(st.integers(2, 40), st.sets(st.integers(1, 39), max_size=6))
def test_exactly_the_bad_cuts_are_found(layers, bad):
    cuts, bad = range(1, layers), {each for each in bad if each < layers}
    if bad:
        found = failing_cuts(cuts, lambda some: "bad" if bad & set(some) else "")
        assert {layer for each, _ in found for layer in each} == bad


@given(
    st.integers(1, 24),
    st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 0), (3, 2), (4, 0), (4, 1), (4, 2)]),
    st.lists(st.sets(st.integers(1, 23), min_size=1, max_size=2), max_size=3),
)
def test_windows_keep_to_places_that_no_verdict_forbids(layers, place, bad):
    multiple, offset = place
    every = range(offset or multiple, layers, multiple)
    verdict = msgspec.structs.replace(
        VERDICT, forbidden=tuple(ForbiddenCut(layers=tuple(sorted(each)), why="x") for each in bad)
    )
    places = allowed(verdict, every)
    assert set(places) <= set(every)
    assert not any(each <= set(places) for each in bad)
    more = [every[step - 1 :: step] for step in range(1, len(every)) if len(every[step - 1 :: step]) > len(places)]
    assert all(any(some <= set(each) for some in bad) for each in more)
    assert allowed(None, every) == every


VERDICT = msgspec.convert(
    {
        **dict.fromkeys(("layers", "cut_multiple"), 1),
        "version": VERSION,
        **dict.fromkeys(("library", "model", "architecture", "why"), ""),
        **dict.fromkeys(("cuts", "routes", "keys", "forbidden", "left"), ()),
        "checked": "2026-11-25T20:00:00Z",
        "result": "certified",
        "seconds": 1.0,
    },
    checking.CheckVerdict,
)


def test_a_verdict_is_kept_for_all_models_with_the_same_windows(child, tmp_path):
    header = model("llama", 12)
    assert load_verdict(tmp_path, header) is None
    verdict = checked(child, header)
    save_verdict(tmp_path, header, verdict)
    other_name = replace(header, values={**header.values, "general.name": scalar_value(GGUFValueType.STRING, "x")})
    for same in (header, other_name):
        assert load_verdict(tmp_path, same) == verdict
        assert load_verdict(tmp_path, same, (3, 7)) == verdict
        assert f"checked bit for bit on {verdict.checked[:10]}" in windows_line(tmp_path, same, [0, 3])
    assert load_verdict(tmp_path, model("llama", 12, rope__freq_base=5.0)) is None
    assert load_verdict(tmp_path, model("llama", 12, tensors=["rope_freqs.weight"])) is None
    assert windows_line(tmp_path, header, [0]) is None


def test_a_verdict_of_some_cuts_is_of_these_alone(child, tmp_path):
    header = model("llama", 12)
    save_verdict(tmp_path, header, checked(child, header, cuts=(4,)))
    assert load_verdict(tmp_path, header, (4,)) is not None
    assert load_verdict(tmp_path, header, (5,)) is None
    assert "not checked" in windows_line(tmp_path, header, [0, 5])


def test_another_library_is_another_verdict(child, tmp_path, monkeypatch):
    header = model("llama")
    before = verdict_key(header)
    monkeypatch.setattr("primad.certify.verdict.build_id", lambda: "another")
    assert verdict_key(header) != before


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"version": 0}', b"[" * 100_000])
def test_a_damaged_record_counts_as_none(tmp_path, content):
    header = model("llama")
    folder = tmp_path / "checks"
    folder.mkdir()
    (folder / f"{verdict_key(header)}.json").write_bytes(content)
    assert load_verdict(tmp_path, header) is None


def test_the_verdict_line_shows_the_known_result(tmp_path):
    path = tmp_path / "m.gguf"
    assert verdict_line(None, path) == f"not checked: primad check {path}"
    failed = msgspec.structs.replace(VERDICT, result="not certified", why="windows that begin at layer 3 are not exact")
    assert verdict_line(failed, path).endswith("windows that begin at layer 3 are not exact")
    unfinished = msgspec.structs.replace(VERDICT, result="not finished")
    assert "in part" in verdict_line(unfinished, path)


@pytest.mark.parametrize("way", WAYS)
def test_a_tiny_model_has_the_layers_and_experts_of_the_real_one(way):
    heads = [0, 0, 8, 0] * 3
    header = model(
        "nemotron_h_moe",
        12,
        attention__head_count=[32] * 12,
        attention__head_count_kv=heads,
        feed_forward_length=[0, 18_944, 0, 1856] * 3,
        attention__key_length=128,
        attention__value_length=128,
        embedding_length=4096,
        expert_count=128,
        expert_used_count=6,
    )
    values = {key.partition(".")[2]: each for key, each in tiny_values(header, way).items()}
    assert values["block_count"].scalar() == 12
    assert (values["expert_count"].scalar(), values["expert_used_count"].scalar()) == (128, 6)
    assert [bool(each) for each in values["attention.head_count_kv"].items()] == [bool(each) for each in heads]
    forward = values["feed_forward_length"].items()
    assert (forward[0], len(set(forward))) == (0, 3)
    assert max(forward) < 200
    assert values["attention.key_length"].scalar() == 32, "a block of a quantised KV cache"
    assert values["embedding_length"].scalar() < 4096


def test_keys_that_differ_in_windows_are_made_wrong_there_alone():
    header = model("gemma3", 12, **SLIDING)
    found = rewritten(header, (0, 5, 6, 12))
    assert found["gemma3.attention.sliding_window"] is False, "a window without a layer that slides has none"
    assert found["gemma3.attention.sliding_window_pattern"] is True
    for first, last in ((0, 5), (5, 6)):
        values, right = (window_metadata(header, first, last) for _ in range(2))
        made_wrong(header, "gemma3.attention.sliding_window")(values, first, last)
        assert values["gemma3.attention.sliding_window"].scalar() == 512
        assert (values == right) is (first == 0)
    values = window_metadata(header, 0, 6)
    made_wrong(header, "gemma3.attention.sliding_window_pattern")(values, 0, 6)
    assert values["gemma3.attention.sliding_window_pattern"] == array_value(GGUFValueType.BOOL, [False] * 5 + [True])


def test_a_model_is_cut_in_two_in_some_places_from_the_first_to_the_last():
    header = model("llama", 40)
    cuts = [windows[1] for windows in in_two(header, 8)]
    assert (cuts[0], cuts[-1], len(cuts)) == (1, 39, 8)
    assert len(in_two(header, None)) == len(cut_points(header)) == 39
