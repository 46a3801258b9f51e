"""Counts of expert use are kept within a bound: adding one removes the oldest."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from primad.engine.streaming import expert_usage
from primad.engine.streaming.expert_usage import (
    LEFT_S,
    MAX_AGE_S,
    StoredFile,
    UsageFolder,
    excess,
    stored,
    whole_model_key,
)
from primad.engine.streaming.experts import ExpertUsage
from primad.gguf.digests import LayerDigests
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.gguf.windows import ModelCutter
from primad.planning.adapters import grouped, with_expert_use
from primad.settings.config import digests_file, usage_folder
from tools import synth

NOW = 1e9


def counted(experts: int = 8) -> ExpertUsage:
    usage = ExpertUsage(experts)
    usage.note(np.array([[1, 2], [1, 3]], np.int32))
    return usage


def file(name: str, age_s: float) -> StoredFile:
    return StoredFile(Path(name), NOW - age_s)


def names(files: list[StoredFile]) -> list[str]:
    return sorted(each.path.name for each in files)


def test_saved_usage_is_loaded_again(tmp_path):
    folder = UsageFolder(tmp_path / "usage")
    folder.save("a", counted())
    folder.bound()
    assert UsageFolder(tmp_path / "usage").load("a", 8).counts.tolist() == pytest.approx(
        counted().counts.tolist(), abs=1e-3
    )


def test_the_newest_stay():
    files = [file(f"{age}.json", age) for age in (5, 1, 4, 2, 3)]
    assert names(excess(files, NOW, max_files=3)) == ["4.json", "5.json"]
    assert names(excess(files, NOW, max_age_s=4.5)) == ["5.json"]
    assert excess(files, NOW) == []
    assert names(excess([*files, file("old.json", MAX_AGE_S + 1)], NOW)) == ["old.json"]


def test_a_partial_file_stays_until_nobody_writes_it_any_more():
    files = [file("a.json.1", 1), file("b.json.2", LEFT_S + 1), file("a.json", 2)]
    assert names(excess(files, NOW)) == ["b.json.2"]
    assert names(excess(files, NOW, max_files=0)) == ["a.json", "b.json.2"]


def test_a_folder_with_too_many_lets_the_oldest_go_when_one_is_added(tmp_path):
    place = tmp_path / "usage"
    folder = UsageFolder(place, max_files=3)
    for number in range(3):
        folder.save(f"layer-{number}", counted())
        os.utime(place / f"layer-{number}.json", (time.time() - 100 + number,) * 2)
    folder.bound()
    assert len(stored(place)) == 3
    folder.save("layer-0", counted())  # it exists already, and becomes the newest
    folder.save("layer-3", counted())
    folder.bound()
    assert names(stored(place)) == ["layer-0.json", "layer-2.json", "layer-3.json"]


def test_the_folder_is_not_read_if_nothing_was_added(tmp_path, monkeypatch):
    folder = UsageFolder(tmp_path)
    folder.save("a", counted())
    folder.bound()
    monkeypatch.setattr(expert_usage, "stored", lambda _: pytest.fail("it was looked at"))
    folder.save("a", counted())
    folder.bound()
    UsageFolder(None).bound()


def test_a_missing_folder_has_nothing_to_remove(tmp_path):
    assert stored(tmp_path / "none") == []
    expert_usage.remove([StoredFile(tmp_path / "none" / "a.json", 0.0)])


def test_plans_use_the_counted_usage_of_a_models_experts(tmp_path):
    path, home = tmp_path / "model.gguf", tmp_path / "home"
    synth.write_model(path, architecture="qwen3moe")
    header = open_model(path)
    model = model_profile(header)
    assert with_expert_use(model, header, home) == model, "nothing was counted"
    even = model.experts_used / model.experts
    usage, folder = ExpertUsage(model.experts), UsageFolder(usage_folder(home))
    usage.note(np.array([[0, 1]] * 200, np.int32))
    folder.save(whole_model_key(path, 1), usage)
    first = with_expert_use(model, header, home).expert_use
    assert sum(first) / len(first) == pytest.approx(even)
    assert list(first) == sorted(first, reverse=True)
    assert first[0] > 0.9 > 0.1 > first[-1]
    digests = LayerDigests(header, digests_file(home))
    cutter = ModelCutter(header, digests)
    usage.note(np.array([[2, 3]] * 4000, np.int32))
    folder.save(cutter.ref(1).digest, usage)
    digests.save()
    assert with_expert_use(model, header, home).expert_use != first, "of two countings the longer one counts"


def test_groups_of_experts_have_the_same_size_and_all_picks_of_a_token():
    assert grouped([0.5, 0.1, 0.1, 0.3], 0.25) == pytest.approx((0.5, 0.3, 0.1, 0.1))
    groups = grouped([0.9] * 4 + [0.1] * 60, 10 / 64)
    assert len(groups) == 8
    assert sum(groups) / 8 == pytest.approx(10 / 64)
    assert grouped([1.0] * 2 + [0.0] * 14, 0.5)[0] == 1, "none is picked more often than always"
