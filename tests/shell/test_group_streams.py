"""Shares of layers stream as windows do: each rank reads its own, and the bits are those of shares in memory."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import numpy as np
import pytest

from primad.engine.streaming.pressure import Hold, PressureWatch
from primad.engine.streaming.streams import StreamedWindow, Streams
from primad.engine.streaming.units import units_of_window
from primad.gguf.header import read_header
from tests.shell.test_streams_exact import EVERYTHING, SIZES, kept
from tests.shell.test_tensor_groups import group_logits
from tools import synth

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing that streams is ever given back")


@pytest.mark.parametrize(
    ("architecture", "streamed", "cuts"),
    [
        ("llama", 0.5, [0, 6]),
        ("llama", EVERYTHING, [0, 6]),
        ("gemma3", 0.7, [0, 2, 6]),
        ("qwen3moe", 0.5, [0, 6]),
        ("qwen3moe", EVERYTHING, [0, 3, 6]),
    ],
)
def test_shares_that_stream_have_the_bits_of_shares_in_memory(architecture, streamed, cuts, tmp_path, monkeypatch):
    monkeypatch.setattr(PressureWatch, "sample", lambda *_, **__: Hold())
    synth.write_model(tmp_path / "model.gguf", architecture=architecture, **SIZES)
    header, read = read_header(tmp_path / "model.gguf"), []

    @contextmanager
    def streaming(rank):
        units = [units_of_window(source) for source in rank.sources]
        streams = Streams(
            [
                StreamedWindow(index=number, assignment=kept(cuts[number], each, streamed), units=each)
                for number, each in enumerate(units)
            ],
            read_ahead_bytes=0,
            lock=False,
            usage=None,
        )
        streams.begin(dict(enumerate(rank.windows)))
        yield
        read.append(streams.streamer.read_bytes)
        streams.end()

    expected, *_ = group_logits(header, [2, 1], cuts, tmp_path / "memory")
    found, *_ = group_logits(header, [2, 1], cuts, tmp_path / "streamed", begins=streaming)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)
    assert len(read) == 2
    assert min(read) > 0, "each rank reads its own share"
