"""A prompt with pictures gives, whole and between any windows, the logits of llama.cpp with its libmtmd, bit for bit."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from primad.engine.llama.windows import WholeModel
from primad.engine.pictures.encoder import PictureEncoder
from primad.engine.pictures.messages import EmbeddedRun
from primad.engine.protocol import EngineOptions, Rows
from primad.engine.vocabulary import LlamaVocabulary
from primad.gguf.architectures.cuts import cut_points
from primad.gguf.architectures.layers import layer_count
from primad.gguf.header import read_header
from primad.gguf.windows import vocabulary_size
from tests.shell.test_cut_exact import Route, assigned, cuts_of, files_of
from tools.lab.encoders import FAMILIES
from tools.lab.mmproj import Eye, noise, write_encoder
from tools.lab.plain_pictures import plain_answer
from tools.synth import write_model

pytestmark = pytest.mark.slow

DECODED = 6
OPTIONS = EngineOptions(context=1024, sequences=1, rows=64, threads=1, batch_threads=1, kv_type="f16", lock=False)
PARTS = ["hello ", noise(1), " and ", noise(2, 160, 120), " end"]


def runs_of(encoder, vocabulary, parts, rows):
    """What is computed step by step, ``rows`` at most: tokens, or rows of a picture and whether they look ahead."""
    runs = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            tokens = vocabulary.tokenize(part, add_special=number == 0, parse_special=True)
            runs.append((np.array(tokens, np.int32), False))
            continue
        for run in encoder.encode(part).runs:
            if isinstance(run, EmbeddedRun):
                runs.append((np.frombuffer(run.content, "<f4").reshape(run.rows, -1), run.looks_ahead))
            else:
                runs.append((np.array(run.tokens, np.int32), False))
    return [
        (content[first : first + rows], looks_ahead)
        for content, looks_ahead in joined(runs)
        for first in range(0, len(content), rows)
    ]


def joined(runs):
    """Tokens that follow each other go in one step, as libmtmd has them."""
    found = []
    for content, looks_ahead in runs:
        if found and found[-1][0].dtype == content.dtype == np.int32:
            found[-1] = (np.concatenate([found[-1][0], content]), False)
        else:
            found.append((content, looks_ahead))
    return found


def answer(forward, logits, runs):
    """Tokens and their logits: most likely ones behind ``runs``."""
    position, found = 0, []
    runs = list(runs)
    while len(found) < DECODED:
        content, looks_ahead = runs.pop(0)
        count = len(content)
        forward(
            Rows(
                content=content,
                positions=range(position, position + count),
                sequences=[[0]] * count,
                outputs=[False] * (count - 1) + [True],
                look_ahead=looks_ahead,
            )
        )
        position += count
        if not runs:
            found.append(logits(count - 1).copy())
            runs.append((np.array([found[-1].argmax()], np.int32), False))
    return found


QUICK = [
    ("gemma3", "gemma3", None),
    ("gemma3", "gemma3", Eye(side=128)),  # a large step, whose rows come to the graph otherwise
    ("pixtral", "mistral3", None),
]
OTHERS = [
    pytest.param(kind, model, None, marks=pytest.mark.matrix)
    for kind, family in FAMILIES.items()
    for model in family.models
    if kind not in ("gemma3", "pixtral")
]


def random_cuts(header, name):
    """Three windows, where there may be as many, at cuts that hang on ``name``."""
    places = sorted(cut_points(header))
    return [0, *sorted(Random(name).sample(places, min(2, len(places)))), layer_count(header)]


@pytest.mark.parametrize(("kind", "architecture", "eye"), QUICK + OTHERS)
def test_windows_give_the_logits_of_libmtmd(kind, architecture, eye, tmp_path):
    """Pictures between text, one of them longer than a step where its rows may be cut."""
    model, encoder = tmp_path / "model.gguf", tmp_path / "encoder.gguf"
    family = FAMILIES[kind]
    options = replace(OPTIONS, rows=128) if family.looks_ahead else OPTIONS
    sizes = {"width": family.model_width} if family.model_width else {}
    shape = write_model(model, architecture=architecture, words=family.words, **sizes)
    write_encoder(encoder, kind, shape.width, eye)
    _, expected = plain_answer(model, encoder, PARTS, DECODED, rows=options.rows, context=options.context)
    others = [*PARTS[:3], noise(3, 160, 120), *PARTS[4:]]
    assert not np.array_equal(
        plain_answer(model, encoder, others, DECODED, rows=options.rows, context=options.context)[1], expected
    ), "what is written hangs on what is seen"
    seeing, vocabulary = PictureEncoder(str(encoder), str(model), threads=1), LlamaVocabulary(model)
    runs = runs_of(seeing, vocabulary, PARTS, options.rows)
    seeing.release()
    vocabulary.release()
    looks_ahead = any(each for _, each in runs)
    assert looks_ahead == family.looks_ahead
    header = read_header(model)
    whole = WholeModel(
        files_of(model, (), assigned(layer_count(header), 0, is_tail=True)),
        options,
        frozenset(),
        vocabulary=vocabulary_size(header),
    )
    assert np.array_equal(answer(whole.forward, whole.logits, runs), expected)
    whole.release()
    for number, cuts in enumerate([*cuts_of(header), random_cuts(header, kind)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        route = Route(header, cuts, folder, options)
        assert np.array_equal(answer(route.forward, route.windows[-1].logits, runs), expected), cuts
        if looks_ahead:
            for window in route.windows:
                window.kv_remove(0, 0, -1)
            causal = answer(route.forward, route.windows[-1].logits, [(content, False) for content, _ in runs])
            assert not np.array_equal(causal, expected), "rows that look ahead are not what others are"
        route.release()
