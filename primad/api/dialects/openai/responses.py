"""Chat and completion responses: generated parts become the chunks of a stream or one body. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from primad.api.answering.backend import TokenPieces
from primad.api.answering.generation import GivenCall, GivenPart, Written, WrittenChoice
from primad.api.answering.job import Choice, FinishReason
from primad.api.answering.text import Placed
from primad.api.dialects.openai.logprobs import chat_logprobs, completion_logprobs, encoded_chat, encoded_completion
from primad.api.dialects.openai.shapes import (
    AssistantMessage,
    CallDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FunctionDelta,
    GivenFunction,
    MessageCall,
    ReadPrompt,
    Usage,
)
from primad.ring.messages import Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class _Headed:
    """What all chunks of a response have in common. ``created`` is in Unix seconds; ``include_usage``: the last chunk
    has ``counts``.

    A choice that streams is its ``opening``, if its form has one, the ``progress`` of its prompt if requested, each
    ``piece`` and its ``closing``. A response that does not stream is ``whole``; the ``entries`` of each choice's
    log-probabilities are made some at a time.
    """

    id: str
    created: int
    model: str
    vocabulary: TokenPieces
    with_logprobs: bool
    include_usage: bool

    @property
    def _no_usage(self) -> UnsetType | None:
        """Return the ``usage`` of a chunk before the last: null if the last chunk will have it, else omitted."""
        return None if self.include_usage else UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponse(_Headed):
    """``/v1/chat/completions``."""

    PREFIX: ClassVar[str] = "chatcmpl"

    def opening(self, choice: Choice) -> ChatChunk:
        return self._chunk(choice, Delta(role="assistant", content=""))

    def piece(self, choice: Choice, written: Written) -> ChatChunk:
        delta = Delta(
            content=written.text if written.text or not (written.thought or written.calls) else UNSET,
            reasoning_content=written.thought or UNSET,
            tool_calls=[_call_delta(call) for call in written.calls] or UNSET,
        )
        return self._chunk(choice, delta, logprobs=self._logprobs(written.tokens))

    def progress(self, choice: Choice, read: ReadPrompt) -> ChatChunk:
        return msgspec.structs.replace(self._chunk(choice, Delta()), prompt_progress=read)

    def closing(self, choice: Choice, finish: FinishReason) -> ChatChunk:
        return self._chunk(choice, Delta(), finish=finish)

    def counts(self, usage: Usage) -> ChatChunk:
        return ChatChunk(id=self.id, created=self.created, model=self.model, choices=[], usage=usage)

    def entries(self, completed: WrittenChoice) -> dict[str, Iterator[bytes]]:
        return {"content": encoded_chat(completed.tokens, self.vocabulary)} if self.with_logprobs else {}

    def whole(
        self, completed: Sequence[WrittenChoice], lists: Sequence[dict[str, Any]], usage: Usage
    ) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=each.choice.index,
                message=_message(each),
                logprobs=ChatLogprobs(**logprobs) if self.with_logprobs else None,
                finish_reason=each.finish,
            )
            for each, logprobs in zip(completed, lists, strict=True)
        ]
        return ChatCompletion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _chunk(
        self, choice: Choice, delta: Delta, *, logprobs: ChatLogprobs | None = None, finish: FinishReason | None = None
    ) -> ChatChunk:
        part = ChatChunkChoice(index=choice.index, delta=delta, logprobs=logprobs, finish_reason=finish)
        return ChatChunk(id=self.id, created=self.created, model=self.model, choices=[part], usage=self._no_usage)

    def _logprobs(self, tokens: Sequence[Placed[Sampled]]) -> ChatLogprobs | None:
        return chat_logprobs(tokens, self.vocabulary) if self.with_logprobs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionResponse(_Headed):
    """``/v1/completions``."""

    PREFIX: ClassVar[str] = "cmpl"

    def opening(self, choice: Choice) -> Completion | None:
        return self._chunk(choice, choice.echo) if choice.echo else None

    def piece(self, choice: Choice, written: Written) -> Completion:
        return self._chunk(choice, written.text, logprobs=self._logprobs(written.tokens))

    def progress(self, choice: Choice, read: ReadPrompt) -> Completion:
        return msgspec.structs.replace(self._chunk(choice, ""), prompt_progress=read)

    def closing(self, choice: Choice, finish: FinishReason) -> Completion:
        return self._chunk(choice, "", finish=finish)

    def counts(self, usage: Usage) -> Completion:
        return Completion(id=self.id, created=self.created, model=self.model, choices=[], usage=usage)

    def entries(self, completed: WrittenChoice) -> dict[str, Iterator[bytes]]:
        return encoded_completion(completed.tokens, self.vocabulary) if self.with_logprobs else {}

    def whole(self, completed: Sequence[WrittenChoice], lists: Sequence[dict[str, Any]], usage: Usage) -> Completion:
        choices = [
            CompletionChoice(
                index=each.choice.index,
                text=each.choice.echo + each.text,
                logprobs=CompletionLogprobs(**logprobs) if self.with_logprobs else None,
                finish_reason=each.finish,
            )
            for each, logprobs in zip(completed, lists, strict=True)
        ]
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _chunk(
        self,
        choice: Choice,
        text: str,
        *,
        logprobs: CompletionLogprobs | None = None,
        finish: FinishReason | None = None,
    ) -> Completion:
        part = CompletionChoice(index=choice.index, text=text, logprobs=logprobs, finish_reason=finish)
        return Completion(id=self.id, created=self.created, model=self.model, choices=[part], usage=self._no_usage)

    def _logprobs(self, tokens: Sequence[Placed[Sampled]]) -> CompletionLogprobs | None:
        return completion_logprobs(tokens, self.vocabulary) if self.with_logprobs else None


ApiResponse = ChatResponse | CompletionResponse
"""A request's response in the shapes of its endpoint."""


def _message(completed: WrittenChoice) -> AssistantMessage:
    return AssistantMessage(
        content=None if completed.calls and not completed.text else completed.text,
        reasoning_content=completed.thought or UNSET,
        tool_calls=[_message_call(call) for call in completed.calls] or UNSET,
    )


def _message_call(call: GivenCall) -> MessageCall:
    return MessageCall(id=call.id, function=GivenFunction(name=call.name, arguments=call.arguments))


def _call_delta(part: GivenPart) -> CallDelta:
    if not part.begins:
        return CallDelta(index=part.index, function=FunctionDelta(arguments=part.arguments))
    function = FunctionDelta(name=part.name, arguments=part.arguments)
    return CallDelta(index=part.index, id=part.id, type="function", function=function)
