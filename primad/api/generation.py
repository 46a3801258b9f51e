"""One choice of a job, from the backend's tokens to text. No HTTP here; both kinds of request and of answer use it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from primad.api.backend import Backend, Vocabulary
from primad.api.openai.job import Choice, Job
from primad.api.openai.shapes import FinishReason
from primad.api.text import Placed, Released, Transcript
from primad.errors import RingError
from primad.ring.messages import Finished, Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What one event of the backend adds to a choice: text that is certain, the tokens that begin in it, and how many
    tokens were sampled. ``finish`` is there in the last one only, with the stop string if one ended the text."""

    text: str
    tokens: tuple[Placed[Sampled], ...]
    sampled: int
    finish: FinishReason | None
    stopped_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A choice that is written to its end; ``text`` is without the choice's echo."""

    choice: Choice
    text: str
    tokens: tuple[Placed[Sampled], ...]
    sampled: int
    finish: FinishReason
    stopped_by: str | None

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
        )


async def write(backend: Backend, vocabulary: Vocabulary, job: Job, choice: Choice) -> AsyncGenerator[Written, None]:
    """The text of ``choice`` as it becomes certain; the last one has ``finish``.

    The backend's generator is closed, and so the sequence freed, before the last one is handed out, and whenever this
    generator is closed or cancelled.

    Raises ``RingError`` when the ring breaks and ``RequestError`` when the backend cannot take the request.
    """
    transcript: Transcript[Sampled] = Transcript(job.stops)
    last: Written | None = None
    events = backend.generate(
        choice.prompt, max_tokens=choice.max_tokens, sampling=choice.sampling, logprobs=job.logprobs
    )
    async with aclosing(events):
        async for event in events:
            match event:
                case Sampled():
                    released = transcript.feed(vocabulary.piece(event.token), event)
                    if transcript.stopped:
                        last = _written(released, sampled=1, finish="stop", stopped_by=transcript.stopped_by)
                        break
                    yield _written(released, sampled=1, finish=None)
                case Finished(reason="error"):
                    raise RingError(event.error or "the ring ended the answer")
                case Finished():
                    released = transcript.finish()
                    finish: FinishReason = "length" if event.reason == "length" and not transcript.stopped else "stop"
                    last = _written(released, sampled=0, finish=finish, stopped_by=transcript.stopped_by)
                    break
    assert last is not None, "the backend ended without Finished"
    yield last


def _written(
    released: Released[Sampled], *, sampled: int, finish: FinishReason | None, stopped_by: str | None = None
) -> Written:
    return Written(text=released.text, tokens=released.entries, sampled=sampled, finish=finish, stopped_by=stopped_by)
