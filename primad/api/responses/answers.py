"""What ``/v1/responses`` answers: a response with one message in its output, whole or as named events. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from primad.api.dialect import NamedEvent
from primad.api.generation import Answered, Written
from primad.api.openai.errors import error_body
from primad.api.responses.schema import ResponsesRequest
from primad.errors import PrimadError


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="response"):
    """A response. ``created_at`` is in Unix seconds; of what was asked the short fields are said again."""

    id: str
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    usage: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    tools: list[dict[str, Any]]
    tool_choice: str
    parallel_tool_calls: bool
    metadata: dict[str, Any]
    previous_response_id: None = None
    store: bool = False


@dataclass(slots=True, kw_only=True)
class ResponseAnswer:
    """One response. A stream is its ``opening``, then ``events`` of what is written; the last one ends it, or ``failed``."""

    id: str
    created: int
    model: str
    ask: ResponsesRequest
    prompt_tokens: int
    sampled: int = 0
    text: list[str] = field(default_factory=list, init=False)
    events_sent: int = field(default=0, init=False)

    def whole(self, answered: Answered) -> ResponseBody:
        """All of it at once."""
        self.sampled = answered.sampled
        return self._ended(answered.text, answered.finish)

    def opening(self) -> Iterator[NamedEvent]:
        """The response that the rest fills, and the message in it."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=msgspec.to_builtins(self._body("in_progress", [])))
        yield self._event("response.output_item.added", output_index=0, item=self._message("in_progress", None))
        yield self._event("response.content_part.added", **self._place, part=_part(""))

    def events(self, written: Written) -> Iterator[NamedEvent]:
        """What ``written`` adds."""
        self.sampled += written.sampled
        if written.text:
            self.text.append(written.text)
            yield self._event("response.output_text.delta", **self._place, delta=written.text, logprobs=[])
        if written.finish is not None:
            text = "".join(self.text)
            body = self._ended(text, written.finish)
            yield self._event("response.output_text.done", **self._place, text=text, logprobs=[])
            yield self._event("response.content_part.done", **self._place, part=_part(text))
            yield self._event("response.output_item.done", output_index=0, item=body.output[0])
            yield self._event(f"response.{body.status}", response=msgspec.to_builtins(body))

    def failed(self, exc: PrimadError) -> NamedEvent:
        """``exc`` as the last event."""
        error = {"code": error_body(exc).error.code or "server_error", "message": str(exc)}
        body = self._body("failed", [self._message("incomplete", "".join(self.text))], error=error)
        return self._event("response.failed", response=msgspec.to_builtins(body))

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    @property
    def _item(self) -> str:
        return self.id.replace("resp_", "msg_", 1)

    def _event(self, name: str, **data: Any) -> NamedEvent:
        number, self.events_sent = self.events_sent, self.events_sent + 1
        return NamedEvent(name, {"type": name, "sequence_number": number, **data})

    def _message(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _ended(self, text: str, finish: str) -> ResponseBody:
        status: Literal["completed", "incomplete"] = "incomplete" if finish == "length" else "completed"
        return self._body(status, [self._message(status, text)])

    def _body(
        self,
        status: Literal["in_progress", "completed", "incomplete", "failed"],
        output: list[dict[str, Any]],
        error: dict[str, Any] | None = None,
    ) -> ResponseBody:
        ask = self.ask
        return ResponseBody(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.model,
            output=output,
            error=error,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            usage=None if status == "in_progress" else self._usage(),
            instructions=ask.instructions,
            max_output_tokens=ask.max_output_tokens,
            temperature=ask.temperature,
            top_p=ask.top_p,
            tools=[],
            tool_choice=ask.tool_choice if isinstance(ask.tool_choice, str) else "auto",
            parallel_tool_calls=ask.parallel_tool_calls is not False,
            metadata=ask.metadata or {},
        )

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": self.sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.sampled,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
