"""Prepares OpenAI's requests in the text process. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import Field

from primad.api.answering.backend import Asking
from primad.api.answering.job import Job, PreparedTexts, check_model
from primad.api.dialects.openai.fields import Strict, expecting
from primad.api.dialects.openai.job import chat_job, completion_job
from primad.api.dialects.openai.samplers import MAX_TOKENS
from primad.api.dialects.openai.schema import ChatRequest, CompletionRequest, SamplingRequest, parse
from primad.api.dialects.openai.shapes import InputTokens
from primad.api.dialects.openai.tool_use import chat_text, chat_tokens

MAX_TEXTS: Final = 2048
"""Limit of the texts to embed of one request."""

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
Dimensions = Annotated[int, Field(ge=1, le=1 << 20)]
_Ids = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKENS)]], Field(min_length=1, fail_fast=True)]
_Lists = Annotated[list[_Ids], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]


class PreparedCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A job, and the form of its response for a client that calls the model ``model``."""

    job: Job
    model: str
    stream: bool
    include_usage: bool
    times_parts: bool


class PreparedRanking(msgspec.Struct, frozen=True, kw_only=True):
    """Documents to rank by similarity to ``query``; the best ``top_n``, None for all."""

    model: str | None
    query: str
    documents: list[str]
    top_n: int | None


class EmbeddingRequest(Strict):
    """``POST /v1/embeddings``."""

    model: Annotated[str, Field(max_length=512)] | None = None
    input: Annotated[
        str | Texts | _Ids | _Lists,
        expecting(f"a string, a list of token ids, or a list of 1 to {MAX_TEXTS} of either"),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None


class RerankRequest(Strict):
    """``POST /v1/rerank``."""

    model: Annotated[str, Field(max_length=512)] | None = None
    query: str
    documents: Texts
    top_n: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None


def chat(body: bytes, asking: Asking) -> PreparedCompletion:
    """``POST /v1/chat/completions``."""
    ask = parse(ChatRequest, body)
    return _prepared(ask, chat_job(ask, asking.served, seed=asking.seed, now=asking.now), asking)


def count(body: bytes, asking: Asking) -> InputTokens:
    """``POST /v1/chat/completions/input_tokens``."""
    return counted(parse(ChatRequest, body), asking)


def counted(ask: ChatRequest, asking: Asking) -> InputTokens:
    """Return the number of tokens of the conversation of ``ask``, even if it is too long."""
    check_model(ask.model, [asking.served])
    text = chat_text(ask, asking.served, now=asking.now)
    return InputTokens(input_tokens=len(chat_tokens(ask, text, asking.served).tokens))


def completion(body: bytes, asking: Asking) -> PreparedCompletion:
    """``POST /v1/completions``."""
    ask = parse(CompletionRequest, body)
    return _prepared(ask, completion_job(ask, asking.served, seed=asking.seed), asking)


def _prepared(ask: SamplingRequest, job: Job, asking: Asking) -> PreparedCompletion:
    return PreparedCompletion(
        job=job,
        model=ask.model or asking.served.id,
        stream=bool(ask.stream),
        include_usage=ask.include_usage,
        times_parts=bool(ask.timings_per_token),
    )


def embedding(body: bytes, _: Asking) -> PreparedTexts:
    """``POST /v1/embeddings``."""
    ask = parse(EmbeddingRequest, body)
    given: Any = ask.input
    is_list = isinstance(given, list) and not isinstance(given[0], int)
    return PreparedTexts(
        model=ask.model,
        texts=given if is_list else [given],
        param="input",
        numbered=is_list,
        dimensions=ask.dimensions,
        as_base64=ask.encoding_format == "base64",
    )


def ranking(body: bytes, _: Asking) -> PreparedRanking:
    """``POST /v1/rerank``."""
    ask = parse(RerankRequest, body)
    return PreparedRanking(model=ask.model, query=ask.query, documents=ask.documents, top_n=ask.top_n)
