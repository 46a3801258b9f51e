"""Bytes from a device of the ring are a step within limits or one clear error; commands and events arrive as sent."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from halda.assignment import in_memory
from primad.engine.protocol import GREEDY, EngineOptions, WindowSource, packed_biases
from primad.errors import ProtocolError
from primad.kv.keys import KvBlock
from primad.ring.grouping import Batching
from primad.ring.messages import (
    MAX_HEADER_BYTES,
    MAX_PARTS,
    PROTOCOL,
    AlsoGenerate,
    Cancel,
    Choices,
    Connect,
    Drain,
    Drained,
    Finished,
    Generate,
    HeadPart,
    KvBegun,
    KvCopy,
    KvForgotten,
    KvKeep,
    KvKept,
    KvLoad,
    KvRemove,
    Loading,
    Open,
    Opened,
    Overdue,
    ProcessMemoryLow,
    Reopen,
    Report,
    RingBroken,
    Sampled,
    Serving,
    StateKeep,
    StateRestore,
    Status,
    Step,
    StepLimits,
    command_decoder,
    decode_route,
    event_decoder,
    in_few,
)
from primad.system.wire import encode
from tests.fakes.ring import generate
from tests.fakes.wire import anything, assert_one_line, numbers, outcome

KEY, OTHER = "0123456789abcdef" * 2, "f" * 32
FIRST, BLOCK = KvBlock(KEY, "", 0, 4), KvBlock(OTHER, KEY, 4, 32)
keys = st.sampled_from([KEY, OTHER, "", "../" + KEY, "F" * 32])
LIMITS = StepLimits(ring=0xABC, epoch=4, windows=frozenset({2, 5}), width=6, rows=8, context=32, sequences=3, states=6)


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
        ops=[
            KvRemove(0, 0, -1),
            KvCopy(0, 1, 32),
            KvKeep(2, BLOCK),
            KvKeep(2, FIRST),
            KvKeep(2, KvBlock(KEY, OTHER, 4, 4)),
            KvLoad(1, KEY, 32),
            StateKeep(2, 5, 32),
            StateRestore(1, 0, 1),
        ],
    )
    return msgspec.structs.replace(step, **changes)


def judged(step: Step, payload_bytes: int | None = None) -> Step:
    return decode_route(encode(step), step.payload_bytes if payload_bytes is None else payload_bytes, LIMITS)


def assert_within_limits(step: Step) -> None:
    """The assumptions of the code after ``decode_route``."""
    rows, width = step.shape
    assert step.protocol == PROTOCOL
    assert (step.ring, step.epoch) == (LIMITS.ring, LIMITS.epoch)
    assert step.window in LIMITS.windows
    assert step.dtype == "f32"
    assert 0 <= rows <= LIMITS.rows
    assert width in range(LIMITS.width, MAX_PARTS * LIMITS.width + 1, LIMITS.width)
    assert len(step.rope) in (0, 4 * rows)
    assert len(step.positions) == len(step.sequences) == len(step.outputs) == rows
    assert all(0 <= position < LIMITS.context for position in step.positions)
    for sequences in step.sequences:
        assert 0 < len(sequences) == len(set(sequences)) <= LIMITS.sequences
        assert all(0 <= sequence < LIMITS.sequences for sequence in sequences)
    for op in step.ops:
        match op:
            case KvRemove(sequence, start, end):
                named, span = {sequence}, (start, end)
            case KvCopy(source, target, end):
                named, span = {source, target}, (0, end)
                assert len(named) == 2
                assert end >= 0
            case KvKeep(sequence, block):
                named, span = {sequence}, (block.start, block.end)
                assert block.start <= block.end != 0
                assert set(block.key) <= set("0123456789abcdef")
                assert len(block.key) == 32
                assert len(block.before) == (32 if block.start else 0)
            case KvLoad(sequence, key, end):
                named, span = {sequence}, (0, end)
                assert set(key) <= set("0123456789abcdef")
                assert (len(key), end > 0) == (32, True)
            case StateKeep(sequence, number, end) | StateRestore(sequence, number, end):
                named, span = {sequence}, (0, end)
                assert 0 <= number < LIMITS.states
                assert end > 0
        assert all(0 <= sequence < LIMITS.sequences for sequence in named)
        assert 0 <= span[0] <= LIMITS.context
        assert -1 <= span[1] <= LIMITS.context
        assert max(abs(value) for value in span) < 1 << 31


def refused_or_within_limits(header: bytes, payload_bytes: int) -> None:
    step = outcome(decode_route, header, payload_bytes, LIMITS)
    if isinstance(step, Step):
        assert_within_limits(step)
        assert payload_bytes == 4 * step.shape[0] * step.shape[1]
    else:
        assert_one_line(step)


def test_a_valid_step_arrives_as_it_was_sent():
    assert judged(a_step()) == a_step()
    assert decode_route(memoryview(encode(a_step())), 72, LIMITS) == a_step()


def test_a_pictures_rows_bring_what_deeper_layers_add_to_them():
    step = a_step(shape=(3, 4 * 6), rope=list(range(12)))
    assert judged(step) == step


def test_a_step_of_operations_alone_has_no_payload():
    step = a_step(shape=(0, 6), positions=[], sequences=[], outputs=[])
    assert judged(step) == step


@pytest.mark.parametrize("changes", [{"ring": 1}, {"epoch": 3}, {"epoch": 5}, {"ring": -(1 << 63), "epoch": 1 << 63}])
def test_another_ring_or_epoch_is_none_of_this_ring(changes):
    with pytest.raises(ProtocolError, match="serving abc 4"):
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
        ({"shape": (3, 30)}, "shape"),
        ({"shape": (2, 6)}, "lists"),
        ({"positions": [0, 1]}, "lists"),
        ({"outputs": [True] * 4}, "lists"),
        ({"sequences": []}, "lists"),
        ({"positions": [0, 1, 32]}, "position outside the context of 32"),
        ({"positions": [-1, 0, 1]}, "position"),
        ({"positions": [0, 1, 1 << 63]}, "position"),
        ({"rope": [0] * 11}, "turns 3 rows by 11 numbers"),
        ({"rope": [0] * 11 + [32]}, "by wrong ones"),
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
        ({"ops": [KvCopy(0, -1, 1)]}, "sequence"),
        ({"ops": [KvCopy(9, 0, 1)]}, "sequence"),
        ({"ops": [KvCopy(0, 1, 1 << 40)]}, "position"),
        ({"ops": [KvCopy(0, 1, -1)]}, "a position before it"),
        ({"ops": [KvCopy(1, 1, 4)]}, "onto itself"),
        ({"ops": [KvKeep(3, FIRST)]}, "sequence"),
        ({"ops": [KvKeep(0, KvBlock(KEY, OTHER, 4, 33))]}, "position"),
        ({"ops": [KvKeep(0, KvBlock(KEY, "", -1, 4))]}, "not a block"),
        ({"ops": [KvKeep(0, KvBlock(KEY, OTHER, -1, 4))]}, "position"),
        ({"ops": [KvKeep(0, KvBlock(KEY, "", 0, 0))]}, "not a block"),
        ({"ops": [KvKeep(0, KvBlock(KEY, OTHER, 5, 4))]}, "not a block"),
        ({"ops": [KvKeep(0, KvBlock(KEY, OTHER, 4, 4))] * 4}, "keeps 4 states with KV cells; there are 3 sequences"),
        ({"ops": [KvKeep(0, KvBlock(KEY, OTHER, 0, 4))]}, "not a block"),
        ({"ops": [KvKeep(0, KvBlock(KEY, "", 4, 8))]}, "not a block"),
        ({"ops": [KvKeep(0, KvBlock("../" + KEY[3:], "", 0, 4))]}, "not a block"),
        ({"ops": [KvKeep(0, KvBlock(KEY, OTHER[1:], 4, 8))]}, "not a block"),
        ({"ops": [KvKeep(0, KvBlock("F" * 100_000, "", 0, 4))]}, "not a block"),
        ({"ops": [StateKeep(3, 0, 4)]}, "sequence"),
        ({"ops": [StateKeep(0, 0, 33)]}, "position"),
        ({"ops": [StateKeep(0, 0, 0)]}, "none of the 6 states"),
        ({"ops": [StateKeep(0, -1, 4)]}, "none of the 6 states"),
        ({"ops": [StateKeep(0, 6, 4)]}, "none of the 6 states"),
        ({"ops": [StateRestore(0, 511, 4)]}, "none of the 6 states"),
        ({"ops": [KvKeep(0, KvBlock(KEY, "", 0, 32)), *[KvKeep(0, BLOCK)] * 3]}, "keeps 116 KV cells; there are 96"),
        ({"ops": [KvLoad(3, KEY, 4)]}, "sequence"),
        ({"ops": [KvLoad(0, KEY, 33)]}, "position"),
        ({"ops": [KvLoad(0, KEY, 0)]}, "not a block"),
        ({"ops": [KvLoad(0, KEY + "\n", 4)]}, "not a block"),
        ({"ops": [KvLoad(0, "", 4)]}, "not a block"),
    ],
)
def test_a_step_outside_the_limits_is_refused_by_name(changes, why):
    step = a_step(**changes)
    payload = 72 if "shape" not in changes else max(0, 4 * step.shape[0] * step.shape[1])
    with pytest.raises(ProtocolError, match=why):
        judged(step, payload)


@pytest.mark.parametrize("size", [0, 71, 73, 72 * 2, 1 << 40])
def test_a_payload_of_another_size_is_refused(size):
    with pytest.raises(ProtocolError, match=f"payload of {size} bytes; 72 expected"):
        judged(a_step(), size)


def test_a_header_without_end_is_refused_unread():
    with pytest.raises(ProtocolError, match="at most 1048576"):
        decode_route(bytes(MAX_HEADER_BYTES + 1), 0, LIMITS)


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


@settings(max_examples=100)
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


@settings(max_examples=100)
@given(st.data())
def test_a_header_with_fields_of_any_value_is_refused_or_within_the_limits(data):
    fields = ["step", *msgspec.structs.astuple(a_step())]
    for _ in range(data.draw(st.integers(1, 3))):
        fields[data.draw(st.integers(0, len(fields) - 1))] = data.draw(anything)
    fields += data.draw(st.lists(anything, max_size=2))
    refused_or_within_limits(msgspec.msgpack.encode(fields), 72)


@settings(max_examples=100)
@given(
    rows=st.integers(-1, 9),
    width=st.sampled_from([6, 6, 6, 0, 7, 1 << 62]),
    positions=st.lists(numbers, max_size=4),
    sequences=st.lists(st.lists(numbers, max_size=3), max_size=4),
    outputs=st.lists(st.booleans(), max_size=4),
    ops=st.lists(
        st.builds(KvRemove, numbers, numbers, numbers)
        | st.builds(KvCopy, numbers, numbers, numbers)
        | st.builds(KvKeep, numbers, st.builds(KvBlock, keys, keys, numbers, numbers))
        | st.builds(KvLoad, numbers, keys, numbers),
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


# ---- between a daemon and its ring process --------------------------------------------------------------------------

SOURCE = WindowSource(window=1, metadata="m", layers=("l",), assignment=in_memory(0, 1), extra_buffers=False)
COMMANDS = [
    Open(
        ring=1,
        epoch=2,
        windows=[SOURCE],
        route=3,
        width=8,
        host="127.0.0.1",
        head=HeadPart(
            model="m",
            vocabulary=9,
            ends=(2, 7),
            depth=2,
            at_once=1,
            chunk_rows=8,
            min_rows=1,
            batching=Batching(rows=3, steps=2, cells=256),
            keep_rows=16,
        ),
        step_timeout_s=5.0,
        options=EngineOptions(context=64, sequences=1, rows=8, threads=1, batch_threads=2, kv_type="f16", lock=False),
        read_ahead_bytes=0,
        usage="/home/primad/expert-usage",
        cells="/home/primad/kv",
    ),
    Reopen(
        ring=1,
        epoch=2,
        windows=[1, 4],
        route=6,
        host="::1",
        step_timeout_s=5.0,
        assignments=[in_memory(0, 1), in_memory(2, 4)],
        read_ahead_bytes=7,
    ),
    Connect("tcp://127.0.0.1:1", "k" * 40, "s" * 40),
    generate(1, [1, 2], sampled=[3], root="model", blocks=[FIRST], replays_rows=False),
    Choices(first=generate(1, [1, 2]), others=[AlsoGenerate(2, 7, None, []), AlsoGenerate(3, 8, [4], [FIRST])]),
    Cancel(1),
    Drain(),
    Report(),
]
EVENTS = [
    Loading(1),
    Opened("tcp://127.0.0.1:1", "k" * 40, keeps=True),
    KvKept(request=1, blocks=[FIRST, BLOCK]),
    KvBegun(keys=[KEY]),
    KvForgotten(keys=[KEY]),
    Serving(),
    Sampled(request=1, token=2, logprob=-0.5, top=((2, -0.5),)),
    Finished(request=1, reason="stop", error=None, prompt_tokens=1, completion_tokens=1, prompt_s=0.5, decode_s=0.5),
    Overdue(step=3, waited_s=1.5),
    ProcessMemoryLow(1 << 20),
    Drained(),
    Status(steps=1, rows=1, compute_s=0.5, hop_s=[0.1], rss_bytes=1, private_bytes=1, refused=0),
    RingBroken("why", None),
    RingBroken("why", "/layers/a.gguf"),
]


@pytest.mark.parametrize(
    ("decoder", "message"),
    [*((command_decoder, command) for command in COMMANDS), *((event_decoder, event) for event in EVENTS)],
    ids=lambda value: type(value).__name__,
)
def test_commands_and_events_arrive_as_they_were_sent(decoder, message):
    assert decoder.decode(encode(message)) == message


def test_no_command_is_an_event():
    for message in COMMANDS:
        with pytest.raises(msgspec.ValidationError):
            event_decoder.decode(encode(message))


def test_fields_that_choices_share_go_to_the_ring_process_once():
    prompt, bias = list(range(500)), packed_biases((token, 1.0) for token in range(10_000))
    sampling = [replace(GREEDY, logit_bias=bias, seed=seed) for seed in range(128)]
    first = replace(generate(0, [1]), prompt=prompt, reports_begin=True)
    requests = [replace(first, request=each.seed, sampling=each, reports_begin=not each.seed) for each in sampling]
    requests[64:] = [replace(each, prompt=[7, each.request], blocks=[FIRST]) for each in requests[64:]]
    requests += [replace(requests[1], request=200, priority=3), replace(first, request=201)]
    commands = [requests[0], Cancel(9), *requests[1:]]
    sent = [command_decoder.decode(encode(each)) for each in in_few(commands)]
    assert [type(each) for each in sent] == [Generate, Cancel, Choices, Generate, Generate]
    assert sum(len(encode(each)) for each in sent) < 4 * len(encode(requests[0]))
    heard = [each for command in sent for each in (command.generates() if isinstance(command, Choices) else [command])]
    assert heard == commands
