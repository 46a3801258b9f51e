"""Requests of OpenAI's API reference, with the samplers of local clients.

Everything is strict (no number in a string) and bounded; null means the default. An unknown field is ignored with a log
line, because clients send many without effect (``user``, ``store``, ``metadata``). A known field that cannot be
honoured is refused, because ignoring it would change the response. What depends on the served model (token ids, context
length) is checked in ``job``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from primad.api.answering.fill_in import Gap
from primad.api.answering.pictures import PromptTokens
from primad.api.dialects.openai.chat_fields import NO_AUDIO, ChatFields
from primad.api.dialects.openai.fields import Strict, expecting, only
from primad.api.dialects.openai.samplers import MAX_TOKENS, SamplerFields
from primad.errors import RequestError, printable

logger = logging.getLogger(__name__)

MAX_CHOICES: Final = 128
"""Limit of the choices of one request: prompts times ``n``."""
MAX_ECHO_CHARS: Final = 4 << 20
"""Limit of echoed characters, counting each prompt ``n`` times; a prompt of 128,000 tokens has some 600,000."""

MAX_STOPS: Final = 64
"""Limit of stop strings: editors send one for each keyword of a language."""
MAX_STOP_CHARS: Final = 256
MAX_TOP_LOGPROBS: Final = 20
MAX_PRIORITY: Final = 2**31 - 1
"""Limit of vLLM's field ``priority``; lower values go first."""
MAX_REPORTED: Final = 8
"""Limit of the ignored fields that are named for one request."""
_HARMLESS: Final = frozenset(
    {
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "verbosity",
    }
)
"""Fields of OpenAI's without effect here; they are not logged."""


