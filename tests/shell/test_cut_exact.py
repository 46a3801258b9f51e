"""Every architecture of the table: windows of a synthetic model give the whole model's logits, bit for bit."""

import ctypes
import sys
from dataclasses import replace
from itertools import pairwise
from mmap import PAGESIZE

import numpy as np
import pytest
from gguf import GGUFValueType
from msgspec.structs import replace as replace_fields

from halda.assignment import in_memory
from primad.engine.embedding_adapter import EmbeddingAdapter
from primad.engine.llama.embedding import TokenEmbedding
from primad.engine.llama.windows import FirstWindow, MiddleWindow, TailWindow, WholeModel
from primad.engine.protocol import AdapterFile, EngineOptions, Rows, WindowSource
from primad.engine.streaming import scratch
from primad.engine.streaming.pages import FileRange, Pages
from primad.errors import EngineError
from primad.gguf.adapter import adapter_header
from primad.gguf.architectures.cuts import cut_multiple, cut_points, cuttable
from primad.gguf.architectures.layers import block_count, drafting_layers, layer_count
from primad.gguf.architectures.table import SUPPORTED
from primad.gguf.architectures.tensors import embedding_scale
from primad.gguf.header import array_value, read_header, scalar_value
from primad.gguf.layers import layer_header
from primad.gguf.profile import model_profile
from primad.gguf.windows import ModelCutter, vocabulary_size
from primad.head.rings.loads import adapted
from tools import synth
from tools.lab import zoo

OPTIONS = EngineOptions(context=256, sequences=4, rows=64, threads=1, batch_threads=1, kv_type="f16", lock=False)
PROMPT = [1, *range(40, 129)]
"""90 tokens: two prefill chunks, longer than every synthetic model's sliding window of 24."""
DECODED = 5

pytestmark = pytest.mark.slow


class Route:
    """The windows of one model between ``cuts``, opened from metadata splits and layer files as a device does.

    ``on_gpu``: GPU layers of each window, the last ones, in the tail with the output (None: the output alone).
    ``prefill_offload``: the GPU computes prompts through the other layers too. ``experts_on_cpu``: experts of GPU layers
    stay on the CPU. ``extra_buffers``: all windows have them. ``others``: layers on a second GPU, by window.
    ``predicts``: the tail has the multi-token prediction layer. ``parts``: files written before.
    """

    def __init__(
        self,
        header,
        cuts,
        folder,
        options=OPTIONS,
        on_gpu=(),
        *,
        prefill_offload=False,
        experts_on_cpu=False,
        adapters=(),
        extra_buffers=False,
        others=(),
        predicts=False,
        parts=None,
    ):
        layers = layer_count(header)
        changes = [EmbeddingAdapter(each) for each in reversed(adapters) if each.embedding is not None]
        embedding = TokenEmbedding.of(header, None, changes)
        self.windows = []
        parts = parts or parts_of(header, cuts, folder, adapters, predicts=predicts)
        for number, ((first, last), (spec, metadata, paths)) in enumerate(zip(pairwise(cuts), parts, strict=True)):
            count = on_gpu[number] if on_gpu else 0
            is_tail = last == layers
            assignment = assigned(
                last - first,
                count,
                is_tail=is_tail,
                first=first,
                prefill_offload=prefill_offload,
                experts_on_cpu=experts_on_cpu,
            )
            assignment = replace(assignment, other_gpus=(others[number],) if others else ())
            files = replace_fields(
                files_of(metadata, paths, assignment),
                adapters=adapters_of(adapters, spec, folder),
                extra_buffers=extra_buffers,
            )
            if last == layers:
                size = vocabulary_size(header)
                window = TailWindow(
                    files,
                    options,
                    frozenset(),
                    vocabulary=size,
                    predicting=int(predicts),
                    predicts=predicts,
                    embedding=embedding,
                )
            elif first == 0:
                window = FirstWindow(files, options, embedding)
            else:
                window = MiddleWindow(files, options)
            self.windows.append(window)

    def logits(self, tokens, position, sequence=0):
        self.forward(rows(np.array(tokens, np.int32), position, sequence))
        return self.windows[-1].logits(len(tokens) - 1).copy()

    def forward(self, step):
        for window in self.windows[:-1]:
            step = replace_fields(step, content=window.forward(step))
        self.windows[-1].forward(step)

    def release(self):
        for window in self.windows:
            window.release()


