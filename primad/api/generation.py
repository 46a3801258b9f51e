"""One choice of a job, from the backend's tokens to text. No HTTP here; both kinds of request and of answer use it."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from primad.api.backend import Backend, Vocabulary
from primad.api.openai.job import Choice, Job
from primad.api.openai.shapes import FinishReason
from primad.api.reading import AnswerReading
from primad.api.text import Placed, Released, Transcript
from primad.errors import RingError
from primad.ring.messages import Finished, PromptProgress, Sampled

_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
"""Half of a character, or a whole one that is written as two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCall:
    """A call of a function that an answer makes, the ``index``-th from 0; ``arguments`` is a JSON object as text."""

    index: int
    id: str
    name: str
    arguments: str

    @property
    def input(self) -> dict[str, Any]:
        """The arguments as an object."""
        found: dict[str, Any] = json.loads(self.arguments)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What one event of the backend adds to a choice: text, thoughts and calls that are certain, the tokens that begin in
    the certain text, and how many tokens were sampled. ``finish`` is there in the last one only, with the stop string if
    one ended the text."""

    text: str
    tokens: tuple[Placed[Sampled], ...]
    sampled: int
    finish: FinishReason | None
    stopped_by: str | None = None
    thought: str = ""
    calls: tuple[GivenCall, ...] = ()
    read_tokens: int | None = None
    """So many tokens of the prompt are computed; nothing else is added then."""

    @property
    def says_something(self) -> bool:
        """Whether it adds to what the client reads."""
        return bool(self.text or self.thought or self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A choice that is written to its end; ``text`` is without the choice's echo."""

    choice: Choice
    text: str
    tokens: tuple[Placed[Sampled], ...]
    sampled: int
    finish: FinishReason
    stopped_by: str | None
    thought: str
    calls: tuple[GivenCall, ...]

    @classmethod
    def of(cls, choice: Choice, parts: Sequence[Written]) -> Answered:
        """All ``parts`` of ``choice`` together."""
        finish = parts[-1].finish
        assert finish is not None, "the last part of a choice ends it"
        return cls(
            choice=choice,
            text="".join(part.text for part in parts),
            tokens=tuple(token for part in parts for token in part.tokens),
            sampled=sum(part.sampled for part in parts),
            finish=finish,
            stopped_by=parts[-1].stopped_by,
            thought="".join(part.thought for part in parts),
            calls=tuple(call for part in parts for call in part.calls),
        )


async def write(backend: Backend, vocabulary: Vocabulary, job: Job, choice: Choice) -> AsyncGenerator[Written, None]:
    """What is written for ``choice`` as it becomes certain; the last one has ``finish``.

    The backend's generator is closed, and so the sequence freed, before the last one is handed out, and whenever this
    generator is closed or cancelled.

    Raises ``RingError`` when the ring breaks and ``RequestError`` when the backend cannot take the request.
    """
    transcript: Transcript[Sampled] = Transcript(job.stops)
    written: Callable[..., Written] = _written if job.reading is None else _Read(job.reading)
    shows_control = job.reading is not None and job.reading.shows_control
    piece = vocabulary.piece_or_marker if shows_control else vocabulary.piece
    last: Written | None = None
    events = backend.generate(
        choice.prompt, max_tokens=choice.max_tokens, sampling=choice.sampling, logprobs=job.logprobs
    )
    async with aclosing(events):
        async for event in events:
            match event:
                case Sampled():
                    released = transcript.feed(piece(event.token), event)
                    end: FinishReason | None = "stop" if transcript.stopped else None
                    part = written(released, sampled=1, finish=end, stopped_by=transcript.stopped_by)
                    if part.finish is not None:
                        last = part
                        break
                    yield part
                case PromptProgress():
                    if job.tells_progress:
                        yield Written(text="", tokens=(), sampled=0, finish=None, read_tokens=event.tokens)
                case Finished(reason="error"):
                    raise RingError(event.error or "the ring ended the answer")
                case Finished():
                    released = transcript.finish()
                    finish: FinishReason = "length" if event.reason == "length" and not transcript.stopped else "stop"
                    last = written(released, sampled=0, finish=finish, stopped_by=transcript.stopped_by)
                    break
    assert last is not None, "the backend ended without Finished"
    yield last


def _written(
    released: Released[Sampled], *, sampled: int, finish: FinishReason | None, stopped_by: str | None
) -> Written:
    return Written(text=released.text, tokens=released.entries, sampled=sampled, finish=finish, stopped_by=stopped_by)


class _Read:
    """``_written`` for an answer in which calls and thoughts are looked for. The first call ends it if one is enough."""

    def __init__(self, reading: AnswerReading) -> None:
        self._reader, self._several = reading.reader(), reading.several
        self._given = 0

    def __call__(
        self, released: Released[Sampled], *, sampled: int, finish: FinishReason | None, stopped_by: str | None
    ) -> Written:
        told = [self._reader.feed(released.text)]
        if finish is not None:
            told.append(self._reader.finish())
        found = [call for each in told for call in each.calls]
        calls = tuple(
            GivenCall(
                index=number, id=f"call_{secrets.token_hex(12)}", name=call.name, arguments=_sound(call.arguments)
            )
            for number, call in enumerate(found if self._several else found[: 1 - self._given], self._given)
        )
        self._given += len(calls)
        if self._given and (finish == "stop" or (finish is None and not self._several)):
            finish = "tool_calls"
        return Written(
            text="".join(each.text for each in told),
            tokens=released.entries,
            sampled=sampled,
            finish=finish,
            stopped_by=stopped_by,
            thought="".join(each.thought for each in told),
            calls=calls,
        )


def _sound(arguments: str) -> str:
    """``arguments`` without halves of characters, which JSON can write and UTF-8 cannot."""
    if _HALF.search(arguments) is None:
        return arguments
    return json.dumps(json.loads(arguments), ensure_ascii=False).encode(errors="replace").decode()
