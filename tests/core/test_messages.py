"""Bytes from a peer are a message of ours within the limits, or one clear error: never anything else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halda import LinkProfile
from primad.cluster import messages as cluster
from primad.errors import ProtocolError
from primad.gguf.layers import HEADER_BYTES, LayerRef, LayerTensor, check_ref, layer_header
from primad.gguf.windows import WindowSpec
from primad.ring.messages import (
    MAX_HEADER_BYTES,
    PROTOCOL,
    KvCopy,
    KvKeep,
    KvRemove,
    Limits,
    StaleEpochError,
    Status,
    Step,
    decode_step,
    encode,
)
from tests.fakes.profile import PROFILE

LIMITS = Limits(ring=0xABC, epoch=4, windows=frozenset({2, 5}), width=6, rows=8, context=32, sequences=3)


def a_step(**changes: Any) -> Step:
    """A valid step of three rows with every kind of KV operation."""
    step = Step(
        protocol=PROTOCOL,
        ring=0xABC,
        epoch=4,
        step=17,
        window=2,
        dtype="f32",
        shape=(3, 6),
        positions=[0, 1, 31],
        sequences=[[0], [1, 2], [0, 1, 2]],
        outputs=[False, True, True],
        ops=[KvRemove(0, 0, -1), KvCopy(0, 1, 0, 32), KvKeep(2)],
    )
    return msgspec.structs.replace(step, **changes)


def judged(step: Step, payload_bytes: int | None = None) -> Step:
    return decode_step(encode(step), step.payload_bytes if payload_bytes is None else payload_bytes, LIMITS)


def assert_within_limits(step: Step) -> None:
    """What the code behind ``decode_step`` relies on."""
    rows, width = step.shape
    assert step.protocol == PROTOCOL
    assert (step.ring, step.epoch) == (LIMITS.ring, LIMITS.epoch)
    assert step.window in LIMITS.windows
    assert step.dtype == "f32"
    assert 0 <= rows <= LIMITS.rows
    assert width == LIMITS.width
    assert len(step.positions) == len(step.sequences) == len(step.outputs) == rows
    assert all(0 <= position < LIMITS.context for position in step.positions)
    for sequences in step.sequences:
        assert 0 < len(sequences) == len(set(sequences)) <= LIMITS.sequences
        assert all(0 <= sequence < LIMITS.sequences for sequence in sequences)
    for op in step.ops:
        match op:
            case KvRemove(sequence, start, end):
                named, span = {sequence}, (start, end)
            case KvCopy(source, target, start, end):
                named, span = {source, target}, (start, end)
            case KvKeep(sequence):
                named, span = {sequence}, (0, -1)
        assert all(0 <= sequence < LIMITS.sequences for sequence in named)
        assert 0 <= span[0] <= LIMITS.context
        assert -1 <= span[1] <= LIMITS.context
        assert max(abs(value) for value in span) < 1 << 31


def refused_or_within_limits(header: bytes, payload_bytes: int) -> None:
    step = outcome(decode_step, header, payload_bytes, LIMITS)
    if isinstance(step, Step):
        assert_within_limits(step)
        assert payload_bytes == 4 * step.shape[0] * step.shape[1]
    else:
        assert_one_line(step)


def outcome(decode: Callable[..., Any], *arguments: Any) -> Any:
    """What ``decode`` gives, or the text of its ``ProtocolError``; no other exception is caught."""
    try:
        return decode(*arguments)
    except ProtocolError as exc:
        return str(exc)


def assert_one_line(text: Any) -> None:
    assert isinstance(text, str)
    assert text.isprintable()
    assert len(text) < 500


def test_a_valid_step_arrives_as_it_was_sent():
    assert judged(a_step()) == a_step()
    assert decode_step(memoryview(encode(a_step())), 72, LIMITS) == a_step()


def test_a_step_of_operations_alone_has_no_payload():
    step = a_step(shape=(0, 6), positions=[], sequences=[], outputs=[])
    assert judged(step) == step


@pytest.mark.parametrize("changes", [{"ring": 1}, {"epoch": 3}, {"epoch": 5}, {"ring": -(1 << 63), "epoch": 1 << 63}])
def test_another_ring_or_epoch_is_stale(changes):
    with pytest.raises(StaleEpochError, match="serving abc 4"):
        judged(a_step(**changes))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"protocol": PROTOCOL - 1}, f"protocol {PROTOCOL - 1}"),
        ({"protocol": PROTOCOL + 1}, f"protocol {PROTOCOL + 1}"),
        ({"step": -1}, "step number -1"),
        ({"window": 3}, "window 3"),
        ({"window": -1}, "window -1"),
        ({"window": 1 << 63}, "window"),
        ({"dtype": "f16"}, "dtype 'f16'"),
        ({"dtype": ""}, "dtype"),
        ({"shape": (9, 6)}, "shape"),
        ({"shape": (-1, 6)}, "shape"),
        ({"shape": (3, 5)}, "shape"),
        ({"shape": (3, 0)}, "shape"),
        ({"shape": (1 << 62, 6)}, "shape"),
        ({"shape": (2, 6)}, "lists"),
        ({"positions": [0, 1]}, "lists"),
        ({"outputs": [True] * 4}, "lists"),
        ({"sequences": []}, "lists"),
        ({"positions": [0, 1, 32]}, "position outside the context of 32"),
        ({"positions": [-1, 0, 1]}, "position"),
        ({"positions": [0, 1, 1 << 63]}, "position"),
        ({"sequences": [[0], [], [0]]}, "0 sequences"),
        ({"sequences": [[0], [1, 1], [0]]}, "one twice"),
        ({"sequences": [[0], [3], [0]]}, "sequence outside 0..2"),
        ({"sequences": [[0], [-1], [0]]}, "sequence outside"),
        ({"sequences": [[0], [0, 1, 2, 3], [0]]}, "4 sequences"),
        ({"ops": [KvRemove(3, 0, -1)]}, "sequence"),
        ({"ops": [KvRemove(0, 33, -1)]}, "position"),
        ({"ops": [KvRemove(0, -1, -1)]}, "position"),
        ({"ops": [KvRemove(0, 0, -2)]}, "position"),
        ({"ops": [KvRemove(0, 0, 33)]}, "position"),
        ({"ops": [KvCopy(0, -1, 0, 1)]}, "sequence"),
        ({"ops": [KvCopy(9, 0, 0, 1)]}, "sequence"),
        ({"ops": [KvCopy(0, 1, 0, 1 << 40)]}, "position"),
        ({"ops": [KvKeep(3)]}, "sequence"),
    ],
)
def test_a_step_outside_the_limits_is_refused_by_name(changes, why):
    step = a_step(**changes)
    payload = 72 if "shape" not in changes else max(0, 4 * step.shape[0] * step.shape[1])
    with pytest.raises(ProtocolError, match=why) as caught:
        judged(step, payload)
    assert not isinstance(caught.value, StaleEpochError)


@pytest.mark.parametrize("size", [0, 71, 73, 72 * 2, 1 << 40])
def test_a_payload_of_another_size_is_refused(size):
    with pytest.raises(ProtocolError, match=f"payload of {size} bytes; 72 expected"):
        judged(a_step(), size)


def test_a_header_without_end_is_refused_unread():
    with pytest.raises(ProtocolError, match="at most 1048576"):
        decode_step(bytes(MAX_HEADER_BYTES + 1), 0, LIMITS)


def test_a_refusal_stays_one_short_line_whatever_was_sent():
    refused_or_within_limits(encode(a_step(dtype="x\n" * 200_000)), 72)
    refused_or_within_limits(encode(a_step(window=1 << 63)), 72)


LENGTHS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
)


@given(st.binary(max_size=200), st.integers(0, 200))
@example(b"", 0)
@example(b"\x91" * 100_000, 0)
@example(b"\x81\xa1a" * 100_000 + b"\xc0", 0)
@example(b"\x9b" + b"\x00" * 11, 0)
@example(b"\x9c\xa4step" + b"\xdd\xff\xff\xff\xff" * 11, 0)
def test_random_bytes_are_refused(data, payload_bytes):
    refused_or_within_limits(data, payload_bytes)


@settings(max_examples=400)
@given(st.data())
def test_a_damaged_header_is_refused_or_still_within_the_limits(data):
    header = bytearray(encode(a_step()))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(header) - 1)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "remove", "length"])):
            case "flip" if header:
                header[at] = data.draw(st.integers(0, 255))
            case "cut":
                del header[at:]
            case "insert":
                header[at:at] = data.draw(st.binary(min_size=1, max_size=6))
            case "remove":
                del header[at : at + data.draw(st.integers(1, 6))]
            case "length":
                header[at : at + 1] = data.draw(st.sampled_from(LENGTHS))
    refused_or_within_limits(bytes(header), data.draw(st.sampled_from([72, 0, 24, 1 << 62])))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=400)
@given(st.data())
def test_a_header_with_fields_of_any_value_is_refused_or_within_the_limits(data):
    fields = ["step", *msgspec.structs.astuple(a_step())]
    for _ in range(data.draw(st.integers(1, 3))):
        fields[data.draw(st.integers(0, len(fields) - 1))] = data.draw(anything)
    fields += data.draw(st.lists(anything, max_size=2))
    refused_or_within_limits(msgspec.msgpack.encode(fields), 72)


numbers = st.one_of(st.integers(-2, 40), st.integers(-(1 << 63), (1 << 64) - 1))


@settings(max_examples=300)
@given(
    rows=st.integers(-1, 9),
    width=st.sampled_from([6, 6, 6, 0, 7, 1 << 62]),
    positions=st.lists(numbers, max_size=4),
    sequences=st.lists(st.lists(numbers, max_size=3), max_size=4),
    outputs=st.lists(st.booleans(), max_size=4),
    ops=st.lists(
        st.builds(KvRemove, numbers, numbers, numbers)
        | st.builds(KvCopy, numbers, numbers, numbers, numbers)
        | st.builds(KvKeep, numbers),
        max_size=3,
    ),
)
def test_any_numbers_are_refused_or_within_the_limits(rows, width, positions, sequences, outputs, ops):
    step = a_step(shape=(rows, width), positions=positions, sequences=sequences, outputs=outputs, ops=ops)
    refused_or_within_limits(encode(step), max(0, 4 * rows * width))


@settings(max_examples=100)
@given(st.integers(0, 8), st.data())
def test_every_step_within_the_limits_is_accepted(rows, data):
    one_row = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)
    step = a_step(
        shape=(rows, 6),
        positions=data.draw(st.lists(st.integers(0, 31), min_size=rows, max_size=rows)),
        sequences=data.draw(st.lists(one_row, min_size=rows, max_size=rows)),
        outputs=data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)),
    )
    assert judged(step) == step


# ---- the control and layer links ------------------------------------------------------------------------------------


def a_tensor(**changes: Any) -> LayerTensor:
    tensor = LayerTensor("blk.*.attn_q.weight", int(GGMLQuantizationType.F32), (8, 2), 0, 64)
    return msgspec.structs.replace(tensor, **changes)


def a_ref(*tensors: LayerTensor, **changes: Any) -> LayerRef:
    tensors = tensors or (a_tensor(), a_tensor(name="blk.*.attn_k.weight", offset=64))
    size = sum(-(-tensor.size_bytes // 32) * 32 for tensor in tensors)
    return msgspec.structs.replace(LayerRef("ab" * 32, size, tensors), **changes)


def a_load(**changes: Any) -> cluster.Load:
    window = WindowSpec(window=1, first=2, last=4, metadata=b"GGUF", layers=(a_ref(), a_ref()))
    load = cluster.Load(
        ring=1,
        epoch=2,
        route=4,
        width=64,
        windows=[window],
        gpu_layers=[0],
        probe=msgspec.structs.replace(window, window=0, last=3, layers=(a_ref(),)),
        force_extra_buffers=False,
        sources=["tcp://127.0.0.1:1"],
        context=128,
        sequences=1,
        rows=64,
        place=0,
        step_timeout_s=5.0,
    )
    return msgspec.structs.replace(load, **changes)


def a_window(**changes: Any) -> WindowSpec:
    return msgspec.structs.replace(a_load().windows[0], **changes)


def a_link(**changes: Any) -> LinkProfile:
    link = LinkProfile(source="desk", target="lap", address="192.168.1.20", round_trip_s=2e-3, bytes_per_s=1e8)
    return dataclasses.replace(link, **changes)


def a_target(**changes: Any) -> cluster.LinkTarget:
    return msgspec.structs.replace(cluster.LinkTarget(device="lap", addresses=["127.0.0.1"], port=1), **changes)


STATUS = Status(steps=1, rows=1, compute_s=0.5, hop_s=[0.1], rss_bytes=1, private_bytes=1, refused=0)

FROM_HEAD = [
    cluster.Hello(protocol=1, version="0", device="desk", session=1),
    a_load(),
    a_load(probe=None),
    cluster.Link(epoch=1, address="tcp://127.0.0.1:1"),
    cluster.Release(epoch=1),
    cluster.Ping(status=True),
    cluster.MeasureLinks(targets=[]),
    cluster.MeasureLinks(
        targets=[cluster.LinkTarget(device="lap", addresses=["127.0.0.1", "::1", "fe80::1%eth0"], port=7770)]
    ),
    cluster.Echo(session=1, device="lap", payload=b"", answer_bytes=cluster.MAX_ECHO_BYTES),
    cluster.Echo(session=1, device="lap", payload=bytes(cluster.MAX_ECHO_BYTES), answer_bytes=0),
]
FROM_WORKER = [
    cluster.Welcome(protocol=1, version="0", build="b", profile=PROFILE),
    cluster.Refused("busy"),
    cluster.Progress(epoch=1, phase="fetch", done=1, total=2),
    cluster.Loaded(epoch=1, port=4000),
    cluster.Linked(1),
    cluster.Broken(epoch=1, error="no memory"),
    cluster.Pong(),
    cluster.WorkerStatus(epoch=1, status=STATUS, daemon_rss_bytes=1),
    cluster.LinksMeasured(links=[]),
    cluster.LinksMeasured(links=[a_link(), a_link(address="")]),
    cluster.Echoed(b"123"),
]
TRANSFER = [
    cluster.FetchChunk(digest="ab" * 32, offset=0, size=1),
    cluster.Chunk(digest="ab" * 32, offset=0),
    cluster.NoChunk(digest="ab" * 32, offset=0, reason="gone"),
]
EVERY = [
    *((cluster.decode_from_head, message) for message in FROM_HEAD),
    *((cluster.decode_from_worker, message) for message in FROM_WORKER),
    *((cluster.decode_transfer, message) for message in TRANSFER),
]


@pytest.mark.parametrize(("decode", "message"), EVERY, ids=lambda value: type(value).__name__)
def test_every_message_of_the_cluster_arrives_as_it_was_sent(decode, message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize("decode", [cluster.decode_from_head, cluster.decode_from_worker, cluster.decode_transfer])
def test_a_message_of_another_conversation_is_refused(decode):
    accepted = [message for _, message in EVERY if not isinstance(outcome(decode, encode(message)), str)]
    assert accepted in (FROM_HEAD, FROM_WORKER, TRANSFER)


decoders = st.sampled_from([cluster.decode_from_head, cluster.decode_from_worker, cluster.decode_transfer])


@given(decoders, st.binary(max_size=200))
@example(cluster.decode_from_head, b"")
@example(cluster.decode_from_head, b"\x91" * 100_000)
@example(cluster.decode_from_head, b"\x81\xa4type\xa4load" * 50_000)
@example(cluster.decode_from_worker, b"\x82\xa4type\xa6status\xa6status\xdf\xff\xff\xff\xff")
@example(cluster.decode_from_head, b"\x82\xa4type\xa4load\xa7windows\xdd\xff\xff\xff\xff")
@example(cluster.decode_transfer, b"\x82\xa4type\xa5fetch\xa6digest\xa2\xff\xfe")
def test_random_bytes_on_the_control_and_layer_links_are_refused(decode, data):
    received = outcome(decode, data)
    if isinstance(received, str):
        assert_one_line(received)


def mutate(data: st.DataObject, content: Any) -> Any:
    """``content`` with one value anywhere in it replaced or removed."""
    if isinstance(content, dict) and content and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(content)))
        if data.draw(st.integers(0, 5)) == 0:
            return {name: value for name, value in content.items() if name != key}
        return content | {key: mutate(data, content[key])}
    if isinstance(content, list | tuple) and content and data.draw(st.integers(0, 4)):
        items = list(content)
        at = data.draw(st.integers(0, len(items) - 1))
        items[at] = mutate(data, items[at])
        return items
    return data.draw(anything)


@settings(max_examples=400)
@given(st.data())
def test_a_changed_message_is_refused_or_can_be_used(data):
    decode, message = data.draw(st.sampled_from(EVERY))
    content = msgspec.msgpack.decode(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        content = mutate(data, content)
    received = outcome(decode, msgspec.msgpack.encode(content))
    if isinstance(received, str):
        assert_one_line(received)
    if isinstance(received, cluster.Load):
        assert_loadable(received)


def assert_loadable(load: cluster.Load) -> None:
    """What the code behind ``decode_from_head`` relies on."""
    numbers = [spec.window for spec in load.windows]
    assert len(numbers) == len(load.gpu_layers) == len(set(numbers)) > 0
    for spec in [*load.windows, *([load.probe] if load.probe else [])]:
        assert len(spec.layers) >= spec.last - spec.first > 0
        for number, ref in enumerate(spec.layers):
            assert len(layer_header(ref.tensors, number=number, split=number + 1)) == HEADER_BYTES


@pytest.mark.parametrize(
    "changes",
    [
        {"route": 1},
        {"route": -1},
        {"route": 1 << 40},
        {"width": 0},
        {"width": 1 << 30},
        {"rows": 0},
        {"rows": 1 << 20},
        {"context": 0},
        {"context": 1 << 40},
        {"sequences": 0},
        {"sequences": 1000},
        {"windows": [], "gpu_layers": []},
        {"gpu_layers": []},
        {"gpu_layers": [0, 0]},
        {"gpu_layers": [-1]},
        {"gpu_layers": [3]},
        {"gpu_layers": [1 << 40]},
        {"windows": [a_window(), a_window()], "gpu_layers": [0, 0]},
        {"windows": [a_window(window=0)]},
        {"windows": [a_window(window=3)]},
        {"windows": [a_window(window=-1)]},
        {"windows": [a_window(first=4)]},
        {"windows": [a_window(first=-1)]},
        {"windows": [a_window(last=9)]},
        {"windows": [a_window(layers=())]},
        {"windows": [a_window(layers=(a_ref(), a_ref(digest="no")))]},
        {"probe": a_window(layers=(a_ref(digest="no"),))},
        {"step_timeout_s": 0.0},
        {"step_timeout_s": float("nan")},
        {"step_timeout_s": float("inf")},
    ],
)
def test_an_impossible_plan_is_refused(changes):
    with pytest.raises(ProtocolError):
        cluster.decode_from_head(encode(a_load(**changes)))


@pytest.mark.parametrize(
    "targets",
    [
        [a_target(device="")],
        [a_target(device="\x1b[2J")],
        [a_target(port=0)],
        [a_target(port=1 << 16)],
        [a_target(port=-1)],
        [a_target(addresses=["lap.local"])],
        [a_target(addresses=["127.0.0.1", "127.0.0.1:80"])],
        [a_target(addresses=["tcp://127.0.0.1"])],
        [a_target(addresses=[""])],
        [a_target(addresses=["127.0.0.1"] * (cluster.MAX_ADDRESSES + 1))],
        [a_target()] * (cluster.MAX_LINK_TARGETS + 1),
    ],
    ids=range(11),
)
def test_links_to_impossible_targets_are_not_measured(targets):
    with pytest.raises(ProtocolError):
        cluster.decode_from_head(encode(cluster.MeasureLinks(targets=targets)))


@pytest.mark.parametrize(
    "echo",
    [
        cluster.Echo(session=1, device="lap", payload=b"", answer_bytes=-1),
        cluster.Echo(session=1, device="lap", payload=b"", answer_bytes=cluster.MAX_ECHO_BYTES + 1),
        cluster.Echo(session=1, device="lap", payload=b"", answer_bytes=1 << 62),
        cluster.Echo(session=1, device="lap", payload=bytes(cluster.MAX_ECHO_BYTES + 1), answer_bytes=0),
        cluster.Echo(session=1, device="\x1b[2J", payload=b"", answer_bytes=0),
    ],
    ids=range(5),
)
def test_an_echo_that_is_too_large_or_for_nobody_is_refused(echo):
    with pytest.raises(ProtocolError):
        cluster.decode_from_head(encode(echo))


@pytest.mark.parametrize(
    "changes",
    [
        {"source": ""},
        {"target": "a b"},
        {"target": "\x1b[2J"},
        {"address": "lap.local"},
        {"address": "192.168.1.20:80"},
        *({"round_trip_s": value} for value in (0.0, -1e-3, math.nan, math.inf, cluster.MAX_ROUND_TRIP_S)),
        *({"bytes_per_s": value} for value in (0.0, -1e8, math.nan, math.inf, cluster.MAX_LINK_BYTES_PER_S)),
    ],
    ids=str,
)
def test_an_impossible_link_is_refused(changes):
    for links in ([a_link(**changes)], [a_link(), a_link(**changes)]):
        with pytest.raises(ProtocolError) as refused:
            cluster.decode_from_worker(encode(cluster.LinksMeasured(links=links)))
        assert_one_line(str(refused.value))


# ---- layers ---------------------------------------------------------------------------------------------------------


def test_a_possible_layer_is_accepted():
    check_ref(a_ref())
    check_ref(a_ref(a_tensor(type=int(GGMLQuantizationType.Q4_K), shape=(256, 3), size_bytes=3 * 144)))
    check_ref(a_ref(a_tensor(shape=(1, 1, 1, 1), size_bytes=4)))


@pytest.mark.parametrize(
    "ref",
    [
        a_ref(digest=""),
        a_ref(digest="AB" * 32),
        a_ref(digest="ab" * 33),
        a_ref(digest="/" * 64),
        a_ref(digest="../" * 21 + "a"),
        a_ref(size_bytes=0),
        a_ref(size_bytes=-128),
        a_ref(size_bytes=129),
        a_ref(size_bytes=1 << 63),
        a_ref(tensors=()),
        a_ref(*[a_tensor(name=f"t{i}", offset=64 * i) for i in range(101)]),
        a_ref(a_tensor(name="")),
        a_ref(a_tensor(name="x" * 61)),
        a_ref(a_tensor(name="é" * 31)),
        a_ref(a_tensor(name="*" * 60)),
        a_ref(a_tensor(name="blk.*.*")),
        a_ref(a_tensor(), a_tensor(offset=64)),
        a_ref(a_tensor(shape=())),
        a_ref(a_tensor(shape=(8, 2, 1, 1, 1))),
        a_ref(a_tensor(shape=(8, 0))),
        a_ref(a_tensor(shape=(-8, -2))),
        a_ref(a_tensor(shape=(1 << 63, 1 << 63, 1 << 63, 1 << 63))),
        a_ref(a_tensor(type=-1)),
        a_ref(a_tensor(type=999)),
        a_ref(a_tensor(type=1 << 63)),
        a_ref(a_tensor(type=int(GGMLQuantizationType.Q4_K))),
        a_ref(a_tensor(size_bytes=63)),
        a_ref(a_tensor(size_bytes=96)),
        a_ref(a_tensor(offset=32)),
        a_ref(a_tensor(offset=-32)),
        a_ref(a_tensor(), a_tensor(name="b", offset=0)),
    ],
)
def test_an_impossible_layer_is_refused(ref):
    with pytest.raises(ProtocolError) as caught:
        check_ref(ref)
    assert len(str(caught.value)) < 300


tensors = st.builds(
    LayerTensor,
    st.sampled_from(["blk.*.attn_q.weight", "*", "token_embd.weight"]) | st.text(max_size=70),
    st.sampled_from([int(kind) for kind in GGMLQuantizationType]) | numbers,
    st.lists(st.sampled_from([1, 32, 256]) | numbers, max_size=5).map(tuple),
    st.sampled_from([0, 32, 64, 128, 1024]) | numbers,
    st.sampled_from([4, 64, 128, 144, 1024]) | numbers,
)


@settings(max_examples=300)
@given(st.lists(tensors, min_size=1, max_size=4), st.booleans(), numbers)
def test_any_layer_is_refused_or_has_a_header(drawn, placed, size):
    if placed:
        drawn, size = fitted(drawn)
    ref = LayerRef("0" * 64, size, tuple(drawn))
    refused = outcome(check_ref, ref)
    if refused is not None:
        assert_one_line(refused)
    else:
        assert len(layer_header(ref.tensors, number=511, split=65_535)) == HEADER_BYTES


def fitted(drawn: list[LayerTensor]) -> tuple[list[LayerTensor], int]:
    """``drawn`` with sizes and offsets that are right, where that is possible."""
    at, out = 0, []
    for tensor in drawn:
        size = tensor.size_bytes
        known = {int(kind): kind for kind in GGMLQuantizationType}
        if tensor.type in known and tensor.shape and min(tensor.shape) > 0 and max(tensor.shape) < 1 << 20:
            block, block_bytes = GGML_QUANT_SIZES[known[tensor.type]]
            size = int(np.prod([int(extent) for extent in tensor.shape], dtype=object)) // block * block_bytes
        out.append(msgspec.structs.replace(tensor, offset=at, size_bytes=size))
        at += -(-size // 32) * 32
    return out, at


def test_the_largest_layer_that_is_accepted_has_a_header():
    names = [f"blk.*.{i:0>54}" for i in range(100)]
    ref = a_ref(*[a_tensor(name=name, shape=(8, 2, 1, 1), offset=64 * i) for i, name in enumerate(names)])
    check_ref(ref)
    assert len(layer_header(ref.tensors, number=511, split=65_535)) == HEADER_BYTES


# ---- what is shown to people ----------------------------------------------------------------------------------------

HOSTILE = "\x1b[2J\r\nyou won" + "x" * 5000


@pytest.mark.parametrize("message", [cluster.Refused(HOSTILE), cluster.Broken(epoch=1, error=HOSTILE)])
def test_the_texts_of_a_worker_are_one_printable_line(message):
    received = cluster.decode_from_worker(encode(message))
    text = received.reason if isinstance(received, cluster.Refused) else received.error
    assert text.isprintable()
    assert "you won" in text
    assert len(text) < 400


def test_the_reason_for_no_chunk_is_one_printable_line():
    received = cluster.decode_transfer(encode(cluster.NoChunk(digest="ab", offset=0, reason=HOSTILE)))
    assert isinstance(received, cluster.NoChunk)
    assert received.reason.isprintable()


@pytest.mark.parametrize("name", ["", HOSTILE, "a b", "[red]", "-x", "x" * 63, "é"])
def test_a_device_without_a_proper_name_is_refused(name):
    with pytest.raises(ProtocolError, match="no device name"):
        cluster.decode_from_head(encode(cluster.Hello(protocol=1, version="0", device=name, session=1)))
    profile = dataclasses.replace(PROFILE, device=name)
    with pytest.raises(ProtocolError, match="no device name"):
        cluster.decode_from_worker(encode(cluster.Welcome(protocol=1, version="0", build="b", profile=profile)))


@pytest.mark.parametrize(
    "figures",
    [{"ram_available_bytes": -1}, {"ram_total_bytes": 1 << 62}]
    + [{"disk": dataclasses.replace(PROFILE.disk, free_bytes=-1)}, {"cpu": dataclasses.replace(PROFILE.cpu, cores=0)}]
    + [{"ram_read_bytes_per_s": rate} for rate in (-1.0, float("nan"), float("inf"))],
)
def test_a_profile_with_impossible_figures_is_refused(figures):
    profile = dataclasses.replace(PROFILE, **figures)
    with pytest.raises(ProtocolError, match="impossible"):
        cluster.decode_from_worker(encode(cluster.Welcome(protocol=1, version="0", build="b", profile=profile)))


@pytest.mark.parametrize(
    "message",
    [
        cluster.Loaded(epoch=1, port=0),
        cluster.Loaded(epoch=1, port=65_536),
        cluster.Progress(epoch=1, phase="dance", done=0, total=1),
        cluster.Progress(epoch=1, phase="load", done=2, total=1),
        cluster.Progress(epoch=1, phase="load", done=-1, total=1),
    ],
)
def test_impossible_news_of_a_worker_are_refused(message):
    with pytest.raises(ProtocolError, match="impossible"):
        cluster.decode_from_worker(encode(message))
