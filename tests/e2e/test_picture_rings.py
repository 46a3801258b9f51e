"""Rings of processes compute prompts with pictures like llama.cpp with libmtmd, bit for bit; daemons serve them to
official clients, even when devices and processes die."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import threading
import time

import httpx
import msgspec
import psutil
import pytest

from primad.engine.pictures.encoder import PictureEncoder
from primad.engine.protocol import GREEDY
from primad.engine.vocabulary import LlamaVocabulary
from primad.gguf.architectures.cuts import cut_points
from primad.gguf.header import read_header
from primad.ring.head import log_softmax
from tests.e2e.cluster import PATIENCE_S, command_of, ring, ring_process, wait_until
from tests.e2e.streams import CompletionOverError, in_the_middle, repeated
from tests.lazily import Lazily
from tests.shell.test_pictures_exact import prompt_of, write_seeing
from tools.lab.encoders import FAMILIES
from tools.lab.local_ring import LocalRing
from tools.lab.mmproj import Eye, noise, tone
from tools.lab.plain_pictures import plain_answer

anthropic = Lazily("anthropic")
ollama = Lazily("ollama")
openai = Lazily("openai")

pytestmark = pytest.mark.slow

ROWS, CONTEXT, TOKENS, END = 64, 512, 8, 2
ENDLESS = msgspec.structs.replace(GREEDY, ignore_eos=True)
ONE = ["hello ", noise(1), " what is it?"]
TWO = ["hello ", noise(1), " and ", noise(2, 160, 120), " are they alike?"]
OTHER = ["hello ", noise(3), " what is it?"]


class Seen:
    """A tiny model with its encoder: prompts made of parts, and libmtmd's results for them."""

    def __init__(self, folder, kind, architecture, eye):
        self.model, self._encoder = folder / "model.gguf", folder / "encoder.gguf"
        write_seeing(self.model, self._encoder, kind, architecture, eye)
        self._known = {}

    def prompt(self, parts):
        encoder, vocabulary = (
            PictureEncoder(str(self._encoder), str(self.model), threads=1),
            LlamaVocabulary(self.model),
        )
        found = prompt_of(encoder, vocabulary, parts)
        encoder.release()
        vocabulary.release()
        return found

    def expected(self, parts, rows=ROWS, context=CONTEXT):
        key = id(parts), rows, context
        if key not in self._known:
            self._known[key] = parts, self._answered(parts, rows, context)
        return self._known[key][1]

    def _answered(self, parts, rows, context):
        tokens, logits = plain_answer(self.model, self._encoder, parts, TOKENS, rows=rows, context=context, never=END)
        logprobs = [float(log_softmax(each)[token]) for token, each in zip(tokens, logits, strict=True)]
        return list(zip(tokens, logprobs, strict=True))


@pytest.fixture(
    scope="module",
    params=[("gemma3", "gemma3", Eye(side=128)), ("qwen3vl_merger of deeper layers", "qwen3vl", None)],
    ids=["looking-ahead", "grids and deeper layers"],
)
def seen(request, tmp_path_factory):
    return Seen(tmp_path_factory.mktemp("seen"), *request.param)


def tokens_of(sampled):
    return [(each.token, each.logprob) for each in sampled]


