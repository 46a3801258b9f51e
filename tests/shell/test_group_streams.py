"""Shares of layers stream as windows do: each rank reads its own, with the same bits as shares in memory."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from primad.engine.streaming.pressure import Hold, PressureWatch
from primad.engine.streaming.streams import StreamedWindow, Streams
from primad.engine.streaming.units import units_of_window
from primad.errors import WeightsError
from primad.gguf.header import read_header
from tests.homelab.rot import overwrite
from tests.shell.test_streams_exact import EVERYTHING, SIZES, share_of
from tests.shell.test_tensor_groups import group_logits, steps
from tools import synth

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing that streams is ever given back")


@contextmanager
def streams_of(rank, cuts, streamed):
    units = [units_of_window(source) for source in rank.sources]
    streams = Streams(
        [
            StreamedWindow(index=number, assignment=share_of(cuts[number], each, streamed), units=each)
            for number, each in enumerate(units)
        ],
        read_ahead_bytes=0,
        lock=False,
        usage=None,
    )
    streams.begin(dict(enumerate(rank.windows)))
    yield streams
    streams.end()


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
        with streams_of(rank, cuts, streamed) as streams:
            yield
            read.append(streams.streamer.read_bytes)

    expected, *_ = group_logits(header, [2, 1], cuts, tmp_path / "memory")
    found, *_ = group_logits(header, [2, 1], cuts, tmp_path / "streamed", context=streaming)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)
    assert len(read) == 2
    assert min(read) > 0, "each rank reads its own share"


@pytest.mark.parametrize("number", [1, 5], ids=["of a new graph", "of a known graph"])
def test_changed_weights_on_one_rank_keep_the_first_rank_from_a_result(number, tmp_path):
    synth.write_model(tmp_path / "model.gguf", **SIZES)
    ranks, cuts = {}, [0, 3, 6]

    @contextmanager
    def resident(rank):
        with streams_of(rank, cuts, 0):
            ranks[rank.number] = rank
            yield

    def made():
        for step, rows in enumerate(steps()):
            if step == number:
                overwrite(Path(ranks[1].sources[0].layers[1]))
            yield rows

    with pytest.raises(WeightsError, match="this file was modified"):
        group_logits(read_header(tmp_path / "model.gguf"), [1, 1], cuts, tmp_path, made=made, context=resident)
    assert len(ranks[0].hidden) == number
