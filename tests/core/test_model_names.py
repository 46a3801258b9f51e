"""Resolution of a typed name among the models of a library."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.library.names import MAX_CHARS, is_short, meant, nearest

HERE = [
    ("llama3.2:1b",),
    ("llama3.2:latest", "llama3.2"),
    ("Qwen/Qwen3-8B-GGUF", "Qwen/Qwen3-8B-GGUF:Q4_K_M", "Qwen3-8B-Q4_K_M"),
    ("unsloth/gemma-3-4b-it-GGUF:Q4_K_M", "gemma-3-4b-it-Q4_K_M"),
    ("unsloth/gemma-3-4b-it-GGUF:Q8_0", "gemma-3-4b-it-Q8_0"),
    ("smollm2",),
    ("SmolLM2",),
]
WORDS = st.text("abAB0.", min_size=1, max_size=4)
NAMES = st.builds(
    lambda parts, ends: "".join(map("".join, zip(parts, (*ends, ""), strict=False))),
    st.lists(WORDS, min_size=1, max_size=3),
    st.lists(st.sampled_from(":/-_"), min_size=3, max_size=3),
)
LIBRARIES = st.lists(st.lists(NAMES, min_size=1, max_size=3).map(tuple), max_size=5)


@pytest.mark.parametrize(
    ("typed", "places"),
    [
        ("llama3.2:1b", [0]),
        ("llama3.2", [1]),
        ("LLAMA3.2", [1]),
        ("llama3", []),
        ("qwen3-8b", [2]),
        ("Qwen/Qwen3-8B", [2]),
        ("qwen/qwen3-8b-gguf:q4_k_m", [2]),
        ("unsloth/gemma-3-4b-it-GGUF", [3, 4]),
        ("gemma-3-4b-it-q8_0", [4]),
        ("gemma-3", [3, 4]),
        ("gemma", [3, 4]),
        ("gem", []),
        ("smollm2", [5]),
        ("smollm2:latest", [5]),
        ("SmolLM2", [6]),
        ("SMOLLM2", [5, 6]),
        ("", []),
        ("qwen3-8b" * MAX_CHARS, []),
    ],
)
def test_a_name_matches_exactly_then_in_other_case_then_as_a_short_form(typed, places):
    assert meant(typed, HERE) == places


def test_no_other_name_of_a_model_hides_one_that_is_called_so():
    assert meant("amber", [("cedar", "amber"), ("amber",)]) == [1]
    assert meant("Amber:latest", [("cedar", "AMBER"), ("amber",)]) == [1]
    assert meant("tiny", [("cedar", "tiny"), ("amber", "tiny")]) == [0, 1]


@given(LIBRARIES)
def test_every_name_of_a_model_means_it_first_of_all(library):
    for place, own in enumerate(library):
        for name in own:
            found = meant(name, library)
            hidden = all(library[each][0].casefold() == name.casefold() for each in found)
            assert place in found or hidden, "another name gives way to a model that is called so"
            assert all(name in library[other] for other in found), "an exact name is never taken for a longer one"


@given(LIBRARIES, NAMES)
def test_case_matters_only_among_names_that_differ_by_it(library, typed):
    lower, upper = set(meant(typed.lower(), library)), set(meant(typed.upper(), library))
    assert bool(lower) == bool(upper)
    if len({name.casefold() for own in library for name in own}) == sum(map(len, library)):
        assert lower == upper


@given(LIBRARIES, NAMES, NAMES)
def test_another_model_never_makes_a_name_unknown(library, typed, added):
    before, after = meant(typed, library), meant(typed, [*library, (added,)])
    assert bool(after) >= bool(before)


@given(NAMES, NAMES)
def test_a_short_form_ends_where_a_part_of_the_name_ends(typed, name):
    if is_short(typed, name):
        begin = name.index(typed)
        assert any(
            (not at or name[at - 1] == "/") and name[at + len(typed) :][:1] in ("", ":", "/", "-", "_")
            for at in range(begin, len(name))
            if name.startswith(typed, at)
        )


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("lama3.2:1b", "llama3.2:1b"),
        ("gema-3-4b-q4", "unsloth/gemma-3-4b-it-GGUF:Q4_K_M"),
        ("Qwen3-8", "Qwen/Qwen3-8B-GGUF"),
    ],
)
def test_a_slip_finds_the_nearest_names(typed, first):
    assert nearest(typed, HERE)[0] == first


def test_nothing_is_near_a_name_of_another_kind():
    assert nearest("mistral-nemo", HERE) == []


def test_a_slip_of_the_name_that_a_model_is_shown_by_finds_that_one():
    assert nearest("Smal", [("gemma", "Small"), ("Small", "gemma")]) == ["Small"]
