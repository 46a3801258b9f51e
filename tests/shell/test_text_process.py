"""The text process may crash, hang or grow over one request; only that request is refused, and no other notices."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from primad.api.answering.any_model import ANY_MODEL, AnyVocabulary
from primad.api.answering.backend import ModelSettings, TextModel
from primad.api.dialects.llama_server import prepared as llama_server
from primad.api.dialects.openai import prepared as openai
from primad.errors import EngineError, ModelError, PromptTooLongError, RequestError, RingError
from primad.head.model.text_messages import LoadText, Prepare, PreparedRequest, RequestRefused, TextReady, TextReply
from primad.head.model.text_process import prepared
from primad.head.model.text_service import MAX_PROCESSES, TextLimits, TextService
from primad.head.model.tokenizer import ModelVocabulary
from primad.system.children.channel import LENGTH, frame
from tests.fakes.vocabulary import write_vocabulary

PATIENCE_S = 180
SETTINGS = ModelSettings(id="toy", created=0, context_tokens=1 << 16)
GROWS = "{% set it = namespace(text='x') %}{% for _ in range(60) %}{% set it.text = it.text ~ it.text %}{% endfor %}"
HANGS = "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = (
    "{% set said = messages[-1].content %}"
    f"{{% if said == 'grow' %}}{GROWS}{{% elif said == 'hang' %}}{HANGS}{{% endif %}}"
    "{% if 'deep' in said|string %}{% macro deeper() %}{{ deeper() }}{% endmacro %}{{ deeper() }}{% endif %}"
    "{{ said }}"
)
QUICK = TextLimits(quick_s=0.3, max_s=3.0, memory_bytes=128 << 20, look_s=0.01)
PRE_TOKENIZERS = (
    "a.x-4.0",
    "afmoe",
    "bailingmoe",
    "bailingmoe2",
    "bloom",
    "chameleon",
    "chatglm-bpe",
    "codeshell",
    "cohere2moe",
    "command-r",
    "dbrx",
    "deepseek-coder",
    "deepseek-llm",
    "deepseek-r1-qwen",
    "deepseek-v3",
    "default",
    "exaone",
    "exaone-moe",
    "exaone4",
    "f2llmv2",
    "falcon",
    "falcon-h1",
    "falcon3",
    "gemma4",
    "gigachat",
    "glm4",
    "glm5",
    "gpt-2",
    "gpt-4o",
    "gpt3-finnish",
    "granite-docling",
    "granite-embed-multi-311m",
    "granite-embed-multi-97m",
    "grok-2",
    "hunyuan",
    "hunyuan-dense",
    "hy_v4",
    "jais",
    "jais-2",
    "jina-de",
    "jina-es",
    "jina-v1-en",
    "jina-v2-code",
    "jina-v2-de",
    "jina-v2-es",
    "jina-v5-nano",
    "joyai-llm",
    "kanana2",
    "kimi-k2",
    "kormo",
    "laguna",
    "lfm2",
    "llada-moe",
    "llama-bpe",
    "llama-v3",
    "llama3",
    "llama4",
    "megrez",
    "mellum",
    "mellum2",
    "midm-2.0",
    "minerva-7b",
    "minicpm5",
    "minimax-m2",
    "modern-bert",
    "mpt",
    "olmo",
    "phi-2",
    "pixtral",
    "poro-chat",
    "qwen2",
    "qwen35",
    "refact",
    "roberta-bpe",
    "sarvam-moe",
    "seed-coder",
    "smaug-bpe",
    "smollm",
    "solar-open",
    "spark2_5",
    "stablelm2",
    "starcoder",
    "superbpe",
    "talkie",
    "tekken",
    "tiny_aya",
    "trillion",
    "ufakzeka",
    "viking",
    "whitespace",
    "youtu",
)
"""All that the pinned llama.cpp has (``tokenizer_pre`` in its ``llama-vocab.cpp``)."""


def chat(text: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


class Took:
    """Stands in for the CPU time of a process."""

    def __init__(self, took_s: float) -> None:
        self._took_s = took_s

    def left_s(self, max_s: float) -> float:
        return max_s - self._took_s


class Judged(TextService):
    """Judges requests by content: one that hangs is slow at the first look, others are quick on any machine."""

    def _look(self, child: Any, turn: Any, _: object) -> None:
        super()._look(child, turn, Took(self._limits.quick_s if b"hang" in turn.task.body else 0.0))  # type: ignore[arg-type]


@asynccontextmanager
async def text_service(
    tmp_path: Path, limits: TextLimits = QUICK, kind: type[TextService] = TextService, **vocabulary: str
) -> AsyncIterator[TextService]:
    """A service; asserts that none of its processes are left."""
    service = kind(str(write_vocabulary(tmp_path / "toy.gguf", **vocabulary)), TEMPLATE, limits=limits)
    async with asyncio.timeout(PATIENCE_S):
        assert (await service.pieces()).piece(65) == b"A"
        try:
            yield service
        finally:
            pids = service.pids
            await service.close()
    assert not any(map(psutil.pid_exists, pids))


async def refused(service: TextService, text: str, **more: str) -> str:
    with pytest.raises(RequestError) as caught:
        await service.prepare(openai.chat, chat(text), SETTINGS, **more)
    assert caught.value.status == 400
    return str(caught.value)


async def works(service: TextService, owner: str = "") -> None:
    prepared = await service.prepare(openai.chat, chat("Hello"), SETTINGS, owner=owner)
    assert prepared.job.prompts[0].max_tokens == SETTINGS.context_tokens - len(prepared.job.prompts[0].tokens)


async def test_only_the_hanging_or_growing_request_is_refused(tmp_path):
    async with text_service(tmp_path) as service:
        assert "took more than 3 s" in await refused(service, "hang")
        await works(service)
        assert "memory" in await refused(service, "grow")
        await works(service)
        assert "chat template" in await refused(service, "deep")
        before = service.pids
        psutil.Process(*before).kill()
        await works(service)
        assert service.pids != before


async def test_a_request_is_read_though_all_processes_were_killed_before_it(tmp_path):
    async with text_service(tmp_path, TextLimits()) as service:
        await service._begin_another()
        before = service.pids
        assert len(before) == MAX_PROCESSES
        for pid in before:
            psutil.Process(pid).kill()
        await works(service)
        assert not set(service.pids) & set(before)


async def test_a_request_that_crashes_its_process_is_refused_and_no_other_is_affected(tmp_path):
    async with text_service(tmp_path, TextLimits(), pre="gpt-4o") as service:
        body = json.dumps({"content": "a" * 1_000_000}).encode()
        crashing = asyncio.create_task(service.prepare(llama_server.tokenize, body, SETTINGS))
        await asyncio.gather(*(works(service, "another") for _ in range(5)))
        with pytest.raises(RequestError, match="the process that read it was ended"):
            await crashing
        await works(service)


async def test_slow_requests_wait_for_each_other_and_others_continue(tmp_path):
    async with text_service(tmp_path, TextLimits(max_s=PATIENCE_S, look_s=0.01, rest_s=0.1), Judged) as service:
        slow = [asyncio.create_task(service.prepare(openai.chat, chat("hang"), SETTINGS, owner="a")) for _ in range(3)]
        for _ in range(3):
            await works(service, "b")
            await works(service, "a")
        assert not any(task.done() for task in slow)
        assert len(service.pids) <= 2
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        await works(service, "a")


async def test_an_owner_can_cost_others_their_process_only_once_in_a_while(tmp_path):
    starts: list[int] = []

    async def run() -> None:
        limits = TextLimits(max_s=PATIENCE_S, look_s=0.01, rest_s=PATIENCE_S)
        path = write_vocabulary(tmp_path / "toy.gguf")
        service = Judged(str(path), TEMPLATE, limits=limits, began=starts.append)
        await service.pieces()
        flood = [asyncio.create_task(service.prepare(openai.chat, chat("hang"), SETTINGS, owner="a")) for _ in range(9)]
        while len(starts) < 3:  # the second was ended for a request that was not the first slow one
            await works(service, "b")
        for _ in range(20):
            await works(service, "b")
        assert len(starts) == 3
        assert not any(task.done() for task in flood)
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        await works(service, "a")
        await service.close()

    await asyncio.wait_for(run(), PATIENCE_S)


async def test_a_process_that_was_just_being_ended_is_waited_for_at_the_end(tmp_path):
    async with text_service(tmp_path, TextLimits()) as service:
        (child,) = service._children
        ending = asyncio.create_task(service._bury(child))
        await asyncio.sleep(0)
        ending.cancel()
        await service.close()
        assert not child.is_alive


async def test_callers_take_turns(tmp_path):
    async with text_service(tmp_path, TextLimits()) as service:
        ended: list[str] = []

        async def send(owner: str) -> None:
            await works(service, owner)
            ended.append(owner)

        await asyncio.gather(*(send("many") for _ in range(20)), send("one"))
        assert ended.index("one") <= 2


async def test_errors_and_log_lines_are_passed_on_unchanged(tmp_path, caplog):
    async with text_service(tmp_path, TextLimits()) as service:
        with pytest.raises(PromptTooLongError) as caught:
            await service.prepare(openai.chat, chat("x" * (1 << 17)), SETTINGS)
        assert (caught.value.param, caught.value.context_tokens) == ("messages", 1 << 16)
        with pytest.raises(RequestError, match="'messages' is required"):
            await service.prepare(openai.chat, b"{}", SETTINGS)
        body = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"const": 1 << 99}}}]}
        with pytest.raises(RequestError, match="more than 64 bits"):
            await service.prepare(openai.chat, json.dumps(json.loads(chat("x")) | body).encode(), SETTINGS)
        caplog.set_level("INFO")
        await service.prepare(openai.chat, json.dumps(json.loads(chat("x")) | {"wibble": 1}).encode(), SETTINGS)
        assert "wibble" in caplog.text


async def test_without_a_model_requests_are_read_for_any_model():
    service = TextService("", None)
    service.begin()
    async with asyncio.timeout(PATIENCE_S):
        grammar = json.dumps(json.loads(chat("x" * (1 << 17))) | {"grammar": 'root ::= "x"'}).encode()
        assert (await service.prepare(openai.chat, grammar, ANY_MODEL.settings)).job.sampling.grammar
        with pytest.raises(RequestError, match="not GBNF") as caught:
            await service.prepare(openai.chat, grammar.replace(b"root ::= ", b"root = "), ANY_MODEL.settings)
        assert not caught.value.of_model
        order = json.dumps(json.loads(chat("x")) | {"samplers": ["temperature", "min_p"]}).encode()
        with pytest.raises(RequestError, match=r"llama\.cpp's order") as caught:
            await service.prepare(openai.chat, order, ANY_MODEL.settings)
        assert caught.value.of_model
        await service.close()


async def test_an_invalid_template_is_the_models_fault(tmp_path):
    service = TextService(str(write_vocabulary(tmp_path / "toy.gguf")), "{% nonsense %}")
    with pytest.raises(ModelError, match="does not compile"):
        await service.prepare(openai.chat, chat("x"), SETTINGS)
    await service.close()
    with pytest.raises(RingError, match="stopping"):
        await service.prepare(openai.chat, chat("x"), SETTINGS)


async def test_a_file_without_vocabulary_is_an_error(tmp_path):
    (tmp_path / "toy.gguf").write_bytes(b"GGUF")
    service = TextService(str(tmp_path / "toy.gguf"), None)
    with pytest.raises(EngineError, match=r"toy\.gguf"):
        await service.pieces()
    with pytest.raises(RingError, match="cannot be read"):
        await service.prepare(openai.embedding, b'{"input": "x"}', None)
    await service.close()


async def test_pieces_are_those_of_the_vocabulary(smollm2):
    vocabulary = ModelVocabulary(str(smollm2), "a template")
    service = TextService(str(smollm2), "a template")
    pieces = await service.pieces()
    await service.close()
    assert (pieces.size, pieces.bos, pieces.eos) == (vocabulary.size, vocabulary.bos, vocabulary.eos)
    for token in [*range(300), *range(300, vocabulary.size, 97)]:
        assert pieces.piece(token) == vocabulary.piece(token)
        assert pieces.piece_or_marker(token) == vocabulary.piece_or_marker(token)
        assert pieces.name(token) == vocabulary.name(token)


@pytest.fixture(scope="module")
def vocabularies(smollm2, gemma3) -> list[ModelVocabulary]:
    """One vocabulary of each kind: BPE and SPM."""
    return [ModelVocabulary(str(file), None) for file in (smollm2, gemma3)]


def test_cut_at_markers_a_text_has_the_same_tokens(vocabularies, monkeypatch):
    text = "".join(f"<|im_start|>user\n {n}<|im_end|>\n<start_of_turn>x\n\n\n<end_of_turn>  \n" for n in range(40))
    for vocabulary in vocabularies:
        whole = vocabulary.tokenize(text, add_special=True, parse_special=True)
        monkeypatch.setattr("primad.engine.vocabulary.PIECE_CHARS", 64)
        assert vocabulary.tokenize(text, add_special=True, parse_special=True) == whole
        monkeypatch.undo()


def test_no_token_has_more_characters_than_reported(vocabularies):
    for vocabulary in vocabularies:
        names = [vocabulary.name(token) for token in range(0, vocabulary.size, 8)]
        assert 8 < max(map(len, names)) <= vocabulary.longest_chars < 100


def test_long_runs_of_a_character_end_no_pre_tokenizer(tmp_path):
    text = "".join(char * 30_000 + "<|im_end|>" for char in "a !字")
    body = json.dumps({"content": text}).encode()
    task = Prepare(
        what=f"{llama_server.tokenize.__module__}:tokenize", body=body, settings=SETTINGS, seed=0, now=datetime.now()
    )
    sent = b""
    for pre in PRE_TOKENIZERS:
        path = write_vocabulary(tmp_path / f"{pre}.gguf", pre=pre)
        load = LoadText(path=str(path), chat_template=None, reports_pieces=False, memory_bytes=4 << 30)
        sent += frame(load) + frame(task)
    with subprocess.Popen(
        [sys.executable, "-m", "primad.head.model.text_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for pre in PRE_TOKENIZERS:
            for kind in (TextReady, PreparedRequest):
                size = LENGTH.size + LENGTH.unpack(sent[: LENGTH.size])[0]
                process.stdin.write(sent[:size])
                process.stdin.flush()
                sent = sent[size:]
                length = process.stdout.read(LENGTH.size)
                assert length, f"{pre} ended the process"
                answer = msgspec.msgpack.decode(process.stdout.read(LENGTH.unpack(length)[0]), type=TextReply)
                assert isinstance(answer, kind), f"{pre}: {answer}"


def test_a_body_that_exceeds_the_recursion_limit_is_refused(monkeypatch):
    def deeper(*_: Any) -> None:
        deeper()

    monkeypatch.setattr(openai, "embedding", deeper)
    task = Prepare(what=f"{openai.__name__}:embedding", body=b"", settings=None, seed=0, now=datetime.now())
    assert isinstance(answer := prepared(task, AnyVocabulary()), RequestRefused)
    assert answer.status == 400


def test_the_settings_of_a_model_are_passed_on_whole():
    model = TextModel(id="toy", created=1, context_tokens=9, vocabulary=object(), tool_parser="hermes")  # type: ignore[arg-type]
    wire = msgspec.msgpack.encode(model.settings)
    assert msgspec.msgpack.decode(wire, type=ModelSettings) == model.settings
