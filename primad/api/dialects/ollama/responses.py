"""The responses of Ollama's paths: lines of JSON, and facts about models. Pure.

Times of day are passed in as Unix seconds and written in ISO 8601; durations are written in nanoseconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from primad.api.answering.backend import ServedModel, TokenPieces
from primad.api.answering.capabilities import capabilities
from primad.api.answering.chat import CHATML
from primad.api.answering.generation import GivenCall, GivenPart, Written, WrittenChoice, whole_calls
from primad.api.answering.timings import CompletionClock
from primad.api.dialects.ollama.job import LATEST
from primad.api.dialects.openai.logprobs import chat_logprobs, encoded_chat
from primad.api.dialects.openai.shapes import TokenLogprob
from primad.errors import PrimadError

API_VERSION: Final = "0.12.0"
"""The Ollama version that is reported: clients refuse older ones."""
NEVER: Final = "9999-12-31T23:59:59Z"
_UNITS: Final = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


class OllamaError(msgspec.Struct, frozen=True, kw_only=True):
    """The error in one line."""

    error: str


class OllamaGivenFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The called function, with its arguments as an object."""

    name: str
    arguments: dict[str, Any]


class OllamaGivenCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a function."""

    function: OllamaGivenFunction


class OllamaReply(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a chat's response, or a part of it."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaGivenCall] | UnsetType = UNSET


class OllamaLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a response, or the complete response: ``message`` in a chat, ``response`` from generate; counts once
    it is done."""

    model: str
    created_at: str
    message: OllamaReply | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


def ollama_error(exc: PrimadError) -> OllamaError:
    """Return Ollama's error object for ``exc``."""
    return OllamaError(error=str(exc))


@dataclass(slots=True, kw_only=True)
class LinesResponse:
    """One response, with its thoughts if it ``shows_thoughts``; ``model`` is the client's name for the model. Times are
    those of ``clock``, except ``created``."""

    model: str
    is_chat: bool
    shows_thoughts: bool
    created: float
    clock: CompletionClock
    vocabulary: TokenPieces | None = None
    """Set if log-probabilities are requested."""
    begun: list[GivenPart] = field(default_factory=list, init=False)
    """The parts of an incomplete call: lines have only complete calls."""

    def part(self, written: Written, now_s: float) -> OllamaLine | None:
        """Return the line for ``written``, if there is enough for one; the last line ends the response."""
        self.clock.count(written.sampled, written.cached, now_s)
        self.begun += written.calls
        if written.finish is not None:
            return self._end(written, list(whole_calls(self.begun)), written.finish, now_s)
        is_reported = bool(self.begun) and self.begun[-1].is_whole
        calls = list(whole_calls(self.begun)) if is_reported else []
        self.begun = [] if is_reported else self.begun
        is_something = written.text or written.thought or calls or (written.tokens and self.vocabulary is not None)
        return self._line(written, calls) if is_something else None

    def entries(self, completed: WrittenChoice) -> Iterator[bytes]:
        """Yield the response's log-probabilities, if requested."""
        return iter(()) if self.vocabulary is None else encoded_chat(completed.tokens, self.vocabulary)

    def whole(self, completed: WrittenChoice, entries: Any, now_s: float) -> OllamaLine:
        """Return the complete response, with its ``entries``; ``clock`` observed its generation."""
        line = self._end(completed, completed.calls, completed.finish, now_s)
        return msgspec.structs.replace(line, logprobs=entries) if entries else line

    def nothing(self) -> OllamaLine:
        """Return a keep-alive without content."""
        return self._line(None)

    def loaded(self, reason: str = "load") -> OllamaLine:
        """Return the response to a request that only loads the model, or with this ``reason`` unloads it."""
        return self._line(None, done=True, done_reason=reason)

    def _end(
        self, written_part: Written | WrittenChoice, calls: Sequence[GivenCall], finish: str, now_s: float
    ) -> OllamaLine:
        prompt_s, decode_s = self.clock.took_s(now_s)
        return self._line(
            written_part,
            calls,
            done=True,
            done_reason="length" if finish == "length" else "stop",
            total_duration=nanoseconds(now_s - self.clock.begun_s),
            load_duration=0,
            prompt_eval_count=self.clock.prompt_tokens,
            prompt_eval_duration=nanoseconds(prompt_s),
            eval_count=self.clock.predicted,
            eval_duration=nanoseconds(decode_s),
        )

    def _line(
        self,
        written_part: Written | WrittenChoice | None,
        calls: Sequence[GivenCall] = (),
        *,
        done: bool = False,
        **ended: Any,
    ) -> OllamaLine:
        given = [_given(call) for call in calls if call.is_whole]
        text = ("" if written_part is None else written_part.text) + "".join(
            _cut(call) for call in calls if not call.is_whole
        )
        thinking = (written_part.thought if written_part is not None and self.shows_thoughts else "") or UNSET
        parts: dict[str, Any] = {"response": text, "thinking": thinking}
        if self.is_chat:
            parts = {"message": OllamaReply(content=text, thinking=thinking, tool_calls=given or UNSET)}
        if self.vocabulary is not None and isinstance(written_part, Written) and written_part.tokens:
            parts["logprobs"] = chat_logprobs(written_part.tokens, self.vocabulary).content
        return OllamaLine(model=self.model, created_at=iso(self.created), done=done, **parts, **ended)


