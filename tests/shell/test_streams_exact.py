"""Whatever is resident and whatever streams, the logits are those of a model in memory, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from halda import WindowAssignment
from halda.assignment import in_memory
from primad.engine.llama.embedding import TokenEmbedding
from primad.engine.llama.windows import FirstWindow, MiddleWindow, TailWindow, WholeModel
from primad.engine.protocol import EngineOptions
from primad.engine.streaming.streams import StreamedWindow, Streams
from primad.engine.streaming.units import WindowUnits, units_of_model, units_of_window
from primad.errors import WeightsError
from primad.gguf.architectures.layers import layer_count
from primad.gguf.header import Header, read_header
from primad.gguf.layers import layer_header
from primad.gguf.windows import ModelCutter, vocabulary_size
from tests.shell.test_cut_exact import DECODED, OPTIONS, PROMPT, cuts_of, files_of, rows, synth, whole_logits
from tools.lab import zoo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing that streams is ever given back"),
]

ARCHITECTURES = ("llama", "qwen3", "gemma3", "granite", "gpt-oss", "deepseek2", "llama-moe", "qwen3moe")
SIZES = {"width": 256, "feed_forward": 512, "expert_feed_forward": 512, "layers": 6}
"""Layers of many pages, most of which can be released."""


def share_of(first: int, units: WindowUnits, streamed: float) -> WindowAssignment:
    """An assignment for ``units`` from layer ``first`` on, with all resident but the share ``streamed``."""
    layers, output = sum(part.size for unit in units.layers for part in unit), sum(part.size for part in units.output)
    return WindowAssignment(
        first=first,
        last=first + len(units.layers),
        gpu_layers=0,
        output="cpu" if output else "none",
        layer_bytes=layers,
        output_bytes=output,
        resident_bytes=int(layers * (1 - min(streamed, 1)) + output * (1 - max(streamed - 1, 0))),
    )


EVERYTHING = 2.0
"""All of the layers and of the output matrix."""


class Streaming:
    """The windows of a model between ``cuts`` in one process, with their streams.

    The share ``streamed`` of each layer streams, and of the output matrix what exceeds 1. A single cut takes the whole
    model's file.
    """

    def __init__(
        self,
        header: Header,
        cuts: Sequence[int],
        folder: Path,
        *,
        streamed: float,
        read_ahead_bytes: int = 0,
        options: EngineOptions = OPTIONS,
    ) -> None:
        self.layers: dict[int, Path] = {}
        self._header, self._options, self.cuts = header, options, cuts
        count = layer_count(header)
        specs = []
        for number, (first, last) in enumerate(pairwise(cuts)):
            whole = len(cuts) == 2
            files = files_of(header.path, (), in_memory(0, count)) if whole else self._cut(folder, number, first, last)
            units = units_of_model(header, files) if whole else units_of_window(files)
            specs.append(
                (files, StreamedWindow(index=number, assignment=share_of(first, units, streamed), units=units))
            )
        self.streams = Streams(
            (window for _, window in specs), read_ahead_bytes=read_ahead_bytes, lock=False, usage=None
        )
        self.units = [window.units for _, window in specs]
        self.windows = []
        with self.streams.loading():
            for number, (files, _) in enumerate(specs):
                self.windows.append(self._open(files, number, len(specs)))
        self.streams.begin(dict(enumerate(self.windows)))

    def _cut(self, folder: Path, number: int, first: int, last: int):
        cutter = ModelCutter(self._header)
        spec = cutter.spec(number, first, last)
        metadata = folder / f"{number}.gguf"
        spec.write_metadata(metadata)
        paths = []
        for split, ref in enumerate(spec.layers, start=1):
            path = folder / f"{ref.digest}-{split}.gguf"
            content = b"".join(cutter.source(ref.digest).chunks())
            path.write_bytes(layer_header(ref.tensors, number=split - 1, split=split) + content)
            self.layers[first + split - 1] = path
            paths.append(str(path))
        return files_of(metadata, paths, in_memory(first, last))

    def _open(self, files, number: int, count: int):
        header, options = self._header, self._options
        if count == 1:
            return WholeModel(files, options, frozenset(), vocabulary=vocabulary_size(header))
        embedding = TokenEmbedding.of(header)
        if number == count - 1:
            size = vocabulary_size(header)
            return TailWindow(files, options, frozenset(), vocabulary=size, embedding=embedding)
        if number == 0:
            return FirstWindow(files, options, embedding)
        return MiddleWindow(files, options)

    def logits(self, tokens: Sequence[int], position: int) -> np.ndarray:
        state = np.array(tokens, np.int32)
        for window in self.windows[:-1]:
            state = window.forward(rows(state, position))
        self.windows[-1].forward(rows(state, position))
        return self.windows[-1].logits(len(tokens) - 1).copy()

    def reopened(self, indices: Sequence[int], streamed: float) -> Streams:
        """The streams of the windows reopened as ``indices`` of another ring."""
        assignments = [share_of(self.cuts[number], self.units[number], streamed) for number in range(len(indices))]
        return self.streams.reopened(indices, assignments, 0)

    def release(self) -> None:
        self.streams.end()
        for window in self.windows:
            window.release()


@contextmanager
def streaming(*arguments: object, **options: object) -> Iterator[Streaming]:
    with ExitStack() as stack:
        made = Streaming(*arguments, **options)
        stack.callback(made.release)
        yield made


def model(folder: Path, architecture: str, **sizes: object) -> Header:
    path = folder / "model.gguf"
    synth.write_model(path, architecture=architecture, **(SIZES | sizes))
    return read_header(path)


def check(made: Streaming, chunks: Sequence[Sequence[int]], expected: Sequence[np.ndarray]) -> None:
    position = 0
    for tokens, logits in zip(chunks, expected, strict=True):
        difference = np.abs(made.logits(tokens, position) - logits).max()
        assert difference == 0, f"position {position}: logits differ by {difference}"
        position += len(tokens)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_with_everything_streamed_logits_are_the_same(architecture, tmp_path):
    """The whole file, windows computed one after the other in one process, and a window for every layer."""
    header = model(tmp_path, architecture)
    chunks, expected = whole_logits(header)
    for number, cuts in enumerate(([0, 6], [0, 2, 4, 6], [0, 1, 2, 3, 4, 5, 6])):
        folder = tmp_path / str(number)
        folder.mkdir()
        with streaming(header, cuts, folder, streamed=EVERYTHING) as made:
            streamer = made.streams.streamer
            if streamer.experts is None:  # streaming by expert has a pool instead
                assert streamer.residency.resident == ()
                assert streamer.residency.streams
            check(made, chunks, expected)


@pytest.mark.parametrize("architecture", ["gemma4-moe", "gemma4-per-layer", "glm4moe", "nemotron_h_moe", "qwen35moe"])
def test_layers_of_several_kinds_stream(architecture, tmp_path):
    header = model(tmp_path, architecture, layers=zoo.layers_of(architecture))
    chunks, expected = whole_logits(header)
    for number, cuts in enumerate(([0, layer_count(header)], *cuts_of(header))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with streaming(header, cuts, folder, streamed=EVERYTHING) as made:
            check(made, chunks, expected)


@pytest.mark.parametrize("architecture", ["llama", "gpt-oss"])
@pytest.mark.parametrize(
    ("streamed", "read_ahead_bytes"), [(0.15, 0), (0.35, 0), (0.7, 1 << 20), (1.0, 0), (1.5, 3 << 20)], ids=str
)
def test_whatever_streams_logits_are_the_same(architecture, streamed, read_ahead_bytes, tmp_path):
    header = model(tmp_path, architecture)
    chunks, expected = whole_logits(header)
    with streaming(header, [0, 3, 6], tmp_path, streamed=streamed, read_ahead_bytes=read_ahead_bytes) as made:
        check(made, chunks, expected)


def test_streaming_under_pressure_during_a_request_does_not_change_its_logits(tmp_path):
    header = model(tmp_path, "llama")
    chunks, expected = whole_logits(header)
    with streaming(header, [0, 3, 6], tmp_path, streamed=0) as made:
        streamer = made.streams.streamer
        levels, position = streamer._levels, 0
        for step, (tokens, logits) in enumerate(zip(chunks, expected, strict=True)):
            streamer.change(levels[(2 * step) % len(levels)])
            assert np.array_equal(made.logits(tokens, position), logits), f"step {step}"
            position += len(tokens)
        assert len(levels) > 3


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_streamed_and_resident_are_the_same_with_a_smaller_kv_cache(architecture, kv_type, tmp_path):
    header = model(tmp_path, architecture, head_width=64)
    options = msgspec.structs.replace(OPTIONS, kv_type=kv_type)
    chunks = [PROMPT[:64], PROMPT[64:], *([token] for token in range(50, 50 + DECODED))]
    found = []
    for name, streamed in (("resident", 0), ("streamed", EVERYTHING)):
        folder = tmp_path / name
        folder.mkdir()
        with streaming(header, [0, 3, 6], folder, streamed=streamed, options=options) as made:
            position, logits = 0, []
            for tokens in chunks:
                logits.append(made.logits(tokens, position))
                position += len(tokens)
            found.append(np.array(logits))
    assert np.isfinite(found[0]).all()
    assert np.array_equal(*found)


def test_parked_windows_continue_to_stream_in_another_ring(tmp_path):
    """A worker's ring process does the same: it ends and begins again."""
    header = model(tmp_path, "llama")
    chunks, expected = whole_logits(header)
    with streaming(header, [0, 2, 4, 6], tmp_path, streamed=EVERYTHING) as made:
        check(made, chunks, expected)
        made.streams.end()
        made.streams = made.reopened([5, 7, 9], EVERYTHING)
        made.streams.begin({5: made.windows[0], 7: made.windows[1], 9: made.windows[2]})
        for window in made.windows:
            window.kv_remove(0, 0, -1)
        assert made.streams.streamer.residency.resident == ()
        check(made, chunks, expected)


