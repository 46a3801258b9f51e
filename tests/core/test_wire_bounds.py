"""Input from a device is bounded before it is read: messages in bytes, lists in entries, and derived sizes.

The fields are found in the types, so a new one without a bound fails here.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect as inspect
import pytest

from primad.errors import ProtocolError
from primad.kv.cells import MAX_LAYERS
from primad.kv.keys import KvBlock
from primad.network import layer_messages, messages
from primad.network.messages import (
    Echo,
    Echoed,
    HeadMessage,
    KvHold,
    WorkerMessage,
    decode_from_head,
    decode_from_worker,
)
from primad.ring.messages import MAX_HEADER_BYTES, RouteMessage, StepLimits, decode_route
from primad.system.wire import encode
from primad.trust import pairing
from tests.core.test_messages import a_load

COSTLY_BYTES = 1 << 20
"""No list in a smaller message can be large."""
MANY = 1 << 20


def types_of(kind: inspect.Type, place: str, seen: tuple[type, ...] = ()) -> Iterator[tuple[str, inspect.Type]]:
    """All types within ``kind``, with the fields that contain them."""
    yield place, kind
    match kind:
        case inspect.StructType() | inspect.DataclassType() if kind.cls not in seen:
            for field in kind.fields:
                yield from types_of(field.type, f"{place}.{field.name}", (*seen, kind.cls))
        case inspect.UnionType(types=types) | inspect.TupleType(item_types=types):
            for each in types:
                yield from types_of(each, place, seen)
        case inspect.CollectionType(item_type=item):
            yield from types_of(item, f"{place}[]", seen)
        case inspect.DictType():
            yield from types_of(kind.key_type, f"{place}{{}}", seen)
            yield from types_of(kind.value_type, f"{place}{{}}", seen)


def max_bytes(message: inspect.StructType) -> int:
    return messages.LARGE_BYTES.get(str(message.tag), messages.USUAL_BYTES)


def of(union: Any) -> list[inspect.StructType]:
    return list(inspect.type_info(union).types)  # type: ignore[attr-defined]


@pytest.mark.parametrize("union", [HeadMessage, WorkerMessage, RouteMessage, layer_messages.TransferMessage])
def test_every_list_of_a_message_that_may_be_large_has_a_bound(union):
    for message in of(union):
        limit = MAX_HEADER_BYTES if union is RouteMessage else max_bytes(message)
        for place, kind in types_of(message, message.cls.__name__):
            assert not isinstance(kind, inspect.AnyType | inspect.RawType), f"{place} may be anything"
            if isinstance(kind, inspect.CollectionType | inspect.DictType):
                of_profile = place.startswith(("Welcome.profile", "Remeasured.profile", "LinksMeasured.links[]."))
                assert kind.max_length is not None or (of_profile and limit <= messages.USUAL_BYTES), (
                    f"{place} has no bound"
                )
                assert kind.max_length is None or kind.max_length <= MANY, place


def test_every_message_has_a_bound_in_bytes():
    tags = {str(message.tag) for union in (HeadMessage, WorkerMessage) for message in of(union)}
    assert messages.LARGE_BYTES.keys() <= tags
    for tag in sorted(tags):
        maximum = messages.LARGE_BYTES.get(tag, messages.USUAL_BYTES)
        assert maximum <= messages.MAX_MESSAGE_BYTES
        body = msgspec.msgpack.encode({"type": tag, "made_up": bytes(maximum)})
        for decode in (decode_from_head, decode_from_worker):
            with pytest.raises(ProtocolError, match=r"too large|not a control message"):
                decode(body)


def test_messages_that_no_head_sends_are_small_enough_to_be_skipped_quickly():
    """A message of unknown fields is parsed to its end, in the event loop that everything shares."""
    tags = {str(message.tag) for message in of(WorkerMessage)}
    assert max(messages.LARGE_BYTES.get(tag, messages.USUAL_BYTES) for tag in tags) == messages.MAX_STATES_BYTES
    assert messages.MAX_STATES_BYTES <= 2 << 20
    for size in messages.ECHO_BYTES:
        assert len(encode(Echo(payload=bytes(size), answer_bytes=size))) <= messages.USUAL_BYTES
        assert len(encode(Echoed(bytes(size)))) <= messages.USUAL_BYTES


@pytest.mark.parametrize(
    "body",
    [
        {"type": "load", "windows": [{}] * 5_000_000},
        {"type": "links", "links": [[]] * 2_000_000},
        {"type": "draft_input", "epoch": 1, "task": {"type": "text", "number": 1, "tokens": [1] * 8_000_000}},
        {"type": "welcome", "profile": {"cpu": {"exact_rows": [[]] * 4_000_000}}},
        {"type": "kv-hold", "number": 1, "blocks": [["", "", 0, 1]] * 900_000},
        {"type": "status", "epoch": 1, "status": {"hop_s": [0] * 15_000_000}},
    ],
    ids=lambda body: body["type"],
)
def test_a_message_of_many_entries_costs_no_memory(body):
    data = msgspec.msgpack.encode(body)
    del body
    for decode in (decode_from_head, decode_from_worker):
        tracemalloc.start()
        with pytest.raises(ProtocolError):
            decode(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 4 << 20


def test_a_step_of_many_rows_costs_no_memory():
    data = msgspec.msgpack.encode(["step", 5, 1, 1, 1, 1, "f32", [1, 1], [], [[]] * 1_000_000, [], []])
    limits = StepLimits(ring=1, epoch=1, windows=frozenset({1}), width=1, rows=1, context=1, sequences=1)
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="step header"):
        decode_route(data, 4, limits)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 << 20


def test_the_largest_hold_that_there_is_is_read():
    block = KvBlock(key="ab" * 16, before="cd" * 16, start=1, end=2)
    hold = KvHold(
        number=1,
        blocks=[block] * messages.MAX_BLOCKS,
        layers=[(0, MAX_LAYERS)],
        sources=[],
        timeout_s=1,
        verify=False,
    )
    assert decode_from_head(msgspec.msgpack.encode(hold)) == hold


@pytest.mark.parametrize(
    "changes",
    [{"rows": 8192, "width": 1 << 20}, {"context": 1 << 26, "sequences": 256}, {"context": 1 << 20, "sequences": 256}],
)
def test_a_plan_for_which_no_device_has_memory_is_refused(changes):
    with pytest.raises(ProtocolError, match="no device has memory"):
        decode_from_head(msgspec.msgpack.encode(a_load(**changes)))


@pytest.mark.parametrize("union", [pairing.Start | pairing.Prove, pairing.Answer | pairing.Accept | pairing.Refuse])
def test_messages_of_a_stranger_in_pairing_are_bounded(union):
    for message in of(union):
        for place, kind in types_of(message, message.cls.__name__):
            assert not isinstance(kind, inspect.CollectionType | inspect.DictType), place
