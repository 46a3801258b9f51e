"""A prompt with pictures gives the logits of llama.cpp with its libmtmd, bit for bit, whole and between any windows."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from gguf import GGUFValueType
from msgspec.structs import replace

from primad.engine.llama.windows import WholeModel
from primad.engine.pictures import encoder
from primad.engine.pictures.encoder import PictureEncoder
from primad.engine.pictures.messages import EmbeddedRun
from primad.engine.protocol import EngineOptions, Rows
from primad.engine.vocabulary import LlamaVocabulary
from primad.gguf.architectures.cuts import cut_points
from primad.gguf.architectures.layers import layer_count, recurrent_layers
from primad.gguf.header import array_value, read_header
from primad.gguf.windows import vocabulary_size
from primad.ring.chunks import Chunking
from primad.ring.pictures import content_of, looks_ahead, placed, rope_of
from tests.shell.test_cut_exact import Route, assigned, cuts_of, files_of
from tools.lab.encoders import FAMILIES
from tools.lab.mmproj import Eye, noise, tone, write_encoder
from tools.lab.plain_pictures import plain_answer
from tools.synth import write_model

pytestmark = pytest.mark.slow

DECODED = 6
OPTIONS = EngineOptions(context=1024, sequences=1, rows=64, threads=1, batch_threads=1, kv_type="f16", lock=False)


def prompt_of(encoder, vocabulary, parts):
    """The token ids of a prompt of ``parts``, and its pictures."""
    prompt, pictures = [], []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            prompt += vocabulary.tokenize(part, add_special=number == 0, parse_special=True)
            continue
        ids, rows = placed(encoder.encode(part), len(prompt))
        prompt, pictures = prompt + ids, pictures + rows
    return prompt, pictures


def answer(forward, logits, prompt, pictures, rows, *, is_causal=False, first=0):
    """The logits after ``prompt`` and each of the greedy tokens; the prompt is computed from ``first`` on, ``rows``
    tokens at a time as in a ring.
    """
    chunking = Chunking(rows=rows, minimum=rows, begins=lambda _: False)
    prompt, found = list(prompt), []
    while len(found) < DECODED:
        last = chunking.end(prompt, first)
        tokens = prompt[first:last]
        content = np.array(tokens, np.int32)
        if tokens[0] < 0:
            content = np.frombuffer(content_of(pictures, first, last), "<f4").reshape(last - first, -1)
        forward(
            Rows(
                content=content,
                positions=range(first, last),
                sequences=[[0]] * (last - first),
                outputs=[False] * (last - first - 1) + [True],
                look_ahead=looks_ahead(tokens[0]) and not is_causal,
                rope=rope_of(pictures, range(first, last)),
            )
        )
        first = last
        if last == len(prompt):
            found.append(logits(len(tokens) - 1).copy())
            prompt.append(int(found[-1].argmax()))
    return found


QUICK = [
    ("gemma3", "gemma3", None),
    ("gemma3", "gemma3", Eye(side=128)),  # a large step, whose embeddings enter the graph in another way
    ("kimivl", "deepseek2", None),
]
OTHERS = [
    pytest.param(kind, model, None, marks=pytest.mark.matrix)
    for kind, family in FAMILIES.items()
    for model in family.models
    if kind not in ("gemma3", "kimivl") or model not in ("gemma3", "deepseek2")
]


def write_seeing(model, encoder, kind, architecture, eye=None):
    """Write a tiny model that sees or hears, with its encoder; returns its shape."""
    family = FAMILIES[kind]
    sizes = {"width": family.model_width} if family.model_width else {}
    values = {f"{architecture}.{key}": array_value(GGUFValueType.INT32, each) for key, each in family.values.items()}
    shape = write_model(model, architecture=architecture, words=family.words, values=values, **sizes)
    write_encoder(encoder, kind, shape.width, eye)
    return shape


def random_cuts(header, name):
    """Up to three windows, with cuts drawn by ``name``."""
    places = sorted(cut_points(header))
    return [0, *sorted(Random(name).sample(places, min(2, len(places)))), layer_count(header)]


@pytest.mark.parametrize(("kind", "architecture", "eye"), QUICK + OTHERS)
def test_windows_give_the_logits_of_libmtmd(kind, architecture, eye, tmp_path):
    """Pictures between text, one of them longer than a step where its embeddings may be split."""
    model, encoder = tmp_path / "model.gguf", tmp_path / "encoder.gguf"
    family = FAMILIES[kind]
    options = replace(OPTIONS, rows=128 if family.looks_ahead else 64, context=2048 if family.hears else 1024)
    seen = [tone(1), tone(2), tone(3)] if family.hears else [noise(1), noise(2, 160, 120), noise(3, 160, 120)]
    parts = ["hello ", seen[0], " and ", seen[1], " end"]
    write_seeing(model, encoder, kind, architecture, eye)
    _, expected = plain_answer(model, encoder, parts, DECODED, rows=options.rows, context=options.context)
    others = [*parts[:3], seen[2], *parts[4:]]
    assert not np.array_equal(
        plain_answer(model, encoder, others, DECODED, rows=options.rows, context=options.context)[1], expected
    ), "the completion depends on the pictures"
    seeing, vocabulary = PictureEncoder(str(encoder), str(model), threads=1), LlamaVocabulary(model)
    prompt, pictures = prompt_of(seeing, vocabulary, parts)
    seeing.release()
    vocabulary.release()
    arguments = (prompt, pictures, options.rows)
    assert any(map(looks_ahead, prompt)) == family.looks_ahead
    assert {each.layout for each in pictures} == {family.layout}
    header = read_header(model)
    whole = WholeModel(
        files_of(model, (), assigned(layer_count(header), 0, is_tail=True)),
        options,
        frozenset(),
        vocabulary=vocabulary_size(header),
    )
    assert np.array_equal(answer(whole.forward, whole.logits, *arguments), expected)
    whole.release()
    for number, cuts in enumerate([*cuts_of(header), random_cuts(header, kind)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        route = Route(header, cuts, folder, options)
        keeps = (
            not number and not any(recurrent_layers(header)) and all(window.kv_supported for window in route.windows)
        )
        assert np.array_equal(answer(route.forward, route.windows[-1].logits, *arguments), expected), cuts
        if keeps:
            middle, end = pictures[-1].first + 3, len(prompt)
            for window in route.windows:
                cells = [window.kv_cells(0, *span) for span in ((0, middle), (middle, end))]
                window.kv_remove(0, 0, -1)
                window.kv_restore(0, cells)
            continued = [*prompt, int(expected[0].argmax())]
            found = answer(route.forward, route.windows[-1].logits, continued, *arguments[1:], first=end)
            assert np.array_equal(found[:-1], expected[1:]), "cells are kept and put back by their index"
        if family.looks_ahead:
            for window in route.windows:
                window.kv_remove(0, 0, -1)
            causal = answer(route.forward, route.windows[-1].logits, *arguments, is_causal=True)
            assert not np.array_equal(causal, expected), "rows that look ahead are not what others are"
        route.release()


def tokens_of(picture):
    return sum(run.rows for run in picture.runs if isinstance(run, EmbeddedRun))


def test_a_picture_with_too_many_tokens_is_scaled_down_and_others_are_unchanged(tmp_path, monkeypatch):
    files = [str(tmp_path / "encoder.gguf"), str(tmp_path / "model.gguf")]
    shape = write_model(tmp_path / "model.gguf", architecture="deepseek2")
    write_encoder(tmp_path / "encoder.gguf", "kimivl", shape.width)
    small, large = noise(1, 96, 64), noise(2, 400, 300)
    whole = PictureEncoder(*files, threads=1)
    assert tokens_of(whole.encode(large)) > 100
    monkeypatch.setattr(encoder, "MAX_CONTENT_BYTES", 100 * 4 * shape.width)
    bounded = PictureEncoder(*files, threads=1)
    before = bounded.encode(small)
    assert before == whole.encode(small)
    made = bounded.encode(large)
    assert 60 < tokens_of(made) <= 100
    assert bounded.encode(small) == before
    arguments = PictureEncoder(*files, threads=1, max_tokens=40).encode(large)
    assert 20 < tokens_of(arguments) <= 40
    assert arguments.encoder != made.encoder == before.encoder


def test_a_picture_that_cannot_be_made_smaller_is_refused(tmp_path, monkeypatch):
    shape = write_model(tmp_path / "model.gguf", architecture="llama")
    write_encoder(tmp_path / "encoder.gguf", "janus_pro", shape.width)
    monkeypatch.setattr(encoder, "MAX_CONTENT_BYTES", 15 * 4 * shape.width)
    with pytest.raises(ValueError, match="more than 0 MB"):
        PictureEncoder(str(tmp_path / "encoder.gguf"), str(tmp_path / "model.gguf"), threads=1).encode(noise(1))
