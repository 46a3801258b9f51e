"""What llama-server's own paths answer, in its shapes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from primad import __version__
from primad.api.backend import ServedModel
from primad.api.chat import CHATML
from primad.api.generation import Answered, Written
from primad.api.openai.job import Job
from primad.api.openai.timings import AnswerClock, AnswerTimings
from primad.api.tool_prompt import mentions


class CompletionPart(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed ``/completion``, before the last."""

    index: int = 0
    content: str
    tokens: list[int]
    stop: Literal[False] = False
    id_slot: int = 0
    tokens_predicted: int
    tokens_evaluated: int
    timings: AnswerTimings | UnsetType = UNSET


class CompletionEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A whole ``/completion``, or the last event of a streamed one (``content`` is empty then)."""

    index: int = 0
    content: str
    tokens: list[int]
    stop: Literal[True] = True
    id_slot: int = 0
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool = False
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    timings: AnswerTimings


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A place where answers are written, one after another."""

    id: int = 0
    n_ctx: int
    speculative: bool = False
    is_processing: bool


@dataclass(slots=True, kw_only=True)
class RawAnswer:
    """An answer of ``/completion`` as it is written; times are those of the ``clock``. If it ``times_parts``, each part of a
    stream has its timings."""

    served: ServedModel
    job: Job
    clock: AnswerClock
    times_parts: bool = False

    def part(self, written: Written, now_s: float) -> CompletionPart:
        """What ``written`` adds."""
        self.clock.count(written.sampled, written.cached, now_s)
        return CompletionPart(
            content=written.text,
            tokens=[placed.entry.token for placed in written.tokens],
            tokens_predicted=self.clock.predicted,
            tokens_evaluated=self.job.prompt_tokens,
            timings=self.clock.timings(now_s) if self.times_parts else UNSET,
        )

    def whole(self, answered: Answered, now_s: float) -> CompletionEnd:
        """All of it at once; the ``clock`` saw it written."""
        return self.end(
            answered.finish,
            answered.stopped_by,
            now_s,
            content=answered.text,
            tokens=[placed.entry.token for placed in answered.tokens],
        )

    def end(
        self,
        finish: str,
        stopped_by: str | None,
        now_s: float,
        *,
        content: str = "",
        tokens: list[int] | None = None,
    ) -> CompletionEnd:
        """The last event."""
        return CompletionEnd(
            content=content,
            tokens=tokens or [],
            model=self.served.id,
            tokens_predicted=self.clock.predicted,
            tokens_evaluated=self.job.prompt_tokens,
            tokens_cached=self.job.prompt_tokens + self.clock.predicted,
            stop_type="limit" if finish == "length" else "eos" if stopped_by is None else "word",
            stopping_word=stopped_by or "",
            timings=self.clock.timings(now_s),
        )


def props(served: ServedModel) -> dict[str, Any]:
    """``GET /props``. What a template can do is read off the names that it mentions."""
    template = served.vocabulary.chat_template or CHATML
    return {
        "default_generation_settings": {"id": 0, "n_ctx": served.context_tokens, "params": {}},
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
        "modalities": {"vision": False, "audio": False},
        "build_info": f"primad {__version__}",
    }
