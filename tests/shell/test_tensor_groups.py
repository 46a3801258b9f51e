"""Groups whose ranks have shares of each layer give the whole model's logits, with the same bits on every rank."""

import re
from contextlib import nullcontext
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from halda.assignment import in_memory
from primad.engine.llama.embedding import TokenEmbedding
from primad.engine.llama.windows import FirstWindow, MiddleWindow, ShareWindow, WholeModel
from primad.engine.protocol import GREEDY, AdapterFile, EngineOptions, Rows, WindowSource
from primad.errors import EngineError, RingError
from primad.gguf.adapter import adapter_header, open_adapter
from primad.gguf.adapter_shares import share_adapter
from primad.gguf.architectures.layers import block_count, layer_count
from primad.gguf.architectures.table import SUPPORTED, NotCutError
from primad.gguf.header import read_header
from primad.gguf.layers import layer_header
from primad.gguf.share_rules import ShareRules
from primad.gguf.shares import share_header
from primad.gguf.windows import ModelCutter, beside_values, token_embedding, vocabulary_size
from tests.fakes.gguf import write_adapter
from tests.fakes.group import FakeExchange, Meeting, in_group
from tools import synth
from tools.lab import zoo

OPTIONS = EngineOptions(context=256, sequences=2, rows=64, threads=1, batch_threads=1, kv_type="f16", lock=False)
TOKENS = np.random.default_rng(0).integers(1, 250, 400).astype(np.int32)
COUNTS = [((0, 64),), ((1, 33),), ((0, 26),), *[((0, 1),)] * 4, *[((0, 1), (1, 1))] * 2]
"""Tokens by sequence and step: a prompt longer than a chunk, another sequence, single tokens, and both at once."""
MAX_DIFFERENCE = 1e-3
ADAPTER_SCALE = 0.02
REFUSED = {"bitnet", "mamba", "mamba2", "rwkv6"}
PICKS = {"deepseek32", "glm-dsa", "glm-dsa-full"}
"""Their indexer picks what attention sees, so another last bit gives another pick."""


def steps():
    ends, offsets = {0: 0, 1: 0}, accumulate((sum(n for _, n in counts) for counts in COUNTS), initial=0)
    for start, counts in zip(offsets, COUNTS, strict=False):
        positions, sequences, outputs = [], [], []
        for sequence, count in counts:
            positions += range(ends[sequence], ends[sequence] + count)
            sequences += [[sequence]] * count
            outputs += [False] * (count - 1) + [True]
            ends[sequence] += count
        content = TOKENS[start : start + len(positions)]
        yield Rows(content=content, positions=positions, sequences=sequences, outputs=outputs)


def source_of(metadata, layers, assignment, adapters=()):
    return WindowSource(
        window=0,
        metadata=str(metadata),
        layers=tuple(layers),
        assignment=assignment,
        extra_buffers=False,
        adapters=adapters,
    )


def whole_logits(header, options, adapters=(), made=steps, *, on_gpu=False):
    layers, output = layer_count(header), "gpu" if on_gpu else "cpu"
    place = in_memory(0, layers, gpu_layers=on_gpu * layers, output=output)
    source = source_of(header.path, (), place, adapters)
    predicting = block_count(header) - layer_count(header)
    model = WholeModel(source, options, frozenset(), vocabulary=vocabulary_size(header), predicting=predicting)
    found = []
    for rows in made():
        model.forward(rows)
        found += [model.logits(row).copy() for row, wanted in enumerate(rows.outputs) if wanted]
    model.release()
    return found


def opened(header, first, last, folder, adapters=(), *, on_gpu=False):
    """The sources of a window of a rank's ``header``, with the rank's ``adapters``."""
    folder.mkdir(parents=True)
    cutter, paths = ModelCutter(header, keeps_name=bool(adapters)), []
    spec = cutter.spec(0, first, last)
    spec.write_metadata(folder / "metadata.gguf")
    for split, ref in enumerate(spec.layers, start=1):
        weights = b"".join(cutter.source(ref.digest).chunks())
        paths.append(str(folder / f"{split}.gguf"))
        (folder / f"{split}.gguf").write_bytes(layer_header(ref.tensors, number=split - 1, split=split) + weights)
    output = ("gpu" if on_gpu else "cpu") if last == layer_count(header) else "none"
    place = in_memory(first, last, output=output, gpu_layers=on_gpu * (last - first))
    files = tuple(adapter_file(each, first, last, folder / "lora.gguf") for each in adapters)
    return source_of(folder / "metadata.gguf", paths, place, files)


