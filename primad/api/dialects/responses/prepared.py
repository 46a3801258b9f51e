"""Prepares Responses requests in the text process. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from primad.api.answering.backend import Asking
from primad.api.answering.job import Job
from primad.api.dialects.openai.job import chat_job
from primad.api.dialects.openai.prepared import counted
from primad.api.dialects.openai.schema import parse, worded_as
from primad.api.dialects.openai.shapes import InputTokens
from primad.api.dialects.responses.job import NAMES, chat_request
from primad.api.dialects.responses.schema import ResponsesRequest


class EchoedFields(msgspec.Struct, frozen=True, kw_only=True):
    """The request fields that a response repeats."""

    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    tool_choice: str
    parallel_tool_calls: bool
    metadata: dict[str, Any]


class PreparedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A job, and the form of its response."""

    job: Job
    model: str
    stream: bool
    echoed: EchoedFields


def respond(body: bytes, asking: Asking) -> PreparedResponse:
    """``POST /v1/responses``."""
    ask = parse(ResponsesRequest, body)
    with worded_as(NAMES):
        job = chat_job(chat_request(ask), asking.served, seed=asking.seed, now=asking.now)
    echoed = EchoedFields(
        instructions=ask.instructions,
        max_output_tokens=ask.max_output_tokens,
        temperature=ask.temperature,
        top_p=ask.top_p,
        tool_choice=ask.tool_choice if isinstance(ask.tool_choice, str) else "auto",
        parallel_tool_calls=ask.parallel_tool_calls is not False,
        metadata=ask.metadata or {},
    )
    return PreparedResponse(job=job, model=ask.model or asking.served.id, stream=bool(ask.stream), echoed=echoed)


def count(body: bytes, asking: Asking) -> InputTokens:
    """``POST /v1/responses/input_tokens``."""
    with worded_as(NAMES):
        return counted(chat_request(parse(ResponsesRequest, body)), asking)