def parts_of(header, cuts, folder, adapters=(), *, predicts=False):
    """The spec, metadata split and layer files of each window, written into ``folder``."""
    assert cuts[0] == 0
    assert cuts[-1] == layer_count(header)
    cutter = ModelCutter(header, keeps_name=any(each.changes_output for each in adapters), predicts=predicts)
    parts = []
    for number, (first, last) in enumerate(pairwise(cuts)):
        spec = cutter.spec(number, first, last)
        metadata = folder / f"{number}.gguf"
        spec.write_metadata(metadata)
        paths = []
        for split, ref in enumerate(spec.layers, start=1):
            path = folder / f"{number}-{split}.gguf"
            path.write_bytes(
                layer_header(ref.tensors, number=split - 1, split=split) + b"".join(cutter.source(ref.digest).chunks())
            )
            paths.append(str(path))
        parts.append((spec, metadata, paths))
    return parts


def adapters_of(adapters, spec, folder):
    """The adapter files for the window of ``spec``, assembled as a device does."""
    placed = []
    for number, each in enumerate(adapted(spec, adapters).adapters):
        path = folder / f"{spec.window}-lora-{number}.gguf"
        sources = [adapter.source(ref.digest) for ref in each.layers for adapter in adapters]
        weights = [b"".join(source.chunks()) for source in sources if source is not None]
        path.write_bytes(adapter_header(each) + b"".join(weights))
        placed.append(AdapterFile(str(path), each.scale))
    return tuple(placed)


def files_of(metadata, layers, assignment):
    return WindowSource(
        window=0, metadata=str(metadata), layers=tuple(layers), assignment=assignment, extra_buffers=False
    )


def assigned(layers, on_gpu, *, is_tail, first=0, prefill_offload=False, experts_on_cpu=False):
    """An assignment of ``layers`` layers from ``first`` on: ``on_gpu`` of them on a GPU (None: the output alone), the
    others ``prefill_offload``.

    ``experts_on_cpu``: experts stay on the CPU.
    """
    output, count = ("cpu" if on_gpu == 0 else "gpu") if is_tail else "none", on_gpu or 0
    window = in_memory(first, first + layers, gpu_layers=count, cpu_experts=count * experts_on_cpu, output=output)
    return replace(window, prefill_offload=prefill_offload)


def rows(content, position, sequence=0):
    count = len(content)
    return Rows(
        content=content,
        positions=range(position, position + count),
        sequences=[[sequence]] * count,
        outputs=[False] * (count - 1) + [True],
    )


def whole_logits(header, on_gpu=0, chunks=(), *, prefill_offload=False, experts_on_cpu=False):
    """The prompt and ``DECODED`` greedy tokens as chunks, and the whole model's logits after each.

    ``chunks`` of another call are computed instead if given; other arguments are those of ``assigned``.
    """
    assignment = assigned(
        layer_count(header), on_gpu, is_tail=True, prefill_offload=prefill_offload, experts_on_cpu=experts_on_cpu
    )
    files = files_of(header.path, (), assignment)
    predicting = block_count(header) - layer_count(header)
    model = WholeModel(files, OPTIONS, frozenset(), vocabulary=vocabulary_size(header), predicting=predicting)
    chunks, position, expected = list(chunks) or [PROMPT[:64], PROMPT[64:]], 0, []
    for step in range(2 + DECODED):
        tokens = chunks[step]
        model.forward(rows(np.array(tokens, np.int32), position))
        expected.append(model.logits(len(tokens) - 1).copy())
        assert np.isfinite(expected[-1]).all()
        position += len(tokens)
        if 0 < step == len(chunks) - 1:
            chunks.append([int(expected[-1].argmax())])
    model.release()
    return chunks[: 2 + DECODED], expected


def check(path, cuts, tmp_path):
    header = read_header(path)
    chunks, expected = whole_logits(header)
    for number, cut in enumerate(cuts):
        folder = tmp_path / str(number)
        folder.mkdir()
        route = Route(header, cut, folder)
        position = 0
        for tokens, logits in zip(chunks, expected, strict=True):
            difference = np.abs(route.logits(tokens, position) - logits).max()
            assert difference == 0, f"cut {cut}, position {position}: logits differ by {difference}"
            position += len(tokens)
        route.release()


EVERY_CUT = ([0, 1, 2, 3, 4, 5, 6], [0, 3, 6], [0, 2, 5, 6])
EVERY_KIND = sorted({*SUPPORTED, "llama-moe", *zoo.MODELS})


HYBRIDS = sorted(name for name in EVERY_KIND if zoo.is_hybrid(name))


