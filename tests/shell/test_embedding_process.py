"""The embedding process with a real model: vectors of plain llama.cpp, limits and crashes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import numpy as np
import psutil
import pytest

from primad.daemon.embedding import CHECKED_CHARS, MAX_WAITING, EmbeddingService
from primad.engine.embedding_messages import (
    CheckTexts,
    EmbeddedText,
    EmbedderReady,
    LoadEmbedder,
    TextRefused,
    TextsChecked,
)
from primad.errors import ConfigError, EngineError, RequestError, RingError
from primad.gguf.model import open_model
from primad.gguf.windows import vocabulary_size
from primad.head import serve
from primad.head.serve import check_embedding
from primad.system.children.channel import frame
from primad.system.memory import Memory, children
from tests.fakes.vocabulary import write_vocabulary
from tests.shell.unanswered import ask_stopped
from tools.synth import write_model

PATIENCE_S = 180
TEXTS = ["The sky is blue.", "Ships have masts.", "A much longer text about the sea, " * 20]
PLAIN = """
import json, sys
from llama_cpp import LLAMA_POOLING_TYPE_MEAN, Llama
model = Llama(sys.argv[1], embedding=True, pooling_type=LLAMA_POOLING_TYPE_MEAN, n_ctx=2048, n_batch=2048, n_ubatch=2048,
              n_threads=1, verbose=False)
