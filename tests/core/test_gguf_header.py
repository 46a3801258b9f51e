"""The header reader on malformed files: always one ``ModelError``, never anything else, never a hang."""

import os
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primad.errors import ModelError
from primad.gguf.header import MAX_HEADER_BYTES, Header, Value, array_value, read_header, scalar_value

U8, U32, F32, STRING, ARRAY, U64 = 0, 4, 6, 8, 9, 10


def text(content):
    data = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(data)) + data


def strings(*contents):
    return struct.pack("<IQ", STRING, len(contents)) + b"".join(map(text, contents))


def key(name, kind, raw):
    return text(name) + struct.pack("<I", kind) + raw


def tensor(name, shape=(4,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


KEYS = (
    key("general.architecture", STRING, text("llama")),
    key("llama.block_count", U32, struct.pack("<I", 2)),
    key("llama.rope.freq_base", F32, struct.pack("<f", 10_000.0)),
    key("llama.attention.head_count_kv", ARRAY, struct.pack("<IQ2I", U32, 2, 3, 4)),
    key("tokenizer.ggml.tokens", ARRAY, strings("<unk>", "a", "ß")),
    key("big", U64, struct.pack("<Q", 1 << 63)),
)
TENSORS = (tensor("token_embd.weight", (4, 3)), tensor("blk.0.attn_q.weight", (32, 2), 8, 64))


def build(keys=KEYS, tensors=TENSORS, *, data=132, version=3, magic=b"GGUF", key_count=None, tensor_count=None):
    """A GGUF file with ``data`` bytes of weights after the header."""
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data), len(head)


GOOD, HEAD = build()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("header") / "model.gguf"


def read(path, content):
    path.write_bytes(content)
    return read_header(path)


def refused(path, content, *words):
    with pytest.raises(ModelError) as caught:
        read(path, content)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def test_a_good_header_is_read(scratch):
    header = read(scratch, GOOD)
    assert header.text("general.architecture") == "llama"
    assert header.count("llama.block_count") == 2
    assert header.number("llama.rope.freq_base") == 10_000.0
    assert header.values["llama.attention.head_count_kv"].items() == [3, 4]
    assert header.values["tokenizer.ggml.tokens"].items() == ["<unk>", "a", "ß"]
    assert len(header.values["tokenizer.ggml.tokens"]) == 3
    embedding, query = header.tensors.values()
    assert (embedding.shape, embedding.bytes, embedding.offset) == ((4, 3), 48, header.data_offset)
    assert (query.type, query.bytes, query.offset) == (GGMLQuantizationType.Q8_0, 68, header.data_offset + 64)


def test_values_are_kept_as_the_bytes_of_the_file(scratch):
    values = read(scratch, GOOD).values
    assert values["llama.block_count"] == scalar_value(GGUFValueType.UINT32, 2)
    assert values["llama.attention.head_count_kv"] == array_value(GGUFValueType.UINT32, [3, 4])


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("a\r\nprimad: b", "a primad: b"),
        ("\u2028a\x85\x1cb\n", "a b"),
        ("a  b", "a b"),
        (" \n", "model"),
        (None, "model"),
    ],
)
def test_a_model_is_called_by_one_line(given, name):
    values = {} if given is None else {"general.name": scalar_value(GGUFValueType.STRING, given)}
    assert Header(path=Path("there/model.gguf"), values=values, tensors={}, data_offset=0).name == name


def test_a_model_is_called_by_one_line_whatever_its_file_is(tmp_path):
    assert Header(path=tmp_path / "a\nprimad: b.gguf", values={}, tensors={}, data_offset=0).name == "a primad: b"


def test_version_2_is_read(scratch):
    assert read(scratch, build(version=2)[0]).values == read(scratch, GOOD).values


