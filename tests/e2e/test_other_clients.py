"""Official clients of other dialects, against a real head with a small model: all give the same text as OpenAI's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pydantic
import pytest

from tests.e2e.cluster import PATIENCE_S, Head, serving
from tests.lazily import Lazily

anthropic = Lazily("anthropic")
ollama = Lazily("ollama")
openai = Lazily("openai")

pytestmark = pytest.mark.slow

MODEL = "quick-15-layers"
HELLO = [{"role": "user", "content": "Name three colours."}]
TOKENS = 12
GREEDY = {"temperature": 0, "num_predict": TOKENS}


@pytest.fixture(scope="module")
def head(quick_model: Path, module_home) -> Iterator[Head]:
    cluster = f"clients-{time.time_ns():x}"
    with serving(
        quick_model, module_home("head"), cluster, "--alone", "--context", 1024, "--alias", "gpt-4o,local"
    ) as head:
        yield head


@pytest.fixture(scope="module")
def printed(head: Head) -> str:
    """The completion of OpenAI's client."""
    with openai.OpenAI(base_url=f"{head.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        answer = client.chat.completions.create(model="gpt-4o", messages=HELLO, temperature=0, max_tokens=TOKENS)
    assert answer.choices[0].message.content
    return answer.choices[0].message.content


def test_anthropics_client(head, printed):
    ask = {"model": "claude-any", "max_tokens": TOKENS, "messages": HELLO, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=head.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        message = client.messages.create(**ask)
        assert (message.content[0].text, message.stop_reason) == (printed, "max_tokens")
        with client.messages.stream(**ask) as stream:
            assert "".join(stream.text_stream) == printed
        counted = client.messages.count_tokens(model="claude-any", messages=HELLO)
        used = message.usage
        assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_ollamas_client(head, printed):
    client = ollama.Client(host=head.url, timeout=PATIENCE_S)
    names = [model.model for model in client.list().models]
    assert names == [f"{MODEL}:latest", "gpt-4o:latest", "local:latest"]
    details = client.show(names[0]).details
    assert (details.family, details.quantization_level, details.parameter_size) == ("llama", "Q8_0", "817.1K")
    assert client.chat(model=names[0], messages=HELLO, options=GREEDY).message.content == printed
    parts = client.chat(model="local", messages=HELLO, options=GREEDY, stream=True)
    assert "".join(part.message.content for part in parts) == printed
    assert client.generate(model=MODEL, prompt=HELLO[0]["content"], options=GREEDY).response == printed
    client._client.close()


def test_the_next_turn_of_a_chat_computes_only_new_tokens_and_gives_the_same_text(head):
    story = "Tell me about the sea, the moon and the tides. " * 20
    with openai.OpenAI(base_url=f"{head.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:

        def ask(messages: list, **more: object) -> tuple[str, int, int]:
            answer = client.chat.completions.create(
                model=MODEL, messages=messages, temperature=0, max_tokens=TOKENS, extra_body=more
            )
            cached = answer.usage.prompt_tokens_details.cached_tokens
            return answer.choices[0].message.content, answer.usage.prompt_tokens, cached

        first = [{"role": "user", "content": story}]
        printed, before, cached = ask(first, cache_prompt=False)
        assert cached == 0
        second = [*first, {"role": "assistant", "content": printed}, {"role": "user", "content": "And in winter?"}]
        reply, tokens, cached = ask(second)
        assert before - 16 < cached < before < tokens
        assert ask(second, cache_prompt=False) == (reply, tokens, 0)
        again, _, cached = ask(first)
        assert again == printed
        assert 0 < cached < before


class Ship(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")  # otherwise the model may add any number of fields

    name: Literal["Argo", "Beagle"]  # not a bounded string: Anthropic's client drops the bound from the schema
    masts: Literal[1, 2, 3]


def test_each_client_gets_the_model_that_it_named(head):
    asked: Any = HELLO
    with anthropic.Anthropic(base_url=head.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        printed = client.messages.parse(model="claude-any", max_tokens=400, messages=asked, output_format=Ship)
        assert isinstance(printed.parsed_output, Ship)
    with openai.OpenAI(base_url=f"{head.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        response = client.responses.parse(model=MODEL, input=asked, text_format=Ship, max_output_tokens=400)
        assert isinstance(response.output_parsed, Ship)
    local = ollama.Client(host=head.url, timeout=PATIENCE_S)
    reported = local.chat(model=MODEL, messages=asked, format=Ship.model_json_schema(), options={"num_predict": 400})
    assert Ship.model_validate_json(reported.message.content)
    assert reported.eval_duration > 0
    local._client.close()


def test_responses(head, printed):
    with openai.OpenAI(base_url=f"{head.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        response = client.responses.create(model=MODEL, input=HELLO, temperature=0, max_output_tokens=TOKENS)
        assert (response.output_text, response.status) == (printed, "incomplete")


def test_llama_servers_paths(head, printed):
    def ask(path: str, **body: object) -> dict:
        return httpx.post(f"{head.url}{path}", json=body, timeout=PATIENCE_S).raise_for_status().json()

    prompt = ask("/apply-template", messages=HELLO)["prompt"]
    assert ask("/completion", prompt=prompt, n_predict=TOKENS, temperature=0)["content"] == printed
    tokens = ask("/tokenize", content=prompt)["tokens"]
    assert ask("/completion", prompt=tokens, n_predict=TOKENS, temperature=0)["content"] == printed
    for text in ("Grüße 😀", "<|im_start|>user\nHi<|im_end|>"):
        assert ask("/detokenize", tokens=ask("/tokenize", content=text)["tokens"])["content"] == text
    props = httpx.get(f"{head.url}/props", timeout=PATIENCE_S).json()
    assert props["default_generation_settings"]["n_ctx"] == 1024
    models = httpx.get(f"{head.url}/v1/models", timeout=PATIENCE_S).json()["data"]
    assert models[0]["meta"] == {"n_ctx": 1024, "n_ctx_train": 4096}
