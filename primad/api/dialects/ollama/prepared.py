"""Prepares Ollama's requests in the text process. Pure."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import Field

from primad.api.answering.backend import Asking
from primad.api.answering.job import Job, PreparedTexts, check_model
from primad.api.dialects.ollama.job import NAMES, chat_request, generate_request, plain
from primad.api.dialects.ollama.schema import ModelRequest, OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from primad.api.dialects.openai.fields import Strict, expecting
from primad.api.dialects.openai.job import chat_job, completion_job
from primad.api.dialects.openai.prepared import MAX_TEXTS, Dimensions, Texts
from primad.api.dialects.openai.schema import ChatRequest, CompletionRequest, parse, worded_as
from primad.errors import RequestError


class PreparedLines(msgspec.Struct, frozen=True, kw_only=True):
    """A job (None: only load the model), and the form of its response for a client that calls the model ``model``."""

    job: Job | None
    model: str
    is_chat: bool
    stream: bool
    shows_thoughts: bool
    with_logprobs: bool


class AskedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a served model."""

    name: str


class PreparedEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    """Texts to embed (None: no texts), for a client that calls the model ``model``."""

    model: str
    texts: PreparedTexts | None


class _OfModel(Strict):
    model: Annotated[str, Field(max_length=512)]
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class OllamaEmbedRequest(_OfModel):
    """``POST /api/embed``. Texts that are too long are truncated, unless ``truncate`` is false."""

    input: Annotated[
        str | Texts | Annotated[list[str], Field(max_length=0)],
        expecting(f"a string, or a list of at most {MAX_TEXTS}"),
    ] = ""
    truncate: bool | None = None
    dimensions: Dimensions | None = None


class OllamaEmbeddingsRequest(_OfModel):
    """``POST /api/embeddings``."""

    prompt: str = ""


def chat(body: bytes, asking: Asking) -> PreparedLines:
    """``POST /api/chat``."""
    ask = parse(OllamaChatRequest, body)
    with worded_as(NAMES):
        core = chat_request(ask) if ask.messages else None
    return _prepared(ask, core, asking)


def generate(body: bytes, asking: Asking) -> PreparedLines:
    """``POST /api/generate``."""
    ask = parse(OllamaGenerateRequest, body)
    with worded_as(NAMES):
        core = generate_request(ask) if ask.prompt or ask.images else None
    return _prepared(ask, core, asking)


def _prepared(ask: OllamaRequest, core: ChatRequest | CompletionRequest | None, asking: Asking) -> PreparedLines:
    check_model(plain(ask.model), [asking.served])
    return PreparedLines(
        job=None if core is None else _job(core, asking, truncates=ask.truncate is not False),
        model=ask.model,
        is_chat=isinstance(ask, OllamaChatRequest),
        stream=ask.stream is not False,
        shows_thoughts=ask.think is not False,
        with_logprobs=bool(ask.logprobs),
    )


def _job(core: ChatRequest | CompletionRequest, asking: Asking, *, truncates: bool) -> Job:
    with worded_as(NAMES):
        if isinstance(core, CompletionRequest):
            return completion_job(core, asking.served, seed=asking.seed)
        return chat_job(core, asking.served, seed=asking.seed, now=asking.now, truncates=truncates)


def show(body: bytes, asking: Asking) -> AskedModel:
    """``POST /api/show``."""
    ask = parse(ModelRequest, body)
    name = ask.name if ask.model is None else ask.model
    if name is None:
        raise RequestError("'model' is required", param="model")
    check_model(plain(name), [asking.served])
    return AskedModel(name=plain(name))


def embed(body: bytes, _: Asking) -> PreparedEmbedding:
    """``POST /api/embed``."""
    ask = parse(OllamaEmbedRequest, body)
    if not ask.input:
        return PreparedEmbedding(model=ask.model, texts=None)
    is_one = isinstance(ask.input, str)
    texts: Any = [ask.input] if is_one else ask.input
    asked = PreparedTexts(
        model=plain(ask.model),
        texts=texts,
        param="input",
        numbered=not is_one,
        dimensions=ask.dimensions,
        cuts=ask.truncate is not False,
    )
    return PreparedEmbedding(model=ask.model, texts=asked)


def embed_one(body: bytes, _: Asking) -> PreparedEmbedding:
    """``POST /api/embeddings``."""
    ask = parse(OllamaEmbeddingsRequest, body)
    if not ask.prompt:
        return PreparedEmbedding(model=ask.model, texts=None)
    asked = PreparedTexts(model=plain(ask.model), texts=[ask.prompt], param="prompt", cuts=True)
    return PreparedEmbedding(model=ask.model, texts=asked)