def adapter_file(adapter, first, last, path):
    spec = adapter.spec(first, last)
    weights = [chunk for ref in spec.layers for chunk in adapter.source(ref.digest).chunks()]
    path.write_bytes(adapter_header(spec) + b"".join(weights))
    return AdapterFile(str(path), spec.scale)


class Rank:
    """A rank's windows between ``cuts``, on the GPU of ``options`` or the CPU."""

    def __init__(self, header, weights, cuts, folder, options, rank, exchange, adapters=(), *, on_gpu=False):
        own = share_header(ShareRules(header), weights, rank)
        embedding = TokenEmbedding.of(header) if rank == 0 else None
        adapters = [share_adapter(each, ShareRules(header), weights, rank) for each in adapters]
        self.hidden, self.windows, self.sources, self.number = [], [], [], rank
        self._width = token_embedding(header).shape[0] + beside_values(header)
        for first, last in pairwise(cuts):
            source = opened(own, first, last, folder / f"{rank}-{first}", adapters, on_gpu=on_gpu)
            self.sources.append(source)
            if last == layer_count(header):
                size = vocabulary_size(header)
                window = ShareWindow(
                    source,
                    options,
                    frozenset(),
                    vocabulary=size,
                    embedding=embedding,
                    exchange=exchange,
                    takes_tokens=first == 0 and rank == 0,
                )
            elif first == 0 and rank == 0:
                window = FirstWindow(source, options, embedding, exchange)
            else:
                window = MiddleWindow(source, options, exchange)
            self.windows.append(window)

    def forward(self, rows):
        content = rows.content
        if self.number:
            width = content.shape[1] if content.ndim > 1 else self._width
            content = np.empty((len(rows), width), np.float32)
        for window in self.windows[:-1]:
            content = window.forward(with_content(rows, content))
            self.hidden.append(content)
        self.windows[-1].forward(with_content(rows, content))

    def release(self):
        for window in self.windows:
            window.release()


def with_content(rows, content):
    return replace(rows, content=content)


def group_logits(
    header, weights, cuts, folder, options=OPTIONS, adapters=(), made=steps, context=lambda _: nullcontext(), on_gpu=()
):
    """The logits of every step, each rank's hidden states between windows, and the number of sums. ``context`` makes a
    context for each computing rank; ranks in ``on_gpu`` have their share on a GPU.
    """

    def run(number, exchange):
        place, found = {"on_gpu": number in on_gpu}, []
        rank = Rank(header, weights, cuts, folder, options, number, exchange, adapters, **place)
        with context(rank):
            for rows in made():
                rank.forward(rows)
                wanted = [row for row, wants in enumerate(rows.outputs) if wants and number == 0]
                found += [rank.windows[-1].logits(row).copy() for row in wanted]
        rank.release()
        return found, rank.hidden

    results, sums = in_group(len(weights), run)
    return results[0][0], [hidden for _, hidden in results], sums


def difference_of(found, expected):
    """The largest difference of logits, without token 0's, relative to the largest logit."""
    differences = [np.abs(a[1:] - b[1:]).max() / np.abs(b[1:]).max() for a, b in zip(found, expected, strict=True)]
    return max(differences)


def check(header, weights, folder, kv_type="f16"):
    """Logits differ by a thousandth, by twice the difference of two llama.cpp kernels, or by half the cost of the KV
    cache type.
    """
    options = replace(OPTIONS, kv_type=kv_type)
    expected = whole_logits(header, options)
    if kv_type == "f16":
        allowed = 2 * difference_of(whole_logits(header, replace(options, flash=False)), expected)
    else:
        allowed = difference_of(whole_logits(header, OPTIONS), expected) / 2
    found, _, sums = group_logits(header, weights, [0, layer_count(header)], folder, options)
    assert sums
    assert difference_of(found, expected) <= max(allowed, MAX_DIFFERENCE)