def cuts_of(header):
    """Cuts at every possible place, and a single cut in the middle."""
    layers, places = layer_count(header), cut_points(header)
    return [0, *places, layers], [0, places[len(places) // 2], layers]


def spoil(start, size):
    """Fill memory with NaNs instead of giving it back."""
    ctypes.memset(start, 0xFF, size)


@pytest.mark.parametrize("architecture", EVERY_KIND)
def test_windows_give_the_whole_models_logits(architecture, tmp_path, monkeypatch):
    """Scratch memory may hold anything between two steps."""
    monkeypatch.setattr(scratch, "discard", spoil)
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture)
    check(path, cuts_of(read_header(path)), tmp_path)


@pytest.mark.parametrize("architecture", ["llama", "qwen3vl", "gemma4", "gemma4-per-layer", *HYBRIDS])
def test_concurrent_sequences_have_the_logits_of_single_ones(architecture, tmp_path):
    """Steps of two sequences alternate; one starts again while the other continues."""
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture)
    header = read_header(path)
    route = Route(header, cuts_of(header)[0], tmp_path)
    prompts = {1: PROMPT[:50], 3: PROMPT[7:40]}
    single = {}
    for sequence, prompt in prompts.items():
        single[sequence] = [route.logits(prompt, 0, sequence), route.logits([9], len(prompt), sequence)]
        for window in route.windows:
            window.kv_remove(sequence, 0, -1)
    for _ in range(2):
        concurrent = {sequence: [route.logits(prompt, 0, sequence)] for sequence, prompt in prompts.items()}
        for sequence, prompt in prompts.items():
            concurrent[sequence].append(route.logits([9], len(prompt), sequence))
        for sequence, logits in single.items():
            assert np.array_equal(logits, concurrent[sequence]), sequence
        for window in route.windows:
            for sequence in prompts:
                window.kv_remove(sequence, 0, -1)
    route.release()


@pytest.mark.parametrize("architecture", sorted(name for name, entry in SUPPORTED.items() if entry.drafts))
def test_a_layer_for_multi_token_prediction_drafts_after_a_tail_as_after_the_whole_model(
    architecture, tmp_path, monkeypatch
):
    """The logits are the same as without the layer."""
    monkeypatch.setitem(zoo.ALL, "deepseek2", {**zoo.ALL["deepseek32"]})
    path = tmp_path / "model.gguf"
    values = {f"{architecture}.nextn_predict_layers": scalar_value(GGUFValueType.UINT32, 1)}
    if architecture == "glm-dsa":
        values["glm-dsa.attention.indexer.types"] = array_value(GGUFValueType.UINT32, [1, 1, 1, 0, 1, 0, 1, 0])
    synth.write_model(path, architecture=architecture, layers=9, values=values)
    header = read_header(path)
    assert drafting_layers(header) == 1
    chunks, expected = whole_logits(header)
    files = files_of(path, (), assigned(8, 0, is_tail=True))
    size = vocabulary_size(header)
    whole = WholeModel(files, OPTIONS, frozenset(), vocabulary=size, predicting=1, predicts=True)
    route, position, drafted = Route(header, [0, 4, 8], tmp_path, predicts=True), len(chunks[0]), []
    read = rows(np.array(chunks[0], np.int32), 0)
    for window, forward in ((whole, whole.forward), (route.windows[-1], route.forward)):
        window.predictor.keep_all(keeps=True)
        forward(replace_fields(read, outputs=[False] * len(read)))
        drafted.append([window.predictor.states(len(read))])
        window.predictor.read(chunks[0][1:], drafted[-1][0][:-1], 0)
        window.predictor.keep_all(keeps=False)
    for tokens, logits in zip(chunks[1:], expected[1:], strict=True):
        whole.forward(rows(np.array(tokens, np.int32), position))
        assert np.array_equal(whole.logits(len(tokens) - 1), logits)
        assert np.array_equal(route.logits(tokens, position), logits)
        token = int(logits.argmax())
        for window in (whole, route.windows[-1]):
            state = window.predictor.state(len(tokens) - 1)
            found, following = window.predictor.predict([token], [state], len(chunks[0]) - 1)
            again, _ = window.predictor.predict([int(found.argmax())], [following], len(chunks[0]))
            drafted.append([found.copy(), following, again.copy()])
        position += len(tokens)
    for one, other in zip(drafted[::2], drafted[1::2], strict=True):
        assert all(map(np.array_equal, one, other))
    whole.release()
    route.release()