@pytest.mark.parametrize(("before", "after"), [(EVERYTHING, 0), (0, EVERYTHING), (0.3, 0.8)])
def test_parked_windows_keep_the_residency_of_the_next_plan(before, after, tmp_path):
    header = model(tmp_path, "llama")
    chunks, expected = whole_logits(header)
    with streaming(header, [0, 2, 4, 6], tmp_path, streamed=before) as made:
        check(made, chunks, expected)
        made.streams.end()
        made.streams = made.reopened([0, 1, 2], after)
        made.streams.begin(dict(enumerate(made.windows)))
        streamer = made.streams.streamer
        assert streamer.residency.resident_bytes <= made.streams.assigned.resident_bytes
        assert streamer.residency.streams == (after > 0)
        for window in made.windows:
            window.kv_remove(0, 0, -1)
        check(made, chunks, expected)


def test_a_layer_file_that_is_overwritten_never_gives_a_result(tmp_path):
    header = model(tmp_path, "llama")
    with streaming(header, [0, 3, 6], tmp_path, streamed=EVERYTHING) as made:
        made.logits(PROMPT[:8], 0)
        path = made.layers[4]
        content = bytearray(path.read_bytes())
        content[-5] ^= 0xFF
        path.write_bytes(content)
        with pytest.raises(WeightsError, match="this file was modified") as caught:
            made.logits(PROMPT[8:9], 8)
        assert caught.value.file == str(path)


def test_a_model_file_that_was_written_to_gives_no_first_hidden_state(tmp_path):
    header = model(tmp_path, "llama")
    with streaming(header, [0, 3, 6], tmp_path, streamed=0) as made:
        made.logits(PROMPT[:8], 0)
        with header.path.open("r+b") as file:
            file.truncate(header.data_offset)
        with pytest.raises(WeightsError, match="the model file was modified") as caught:
            made.logits(PROMPT[8:9], 8)
        assert caught.value.file == str(header.path)
