"""A head with ``--embedding``: official clients get the vectors of plain llama.cpp, even while a chat streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.e2e.cluster import PATIENCE_S, Head, command_of, serving
from tests.lazily import Lazily
from tests.shell.test_embedding_process import PLAIN
from tools.synth import FEW_TOKENS, write_model

ollama = Lazily("ollama")
openai = Lazily("openai")

pytestmark = pytest.mark.slow

TEXTS = ["Ships have masts.", "Trees have leaves, and some have needles."]
HELLO = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def embedder(smollm2, tmp_path_factory) -> Path:
    """A few layers like Gemma 3's with random weights; ``test_embedding_process.py`` has other kinds."""
    path = tmp_path_factory.mktemp("embedder") / "embedder.gguf"
    write_model(path, architecture="gemma3", context=2048, width=640, vocabulary=f"from:{smollm2}", tokens=FEW_TOKENS)
    return path


@pytest.fixture(scope="module")
def head(smollm2, embedder, module_home) -> Iterator[Head]:
    cluster = f"embeddings-{time.time_ns():x}"
    arguments = ("--alone", "--context", 1024, "--embedding", embedder)
    with serving(smollm2, module_home("head"), cluster, *arguments) as head:
        yield head


@pytest.fixture(scope="module")
def client(head) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{head.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def plain(embedder) -> np.ndarray:
    printed = subprocess.run([sys.executable, "-c", PLAIN, str(embedder), *TEXTS], capture_output=True, check=True)
    return np.array(json.loads(printed.stdout.splitlines()[-1]), np.float32)


def near(vectors, plain) -> None:
    """Check that vectors are as close as with other numbers of threads."""
    np.testing.assert_allclose(np.array(vectors, np.float32), plain, atol=1e-3)


def embedding_process(head: Head) -> int:
    (process,) = [each for each in head.run.processes() if "primad.engine.embedding_process" in command_of(each)]
    return process.pid


def test_the_first_lines_name_the_embedding_model(head, embedder):
    head.run.wait_for(rf"^{embedder.stem} serves embeddings of 640 numbers for texts of at most 2048 tokens")
    head.run.wait_for(rf"^{embedder.stem} serves embeddings there, on this device only$")


def test_openais_client_while_a_chat_streams(head, client, embedder, plain):
    chat = {"model": "smollm2-135m-q4_1", "messages": HELLO, "temperature": 0, "max_tokens": 120}
    streams = False
    while not streams:  # it was over before
        with client.chat.completions.create(**chat, stream=True) as stream:
            parts = iter(stream)
            next(parts)
            floats = client.embeddings.create(model=embedder.stem, input=TEXTS, encoding_format="float")
            streams = head.answers()
            printed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert printed
    near([each.embedding for each in floats.data], plain)
    near([each.embedding for each in client.embeddings.create(model=embedder.stem, input=TEXTS).data], plain)
    cut = client.embeddings.create(model=embedder.stem, input=TEXTS[0], dimensions=64).data[0].embedding
    near(cut, plain[0, :64] / np.linalg.norm(plain[0, :64]))
    alone = client.chat.completions.create(**chat)
    assert alone.choices[0].message.content.endswith(printed)
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]: has \d+ tokens"):
        client.embeddings.create(model=embedder.stem, input=["Ships", "sea " * 4000])


def test_ollamas_client(head, embedder, plain):
    client = ollama.Client(host=head.url, timeout=PATIENCE_S)
    near(client.embed(model=embedder.stem, input=TEXTS).embeddings, plain)
    near(client.embeddings(model=embedder.stem, prompt=TEXTS[0]).embedding, plain[0])
    assert f"{embedder.stem}:latest" in [model.model for model in client.list().models]
    client._client.close()


def test_a_killed_embedding_process_starts_again(head, client, embedder, plain):
    before = embedding_process(head)
    os.kill(before, signal.SIGKILL)
    near([each.embedding for each in client.embeddings.create(model=embedder.stem, input=TEXTS).data], plain)
    assert embedding_process(head) != before
    ranked = httpx.post(
        f"{head.url}/v1/rerank", json={"query": TEXTS[1], "documents": TEXTS}, timeout=PATIENCE_S
    ).json()
    assert [each["index"] for each in ranked["results"]] == [1, 0]
    assert head.run.process.poll() is None