_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""An escape in JSON; an unpaired surrogate is not a character."""
_StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKENS)]], Field(min_length=1, fail_fast=True)]
TokenLimit = Annotated[
    Literal[-1] | Annotated[int, Field(ge=1, le=MAX_TOKENS)], expecting("a count from 1, or -1 for as many as fit")
]


class StreamOptions(Strict):
    """``include_usage``: a last chunk with the token counts of the whole request."""

    include_usage: bool | None = None


class SamplingRequest(SamplerFields):
    """Fields common to chat and completion requests. ``model`` may be left out."""

    model_config = ConfigDict(extra="allow")  # so that ignored fields can be logged

    model: Annotated[str, Field(max_length=512)] | None = None
    stop: Annotated[
        _StopString | Annotated[list[_StopString], Field(max_length=MAX_STOPS)] | None,
        expecting(
            f"a string or a list of at most {MAX_STOPS} strings, each of at most {MAX_STOP_CHARS} characters",
        ),
    ] = None
    max_tokens: TokenLimit | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None

    @field_validator("stream_options")
    @classmethod
    def _options_of_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "only allowed when stream is true")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, without empty ones."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(filter(None, given))

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(ChatFields, SamplingRequest):
    """``POST /v1/chat/completions``."""

    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    modalities: Annotated[Any, only(None, ["text"], why="this server returns text only")] = None
    audio: Annotated[Any, NO_AUDIO] = None
    web_search_options: Annotated[Any, only(None, why="this server does not search the web")] = None

    @field_validator("top_logprobs")
    @classmethod
    def _top_of_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise PydanticCustomError("top_logprobs", "only allowed when logprobs is true")
        return value

    @property
    def token_limit(self) -> int | None:
        """The limit of a response's tokens, or None for the rest of the context."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return None if limit == -1 else limit

    @property
    def logprob_count(self) -> int | None:
        """The number of alternatives per token, or None without log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingRequest):
    """``POST /v1/completions``."""

    prompt: Annotated[
        str
        | _TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | Annotated[list[_TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)],
        expecting(f"a string, a list of token ids, or a list of 1 to {MAX_CHOICES} of either"),
    ]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: str | None = None

    @field_validator("best_of")
    @classmethod
    def _best_of_n(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != (info.data.get("n") or 1):
            raise PydanticCustomError("best_of", "not supported unless it equals n")
        return value

    @field_validator("logprobs")
    @classmethod
    def _logprobs_without_echo(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("echo"):
            raise PydanticCustomError("echo", "not supported together with echo: the prompt's are not computed")
        return value

    @property
    def gap(self) -> Gap | None:
        """The gap to fill, None for a plain continuation."""
        return Gap(after=self.suffix, param="suffix") if self.suffix else None

    @property
    def token_limit(self) -> int | None:
        """The limit of a response's tokens, by OpenAI's default 16, or None for the rest of the context."""
        limit = 16 if self.max_tokens is None else self.max_tokens
        return None if limit == -1 else limit

    @property
    def logprob_count(self) -> int | None:
        """The number of alternatives per token, or None without log-probabilities."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int] | PromptTokens]:
        """The single prompts, each as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        whole: list[Any] = self.prompt
        return [whole] if isinstance(whole[0], int) else whole


R = TypeVar("R", bound=BaseModel)


def parse(model: type[R], body: bytes) -> R:
    """Parse a request body as ``model``. Raises ``RequestError`` (400) that names the first wrong field.

    Unpaired surrogates, sent by clients that cut texts, become U+FFFD.
    """
    try:
        request = _validated(model, body)
    except ValidationError as exc:
        raise _refusal(exc) from exc
    _notify_ignored(request)
    return request


def _validated(model: type[R], body: bytes) -> R:
    try:
        return model.model_validate_json(body)
    except ValidationError as exc:
        if exc.errors(include_url=False, include_input=False)[0]["type"] != "json_invalid" or b"\\u" not in body:
            raise
    return model.model_validate_json(_ESCAPE.sub(lambda found: rb"\ufffd" if found["half"] else found[0], body))


def build(model: type[R], fields: dict[str, Any]) -> R:
    """Build a ``model`` from ``fields``, which a dialect translated. Raises ``RequestError`` (400) like ``parse``."""
    try:
        return model.model_validate(fields)
    except ValidationError as exc:
        raise _refusal(exc) from exc


@contextmanager
def worded_as(names: Mapping[str, str]) -> Iterator[None]:
    """Make errors name a field as in ``names``: as the client of a dialect wrote it."""
    try:
        yield
    except RequestError as exc:
        name = names.get(exc.param or "")
        if name is not None:
            exc.args = (str(exc).replace(f"'{exc.param}'", f"'{name}'"),)
            exc.param = name
        raise


def _refusal(exc: ValidationError) -> RequestError:
    error = exc.errors(include_url=False, include_input=False)[0]
    loc = error["loc"]
    param = _path(loc[:1] if loc[:1] == ("logit_bias",) else loc)  # its keys are the client's, of any length
    if error["type"] == "json_invalid" and str(error["ctx"]["error"]).startswith("recursion limit exceeded"):
        return RequestError("the body is nested too deeply: about 200 levels are accepted", code="nested_too_deeply")
    if error["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {error['ctx']['error']}")
    if error["type"] == "missing" and param:
        return RequestError(f"'{param}' is required", param=param, code="missing_required_parameter")
    if not param:
        return RequestError("the body must be a JSON object")
    code = "unsupported_parameter" if error["type"] == "unsupported" else "invalid_value"
    return RequestError(f"'{param}': {error['msg']}", param=param, code=code)


def _notify_ignored(request: BaseModel) -> None:
    unknown = sorted((request.model_extra or {}).keys() - _HARMLESS)
    if unknown:
        named = ", ".join(printable(name, 40) for name in unknown[:MAX_REPORTED])
        more = f" and {len(unknown) - MAX_REPORTED} more" if len(unknown) > MAX_REPORTED else ""
        logger.info("unknown fields of a request were ignored: %s%s", named, more)


def _path(loc: tuple[int | str, ...]) -> str:
    """Return ``("messages", 0, "content")`` as ``messages[0].content``."""
    path = ""
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path
