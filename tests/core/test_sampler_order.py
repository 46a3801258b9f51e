"""Sampler lists are accepted if they sample as llama.cpp does in its own order."""

from __future__ import annotations

import msgspec
import pytest

from primad.api.dialects.openai.sampler_order import in_order
from primad.errors import RequestError
from primad.ring.messages import GREEDY, Sampling

OURS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
SETS_ALL = msgspec.structs.replace(
    GREEDY,
    **{"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repeat_penalty": 1.1, "penalty_tokens": 64},
    **{"typical_p": 0.9, "top_n_sigma": 2.0, "dry_multiplier": 0.5, "dry_tokens": 64, "xtc_probability": 0.5},
)
USUAL = msgspec.structs.replace(GREEDY, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)


def test_llama_cpps_own_order_is_taken_whole_by_any_of_its_names():
    for named in (
        OURS,
        "edskypmxt",
        [*OURS, "infill", "tfs_z"],
        [name.replace("_", "-") for name in OURS],
        [*OURS, *OURS],
    ):
        assert in_order(SETS_ALL, named) == SETS_ALL
    assert in_order(USUAL, ["temp" if name == "temperature" else name for name in OURS]) == USUAL


def test_samplers_that_are_left_out_do_nothing():
    assert in_order(SETS_ALL, ["top_k", "top_p", "infill"]) == msgspec.structs.replace(
        GREEDY, temperature=1.0, top_k=40, top_p=0.9, penalty_tokens=64
    )
    bare = in_order(SETS_ALL, [])
    assert (bare.temperature, bare.top_k, bare.top_p, bare.min_p, bare.penalises) == (1.0, 0, 1.0, 0.0, False)


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (USUAL, ["min_p", "top_k", "temperature"]),
        (USUAL, ["temperature", "top_k"]),
        (USUAL, ["xtc", "typ_p", "dry", "penalties", "top_k", "top_p", "min_p", "temperature"]),
        (msgspec.structs.replace(USUAL, temperature=1.0), ["temperature", "top_p", "min_p"]),
        (msgspec.structs.replace(USUAL, temperature=0.0), ["temperature", "top_p", "top_k", "min_p"]),
        (msgspec.structs.replace(SETS_ALL, mirostat=2), ["temperature", "top_p", "penalties"]),
    ],
)
def test_an_order_that_changes_nothing_is_taken(sampling: Sampling, named: list[str]):
    assert in_order(sampling, named).temperature == sampling.temperature


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (USUAL, ["top_p", "top_k"]),
        (USUAL, ["temperature", "top_p"]),
        (USUAL, "tp"),
        (SETS_ALL, ["top_k", "penalties"]),
        (SETS_ALL, ["temperature", "xtc"]),
        (msgspec.structs.replace(USUAL, temperature_range=0.5), ["temperature", "top_k"]),
    ],
)
def test_an_order_that_changes_something_is_refused_by_name(sampling: Sampling, named: list[str]):
    with pytest.raises(RequestError, match=r"'samplers'.*before") as caught:
        in_order(sampling, named)
    assert caught.value.param == "samplers"