def test_zeros_after_a_window_are_released(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="qwen35", width=256)
    route = Route(read_header(path), [0, 1, 8], tmp_path)
    zeros = [each for each in read_header(tmp_path / "0.gguf").tensors.values() if each.name.startswith("blk.")]
    first, last = zeros[0].offset, zeros[-1].offset + zeros[-1].bytes
    pages = Pages([FileRange(str(tmp_path / "0.gguf"), first, last - first)])
    pages.find()
    route.logits(PROMPT[:64], 0)
    assert last - first > 10 * PAGESIZE
    assert pages.missing() >= (last - first - 2 * PAGESIZE) * (sys.platform == "linux")
    pages.close()
    route.release()


def test_glm_5_2_is_exact_at_every_fourth_layer_from_the_third_on(tmp_path):
    path = tmp_path / "model.gguf"
    types = array_value(GGUFValueType.UINT32, [int(layer < 2 or layer % 4 == 2) for layer in range(11)])
    synth.write_model(path, architecture="glm-dsa", layers=11, values={"glm-dsa.attention.indexer.types": types})
    header = read_header(path)
    assert [*cut_points(header)] == [2, 6, 10]
    check(path, cuts_of(header), tmp_path)


def test_smollm3_is_exact_at_every_fourth_layer(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="smollm3", layers=9)
    check(path, ([0, 4, 9], [0, 4, 8, 9]), tmp_path)


@pytest.mark.parametrize(
    "quantisation", ["f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k_m", "q6_k"]
)
def test_embedding_rows_of_every_type_equal_those_of_llama_cpp(quantisation, tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(
        path, architecture="gemma3", quantisation=quantisation, width=256, layers=2, sliding_window=64, rope_base=1e6
    )
    check(path, ([0, 1, 2],), tmp_path)


def test_gpt_oss_with_its_own_type(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="gpt-oss", quantisation="mxfp4")
    check(path, EVERY_CUT, tmp_path)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "granite"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_output(architecture, tied, tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture, tied=tied, layers=2)
    check(path, ([0, 1, 2],), tmp_path)


@pytest.mark.parametrize("architecture", ["gemma3", "olmo2", "cohere2", "gpt-oss"])
@pytest.mark.parametrize(
    "slides", [[1, 0, 0, 1, 1, 0], [0, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]], ids=["mixed", "late", "all"]
)
def test_explicit_sliding_patterns(architecture, slides, tmp_path):
    path = tmp_path / "model.gguf"
    key = f"{architecture}.attention.sliding_window_pattern"
    pattern = array_value(GGUFValueType.BOOL, [bool(flag) for flag in slides])
    synth.write_model(path, architecture=architecture, values={key: pattern})
    check(path, EVERY_CUT, tmp_path)


@pytest.mark.parametrize("architecture", ["gemma3", "olmo2"])
def test_a_sliding_architecture_without_a_window(architecture, tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture, sliding_window=0)
    check(path, ([0, 2, 5, 6],), tmp_path)


def test_deepseek2_lite_is_recognised_by_its_number_of_layers(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="deepseek2-lite", layers=27)
    check(path, ([0, 1, 3, 14, 26, 27], [0, 13, 27]), tmp_path)


def test_minicpm_with_and_without_its_scales(tmp_path):
    path = tmp_path / "model.gguf"
    scales = {"minicpm.residual_scale": 0.3, "minicpm.embedding_scale": 7.0}
    values = {key: scalar_value(GGUFValueType.FLOAT32, scale) for key, scale in scales.items()}
    synth.write_model(path, architecture="minicpm", values=values)
    assert embedding_scale(read_header(path)) == 7.0
    check(path, EVERY_CUT, tmp_path)


def test_every_supported_architecture_can_be_synthesised(tmp_path):
    for architecture in SUPPORTED:
        path = tmp_path / f"{architecture}.gguf"
        synth.write_model(path, architecture=architecture, layers=8)
        header = read_header(path)
        assert cuttable(header).name == architecture
        profile = model_profile(header)
        assert (len(profile.layers), profile.cut_multiple) == (layer_count(header), cut_multiple(header))


def test_a_graph_that_never_reads_the_hidden_states_is_refused(monkeypatch, tmp_path):
    """A large step's hidden states enter where the graph looks up tokens; a graph that uses another name is refused."""
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="llama", layers=3)
    route = Route(read_header(path), [0, 1, 2, 3], tmp_path)
    monkeypatch.setattr("primad.engine.llama.tap._ENTRIES", frozenset())
    with pytest.raises(EngineError, match="without its hidden states"):
        route.logits(PROMPT[:64], 0)
    assert np.isfinite(route.logits(PROMPT[64:], 64)).all(), "a small step has them in its batch"
    route.release()
