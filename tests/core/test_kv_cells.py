"""KV cache files: packed content comes back, and anything else is refused before memory is allocated."""

import struct
from io import BytesIO

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.kv import keys
from primad.kv.cells import CellsError, CellsFile, LayerCells, _digest, pack, unpack
from primad.kv.keys import KvBlock

FIRST = keys.block("root", None, [1, 2, 3], [3])
SECOND = keys.block("root", FIRST, [4, 5], [4, 5])


def cells(block, layer, key_bytes=6, value_bytes=4, fill=7):
    rows = block.end - block.start
    return LayerCells(
        layer=layer,
        start=block.start,
        end=block.end,
        key_type=1,
        value_type=8,
        keys=bytes((fill + layer + i) % 256 for i in range(rows * key_bytes)),
        values=bytes((fill + layer + 3 * i) % 256 for i in range(rows * value_bytes)),
    )


def packed(block, layers):
    return b"".join(pack(block, layers))


@given(
    block=st.sampled_from([FIRST, SECOND]),
    first=st.integers(0, 900),
    sizes=st.lists(st.just((0, 0)) | st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=5),
)
def test_packed_cells_come_back(block, first, sizes):
    layers = [cells(block, first + i, *each) for i, each in enumerate(sizes)]
    data = packed(block, layers)
    assert unpack(data) == (block, layers)
    file = CellsFile(BytesIO(data), len(data))
    assert [file.read(range(layer, layer + 1))[0] for layer in reversed(file.layers)] == layers[::-1]
    assert file.read(file.layers) == layers


@given(place=st.integers(0), bit=st.integers(0, 7), cut=st.booleans(), more=st.binary(max_size=3))
def test_no_flipped_bit_and_no_other_length_is_believed(place, bit, cut, more):
    layers = [cells(SECOND, 3), cells(SECOND, 4)]
    data = bytearray(packed(SECOND, layers))
    place %= len(data)
    if cut:
        damaged = data[:place] + more
    else:
        data[place] ^= 1 << bit
        damaged = data + more
    with pytest.raises(CellsError):
        unpack(bytes(damaged))


def test_a_damaged_layer_leaves_the_others():
    data = bytearray(packed(FIRST, [cells(FIRST, 0), cells(FIRST, 1)]))
    data[-1] ^= 1
    file = CellsFile(BytesIO(data), len(data))
    assert file.read(range(1)) == [cells(FIRST, 0)]
    with pytest.raises(CellsError, match="layer 1 are damaged"):
        file.read(range(1, 2))


def forged(change):
    """A file with an altered index and a matching digest."""
    data = packed(SECOND, [cells(SECOND, 3), cells(SECOND, 4)])
    length = struct.unpack_from("<I", data, 8)[0]
    index = msgspec.msgpack.decode(data[12 : 12 + length])
    change(index)
    return refiled(msgspec.msgpack.encode(index), data[12 + length + 16 :])


def refiled(index, body):
    return struct.pack("<8sI", b"primadKV", len(index)) + index + _digest(index) + body


def put(value, *path):
    def change(index):
        for step in path[:-1]:
            index = index[step]
        index[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("../../etc", 0, 0),
        put("", 0, 0),
        put("x" * 32, 0, 1),
        put("", 0, 1),
        put(-1, 0, 2),
        put(6, 0, 2),
        put(1 << 60, 0, 3),
        put([], 1),
        put(-1, 1, 0, 0),
        put(3, 1, 1, 0),
        put(9, 1, 1, 0),
        put(300, 1, 0, 1),
        put(-1, 1, 0, 2),
        put(0, 1, 0, 3),
        put(11, 1, 0, 3),
        put(-8, 1, 0, 4),
        put(1 << 62, 1, 0, 4),
        put("1", 1, 0, 3),
        put(None, 1, 0, 5),
    ],
)
def test_an_index_with_impossible_values_is_refused(change):
    with pytest.raises(CellsError):
        unpack(forged(change))


def test_a_size_that_is_not_of_whole_cells_is_refused():
    def change(index):
        index[1][0][3:5] = 11, 9  # two cells of 6 and 4 bytes: the file's size still fits

    with pytest.raises(CellsError, match="2 KV cells of layer 3 cannot take 11 bytes"):
        unpack(forged(change))


def test_an_index_without_sense_is_refused():
    for index in (b"", b"\xc1", b"\x93\x01\x02\x03", msgspec.msgpack.encode([])):
        with pytest.raises(CellsError):
            unpack(refiled(index, b""))
    with pytest.raises(CellsError, match="not a file"):
        unpack(struct.pack("<8sI", b"primadKV", 1 << 31) + bytes(100))


def test_a_part_of_another_block_is_never_packed_with_it():
    with pytest.raises(AssertionError):
        pack(FIRST, [cells(SECOND, 0)])
    assert KvBlock(key=SECOND.key, before=FIRST.key, start=3, end=5) == SECOND
