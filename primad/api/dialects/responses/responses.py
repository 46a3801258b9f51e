"""The responses of ``/v1/responses``: thoughts, a message and calls as items, complete or as named events. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from primad.api.answering.generation import GivenCall, GivenPart, Written, WrittenChoice, whole_calls
from primad.api.dialects.responses.prepared import EchoedFields
from primad.api.http.errors import error_body
from primad.api.http.framing import NamedEvent
from primad.errors import PrimadError

OutputKind = Literal["reasoning", "message"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]
_TEXTS: Final[dict[OutputKind, str]] = {"reasoning": "response.reasoning_text", "message": "response.output_text"}
_PREFIXES: Final[dict[OutputKind, str]] = {"reasoning": "rs", "message": "msg"}
_LOGPROBS: Final[dict[OutputKind, dict[str, Any]]] = {"reasoning": {}, "message": {"logprobs": []}}


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="response"):
    """A response. ``created_at`` is in Unix seconds; short request fields are repeated."""

    id: str
    created_at: int
    status: ResponseStatus
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
class ResponseStream:
    """One response. A stream is its ``opening``, then ``events`` for each part; the last event ends it, or ``failed``
    does."""

    id: str
    created: int
    model: str
    echoed: EchoedFields
    prompt_tokens: int
    sampled: int = 0
    cached: int = 0
    output: list[dict[str, Any]] = field(default_factory=list, init=False)
    text: list[str] = field(default_factory=list, init=False)
    open_kind: OutputKind | None = field(default=None, init=False)
    open_call: list[GivenPart] = field(default_factory=list, init=False)
    events_sent: int = field(default=0, init=False)

    def whole(self, completed: WrittenChoice) -> ResponseBody:
        """Return the complete response."""
        self.sampled, self.cached = completed.sampled, completed.cached
        status = _status(completed.finish)
        if completed.thought:
            is_last = not (completed.text or completed.calls)
            self.output.append(self._item("reasoning", status if is_last else "completed", completed.thought))
        if completed.text or not (completed.thought or completed.calls):
            self.output.append(self._item("message", "completed" if completed.calls else status, completed.text))
        for call in completed.calls:
            self.output.append(self._called(call, _call_status(call), call.arguments))
        return self._body(status, self.output)

    def opening(self) -> Iterator[NamedEvent]:
        """Yield the events with the response that the stream fills."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=msgspec.to_builtins(self._body("in_progress", [])))

    def events(self, written: Written) -> Iterator[NamedEvent]:
        """Yield the events for ``written``."""
        self.sampled, self.cached = self.sampled + written.sampled, written.cached
        for part in written.calls:
            if not part.begins:
                yield from self._call(part)
        if written.thought:
            yield from self._add("reasoning", written.thought)
        if written.text:
            yield from self._add("message", written.text)
        for part in written.calls:
            if part.begins:
                yield from self._call(part)
        if written.finish is not None:
            status = _status(written.finish)
            if self.open_kind is None and not self.output and not self.open_call:
                yield from self._open("message")
            yield from self._close(status)
            yield self._event(f"response.{status}", response=msgspec.to_builtins(self._body(status, self.output)))

    def failed(self, exc: PrimadError) -> NamedEvent:
        """Return ``exc`` as the last event."""
        error = {"code": error_body(exc).error.code or "server_error", "message": str(exc)}
        open_items = [self._item(self.open_kind, "incomplete", "".join(self.text))] if self.open_kind else []
        open_items += [self._called(call, "incomplete", call.arguments) for call in whole_calls(self.open_call)]
        body = self._body("failed", [*self.output, *open_items], error=error)
        return self._event("response.failed", response=msgspec.to_builtins(body))

    def _add(self, kind: OutputKind, text: str) -> Iterator[NamedEvent]:
        if self.open_kind != kind:
            yield from self._close("completed")
            yield from self._open(kind)
        self.text.append(text)
        yield self._event(f"{_TEXTS[kind]}.delta", **self._place(kind), delta=text, **_LOGPROBS[kind])

    def _open(self, kind: OutputKind) -> Iterator[NamedEvent]:
        self.open_kind = kind
        item = self._item(kind, "in_progress", None)
        yield self._event("response.output_item.added", output_index=len(self.output), item=item)
        yield self._event("response.content_part.added", **self._place(kind), part=_part(kind, ""))

    def _close(self, status: str) -> Iterator[NamedEvent]:
        yield from self._close_call()
        kind = self.open_kind
        if kind is None:
            return
        text, place = "".join(self.text), self._place(kind)
        item = self._item(kind, status, text)
        yield self._event(f"{_TEXTS[kind]}.done", **place, text=text, **_LOGPROBS[kind])
        yield self._event("response.content_part.done", **place, part=_part(kind, text))
        yield self._event("response.output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)
        self.text, self.open_kind = [], None

    def _call(self, part: GivenPart) -> Iterator[NamedEvent]:
        if part.begins:
            yield from self._close("completed")
            begun = self._called(part, "in_progress", "")
            yield self._event("response.output_item.added", output_index=len(self.output), item=begun)
        self.open_call.append(part)
        place = {"item_id": self._id("fc"), "output_index": len(self.output)}
        yield self._event("response.function_call_arguments.delta", **place, delta=part.arguments)
        if part.is_whole:
            yield from self._close_call()

    def _close_call(self) -> Iterator[NamedEvent]:
        for call in whole_calls(self.open_call):
            item, number = self._called(call, _call_status(call), call.arguments), len(self.output)
            echoed = {"item_id": item["id"], "output_index": number, "name": call.name, "arguments": call.arguments}
            yield self._event("response.function_call_arguments.done", **echoed)
            yield self._event("response.output_item.done", output_index=number, item=item)
            self.output.append(item)
        self.open_call = []

    def _place(self, kind: OutputKind) -> dict[str, Any]:
        return {"item_id": self._id(_PREFIXES[kind]), "output_index": len(self.output), "content_index": 0}

    def _id(self, prefix: str) -> str:
        """Return the id of the next item; the first ones are named after the response."""
        number = len(self.output)
        return self.id.replace("resp", prefix, 1) + (f"_{number}" if number else "")

    def _event(self, name: str, /, **data: Any) -> NamedEvent:
        number, self.events_sent = self.events_sent, self.events_sent + 1
        return NamedEvent(name, {"type": name, "sequence_number": number, **data})

    def _item(self, kind: OutputKind, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_part(kind, text)]
        own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        return {"id": self._id(_PREFIXES[kind]), "type": kind, **own, "status": status, "content": content}

    def _called(self, call: GivenCall | GivenPart, status: str, arguments: str) -> dict[str, Any]:
        named = {"call_id": call.id, "name": call.name, "arguments": arguments}
        return {"id": self._id("fc"), "type": "function_call", "status": status, **named}

    def _body(
        self, status: ResponseStatus, output: list[dict[str, Any]], error: dict[str, Any] | None = None
    ) -> ResponseBody:
        return ResponseBody(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.model,
            output=output,
            error=error,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            usage=None if status == "in_progress" else self._usage(),
            tools=[],
            **msgspec.structs.asdict(self.echoed),
        )

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.sampled,
        }


def _status(finish: str) -> Literal["completed", "incomplete"]:
    return "incomplete" if finish == "length" else "completed"


def _call_status(call: GivenCall) -> Literal["completed", "incomplete"]:
    return "completed" if call.is_whole else "incomplete"


def _part(kind: OutputKind, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