def test_a_missing_file(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        read_header(tmp_path / "absent.gguf")


def test_a_directory(tmp_path):
    with pytest.raises(ModelError, match="is a directory"):
        read_header(tmp_path)


def test_a_path_through_a_file(scratch):
    scratch.write_bytes(GOOD)
    with pytest.raises(ModelError):
        read_header(scratch / "model.gguf")


def test_a_pipe_does_not_block(tmp_path):
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    with pytest.raises(ModelError, match="not a regular file"):
        read_header(pipe)


def test_an_empty_file(scratch):
    refused(scratch, b"", "is empty")


@pytest.mark.parametrize("content", [b"G", b"GGM", b"PK\3\4" + bytes(100), b"ggjt" + bytes(100), b"{" * 50])
def test_not_a_gguf(scratch, content):
    refused(scratch, content, "is not a GGUF file")


@pytest.mark.parametrize(
    ("content", "instead"),
    [(b"<!DOCTYPE html>", "a web page"), (b"<html>", "a web page"), (b"version https://git-lfs", "git lfs pull")],
    ids=["page", "short page", "pointer"],
)
def test_a_download_of_something_else_is_named(scratch, content, instead):
    refused(scratch, content, instead)


def test_big_endian(scratch):
    refused(scratch, b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian")


@pytest.mark.parametrize("version", [0, 1, 4, 99])
def test_other_versions(scratch, version):
    refused(scratch, build(version=version)[0], f"version {version}")


def test_cut_at_every_byte_of_the_header(scratch):
    for end in range(1, HEAD):
        refused(scratch, GOOD[:end])


def test_cut_in_the_weights(scratch):
    for end in range(HEAD, len(GOOD)):
        refused(scratch, GOOD[:end], "cut short or damaged", "fetch the file again")


@pytest.mark.parametrize("count", [100, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_absurd_counts(scratch, count):
    refused(scratch, build(tensor_count=count)[0])
    refused(scratch, build(key_count=count)[0])


@pytest.mark.parametrize("size", [1000, 65_536, 1 << 32, 1 << 62, (1 << 64) - 1])
def test_absurd_lengths(scratch, size):
    length = struct.pack("<Q", size)
    refused(scratch, build([length + b"key" + bytes(20)])[0])
    refused(scratch, build([key("text", STRING, length + b"short")])[0], "'text'")
    refused(scratch, build([key("texts", ARRAY, struct.pack("<I", STRING) + length)])[0], "'texts'")
    refused(scratch, build([key("numbers", ARRAY, struct.pack("<I", U32) + length)])[0], "'numbers'")
    refused(scratch, build([key("one", ARRAY, struct.pack("<IQ", STRING, 1) + length)])[0], "'one'")
    refused(scratch, build(tensors=[length + b"name"])[0])


def test_a_header_that_never_ends(scratch):
    """The first key of a sparse file claims more than the maximum header size; it is refused before it is read."""
    size = MAX_HEADER_BYTES + 1
    head = build([key("numbers", ARRAY, struct.pack("<IQ", U8, size))], data=0)[0]
    scratch.write_bytes(head)
    os.truncate(scratch, len(head) + 2 * size)
    tracemalloc.start()
    with pytest.raises(ModelError, match="'numbers' makes it larger than"):
        read_header(scratch)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_endless_empty_strings(scratch):
    head = build([key("texts", ARRAY, struct.pack("<IQ", STRING, 1 << 24))], data=0)[0]
    scratch.write_bytes(head)
    os.truncate(scratch, 1 << 28)
    with pytest.raises(ModelError, match=r"cut short or damaged: .*'texts' has 16777216 strings"):
        read_header(scratch)
    scratch.unlink()


@pytest.mark.parametrize(("kind", "size"), [(U32, 4), (0, 1), (12, 8)])
def test_arrays_of_more_numbers_than_any_model_has(scratch, kind, size):
    scratch.write_bytes(build([key("heads", ARRAY, struct.pack("<IQ", kind, (1 << 22) + 1))], data=0)[0])
    os.truncate(scratch, 1 << 26)
    with pytest.raises(ModelError, match=r"'heads' has 4194305 items"):
        read_header(scratch)
    scratch.unlink()


def test_one_item_of_a_long_array_is_read_without_the_others(monkeypatch):
    value = array_value(GGUFValueType.INT16, list(range(-1, 9)))
    monkeypatch.setattr(Value, "items", None)
    assert [value.item(index) for index in (0, 1, 9)] == [-1, 0, 8]


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((), 0), ((1, 1, 1, 1, 1), 0), ((0,), 0), ((4, 0), 0), ((1 << 63, 4), 0), ((1 << 62, 1 << 62), 0), ((33,), 8)],
)
def test_impossible_shapes(scratch, shape, kind):
    refused(scratch, build(tensors=[tensor("odd", shape, kind)])[0], "'odd'")


@pytest.mark.parametrize("offset", [1, 16, 96, 128, 1 << 40, (1 << 64) - 32, (1 << 64) - 1])
def test_impossible_offsets(scratch, offset):
    refused(scratch, build(tensors=[tensor("far", (16,), 0, offset)], data=128)[0], "'far'")


@pytest.mark.parametrize("kind", [4, 5, 31, 1000, (1 << 32) - 1])
def test_unknown_tensor_types(scratch, kind):
    refused(scratch, build(tensors=[tensor("odd", (32,), kind)])[0], "'odd'", f"unknown type {kind}")


@pytest.mark.parametrize("kind", [13, 255, (1 << 32) - 1])
def test_unknown_value_types(scratch, kind):
    refused(scratch, build([key("odd", kind, bytes(8))])[0], "'odd'", f"unknown type {kind}")
    refused(scratch, build([key("odd", ARRAY, struct.pack("<IQ", kind, 1))])[0], "'odd'", f"unknown type {kind}")


def test_arrays_of_arrays(scratch):
    nested = struct.pack("<IQIQ", ARRAY, 1, ARRAY, 1) + strings("deep")
    refused(scratch, build([key("nest", ARRAY, nested)])[0], "array of arrays")


def test_repeated_names(scratch):
    refused(scratch, build([KEYS[1], KEYS[1]])[0], "'llama.block_count' occurs twice")
    refused(scratch, build(tensors=[TENSORS[0], TENSORS[0]])[0], "'token_embd.weight' occurs twice")


@pytest.mark.parametrize("name", [b"\xff\xfe", b"new\nline", b"\x1b[31mred", b"nul\0"])
def test_names_that_are_not_printable(scratch, name):
    refused(scratch, build([text(name) + struct.pack("<II", U32, 1)])[0], "damaged header")
    refused(scratch, build(tensors=[tensor(name)])[0], "damaged header")


@pytest.mark.parametrize("alignment", [0, 1, 33, 1 << 31])
def test_odd_alignments(scratch, alignment):
    refused(scratch, build([key("general.alignment", U32, struct.pack("<I", alignment))])[0], "general.alignment")


def test_accessors_name_the_key_and_the_file(scratch):
    header = read(scratch, build([*KEYS, key("nan", F32, struct.pack("<f", float("nan")))])[0])
    for call in (
        lambda: header.text("absent"),
        lambda: header.text("llama.block_count"),
        lambda: header.number("general.architecture"),
        lambda: header.number("absent"),
        lambda: header.number("nan"),
        lambda: header.count("llama.attention.head_count_kv"),
        lambda: header.count("big"),
        lambda: header.count("llama.block_count", maximum=1),
    ):
        with pytest.raises(ModelError, match="metadata key") as caught:
            call()
        assert str(scratch) in str(caught.value)
    assert header.count("absent", 7) == 7
    assert header.text("absent", "x") == "x"


def survives(path, content):
    began_s = time.thread_time()
    tracemalloc.start()
    try:
        header = read(path, content)
        for value in header.values.values():
            assert value.items() is not None if value.is_array else value.scalar() is not None
        for name in header.values:
            for call in (header.text, header.number, header.count):
                try:
                    call(name)
                except ModelError:
                    continue
    except ModelError as error:
        message = str(error)
    else:
        message = ""
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.thread_time() - began_s < 2
    assert "\n" not in message
    assert peak < 50 << 20


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(0, HEAD - 1), st.integers(0, 255)), min_size=1, max_size=8),
    end=st.integers(0, len(GOOD)) | st.none(),
)
def test_changed_bytes_are_read_or_refused(scratch, changes, end):
    content = bytearray(GOOD)
    for at, byte in changes:
        content[at] = byte
    survives(scratch, bytes(content[:end]))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(4, HEAD - 8), number=st.integers(0, (1 << 64) - 1) | st.sampled_from([1 << 31, 1 << 32, 1 << 63]))
def test_changed_numbers_are_read_or_refused(scratch, at, number):
    survives(scratch, GOOD[:at] + struct.pack("<Q", number) + GOOD[at + 8 :])


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=400))
def test_random_bytes_after_the_magic_are_refused(scratch, content):
    survives(scratch, b"GGUF" + struct.pack("<I", 3) + content)
