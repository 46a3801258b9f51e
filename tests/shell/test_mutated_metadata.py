"""Any metadata of a model file, of any type, value and length, gives a clear error or a model, never a crash."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from gguf import GGUFValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primad.certify.check import Wanted, check
from primad.certify.cuts import is_allowed, route
from primad.certify.derive import derived, multiples, provisional
from primad.certify.keys import made_wrong, rewritten
from primad.certify.tiny import WAYS, tiny_values
from primad.certify.verdict import verdict_key
from primad.errors import PrimadError
from primad.gguf.architecture import Architecture
from primad.gguf.architectures.cuts import cut_points, cuttable
from primad.gguf.architectures.layers import layer_count
from primad.gguf.architectures.table import is_unknown
from primad.gguf.architectures.tensors import embedding_scale
from primad.gguf.header import Value, array_value, scalar_value
from primad.gguf.layers import SmallTensor, metadata_split
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.gguf.windows import window_metadata
from tools import synth

FAMILIES = (
    "llama",
    "qwen3moe",
    "gemma3",
    "granite",
    "deepseek2",
    "glm4moe",
    "gemma4-per-layer",
    "qwen35",
    "jamba",
    "openelm",
    "apertus",
    "bloom",
    "baichuan",
)
"""The last two are not in the table."""
NAMES = Architecture(name="", entries=("embd",))
BITS = (8, 16, 32, 64)
INTEGERS = {
    **{f"UINT{bits}": (0, 2**bits - 1) for bits in BITS},
    **{f"INT{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in BITS},
}


def items(kind):
    if kind in INTEGERS:
        minimum, maximum = INTEGERS[kind]
        return st.one_of(st.sampled_from([0, 1, 2, 3, 4, 8, maximum, minimum]), st.integers(minimum, maximum))
    if kind == "BOOL":
        return st.booleans()
    return st.floats(width=32 if kind == "FLOAT32" else 64)


def text(content):
    return struct.pack("<Q", len(content)) + content


numbers = st.sampled_from([*INTEGERS, "BOOL", "FLOAT32", "FLOAT64"])
scalars = numbers.flatmap(lambda kind: items(kind).map(lambda item: scalar_value(GGUFValueType[kind], item)))
lengths = st.one_of(st.integers(0, 10), st.just(600))
arrays = st.tuples(numbers, lengths).flatmap(
    lambda of: st.lists(items(of[0]), min_size=of[1], max_size=of[1]).map(
        lambda content: array_value(GGUFValueType[of[0]], content)
    )
)
texts = (st.binary(max_size=9) | st.just(b"x" * 100_000)).map(
    lambda content: Value(GGUFValueType.STRING, text(content))
)
many_texts = st.integers(0, 9).map(
    lambda count: Value(GGUFValueType.ARRAY, struct.pack("<IQ", GGUFValueType.STRING, count) + count * text(b"x"))
)
values = st.one_of(scalars, arrays, texts, many_texts)


@pytest.fixture(scope="module")
def headers(tmp_path_factory):
    found = {}
    for family in FAMILIES:
        path = tmp_path_factory.mktemp(family) / "model.gguf"
        synth.write_model(path, architecture=family)
        found[family] = open_model(path)
    return found


def mutated(headers, data):
    """The header of a model with one or two keys changed or removed."""
    header = headers[data.draw(st.sampled_from(FAMILIES))]
    keys = dict(header.values)
    for key in data.draw(st.lists(st.sampled_from(sorted(keys)), min_size=1, max_size=2, unique=True)):
        value = data.draw(st.one_of(values, st.none()))
        if value is None:
            del keys[key]
        else:
            keys[key] = value
    return replace(header, values=keys)


def use(header):
    """Everything that a daemon does with a header before a process loads the model."""
    model_profile(header)
    if is_unknown(header):
        header = provisional(header)
        multiples(header)
        header = derived(header, NAMES, 1)
        model_profile(header)
    cuttable(header)
    embedding_scale(header)
    verdict_key(header)
    for way in WAYS:
        tiny_values(header, way)
    windows = route(header, cut_points(header))
    if is_allowed(header, windows):
        for key in rewritten(header, windows):
            made_wrong(header, key)(window_metadata(header, 0, windows[1]), 0, windows[1])
    window_metadata(header, 0, layer_count(header))


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_header_of_any_metadata_is_used_or_refused_in_one_line(headers, data):
    refused = ""
    try:
        use(mutated(headers, data))
    except PrimadError as refusal:
        refused = str(refusal)
    assert "\n" not in refused
    assert len(refused) < 5000


def try_cuts(headers, path, data):
    """Check a file with such a header; even if llama.cpp aborts, there is a verdict."""
    header = mutated(headers, data)
    tensors = [
        SmallTensor(name=each.name, type=each.type, shape=each.shape, data=bytes(each.bytes))
        for each in header.tensors.values()
    ]
    path.write_bytes(metadata_split(header.values, tensors, splits=1, tensors=len(tensors)))
    try:
        verdict = check(open_model(path), Wanted(time_limit_s=600), lambda _: None)
    except PrimadError as refusal:
        why = str(refusal)
    else:
        why = verdict.why
        assert (verdict.result == "certified") == (not why)
    assert "\n" not in why


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_check_of_any_metadata_ends_with_a_verdict_or_a_refusal(headers, tmp_path_factory, data):
    try_cuts(headers, tmp_path_factory.mktemp("mutated") / "model.gguf", data)


@pytest.mark.slow
@pytest.mark.matrix
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_check_of_any_metadata_ends_with_a_verdict_or_a_refusal_in_many_more_examples(
    headers, tmp_path_factory, data
):
    try_cuts(headers, tmp_path_factory.mktemp("mutated") / "model.gguf", data)