@pytest.mark.parametrize("windows", [None, [1, 3], [1, 1, 2]], ids=["one", "two", "three"])
async def test_a_ring_with_pictures_gives_the_tokens_of_libmtmd(seen, windows, tmp_path):
    """One picture, two between text, concurrent requests, a repeated prompt, and a new head that resumes a request."""
    ring = LocalRing(
        seen.model, windows, rows=ROWS, context=CONTEXT, sequences=3, threads=1, folder=tmp_path, flash=True
    )
    expected = {id(parts): seen.expected(parts) for parts in (ONE, TWO, OTHER)}
    assert len({tuple(each) for each in expected.values()}) == 3
    async with asyncio.timeout(240), ring:
        for parts in (ONE, TWO, OTHER, ONE):
            prompt, pictures = seen.prompt(parts)
            sampled, finished = await ring.generate(
                prompt, TOKENS, logprobs=0, sampling=ENDLESS, reuses=True, pictures=pictures
            )
            assert finished.error is None
            assert tokens_of(sampled) == expected[id(parts)]
        requests = {}
        for parts in (TWO, OTHER, ONE):
            prompt, pictures = seen.prompt(parts)
            requests[await ring.ask(prompt, TOKENS, logprobs=0, sampling=ENDLESS, pictures=pictures)] = expected[
                id(parts)
            ]
        beside = await ring.follow(list(requests))
        assert {request: tokens_of(sampled) for request, (sampled, _) in beside.items()} == requests
        await ring.replace_head()
        prompt, pictures = seen.prompt(TWO)
        known = [token for token, _ in expected[id(TWO)][:3]]
        sampled, _ = await ring.generate(
            prompt, TOKENS, replayed=known, logprobs=0, sampling=ENDLESS, pictures=pictures
        )
        assert tokens_of(sampled) == expected[id(TWO)][3:]


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("gemma4v", "gemma4-per-layer"),
        ("ultravox", "llama"),
        pytest.param("mlp", "llama", marks=pytest.mark.matrix),
        pytest.param("qwen2vl_merger", "qwen2vl", marks=pytest.mark.matrix),
        pytest.param("qwen3vl_merger", "qwen35", marks=pytest.mark.matrix),
        pytest.param("qwen2a of parts", "qwen2vl", marks=pytest.mark.matrix),
    ],
    ids=["inputs of layers", "sound", "plain", "grids", "recurrent layers", "sound in parts"],
)
async def test_a_ring_of_three_gives_the_tokens_of_libmtmd_for_every_encoder(kind, architecture, tmp_path):
    """The kinds that the test above does not have."""
    seen, hears = Seen(tmp_path, kind, architecture, None), FAMILIES[kind].hears
    parts = ["hello ", tone(1), " what is it?"] if hears else TWO
    context, rows = (2 * CONTEXT, ROWS) if hears else (CONTEXT, 2 * ROWS)
    first, second, *_, last = sorted(cut_points(read_header(seen.model)))
    windows = [first, second - first, last - second]
    ring = LocalRing(seen.model, windows, rows=rows, context=context, threads=1, folder=tmp_path, flash=True)
    async with asyncio.timeout(240), ring:
        prompt, pictures = seen.prompt(parts)
        sampled, finished = await ring.generate(prompt, TOKENS, logprobs=0, sampling=ENDLESS, pictures=pictures)
    assert finished.error is None
    assert tokens_of(sampled) == seen.expected(parts, context=context, rows=rows)


ASKED, PNG = "what is it?", base64.b64encode(noise(1, 160, 160)).decode()
URL = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
MESSAGES = [{"role": "user", "content": [URL, {"type": "text", "text": ASKED}]}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, module_home):
    """A head and three workers with layers of a vision model; its encoder is in the same folder."""
    folder = tmp_path_factory.mktemp("served")
    write_seeing(folder / "tiny.gguf", folder / "mmproj-tiny.gguf", "qwen3vl_merger of deeper layers", "qwen3vl")
    homes = [module_home(name) for name in ("head", "w1", "w2", "w3")]
    with ring(folder / "tiny.gguf", homes, f"sees-{time.time_ns():x}", "--context", 4096, "--mmproj-device", "w3") as (
        head,
        workers,
    ):
        yield head, workers


def asked(head, act=None, messages=MESSAGES, tokens=48, chunks=None):
    """Stream a completion; append its ``chunks``; return its text and usage.

    In the middle ``act`` is called while the ring stands still; a request that was over before is repeated.
    """
    return repeated(lambda: _asked(head, act, messages, tokens, [] if chunks is None else chunks))


