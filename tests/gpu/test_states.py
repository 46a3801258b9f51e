"""Sequence state of GPU layers is saved and restored as on a CPU: KV cells, small sliding-window caches, recurrent
states; layers for multi-token prediction draft there.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from primad.engine.llama.windows import WholeModel
from primad.gguf.architectures.layers import layer_count
from tests.shell import test_cut_exact, test_kv_exact, test_state_exact
from tests.shell.test_cut_exact import OPTIONS, PROMPT, Route, assigned, cuts_of, whole_logits
from tests.shell.test_kv_exact import WIDE, cut_into, judge, written
from tests.shell.test_state_exact import WRONG, each, step

HYBRIDS = ("qwen35", "nemotron_h", "lfm2")
SLIDING = ("gemma3", "gpt-oss")
MAX_OFF = 0.05
"""With logits of about 10, tokens of a batch are summed in another order than single ones. Wrong states differ by 6."""


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch) -> None:
    """All layers of all windows and the output matrix are on the GPU."""

    def all_assigned(layers, on_gpu=None, *, is_tail, first=0, **_):
        return assigned(layers, layers, is_tail=is_tail, first=first)

    monkeypatch.setattr(test_cut_exact, "assigned", all_assigned)
    monkeypatch.setattr(test_kv_exact, "in_memory", lambda first, last: all_assigned(last - first, is_tail=True))


@pytest.mark.parametrize("kind", test_kv_exact.KINDS)
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "deepseek2"])
def test_kv_cells_restore_into_windows_of_another_cut(architecture, kind, tmp_path):
    header = written(tmp_path, architecture, **WIDE)
    judge(header, tmp_path, kind, 3, cut_into(header, tmp_path, ([0, 2, 4, 6], [0, 1, 5, 6])))


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_sequence_returns_to_a_saved_state(architecture, tmp_path):
    test_state_exact.test_a_sequence_returns_to_a_saved_state(architecture, tmp_path)


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_kv_cells_and_a_state_restore_into_windows_of_another_cut(architecture, tmp_path):
    test_state_exact.test_kv_cells_and_a_state_restore_into_windows_of_another_cut(architecture, tmp_path)


@pytest.mark.parametrize("architecture", SLIDING)
def test_a_small_window_cache_returns_to_its_saved_kv_cells(architecture, tmp_path):
    test_state_exact.test_a_small_window_cache_returns_to_its_saved_kv_cells(architecture, tmp_path)


@pytest.mark.parametrize("architecture", SLIDING)
def test_blocks_of_a_small_cache_restore_into_windows_of_another_cut(architecture, tmp_path):
    test_state_exact.test_blocks_of_a_small_cache_restore_into_windows_of_another_cut(architecture, True, tmp_path)


@pytest.mark.parametrize("architecture", [*HYBRIDS, *SLIDING])
def test_a_copy_resumes_from_a_saved_state(architecture, tmp_path):
    test_state_exact.test_a_copy_resumes_from_a_saved_state(architecture, tmp_path)


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_rejected_drafts_are_rolled_back_from_states(architecture, tmp_path):
    header = written(tmp_path, architecture)
    chunks, expected = whole_logits(header, layer_count(header))
    route = Route(header, cuts_of(header)[0], tmp_path, msgspec.structs.replace(OPTIONS, rollback=len(WRONG)))
    route.logits(PROMPT[:64], 0)
    route.logits(PROMPT[64:], 64)
    for position, (tokens, logits) in enumerate(zip(chunks[2:], expected[2:], strict=True), len(PROMPT)):
        (found, *_) = step(route, [*tokens, *WRONG], position, 0)
        assert np.abs(found - logits).max() < MAX_OFF, position
        each(route, lambda window, end=position + 1: window.kv_remove(0, end, -1))
    route.release()


@pytest.mark.parametrize("architecture", ["qwen35", "glm4moe"])
def test_a_layer_for_multi_token_prediction_drafts_after_a_tail_as_after_the_whole_model(
    architecture, tmp_path, monkeypatch
):
    """The whole model here also has the multi-token prediction layer: its last regular layer then computes all tokens
    of a prompt, which a GPU sums in another order than the requested one alone.
    """

    def predicting(*arguments, **options):
        return WholeModel(*arguments, **options | {"predicts": True})

    monkeypatch.setattr(test_cut_exact, "WholeModel", predicting)
    test_cut_exact.test_a_layer_for_multi_token_prediction_drafts_after_a_tail_as_after_the_whole_model(
        architecture, tmp_path, monkeypatch
    )
