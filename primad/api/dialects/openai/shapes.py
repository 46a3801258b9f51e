"""The API's responses, field by field as in OpenAI's API reference (platform.openai.com/docs/api-reference).

A field of type ``UnsetType`` is omitted from the JSON while it is ``UNSET``, which differs from ``null``.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from primad.api.answering.job import FinishReason
from primad.api.answering.timings import CompletionTimings
from primad.api.http.error_body import ErrorBody
from primad.api.http.status import StatusBody


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The number of prompt tokens from the cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Accepted and rejected draft tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a whole request; an end-of-generation token is not counted. ``completion_tokens_details`` is
    present if tokens were drafted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


# ---- log-probabilities ----------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One alternative; ``bytes`` are the token's raw bytes, which need not be whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token of the response and the most likely tokens at its position, best first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities in chat form."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities in completion form: parallel lists; ``text_offset`` counts characters of ``text``."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


# ---- /v1/chat/completions -------------------------------------------------------------------------------------------


class GivenFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The called function; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


class MessageCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a function."""

    id: str
    type: Literal["function"] = "function"
    function: GivenFunction


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The called function at its start, and then the next piece of its ``arguments``."""

    name: str | UnsetType = UNSET
    arguments: str


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """An addition to the ``index``-th call of a message, which starts with the ``id``."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message of one choice. ``content`` is null if there are only calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageCall] | UnsetType = UNSET
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the ``n`` choices."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="chat.completion"):
    """The response to a chat request that does not stream. ``created`` is in Unix seconds."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: CompletionTimings | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """An addition to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk's part of the choice ``index``."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ReadPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a prompt: ``processed`` tokens of ``total`` after this time, ``cache`` of them from the cache."""

    total: int
    cache: int
    processed: int
    time_ms: int


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the model of a request is loaded while the request waits for it: ``value`` goes from 0 to 1, and the
    model will be ready in ``expected_s`` seconds; null if unknown."""

    status: str
    value: float | None
    expected_s: float | None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="chat.completion.chunk"):
    """One event of a streamed chat response. ``created`` is in Unix seconds."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_progress: ReadPrompt | UnsetType = UNSET
    load_progress: LoadProgress | UnsetType = UNSET
    timings: CompletionTimings | UnsetType = UNSET


# ---- /v1/completions ------------------------------------------------------------------------------------------------


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice, or a chunk's addition to it (with ``finish_reason`` null until the last)."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="text_completion"):
    """The response to a completion request, or one event of it. ``created`` is in Unix seconds."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_progress: ReadPrompt | UnsetType = UNSET
    load_progress: LoadProgress | UnsetType = UNSET
    timings: CompletionTimings | UnsetType = UNSET


# ---- the rest -------------------------------------------------------------------------------------------------------


class ModelMeta(msgspec.Struct, frozen=True, kw_only=True):
    """llama-server's facts about a model: its context in tokens as served and as trained, and the bytes of its file.

    The first is missing while the model is not loaded, the others if they are unknown.
    """

    n_ctx: int | UnsetType
    n_ctx_train: int | UnsetType
    size: int | UnsetType = UNSET


class Model(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="model"):
    """A served model. ``created`` is in Unix seconds; ``max_model_len`` is vLLM's name of the context.

    The other fields are set if requests choose among several models: ``status`` has llama-server's ``value``
    (``unloaded``, ``loading``, ``loaded``), ``failed`` and ``detail``, ``progress`` (0 to 1), and ``expected_s`` until
    it is loaded.
    """

    id: str
    created: int
    owned_by: str
    max_model_len: int | UnsetType
    meta: ModelMeta
    aliases: list[str] | UnsetType = UNSET
    status: dict[str, Any] | UnsetType = UNSET
    architecture: dict[str, list[str]] | UnsetType = UNSET
    capabilities: list[str] | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """``GET /v1/models``."""

    data: list[Model]


class InputTokens(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="response.input_tokens"):
    """The number of tokens of a prompt."""

    input_tokens: int


class HealthBody(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /health``."""

    status: Literal["ok", "loading"]
    detail: str
    model: str | None


RESPONSES = (ChatCompletion, ChatChunk, Completion, Model, ModelList, InputTokens, HealthBody, StatusBody, ErrorBody)
"""All response types of a route, for the OpenAPI document."""