def _asked(head, act, messages, tokens, chunks):
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True, "logit_bias": {"2": -100}}
    text, pieces, usage = "", 0, None
    body |= {"stream_options": {"include_usage": True}, "return_progress": True}
    ring = None if act is None else ring_process(head.run)
    with httpx.stream("POST", f"{head.url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            chunks.append(chunk)
            usage = chunk.get("usage") or usage
            if chunk.get("prompt_progress"):
                continue
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
            pieces += 1
            if act is not None and pieces == 6:
                with in_the_middle(head, ring):
                    act()
    assert act is None or pieces >= 6
    return text, usage


def test_official_clients_send_a_picture_as_documented(cluster):
    head, _ = cluster
    with openai.OpenAI(base_url=f"{head.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        chat = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=8)
        printed = chat.choices[0].message.content
        assert printed
        parts = [
            {"type": "input_image", "image_url": URL["image_url"]["url"]},
            {"type": "input_text", "text": ASKED},
        ]
        given = [{"role": "user", "content": parts}]
        response = client.responses.create(model="tiny", input=given, temperature=0, max_output_tokens=8)
        assert response.output_text == printed
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    turn = {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": ASKED}]}
    with anthropic.Anthropic(base_url=head.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        message = client.messages.create(model="tiny", max_tokens=8, messages=[turn], extra_body={"temperature": 0})
        assert message.content[0].text == printed
        counted = client.messages.count_tokens(model="tiny", messages=[turn])
        assert counted.input_tokens == chat.usage.prompt_tokens > 64, "the picture's rows are counted"
    client = ollama.Client(host=head.url, timeout=PATIENCE_S)
    turn = {"role": "user", "content": ASKED, "images": [PNG]}
    greedy = {"temperature": 0, "num_predict": 8}
    assert client.chat(model="tiny", messages=[turn], options=greedy).message.content == printed
    assert "vision" in client.show("tiny").capabilities
    client._client.close()


def test_the_next_turn_computes_only_new_tokens(cluster):
    head, _ = cluster
    text, first = asked(head)
    turns = [*MESSAGES, {"role": "assistant", "content": text[:8]}, {"role": "user", "content": "and now?"}]
    _, again = asked(head, messages=turns)
    assert again["prompt_tokens_details"]["cached_tokens"] > 64, "the picture comes after no new token"
    assert again["prompt_tokens"] > first["prompt_tokens"]


def test_another_device_encodes_pictures_and_the_head_does_if_that_dies(cluster):
    """Bytes after a PNG's end change no pixel, but make it another file."""
    head, workers = cluster
    texts, copies = dict[int, str](), itertools.count()

    def elsewhere():
        return head.status()["pictures"]["encoded_elsewhere"]

    def ask():
        copy = next(copies)
        url = f"data:image/png;base64,{base64.b64encode(noise(5, 160, 160) + bytes(copy)).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
        texts[copy] = asked(head, messages=[{"role": "user", "content": parts}])[0]

    def is_elsewhere():
        before = elsewhere()
        ask()
        return elsewhere() == before + 1

    wait_until(is_elsewhere, "the device of --mmproj-device encodes")  # the head does, until that one has the encoder
    before = elsewhere()
    (encoder,) = [each for each in workers[2].processes() if "primad.engine.pictures.process" in command_of(each)]
    encoder.suspend()
    asking = threading.Thread(target=ask)
    asking.start()
    workers[2].kill()
    asking.join(PATIENCE_S)
    ask()
    assert elsewhere() == before
    assert len(texts) == next(copies) > 2
    assert len(set(texts.values())) == 1


def test_a_request_continues_after_the_death_of_the_encoder_and_of_a_worker(cluster):
    head, workers = cluster
    undisturbed, _ = asked(head)
    encoders = [each for each in head.run.processes() if "primad.engine.pictures.process" in command_of(each)]
    assert len(encoders) == 1

    def kill() -> None:
        encoders[0].kill()
        psutil.wait_procs(encoders, PATIENCE_S)
        workers[1].kill()

    assert asked(head, kill)[0] == undisturbed
    other = [{"role": "user", "content": [{**URL, "image_url": {"url": other_url(2)}}, {"type": "text", "text": "?"}]}]
    assert asked(head, messages=other)[0], "the next picture starts the encoder again"
    assert "Traceback" not in head.run.output


def test_the_text_is_the_same_if_a_worker_dies_within_a_picture(cluster):
    head, workers = cluster
    for seed in itertools.count(3):
        large = [{"type": "image_url", "image_url": {"url": other_url(seed, 640, 640)}}, {"type": "text", "text": "?"}]
        messages = [{"role": "user", "content": large}]
        if (text := dies_within(head, workers[0], messages)) is not None:
            break
    assert asked(head, messages=messages)[0] == text, "as from a ring that nobody disturbed"


def dies_within(head, worker, messages):
    """Kill a worker while a prompt is computed; return the text, or None if the prompt was computed before."""
    chunks, texts, ring = [], [], ring_process(head.run)
    asking = threading.Thread(target=lambda: texts.append(asked(head, messages=messages, chunks=chunks)[0]))
    asking.start()
    try:
        wait_until(lambda: any(64 < read < total for read, total in progress(chunks)), "the picture is computed")
        with in_the_middle(head, ring):
            if any(choice["delta"].get("content") for chunk in list(chunks) for choice in chunk["choices"]):
                return None
            worker.kill()
    except CompletionOverError:
        return None
    finally:
        asking.join(PATIENCE_S)
    return texts[0]


def progress(chunks):
    """Return the numbers of computed and of all tokens of a prompt, from the chunks that report them."""
    found = [chunk["prompt_progress"] for chunk in list(chunks) if chunk.get("prompt_progress")]
    return [(each["processed"], each["total"]) for each in found]


def other_url(seed, *size):
    return f"data:image/png;base64,{base64.b64encode(noise(seed, *size)).decode()}"
