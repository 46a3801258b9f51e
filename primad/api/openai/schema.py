"""What a client may ask: the requests of OpenAI's API reference, and the samplers that local clients know beside them.

The only file with pydantic. Everything is strict (no number in a string) and bounded; null means the default; a field we
do not know is ignored, because clients send many that change nothing (``user``, ``store``, ``metadata``); a field we know
and cannot honour is refused, because ignoring it would change the answer. What depends on the served model (token ids,
context length) is checked in ``job``.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic_core import PydanticCustomError

from primad.errors import RequestError

MAX_CHOICES: Final = 128
"""Answers of one request: prompts times ``n``."""

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_TOP_LOGPROBS: Final = 20
MAX_TOKENS: Final = 2**31 - 1


def _expecting(what: str) -> WrapValidator:
    """One clear sentence in place of what each member of a union has to say."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError as exc:
            raise PydanticCustomError("expected", "expected {what}", {"what": what}) from exc

    return WrapValidator(check)


def _only(*allowed: object, why: str) -> AfterValidator:
    """A feature that is known and not served: only the values that ask for nothing pass."""

    def check(value: object) -> object:
        if not any(type(value) is type(harmless) and value == harmless for harmless in allowed):
            raise PydanticCustomError("unsupported", "not supported: {why}", {"why": why})
        return value

    return AfterValidator(check)


_NoTools = Annotated[Any, _only(None, [], why="this server does not call tools")]
_NoAudio = Annotated[Any, _only(None, why="this server answers with text only")]
_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKENS)]], Field(min_length=1, fail_fast=True)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_TokenCount = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(_Strict):
    """``include_usage``: a last chunk with the token counts of the whole request."""

    include_usage: bool | None = None


class TextPart(_Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One message of a conversation. Only an assistant's content may be null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[TextPart] | None,
        _expecting("a string or a list of text parts (images, audio and files are not supported)"),
    ] = Field(default=None, validate_default=True)
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: _NoTools = None
    function_call: Annotated[Any, _only(None, why="this server does not call functions")] = None
    audio: _NoAudio = None

    @field_validator("content")
    @classmethod
    def _content_is_there(cls, value: str | list[TextPart] | None, info: ValidationInfo) -> str | list[TextPart] | None:
        if value is None and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("missing", "a message needs content; only an assistant's may be null")
        return value

    def for_template(self) -> dict[str, str]:
        """The message as chat templates read it: text parts joined by newlines, null content as ""."""
        match self.content:
            case None:
                text = ""
            case str():
                text = self.content
            case parts:
                text = "\n".join(part.text for part in parts)
        optional = {"name": self.name, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": text} | {key: value for key, value in optional.items() if value}


class SamplingRequest(_Strict):
    """What chat and completion requests share. ``model`` may be left out: there is only one."""

    model: Annotated[str, Field(max_length=512)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = Field(
        default=None, validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    repeat_last_n: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    logit_bias: dict[str, _Bias] | None = None
    stop: Annotated[
        _StopString | Annotated[list[_StopString], Field(max_length=MAX_STOPS)] | None,
        _expecting(
            f"a string or a list of at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters",
        ),
    ] = None
    max_tokens: _TokenCount | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("stream_options")
    @classmethod
    def _options_of_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "only allowed when stream is true")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        match self.stop:
            case None:
                return ()
            case str():
                return (self.stop,)
            case strings:
                return tuple(strings)

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with its token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(SamplingRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: _TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: _NoTools = None
    tool_choice: Annotated[Any, _only(None, "none", "auto", why="this server does not call tools")] = None
    functions: _NoTools = None
    function_call: Annotated[Any, _only(None, "none", "auto", why="this server does not call functions")] = None
    response_format: Annotated[Any, _only(None, {"type": "text"}, why="the answer is plain text")] = None
    modalities: Annotated[Any, _only(None, ["text"], why="this server answers with text only")] = None
    audio: _NoAudio = None
    prediction: Annotated[Any, _only(None, why="this server takes no predicted output")] = None
    web_search_options: Annotated[Any, _only(None, why="this server does not search the web")] = None

    @field_validator("top_logprobs")
    @classmethod
    def _top_of_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise PydanticCustomError("top_logprobs", "only allowed when logprobs is true")
        return value

    @property
    def token_limit(self) -> int | None:
        """The most tokens of an answer, or None for what the context leaves."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def logprob_count(self) -> int | None:
        """How many alternatives each token lists, or None without log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingRequest):
    """``POST /v1/completions``."""

    prompt: Annotated[
        str
        | _TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | Annotated[list[_TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)],
        _expecting(f"a string, a list of token ids, or a list of 1 to {MAX_CHOICES} of either"),
    ]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Annotated[Any, _only(None, "", why="this server only continues a prompt")] = None

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
    def token_limit(self) -> int:
        """The most tokens of an answer; OpenAI's default of 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        """How many alternatives each token lists, or None without log-probabilities."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself, as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        whole: list[Any] = self.prompt
        return [whole] if isinstance(whole[0], int) else whole


R = TypeVar("R", bound=SamplingRequest)


def parse(model: type[R], body: bytes) -> R:
    """A request body as ``model``. Raises ``RequestError`` (400) that names the first field that is wrong."""
    try:
        return model.model_validate_json(body)
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_input=False)[0]
    loc = error["loc"]
    param = _path(loc[:1] if loc[:1] == ("logit_bias",) else loc)  # its keys are the client's, of any length
    if error["type"] == "json_invalid":
        raise RequestError(f"the body is not valid JSON: {error['ctx']['error']}")
    if error["type"] == "missing" and param:
        raise RequestError(f"'{param}' is required", param=param, code="missing_required_parameter")
    if not param:
        raise RequestError("the body must be a JSON object")
    code = "unsupported_parameter" if error["type"] == "unsupported" else "invalid_value"
    raise RequestError(f"'{param}': {error['msg']}", param=param, code=code)


def _path(loc: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``."""
    path = ""
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path