def _given(call: GivenCall) -> OllamaGivenCall:
    return OllamaGivenCall(function=OllamaGivenFunction(name=call.name, arguments=call.input))


def _cut(call: GivenCall) -> str:
    """Return an incomplete call as text, since clients would execute it as a call."""
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments}'


def tags(served: ServedModel | None, also: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """``GET /api/tags``: the served model by its names, none until it is known; and the entries ``also``."""
    return {"models": [*([_entry(served, name) for name in served.all_names] if served else []), *also]}


def running(served: ServedModel | None) -> dict[str, Any]:
    """``GET /api/ps``: the served model, which never expires."""
    models = []
    if served is not None:
        loaded = {"expires_at": NEVER, "size_vram": 0, "context_length": served.context_tokens}
        models.append(_entry(served, served.id) | loaded)
    return {"models": models}


def shown(served: ServedModel) -> dict[str, Any]:
    """``POST /api/show``."""
    facts = served.facts
    architecture = facts.architecture or "llama"
    return {
        "modelfile": "",
        "parameters": "",
        "template": served.vocabulary.chat_template or CHATML,
        "details": _details(served),
        "model_info": {
            "general.architecture": architecture,
            "general.basename": facts.basename or served.id,
            "general.parameter_count": facts.parameters,
            f"{architecture}.context_length": served.context_tokens,
            f"{architecture}.embedding_length": facts.width,
        },
        "capabilities": capabilities(served),
        "modified_at": iso(served.created),
    }


def _entry(served: ServedModel, name: str) -> dict[str, Any]:
    size = served.facts.size_bytes
    return model_entry(tagged(name), served.created, size or 0, f"{served.id} {size}", _details(served))


def tagged(name: str) -> str:
    """Return a model's name with a tag, which clients expect."""
    return name if ":" in name else name + LATEST


def model_entry(tag: str, created: float, size_bytes: int, same: str, details: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's entry in a list; entries with the ``same`` text are one model under several tags."""
    return {
        "name": tag,
        "model": tag,
        "modified_at": iso(created),
        "size": size_bytes,
        "digest": digest_of(same),
        "details": details,
    }


def digest_of(text: str) -> str:
    """Return a digest of ``text``. Clients treat models and files with the same digest as identical."""
    return hashlib.sha256(text.encode()).hexdigest()


def model_details(family: str, parameters: str, quantisation: str) -> dict[str, Any]:
    """Return the details that accompany every mention of a model."""
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": parameters,
        "quantization_level": quantisation,
    }


def _details(served: ServedModel) -> dict[str, Any]:
    facts = served.facts
    return model_details(facts.architecture, _short(facts.parameters or 0), facts.quantization)


def _short(count: int) -> str:
    size, unit = next(((size, unit) for size, unit in _UNITS if count >= size), (1, ""))
    return f"{count / size:.1f}{unit}"


def iso(unix_s: float) -> str:
    """Return a moment in Unix seconds as ISO 8601."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Return a duration in seconds in Ollama's unit."""
    return round(1e9 * seconds)