print(json.dumps([model.embed(text, normalize=True) for text in sys.argv[2:]]))
"""
INPUT = "input[{}]".format


def numbers(vectors):
    return np.stack([np.frombuffer(vector, "<f4") for vector in vectors])


@asynccontextmanager
async def embedding(path, *, starts=True, **options):
    service = EmbeddingService(path, "small", threads=1, **options)
    try:
        async with asyncio.timeout(PATIENCE_S):
            if starts:
                await service.start()
            yield service
    finally:
        await service.close()


@pytest.mark.slow
async def test_vectors_are_those_of_plain_llama_cpp(quick_model):
    async with embedding(quick_model) as service:
        vectors, tokens = await service.embed(TEXTS, INPUT)
    command = [sys.executable, "-c", PLAIN, str(quick_model), *TEXTS]
    printed = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)
    plain = np.array(json.loads(printed.stdout.splitlines()[-1]), np.float32)
    np.testing.assert_allclose(numbers(vectors), plain, atol=1e-5)
    assert tokens > 100


@pytest.mark.slow
async def test_a_text_is_refused_or_cut_and_others_are_not_touched(tmp_path):
    path, vocabulary = tmp_path / "small.gguf", write_vocabulary(tmp_path / "vocabulary.gguf", pre="gpt-4o")
    write_model(path, layers=2, vocabulary=f"from:{vocabulary}")
    last = vocabulary_size(open_model(path)) - 1
    endless = "a" * 1_000_000  # that pre-tokenizer recurses once per character
    async with embedding(path) as service:
        before = await service.embed(["Hello"], INPUT)
        for texts, wrong in (
            (["Hello", "sea " * 4000], r"input\[1\]: has \d+ tokens and exceeds the available context size of 2048"),
            (
                ["Hello", endless],
                r"input\[1\]: has at least 2049 tokens and exceeds the available context size of 2048",
            ),
            (["Hello", ""], r"input\[1\]: is empty"),
            ([[]], r"input\[0\]: is empty"),
            ([[1, last + 1]], rf"input\[0\]: token ids go from 0 to {last}"),
        ):
            with pytest.raises(RequestError, match=wrong):
                await service.embed(texts, INPUT)
        for text in ("sea " * 4000, endless):
            _, tokens = await service.embed([text], INPUT, cuts=True)
            assert tokens == 2048
        assert await service.embed(["Hello"], INPUT) == before


@pytest.mark.slow
async def test_a_crash_is_no_error_but_a_second_one_in_a_request_is_and_the_next_request_succeeds(smollm2):
    crashing = False

    def began(pid):
        if crashing:
            os.kill(pid, signal.SIGKILL)

    async with embedding(smollm2, began=began) as service:
        before = await service.embed(["Hello"], INPUT)
        for crashing in (False, True):
            pending = await ask_stopped(service.pid, service.embed(["Hello"], INPUT))
            os.kill(service.pid, signal.SIGKILL)
            if crashing:
                with pytest.raises(RingError, match="was ended by SIGKILL; the next request starts it again"):
                    await pending
            else:
                assert await pending == before
        crashing = False
        assert await service.embed(["Hello"], INPUT) == before
        leaving = asyncio.create_task(service.embed(["sea " * 2000] * 9, INPUT))
        await asyncio.sleep(0)
        leaving.cancel()
        pid = service.pid
        assert await service.embed(["Hello"], INPUT) == before
        assert service.pid == pid, "who leaves costs nobody a new process"
        status = service.status()
        assert (status["requests"], status["errors"], status["starts"], status["waiting"]) == (6, 1, 4, 0)
        assert status["alive"]
        assert status["rss_bytes"] > 1 << 20
        assert (status["tokens"] > 0, status["compute_s"] > 0) == (True, True)
        pending = [service.embed(["Hello"], INPUT) for _ in range(MAX_WAITING + 1)]
        *results, refused = await asyncio.gather(*pending, return_exceptions=True)
        assert results == [before] * MAX_WAITING
        assert isinstance(refused, RequestError)
        assert (refused.status, refused.code) == (429, "queue_full")


@pytest.mark.slow
async def test_plans_do_not_count_on_the_embedding_process_memory(smollm2):
    async with embedding(smollm2) as service:
        pid = service.pid
        assert pid not in children()
        assert pid in [child.pid for child in psutil.Process().children()]
    assert not psutil.pid_exists(pid)


@pytest.mark.slow
def test_the_embedding_process_ends_with_its_parent(smollm2):
    process = subprocess.Popen(
        [sys.executable, "-m", "primad.engine.embedding_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        process.stdin.write(frame(LoadEmbedder(path=str(smollm2), threads=1)))
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


async def test_a_file_that_is_no_model_is_one_error(tmp_path):
    path = tmp_path / "none.gguf"
    path.write_bytes(b"no model")
    async with embedding(path, starts=False) as service:
        with pytest.raises(EngineError, match=r"cannot load .*none\.gguf"):
            await service.start()
        with pytest.raises(RingError, match="is being loaded"):
            await service.embed(["Hello"], INPUT)


async def test_a_process_that_cannot_be_started_is_an_error_for_the_caller(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    async with embedding(tmp_path / "none.gguf", starts=False) as service:
        with pytest.raises(EngineError, match="the embedding process cannot be started: No such file"):
            await service.start()


def test_a_model_without_room_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write_model(path)
    check_embedding(path)
    monkeypatch.setattr(serve, "memory", lambda: Memory(total_bytes=1 << 20, available_bytes=1 << 10))
    with pytest.raises(
        ConfigError, match=rf"^--embedding {path}: has .* of weights, and 1.* free here; choose a smaller"
    ):
        check_embedding(path)


async def test_a_process_that_hangs_is_ended(tmp_path):
    async with embedding(tmp_path / "none.gguf", starts=False, timeout_s=0.0) as service:
        with pytest.raises(EngineError, match="did not respond within 0 s"):
            await service.start()
        assert service.pid is None


class Process:
    """An embedding process that replies at once; each vector contains the text itself."""

    def __init__(self, monkeypatch) -> None:
        self.is_alive, self.pid, self.tasks = True, 0, []

        async def load(service):
            service._child = self
            return EmbedderReady(width=1, max_text_tokens=512, bytes=0)

        async def ask(service, task):
            self.tasks.append(task)
            await asyncio.sleep(0)
            if isinstance(task, CheckTexts):
                wrong = [index for index, text in enumerate(task.texts) if not text]
                return TextRefused(index=wrong[0], error="is empty") if wrong else TextsChecked(tokens=len(task.texts))
            return EmbeddedText(vector=task.text.encode())

        async def end(service, **_):
            service._child = None

        monkeypatch.setattr(EmbeddingService, "_load", load)
        monkeypatch.setattr(EmbeddingService, "_ask", ask)
        monkeypatch.setattr(EmbeddingService, "_end", end)


async def test_callers_take_turns_however_many_requests_each_has(tmp_path, monkeypatch):
    process = Process(monkeypatch)
    async with embedding(tmp_path / "none.gguf") as service:
        greedy = [asyncio.create_task(service.embed([f"a{n}"] * 20, INPUT, owner="a")) for n in range(MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="waiting already"):
            await service.embed(["a"], INPUT, owner="a")
        before = len(process.tasks)
        assert await service.embed(["b"], INPUT, owner="b") == ([b"b"], 1)
        assert len(process.tasks) - before <= 5, "one of a and one of b in turn"
        for task in greedy:
            task.cancel()
        await asyncio.wait(greedy)
        assert await service.embed(["a"], INPUT, owner="a") == ([b"a"], 1)


async def test_many_texts_are_counted_in_batches_and_named_by_their_index_in_the_request(tmp_path, monkeypatch):
    process, texts = Process(monkeypatch), ["x" * (CHECKED_CHARS // 2)] * 5
    async with embedding(tmp_path / "none.gguf") as service:
        assert await service.embed(texts, INPUT) == ([text.encode() for text in texts], 5)
        assert [len(task.texts) for task in process.tasks if isinstance(task, CheckTexts)] == [2, 2, 1]
        with pytest.raises(RequestError, match=r"^input\[4\]: is empty"):
            await service.embed([*texts[:4], ""], INPUT)
