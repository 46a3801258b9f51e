"""The responses of llama-server's own paths. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from primad import __version__
from primad.api.answering.backend import ServedModel
from primad.api.answering.chat import CHATML
from primad.api.answering.generation import Written, WrittenChoice
from primad.api.answering.job import Choice
from primad.api.answering.text import Placed
from primad.api.answering.timings import CompletionClock, CompletionTimings
from primad.api.answering.tool_prompt import mentions
from primad.api.dialects.llama_server.settings import GenerationSettings
from primad.api.dialects.openai.logprobs import IMPOSSIBLE
from primad.api.dialects.openai.shapes import LoadProgress
from primad.ring.messages import Sampled


class CompletionPart(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed ``/completion``, before the last."""

    index: int = 0
    content: str
    tokens: list[int]
    stop: Literal[False] = False
    id_slot: int = 0
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[Any] | UnsetType = UNSET
    load_progress: LoadProgress | UnsetType = UNSET
    timings: CompletionTimings | UnsetType = UNSET


class CompletionEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A complete ``/completion``, or the last event of a streamed one (``content`` is empty then)."""

    index: int = 0
    content: str
    tokens: list[int]
    stop: Literal[True] = True
    id_slot: int = 0
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    generation_settings: GenerationSettings
    prompt: str
    has_new_line: bool = False
    truncated: bool = False
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    completion_probabilities: list[Any] | UnsetType = UNSET
    timings: CompletionTimings


class TokenChance(msgspec.Struct, frozen=True, kw_only=True):
    """An alternative token."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class SampledChance(TokenChance, frozen=True, kw_only=True):
    """A generated token, with the likeliest alternatives at its position, best first."""

    top_logprobs: list[TokenChance]


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A slot, in which requests run one after another."""

    id: int = 0
    n_ctx: int
    speculative: bool = False
    is_processing: bool


@dataclass(slots=True, kw_only=True)
class RawCompletion:
    """A choice of ``/completion`` as it is generated, for a client that calls the model ``model``, with the text of its
    ``prompt`` and its ``settings``. Times are those of ``clock``. If it ``times_parts``, each part of a stream has its
    timings."""

    model: str
    prompt: str
    settings: GenerationSettings
    served: ServedModel
    choice: Choice
    clock: CompletionClock
    with_probs: bool = False
    times_parts: bool = False
    has_new_line: bool = False

    def part(self, written: Written, now_s: float) -> CompletionPart:
        """Return the event for ``written``."""
        self.clock.count(written.sampled, written.cached, now_s)
        self.has_new_line = self.has_new_line or "\n" in written.text
        return CompletionPart(
            index=self.choice.index,
            content=written.text,
            tokens=[placed.entry.token for placed in written.tokens],
            tokens_predicted=self.clock.predicted,
            tokens_evaluated=self.clock.prompt_tokens,
            completion_probabilities=list(self.chances(written.tokens)) or UNSET,
            timings=self.clock.timings(now_s) if self.times_parts else UNSET,
        )

    def chances(self, tokens: Iterable[Placed[Sampled]]) -> Iterator[SampledChance]:
        """Yield the probabilities of ``tokens`` one by one, if requested."""
        if not self.with_probs:
            return
        for placed in tokens:
            sampled = placed.entry
            top = [TokenChance(**self._chance(token, logprob)) for token, logprob in sampled.top]
            assert sampled.logprob is not None, "it was asked for"
            yield SampledChance(**self._chance(sampled.token, sampled.logprob), top_logprobs=top)

    def _chance(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.served.vocabulary.piece(token)
        text = piece.decode("utf-8", "ignore")
        return {"id": token, "token": text, "bytes": list(piece), "logprob": max(logprob, IMPOSSIBLE)}

    def whole(self, completed: WrittenChoice, chances: Any, now_s: float) -> CompletionEnd:
        """Return the complete response, with its ``chances``; ``clock`` observed its generation."""
        end = self.end(completed.finish, completed.stopped_by, now_s)
        return msgspec.structs.replace(
            end,
            content=completed.text,
            has_new_line="\n" in completed.text,
            tokens=[placed.entry.token for placed in completed.tokens],
            completion_probabilities=chances or UNSET,
        )

    def end(self, finish: str, stopped_by: str | None, now_s: float) -> CompletionEnd:
        """Return the last event."""
        total = self.clock.prompt_tokens + self.clock.predicted
        return CompletionEnd(
            index=self.choice.index,
            content="",
            tokens=[],
            model=self.model,
            tokens_predicted=self.clock.predicted,
            tokens_evaluated=self.clock.prompt_tokens,
            tokens_cached=total,
            generation_settings=self.settings,
            prompt=self.prompt,
            has_new_line=self.has_new_line,
            truncated=finish == "length" and total >= self.served.context_tokens,
            stop_type="limit" if finish == "length" else "eos" if stopped_by is None else "word",
            stopping_word=stopped_by or "",
            timings=self.clock.timings(now_s),
        )


def picked(end: CompletionEnd, fields: Sequence[str]) -> Any:
    """Return the existing ``fields`` of ``end``, under the last part of their names; all if ``fields`` is empty.
    ``timings/prompt_n`` names a nested field."""
    if not fields:
        return end
    whole = msgspec.json.decode(msgspec.json.encode(end))
    found: dict[str, Any] = {}
    for field in fields:
        value, names = whole, field.split("/")
        for name in names:
            value = value.get(name, UNSET) if isinstance(value, dict) else UNSET
        if value is not UNSET:
            found[names[-1]] = value
    return found


def props(served: ServedModel) -> dict[str, Any]:
    """``GET /props``. The template's features are recognised by the names that it mentions."""
    template = served.vocabulary.chat_template or CHATML
    return {
        "default_generation_settings": {"id": 0, "n_ctx": served.context_tokens, "params": _usual(served)},
        "total_slots": served.sequences,
        "batching": "exact" if served.is_exact else "fast",
        "model_alias": served.id,
        "model_path": f"{served.id}.gguf",
        "chat_template": template,
        "chat_template_caps": {
            "supports_tools": mentions(template, "tools"),
            "supports_tool_calls": mentions(template, "tool_calls"),
            "supports_system_role": "system" in template,
            "supports_parallel_tool_calls": mentions(template, "tool_calls"),
        },
        "bos_token": served.vocabulary.bos,
        "eos_token": served.vocabulary.eos,
        "modalities": {"vision": served.sees, "audio": served.hears},
        "build_info": f"primad {__version__}",
    }


def router_props() -> dict[str, Any]:
    """``GET /props`` while no model is loaded."""
    settings = {"id": 0, "n_ctx": 0, "params": None}
    return {"role": "router", "default_generation_settings": settings, "build_info": f"primad {__version__}"}


def _usual(served: ServedModel) -> dict[str, Any]:
    """Return the default sampling settings."""
    usual = asdict(served.sampling)
    reach = usual.pop("penalty_tokens")
    return usual | {"repeat_last_n": reach, "n_predict": -1, "max_tokens": -1, "stop": []}
