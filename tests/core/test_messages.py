"""Bytes from a device on the control and layer links are one of our messages or one clear error."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halda import (
    CacheCost,
    DeviceProfile,
    LinkProfile,
    MessageTime,
    OffloadSpeed,
    RowSpeed,
    TypeRows,
    WidthCost,
)
from halda.assignment import WindowAssignment, in_memory
from primad.errors import ProtocolError
from primad.gguf.layers import HEADER_BYTES, LayerRef, LayerTensor, check_ref, layer_header
from primad.gguf.windows import WindowPlan, WindowSpec
from primad.network import layer_messages as transfer
from primad.network import messages as cluster
from primad.network.contacts import MAX_ADDRESSES, Contact
from primad.network.versions import Versions
from primad.ring.messages import DecodeStatus, PromptStatus, Status
from primad.system.wire import encode
from tests.fakes.profile import PROFILE
from tests.fakes.wire import anything, assert_one_line, numbers, outcome

# ---- the control and layer links ------------------------------------------------------------------------------------


KEY = "k" * 40
HOSTILE = "\x1b[2J\r\nyou won" + "x" * 5000
SOURCE = Contact(device="lap", key=KEY, addresses=["127.0.0.1", "fe80::1%eth0"], port=7771)


def a_tensor(**changes: Any) -> LayerTensor:
    tensor = LayerTensor("blk.*.attn_q.weight", int(GGMLQuantizationType.F32), (8, 2), 0, 64)
    return msgspec.structs.replace(tensor, **changes)


def a_ref(*tensors: LayerTensor, **changes: Any) -> LayerRef:
    tensors = tensors or (a_tensor(), a_tensor(name="blk.*.attn_k.weight", offset=64))
    size = sum(-(-tensor.size_bytes // 32) * 32 for tensor in tensors)
    return msgspec.structs.replace(LayerRef("ab" * 32, size, tensors), **changes)


IN_MEMORY = in_memory(2, 4)


def a_load(**changes: Any) -> cluster.Load:
    window = WindowSpec(window=1, first=2, last=4, metadata=b"GGUF", layers=(a_ref(), a_ref()))
    load = cluster.Load(
        ring=1,
        epoch=2,
        route=4,
        width=64,
        windows=[WindowPlan(spec=window, assignment=in_memory(2, 4), extra_buffers=False)],
        read_ahead_bytes=0,
        sources=[SOURCE],
        context=128,
        sequences=1,
        rows=64,
        place=0,
        kv_type="f16",
        step_timeout_s=5.0,
    )
    return msgspec.structs.replace(load, **changes)


def a_window(assignment: WindowAssignment = IN_MEMORY, **changes: Any) -> WindowPlan:
    window = a_load().windows[0]
    spec = msgspec.structs.replace(window.spec, **changes)
    return msgspec.structs.replace(window, spec=spec, assignment=assignment)


IMPOSSIBLE_TIMES = [
    [(0, 0.0)],
    [(8192, -0.1)],
    [(8192, math.nan)],
    [(8192, 0.2), (8192, 0.3)],
    [(8192, 0.2), (9000, 0.1)],
    [(1 << 40, 0.1)],
    [(i + 1, 0.1) for i in range(cluster.MAX_MESSAGE_TIMES + 1)],
]


def message_times(*times: tuple[int, float]) -> tuple[MessageTime, ...]:
    return tuple(MessageTime(size_bytes=size, beyond_s=seconds) for size, seconds in times)


def a_link(**changes: Any) -> LinkProfile:
    link = LinkProfile(source="desk", target="lap", address="192.168.1.20", round_trip_s=2e-3, bytes_per_s=1e8)
    return dataclasses.replace(link, **changes)


def a_target(**changes: Any) -> Contact:
    target = Contact(device="lap", key=KEY, addresses=["127.0.0.1"], port=1)
    return msgspec.structs.replace(target, **changes)


def a_hello(**changes: Any) -> cluster.Hello:
    hello = cluster.Hello(protocol=cluster.PROTOCOL, version="0", device="desk", session=1, build="b", gone_after_s=4.0)
    return msgspec.structs.replace(hello, **changes)


def a_welcome(profile: DeviceProfile = PROFILE, layer_port: int = 7771) -> cluster.Welcome:
    return cluster.Welcome(protocol=cluster.PROTOCOL, version="0", build="b", profile=profile, layer_port=layer_port)


def a_state(epoch: int = 1, **changes: Any) -> cluster.StageState:
    loaded = cluster.Loaded(port=4000, key=KEY)
    broken = cluster.Broken(error="no memory", fault="load")
    state = cluster.StageState(epoch=epoch, loaded=loaded, linked=True, broken=broken)
    return msgspec.structs.replace(state, **changes)


def the_states(*states: cluster.StageState, revision: int = 1) -> cluster.StageStates:
    return cluster.StageStates(revision=revision, states=list(states))


STATUS = Status(steps=1, rows=1, compute_s=0.5, hop_s=[0.1], rss_bytes=1, private_bytes=1, refused=0)

FROM_HEAD = [
    cluster.Probe(protocol=cluster.PROTOCOL, oldest=cluster.OLDEST, version="0", device="desk"),
    a_hello(),
    cluster.Introduce(devices=[], revoked=[]),
    cluster.Introduce(devices=[cluster.Introduction("lap", KEY)], revoked=[KEY]),
    a_load(),
    a_load(sources=[]),
    cluster.Link(epoch=1, address="tcp://127.0.0.1:1", key=KEY, sender=KEY),
    cluster.Release(epoch=1),
    cluster.Ping(status=True),
    cluster.Ping(status=False, number=7, revision=5),
    cluster.MeasureLinks(targets=[]),
    cluster.MeasureLinks(targets=[a_target(addresses=["127.0.0.1", "::1", "fe80::1%eth0"], port=7770)]),
    cluster.Echo(payload=b"", answer_bytes=cluster.MAX_ECHO_BYTES),
    cluster.Echo(payload=bytes(cluster.MAX_ECHO_BYTES), answer_bytes=0),
    cluster.Dismiss(),
]
FROM_WORKER = [
    cluster.Probed(protocol=cluster.PROTOCOL, oldest=cluster.OLDEST, version="0", device="lap"),
    a_welcome(),
    cluster.Refused("busy"),
    cluster.Progress(epoch=1, phase="fetch", done=1, total=2),
    the_states(revision=0),
    the_states(a_state(loaded=None, broken=None), a_state(epoch=2), a_state(epoch=-3, broken=None)),
    cluster.Leaving("paused"),
    cluster.MemoryLow(epoch=1, needed_bytes=1, ram_available_bytes=0),
    cluster.MemoryRecovered(0),
    cluster.Remeasured(PROFILE),
    cluster.Pong(),
    cluster.Pong(7, cluster.MAX_REVISION),
    cluster.WorkerStatus(epoch=1, status=STATUS, daemon_rss_bytes=1),
    cluster.LinksMeasured(links=[]),
    cluster.LinksMeasured(links=[a_link(), a_link(address="", network_s=1e-4)]),
    cluster.Echoed(b"123"),
]
TRANSFER = [
    transfer.AskPresent(digests=["ab" * 32]),
    transfer.Present(held=[True, False]),
    transfer.FetchDigests(digest="ab" * 32),
    transfer.Digests(digest="ab" * 32, tree=b"1"),
    transfer.FetchChunk(digest="ab" * 32, offset=0, size=1),
    transfer.Chunk(digest="ab" * 32, offset=0),
    transfer.NoChunk(digest="ab" * 32, offset=0, reason="gone"),
    transfer.NoChunk(digest="ab" * 32, offset=None, reason="gone"),
]
EVERY = [
    *((cluster.decode_from_head, message) for message in FROM_HEAD),
    *((cluster.decode_from_worker, message) for message in FROM_WORKER),
    *((transfer.decode_transfer, message) for message in TRANSFER),
]


@pytest.mark.parametrize(("decode", "message"), EVERY, ids=lambda value: type(value).__name__)
def test_every_message_of_the_cluster_arrives_as_it_was_sent(decode, message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize("decode", [cluster.decode_from_head, cluster.decode_from_worker, transfer.decode_transfer])
def test_a_message_of_another_conversation_is_refused(decode):
    accepted = [message for _, message in EVERY if not isinstance(outcome(decode, encode(message)), str)]
    assert accepted in (FROM_HEAD, FROM_WORKER, TRANSFER)


decoders = st.sampled_from([cluster.decode_from_head, cluster.decode_from_worker, transfer.decode_transfer])


@given(decoders, st.binary(max_size=200))
@example(cluster.decode_from_head, b"")
@example(cluster.decode_from_head, b"\x91" * 100_000)
@example(cluster.decode_from_head, b"\x81\xa4type\xa4load" * 50_000)
@example(cluster.decode_from_worker, b"\x82\xa4type\xa6status\xa6status\xdf\xff\xff\xff\xff")
@example(cluster.decode_from_head, b"\x82\xa4type\xa4load\xa7windows\xdd\xff\xff\xff\xff")
@example(transfer.decode_transfer, b"\x82\xa4type\xa5fetch\xa6digest\xa2\xff\xfe")
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


@settings(max_examples=100)
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
    """The assumptions of the code after ``decode_from_head``."""
    specs = [window.spec for window in load.windows]
    assert len(specs) == len({spec.window for spec in specs}) > 0
    for spec in specs:
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
        {"windows": []},
        {"windows": [a_window(in_memory(2, 4, gpu_layers=-1))]},
        {"windows": [a_window(in_memory(2, 4, gpu_layers=3))]},
        {"windows": [a_window(in_memory(2, 4, gpu_layers=1, cpu_experts=2))]},
        {"windows": [a_window(in_memory(2, 4, gpu_layers=1, cpu_experts=-1))]},
        {"windows": [a_window(in_memory(2, 4, gpu_layers=1 << 40))]},
        {"windows": [a_window(in_memory(2, 5))]},
        {"windows": [a_window(in_memory(2, 4, output="cpu"))]},
        {"windows": [a_window(dataclasses.replace(in_memory(2, 4), resident_bytes=1))]},
        {"windows": [a_window(dataclasses.replace(in_memory(2, 4), layer_bytes=1, resident_bytes=-1))]},
        {"windows": [a_window(dataclasses.replace(in_memory(2, 4), layer_bytes=1 << 60))]},
        {"windows": [a_window(dataclasses.replace(in_memory(2, 4), output_bytes=1))]},
        {"read_ahead_bytes": -1},
        {"read_ahead_bytes": 1 << 60},
        {"windows": [a_window(), a_window()]},
        {"windows": [a_window(window=0)]},
        {"windows": [a_window(window=3)]},
        {"windows": [a_window(window=-1)]},
        {"windows": [a_window(first=4)]},
        {"windows": [a_window(first=-1)]},
        {"windows": [a_window(last=9)]},
        {"windows": [a_window(layers=())]},
        {"windows": [a_window(layers=(a_ref(), a_ref(digest="no")))]},
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
        [a_target(addresses=["127.0.0.1"] * (MAX_ADDRESSES + 1))],
        [a_target()] * (cluster.MAX_CONTACTS + 1),
    ],
    ids=range(11),
)
def test_links_to_impossible_targets_are_not_measured(targets):
    with pytest.raises(ProtocolError):
        cluster.decode_from_head(encode(cluster.MeasureLinks(targets=targets)))


@pytest.mark.parametrize(
    "echo",
    [
        cluster.Echo(payload=b"", answer_bytes=-1),
        cluster.Echo(payload=b"", answer_bytes=cluster.MAX_ECHO_BYTES + 1),
        cluster.Echo(payload=b"", answer_bytes=1 << 62),
        cluster.Echo(payload=bytes(cluster.MAX_ECHO_BYTES + 1), answer_bytes=0),
    ],
    ids=range(4),
)
def test_an_echo_that_is_too_large_is_refused(echo):
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
        *({"late_s": value} for value in (-1e-3, math.nan, math.inf)),
        *({"network_s": value} for value in (-1e-3, math.nan, math.inf, cluster.MAX_ROUND_TRIP_S)),
        *({"messages": message_times(*times)} for times in IMPOSSIBLE_TIMES),
        *({"bytes_per_s": value} for value in (0.0, -1e8, math.nan, math.inf, cluster.MAX_LINK_BYTES_PER_S)),
    ],
    ids=str,
)
def test_an_impossible_link_is_refused(changes):
    for links in ([a_link(**changes)], [a_link(), a_link(**changes)]):
        with pytest.raises(ProtocolError) as refused:
            cluster.decode_from_worker(encode(cluster.LinksMeasured(links=links)))
        assert_one_line(str(refused.value))


@pytest.mark.parametrize("key", ["", "k" * 39, "k" * 41, " " * 40, "#" * 40, "é" * 40, HOSTILE])
@pytest.mark.parametrize(
    "with_key",
    [
        lambda key: cluster.Link(epoch=1, address="tcp://127.0.0.1:1", key=key, sender=KEY),
        lambda key: cluster.Link(epoch=1, address="tcp://127.0.0.1:1", key=KEY, sender=key),
        lambda key: cluster.MeasureLinks(targets=[a_target(key=key)]),
        lambda key: cluster.Introduce(devices=[cluster.Introduction("lap", key)], revoked=[]),
        lambda key: cluster.Introduce(devices=[], revoked=[key]),
        lambda key: a_load(sources=[msgspec.structs.replace(SOURCE, key=key)]),
    ],
    ids=["link to", "link from", "target", "introduced", "revoked", "source"],
)
def test_an_invalid_key_is_refused(with_key, key):
    with pytest.raises(ProtocolError) as refused:
        cluster.decode_from_head(encode(with_key(key)))
    assert_one_line(str(refused.value))


@pytest.mark.parametrize("gone_after_s", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_a_head_with_an_impossible_patience_is_refused(gone_after_s):
    with pytest.raises(ProtocolError, match="gone_after_s"):
        cluster.decode_from_head(encode(a_hello(gone_after_s=gone_after_s)))


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::", "*", "desk.local", "tcp://127.0.0.1", "fe80::1%" + "x" * 33])
def test_layers_are_not_fetched_from_impossible_places(address):
    source = msgspec.structs.replace(SOURCE, addresses=[address])
    with pytest.raises(ProtocolError, match=r"lap at .*, which is not an address"):
        cluster.decode_from_head(encode(a_load(sources=[source])))


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


@settings(max_examples=100)
@given(st.lists(tensors, min_size=1, max_size=4), st.booleans(), numbers)
def test_any_layer_is_refused_or_has_a_header(sampled, placed, size):
    if placed:
        sampled, size = fitted(sampled)
    ref = LayerRef("0" * 64, size, tuple(sampled))
    refused = outcome(check_ref, ref)
    if refused is not None:
        assert_one_line(refused)
    else:
        assert len(layer_header(ref.tensors, number=511, split=65_535)) == HEADER_BYTES


def fitted(sampled: list[LayerTensor]) -> tuple[list[LayerTensor], int]:
    """``sampled`` with valid sizes and offsets, where possible."""
    at, out = 0, []
    for tensor in sampled:
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


@pytest.mark.parametrize(
    "message",
    [
        cluster.Refused(HOSTILE),
        the_states(a_state(), a_state(epoch=2, broken=cluster.Broken(error=HOSTILE, fault="ring"))),
        cluster.Leaving(HOSTILE),
    ],
)
def test_the_texts_of_a_worker_are_one_printable_line(message):
    received = cluster.decode_from_worker(encode(message))
    is_states = isinstance(received, cluster.StageStates)
    text = received.states[1].broken.error if is_states else received.reason
    assert text.isprintable()
    assert "you won" in text
    assert len(text) < 400


def test_the_device_at_fault_stays_the_same_when_the_text_is_made_printable():
    for printed in ({"again": True}, {"sender": True}, {}):
        broken = cluster.Broken(error="why", fault="ring", **printed)
        received = cluster.decode_from_worker(encode(the_states(a_state(broken=broken))))
        assert received.states[0].broken == broken


def test_the_build_and_version_of_a_worker_are_one_printable_line():
    hostile = msgspec.structs.replace(a_welcome(), build=HOSTILE, version=HOSTILE)
    received = cluster.decode_from_worker(encode(hostile))
    assert (received.build + received.version).isprintable()


def test_the_reason_for_no_chunk_is_one_printable_line():
    received = transfer.decode_transfer(encode(transfer.NoChunk(digest="ab", offset=0, reason=HOSTILE)))
    assert isinstance(received, transfer.NoChunk)
    assert received.reason.isprintable()


@pytest.mark.parametrize("name", ["", HOSTILE, "a b", "[red]", "-x", "x" * 63, "é"])
def test_a_device_without_a_proper_name_is_refused(name):
    with pytest.raises(ProtocolError, match="matching regex"):
        cluster.decode_from_head(encode(a_hello(device=name)))
    with pytest.raises(ProtocolError, match="matching regex"):
        cluster.decode_from_head(
            encode(cluster.Probe(protocol=cluster.PROTOCOL, oldest=cluster.OLDEST, version="0", device=name))
        )
    with pytest.raises(ProtocolError, match="matching regex"):
        cluster.decode_from_worker(
            encode(cluster.Probed(protocol=cluster.PROTOCOL, oldest=cluster.OLDEST, version="0", device=name))
        )
    with pytest.raises(ProtocolError, match="matching regex"):
        cluster.decode_from_head(encode(cluster.Introduce(devices=[cluster.Introduction(name, KEY)], revoked=[])))
    with pytest.raises(ProtocolError, match="matching regex"):
        cluster.decode_from_head(encode(a_load(sources=[msgspec.structs.replace(SOURCE, device=name)])))
    profile = dataclasses.replace(PROFILE, device=name)
    with pytest.raises(ProtocolError, match="no device name"):
        cluster.decode_from_worker(encode(a_welcome(profile)))
    with pytest.raises(ProtocolError, match="impossible"):
        cluster.decode_from_worker(encode(cluster.Remeasured(profile)))


@pytest.mark.parametrize(
    "figures",
    [{"ram_available_bytes": -1}, {"ram_total_bytes": 1 << 62}]
    + [{"disk": dataclasses.replace(PROFILE.disk, free_bytes=-1)}, {"cpu": dataclasses.replace(PROFILE.cpu, cores=0)}]
    + [{"ram_read_bytes_per_s": rate} for rate in (-1.0, float("nan"), float("inf"))],
)
def test_a_profile_with_impossible_figures_is_refused(figures):
    profile = dataclasses.replace(PROFILE, **figures)
    with pytest.raises(ProtocolError, match="impossible"):
        cluster.decode_from_worker(encode(a_welcome(profile)))


def all_numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every number in plain data, with its path."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, each in inner:
        yield from all_numbers(each, (*path, key))
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def test_every_number_of_a_profile_has_bounds():
    """Plans use all of them, so a value that is not a number or far out of range would crash the head."""
    speed = dataclasses.replace(PROFILE.cpu.speeds[0], rows=(RowSpeed(rows=2, bytes_per_s=8e9),))
    cpu = dataclasses.replace(
        PROFILE.cpu,
        speeds=(dataclasses.replace(speed, plain=speed),),
        exact_rows=(TypeRows(type="Q4_K", rows=4, piece_rows=8, replay_rows=2),),
        exact_states=(TypeRows(type="delta", rows=4, piece_rows=8, replay_rows=2),),
        widths=(WidthCost(weights=1_000_000, ratio=1.0, many_ratio=1.0),),
        caches=(CacheCost(bytes=1_000_000, ratio=0.5),),
    )
    offload = OffloadSpeed(type="Q4_K", few_bytes_per_s=1e10, prefill_flop_per_s=1e13)
    gpu = dataclasses.replace(PROFILE.gpu, speeds=PROFILE.gpu.speeds[:1], prefill_offload=(offload,))
    profile = dataclasses.replace(PROFILE, cpu=cpu, gpu=gpu, other_gpus=(gpu,), cores=(0, 1))
    assert cluster.decode_from_worker(encode(a_welcome(profile))).profile == profile
    for path, number in all_numbers(msgspec.to_builtins(profile)):
        for absurd in (math.nan, math.inf, -1.0, 1e300) if isinstance(number, float) else (-1, 1 << 62):
            data = msgspec.msgpack.decode(encode(a_welcome(profile)))
            *keys, last = "profile", *path
            functools.reduce(lambda inner, key: inner[key], keys, data)[last] = absurd
            with pytest.raises(ProtocolError) as refused:
                cluster.decode_from_worker(msgspec.msgpack.encode(data))
            assert "impossible" in str(refused.value), path


@pytest.mark.parametrize(
    "message",
    [
        the_states(a_state(loaded=cluster.Loaded(port=0, key=KEY))),
        the_states(a_state(loaded=cluster.Loaded(port=65_536, key=KEY))),
        the_states(a_state(), a_state(epoch=2, loaded=cluster.Loaded(port=0, key=KEY))),
        the_states(a_state(broken=cluster.Broken(error="no memory", fault="dance"))),
        the_states(revision=-1),
        the_states(revision=cluster.MAX_REVISION + 1),
        cluster.Pong(1, -1),
        cluster.Pong(1, cluster.MAX_REVISION + 1),
        a_welcome(layer_port=0),
        cluster.Progress(epoch=1, phase="dance", done=0, total=1),
        cluster.Progress(epoch=1, phase="load", done=2, total=1),
        cluster.Progress(epoch=1, phase="load", done=-1, total=1),
        cluster.MemoryLow(epoch=1, needed_bytes=0, ram_available_bytes=1),
        cluster.MemoryLow(epoch=1, needed_bytes=cluster.MAX_MEMORY_BYTES + 1, ram_available_bytes=1),
        cluster.MemoryLow(epoch=1, needed_bytes=1, ram_available_bytes=-1),
        cluster.MemoryRecovered(-1),
        cluster.MemoryRecovered(cluster.MAX_MEMORY_BYTES + 1),
    ],
)
def test_impossible_news_of_a_worker_are_refused(message):
    with pytest.raises(ProtocolError) as refused:
        cluster.decode_from_worker(encode(message))
    assert_one_line(str(refused.value))


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf, -1.0, 1e19])
@pytest.mark.parametrize(
    "place",
    [
        lambda figure: {"compute_s": figure},
        lambda figure: {"hop_s": [0.1, figure]},
        lambda figure: {"decode": DecodeStatus(tokens=9, token_s=None, compute_s=1, stall_s=figure, read_bytes=0)},
        lambda figure: {"prompt": PromptStatus(rows=512, row_s=figure)},
    ],
    ids=["compute", "hops", "decode", "prompt"],
)
def test_impossible_figures_of_a_worker_are_refused(place, figure):
    status = msgspec.structs.replace(STATUS, **place(figure))
    with pytest.raises(ProtocolError, match="impossible figure") as refused:
        cluster.decode_from_worker(encode(cluster.WorkerStatus(epoch=1, status=status, daemon_rss_bytes=1)))
    assert_one_line(str(refused.value))


@pytest.mark.parametrize(
    ("states", "why"),
    [
        ([a_state(number) for number in range(cluster.MAX_STAGES + 1)], "of length <= 64"),
        ([a_state(), a_state()], "twice in one epoch"),
        ([a_state(loaded=cluster.Loaded(port=1, key=HOSTILE))], "not a public key"),
    ],
    ids=["too many", "twice", "key"],
)
def test_impossible_stages_are_refused(states, why):
    with pytest.raises(ProtocolError, match=why) as refused:
        cluster.decode_from_worker(encode(the_states(*states)))
    assert_one_line(str(refused.value))


# ---- versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [
        ((5, 4), (5, 4), 5),
        ((5, 4), (4, 3), 4),
        ((5, 4), (6, 5), 5),
        ((5, 4), (3, 2), None),
        ((5, 4), (7, 6), None),
        ((5, 4), (9, 1), 5),
    ],
)
def test_a_version_talks_to_its_neighbours_and_no_other_in_both_directions(ours, theirs, agreed):
    for (protocol, oldest), other in ((ours, theirs), (theirs, ours)):
        assert Versions(primad="1", protocol=protocol, oldest=oldest).agreed(*other) == agreed


def test_signs_of_life_of_an_older_version_are_understood_and_ours_by_it():
    assert cluster.decode_from_head(msgspec.msgpack.encode({"type": "ping", "status": False})) == cluster.Ping(False)
    assert cluster.decode_from_worker(msgspec.msgpack.encode({"type": "pong"})) == cluster.Pong()

    class Pong(msgspec.Struct, frozen=True, tag="pong"):
        """The message of an earlier version."""

    assert msgspec.msgpack.decode(encode(cluster.Pong(7, 5)), type=Pong) == Pong()


def test_a_field_of_a_newer_version_is_skipped():
    content = msgspec.msgpack.decode(encode(a_hello())) | {"a_field_of_tomorrow": [1, 2]}
    assert cluster.decode_from_head(msgspec.msgpack.encode(content)) == a_hello()
