"""The responses of ``/v1/messages``: a message of content blocks, complete or as named events; and its errors. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from primad.api.answering.generation import GivenCall, GivenPart, Written, WrittenChoice
from primad.api.dialects.anthropic.job import stop_reason
from primad.api.http.errors import status_of
from primad.api.http.framing import NamedEvent
from primad.errors import PrimadError, PromptTooLongError

_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The error in one line."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """Anthropic's error object."""

    error: AnthropicErrorDetail
    request_id: None = None


class AnthropicUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request; ``input_tokens`` are the prompt tokens that did not come from the cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class AnthropicMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A complete response."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage


def anthropic_error(exc: PrimadError) -> AnthropicError:
    """Return Anthropic's error object for ``exc``. Clients recognise a prompt that is too long by the first words, and
    shorten it."""
    status = status_of(exc)
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = str(exc)
    if isinstance(exc, PromptTooLongError):
        message = f"prompt is too long: {exc.prompt_tokens} tokens > {exc.context_tokens} maximum; {message}"
    return AnthropicError(error=AnthropicErrorDetail(type=kind, message=message))


def error_event(exc: PrimadError) -> NamedEvent:
    """Return ``exc`` as the last event of a stream."""
    return NamedEvent("error", msgspec.to_builtins(anthropic_error(exc)))


@dataclass(slots=True, kw_only=True)
class MessageResponse:
    """One response, with its thoughts if it ``shows_thoughts``. A stream is ``opening``, then ``events`` for each part;
    those of the last part end it."""

    id: str
    model: str
    prompt_tokens: int
    shows_thoughts: bool
    sampled: int = 0
    cached: int = 0
    blocks: int = field(default=0, init=False)
    open_kind: str | None = field(default=None, init=False)

    def whole(self, completed: WrittenChoice) -> AnthropicMessage:
        """Return the complete response."""
        content: list[dict[str, Any]] = []
        if completed.thought and self.shows_thoughts:
            content.append({"type": "thinking", "thinking": completed.thought, "signature": ""})
        if completed.text:
            content.append({"type": "text", "text": completed.text})
        content += [_tool_use(call) | {"input": call.input} for call in completed.calls]
        reason, self.cached = stop_reason(completed.finish, completed.stopped_by), completed.cached
        return self._message(content, reason, completed.stopped_by, completed.sampled)

    def opening(self) -> NamedEvent:
        """Return the event with the message that the stream fills."""
        message = msgspec.to_builtins(self._message([], None, None, 0))
        return NamedEvent("message_start", {"type": "message_start", "message": message})

    def events(self, written: Written) -> Iterator[NamedEvent]:
        """Yield the events for ``written``."""
        self.sampled += written.sampled
        for part in written.calls:
            if not part.begins:  # it continues the open block
                yield self._delta(type="input_json_delta", partial_json=part.arguments)
        if written.thought and self.shows_thoughts:
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta(type="thinking_delta", thinking=written.thought)
        if written.text:
            yield from self._open("text", {"type": "text", "text": ""})
            yield self._delta(type="text_delta", text=written.text)
        for part in written.calls:
            if part.begins:
                yield from self._open("tool_use", _tool_use(part))
                yield self._delta(type="input_json_delta", partial_json=part.arguments)
        if written.finish is not None:
            self.cached = written.cached
            yield from self._close()
            ended = {
                "stop_reason": stop_reason(written.finish, written.stopped_by),
                "stop_sequence": written.stopped_by,
            }
            usage = msgspec.to_builtins(self._usage(self.sampled))
            yield NamedEvent("message_delta", {"type": "message_delta", "delta": ended, "usage": usage})
            yield NamedEvent("message_stop", {"type": "message_stop"})

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[NamedEvent]:
        """Open ``block``, unless a block of this ``kind`` is open; each call has its own block."""
        if self.open_kind == kind != "tool_use":
            return
        yield from self._close()
        self.open_kind = kind
        yield self._of_block("content_block_start", content_block=block)

    def _close(self) -> Iterator[NamedEvent]:
        if self.open_kind is None:
            return
        if self.open_kind == "thinking":
            yield self._delta(
                type="signature_delta", signature=""
            )  # clients wait for a signature before they show the thoughts
        yield self._of_block("content_block_stop")
        self.open_kind, self.blocks = None, self.blocks + 1

    def _delta(self, **delta: str) -> NamedEvent:
        return self._of_block("content_block_delta", delta=delta)

    def _of_block(self, name: str, **data: Any) -> NamedEvent:
        return NamedEvent(name, {"type": name, "index": self.blocks, **data})

    def _usage(self, sampled: int) -> AnthropicUsage:
        return AnthropicUsage(
            input_tokens=self.prompt_tokens - self.cached, output_tokens=sampled, cache_read_input_tokens=self.cached
        )

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stopped_by: str | None, sampled: int
    ) -> AnthropicMessage:
        return AnthropicMessage(
            id=self.id,
            model=self.model,
            content=content,
            stop_reason=reason,
            stop_sequence=stopped_by,
            usage=self._usage(sampled),
        )


def _tool_use(call: GivenCall | GivenPart) -> dict[str, Any]:
    """Return the block of a call, whose input follows."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
