"""Prepares Anthropic's requests in the text process. Pure."""

from __future__ import annotations

import msgspec

from primad.api.answering.backend import Asking
from primad.api.answering.job import Job, check_model
from primad.api.dialects.anthropic.job import NAMES, chat_request
from primad.api.dialects.anthropic.schema import CountRequest, MessagesRequest
from primad.api.dialects.openai.job import chat_job
from primad.api.dialects.openai.schema import parse, worded_as
from primad.api.dialects.openai.tool_use import chat_text, chat_tokens


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/messages/count_tokens``."""

    input_tokens: int


class PreparedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A job, and the form of its response."""

    job: Job
    model: str
    stream: bool
    shows_thoughts: bool


def messages(body: bytes, asking: Asking) -> PreparedMessage:
    """``POST /v1/messages``."""
    ask = parse(MessagesRequest, body)
    request = chat_request(ask, asking.served)
    with worded_as(NAMES):
        job = chat_job(request, asking.served, seed=asking.seed, now=asking.now)
    shows_thoughts = ask.thinking is not None and ask.thinking.type != "disabled"
    return PreparedMessage(
        job=job,
        model=request.model or asking.served.id,
        stream=bool(ask.stream),
        shows_thoughts=shows_thoughts,
    )


def count(body: bytes, asking: Asking) -> TokenCount:
    """``POST /v1/messages/count_tokens``: the number of tokens of a conversation, even of one that is too long."""
    asked = chat_request(parse(CountRequest, body), asking.served)
    check_model(asked.model, [asking.served])
    text = chat_text(asked, asking.served, now=asking.now)
    return TokenCount(input_tokens=len(chat_tokens(asked, text, asking.served).tokens))