@pytest.mark.parametrize(
    ("architecture", "quantisation", "weights"),
    [
        ("llama", "f32", [1, 1]),
        ("llama", "q8_0", [3, 1]),
        ("llama", "q4_k_m", [1, 1]),
        ("qwen2", "f32", [1, 2, 1]),
        ("gemma3", "f32", [2, 1, 1, 2]),
        ("gpt-oss", "f32", [2, 1]),
        ("deepseek2", "f32", [1, 1, 1]),
        ("qwen35", "f32", [1, 1]),
        ("falcon-h1", "f32", [1, 1]),
        ("grovemoe", "f32", [2, 1]),
        ("olmo2", "f32", [2, 1]),
        ("lfm2moe", "f32", [1, 1]),
        ("mpt", "f32", [1, 2]),
        ("gemma4-per-layer", "f32", [1, 1]),
    ],
)
def test_a_group_gives_the_whole_models_logits(architecture, quantisation, weights, tmp_path):
    path = tmp_path / "model.gguf"
    wide = {"width": 256, "heads": 8, "head_width": 64, "feed_forward": 768} if quantisation == "q4_k_m" else {}
    synth.write_model(path, architecture=architecture, quantisation=quantisation, **wide)
    check(read_header(path), weights, tmp_path)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "hunyuan-moe", "olmo2"])
def test_an_adapter_is_split_like_the_weights_it_changes(architecture, tmp_path):
    synth.write_model(tmp_path / "model.gguf", architecture=architecture, quantisation="f32", layers=2)
    header = read_header(tmp_path / "model.gguf")
    changes = re.compile(r"blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down)(_exps|_shexp)?)\.weight|output\.weight")
    changed = {name: tensor.shape for name, tensor in header.tensors.items() if changes.fullmatch(name)}
    path = write_adapter(tmp_path / "lora.gguf", changed, architecture=architecture)
    expected = whole_logits(header, OPTIONS, (AdapterFile(str(path), ADAPTER_SCALE),))
    assert difference_of(whole_logits(header, OPTIONS), expected) > 10 * MAX_DIFFERENCE
    adapter = open_adapter(path, ADAPTER_SCALE, header)
    found, _, _ = group_logits(header, [1, 1], [0, 2], tmp_path, adapters=[adapter])
    assert difference_of(found, expected) <= MAX_DIFFERENCE


@pytest.mark.parametrize(("architecture", "parts", "look_ahead"), [("gemma3", 1, True), ("qwen3vl", 4, False)])
def test_all_ranks_get_picture_embeddings_even_if_deeper_layers_take_parts_of_them(
    architecture, parts, look_ahead, tmp_path
):
    synth.write_model(tmp_path / "model.gguf", architecture=architecture, quantisation="f32", layers=6)
    header = read_header(tmp_path / "model.gguf")
    width = header.count(f"{architecture}.embedding_length")
    seen = np.random.default_rng(1).standard_normal((8, parts * width)).astype(np.float32)

    def made():
        for content, first in (
            (TOKENS[:8], 0),
            (seen, 8),
            (TOKENS[8:16], 16),
            (seen[::-1].copy(), 24),
            (TOKENS[:1], 32),
        ):
            positions = range(first, first + len(content))
            yield Rows(
                content=content,
                positions=positions,
                sequences=[[0]] * len(content),
                outputs=[False] * (len(content) - 1) + [True],
                look_ahead=look_ahead and content.ndim > 1,
                rope=[part for at in positions for part in (at, at // 2, at % 3, 0)] if parts > 1 else (),
            )

    expected = whole_logits(header, OPTIONS, made=made)
    found, _, _ = group_logits(header, [1, 1], [0, 6], tmp_path, made=made)
    assert difference_of(found, expected) <= MAX_DIFFERENCE


@pytest.mark.matrix
@pytest.mark.parametrize("quantisation", ["f32", "q8_0"])
@pytest.mark.parametrize("architecture", sorted({*SUPPORTED, "llama-moe", *zoo.MODELS} - PICKS))
def test_every_architecture_that_can_be_shared(architecture, quantisation, tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture, quantisation=quantisation)
    header = read_header(path)
    reasons = []
    for number, weights in enumerate(([2, 1], [1, 1, 2], [1, 2, 1, 1])):
        reasons.append(why_not(header, weights))
        if not reasons[-1]:
            check(header, weights, tmp_path / str(number))
    assert all("devices are more than" in reason for reason in reasons if reason) == (architecture not in REFUSED)


def why_not(header, weights):
    try:
        share_header(ShareRules(header), weights, 0)
    except NotCutError as exc:
        return exc.reason
    return ""


@settings(max_examples=6)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.sampled_from(["f16", "q8_0", "q4_0"]))
def test_any_shares_with_any_type_of_kv_cache(wide, tmp_path_factory, weights, kv_type):
    check(wide, weights, tmp_path_factory.mktemp("shares"), kv_type)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose heads are as wide as a block of a quantised KV cache."""
    path = tmp_path_factory.mktemp("wide") / "model.gguf"
    synth.write_model(path, architecture="llama", quantisation="f32", layers=2, heads=8, heads_kv=4, head_width=32)
    return read_header(path)


def test_ranks_agree_to_the_bit_and_a_group_is_a_place_between_windows(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="llama", quantisation="q8_0")
    header = read_header(path)
    found, hidden, _ = group_logits(header, [2, 1], [0, 2, 4, 6], tmp_path)
    assert difference_of(found, group_logits(header, [2, 1], [0, 6], tmp_path / "one")[0]) <= MAX_DIFFERENCE
    for one, other in zip(*hidden, strict=True):
        assert np.array_equal(one, other)


def test_a_token_of_an_unchanged_graph_stops_only_at_sums(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="llama", quantisation="f32", layers=3)
    header, meeting = read_header(path), Meeting(1)
    rank = Rank(header, [1], [0, 3], tmp_path, OPTIONS, 0, FakeExchange(meeting, 0))
    tap, seen = type(rank.windows[0]._tap), []
    missing = tap.__missing__
    for position in range(4):
        rows = Rows(content=TOKENS[:1], positions=[position], sequences=[[0]], outputs=[True])
        if position == 3:
            monkeypatch.setattr(tap, "__missing__", lambda self, node: seen.append(node) or missing(self, node))
        before = meeting.sums
        rank.forward(rows)
        assert meeting.sums - before == 6
    assert len(seen) == 12  # each sum is asked for once and reported once
    rank.release()


def test_the_kv_cache_of_a_share_leaves_and_returns(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="llama", quantisation="f32", layers=2)
    header = read_header(path)

    def run(number, exchange):
        rank = Rank(header, [1, 1], [0, 2], tmp_path, OPTIONS, number, exchange)
        tail, found = rank.windows[0], []
        assert tail.kv_supported
        first, *_ = steps()
        rank.forward(first)
        for sequence in (0, 1):
            rows = Rows(content=TOKENS[:1], positions=[64], sequences=[[sequence]], outputs=[True])
            if sequence:
                tail.kv_restore(1, [tail.kv_cells(0, 0, 64)])
            rank.forward(rows)
            found.append(None if number else tail.logits(0).copy())
        rank.release()
        return found

    (before, after), _ = in_group(2, run)[0]
    assert np.array_equal(before, after)


def test_the_first_rank_samples_from_the_logits_of_all(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="llama", quantisation="f32", layers=2)
    header = read_header(path)

    def run(number, exchange):
        rank = Rank(header, [1, 1], [0, 2], tmp_path, OPTIONS, number, exchange)
        rank.forward(next(steps()))
        tail = rank.windows[0]
        if number:
            with pytest.raises(EngineError, match="no logits on this device"):
                tail.logits(63)
            return rank.release()
        logits = tail.logits(63)
        greedy, chain = (
            tail.sampler(each, [1], []).sample(63)
            for each in (GREEDY, replace(GREEDY, temperature=1.0, top_k=4, top_p=0.01))
        )
        rank.release()
        return len(logits), int(logits.argmax()), greedy, chain

    (size, likeliest, greedy, chain), _ = in_group(2, run)[0]
    assert size == vocabulary_size(header)
    assert likeliest == greedy == chain


def test_a_partial_sum_without_a_known_reader_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="llama", quantisation="f32", layers=2)
    rank = Rank(read_header(path), [1], [0, 2], tmp_path, OPTIONS, 0, FakeExchange(Meeting(1), 0))
    monkeypatch.setattr(
        "primad.engine.llama.sums._COLUMNS", re.compile(rb"(?:blk\.(\d+)\.)?(attn_output|ffn_down|token_embd)")
    )
    with pytest.raises(EngineError, match="without the sums of its group"):
        rank.forward(next(steps()))
    rank.release()


def test_an_exchange_that_fails_ends_the_step_with_its_error(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="llama", quantisation="f32", layers=2)

    class Fails(FakeExchange):
        def sum(self, values):
            raise RingError("mini of the group is gone")

    rank = Rank(read_header(path), [1], [0, 2], tmp_path, OPTIONS, 0, Fails(Meeting(1), 0))
    with pytest.raises(RingError, match="mini of the group is gone"):
        rank.forward(next(steps()))
    rank.release()
