"""Generates one choice of a job: turns the backend's tokens into text. All dialects use it; it knows no HTTP."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

import msgspec
import pydantic_core

from primad.api.answering.backend import Backend, TokenPieces
from primad.api.answering.calls.events import CallPart
from primad.api.answering.job import Choice, FinishReason, Job
from primad.api.answering.reading import CompletionReading
from primad.api.answering.text import Placed, Released, Transcript
from primad.errors import RequestError, RingError
from primad.ring.messages import Finished, Generate, PromptProgress, Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCall:
    """Function call number ``index`` of a response, from 0; ``arguments`` is a JSON object as text, incomplete unless
    ``is_whole``."""

    index: int
    id: str
    name: str
    arguments: str
    is_whole: bool

    @property
    def input(self) -> dict[str, Any]:
        """The arguments as an object; of incomplete arguments the complete part."""
        try:
            found: dict[str, Any] = pydantic_core.from_json(self.arguments, allow_partial=not self.is_whole)
        except ValueError:  # half a character at the end
            return {}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPart:
    """An addition to the call ``index``, which may start and end here: more ``arguments``."""

    index: int
    id: str
    name: str
    arguments: str
    begins: bool
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """The numbers of a response's draft tokens that were accepted and rejected."""

    right: int = 0
    wrong: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(right=self.right + other.right, wrong=self.wrong + other.wrong)


NO_DRAFTS_COUNTED: Final = DraftCounts()
MAX_TOKENS_AT_ONCE: Final = 16
"""Limit of tokens per part: a token with a hundred log-probabilities takes 0.3 ms. Other tasks run between parts."""


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What one event of the backend adds to a choice: certain text, thoughts and calls, the tokens that start in that
    text, and the number of sampled tokens. Only the last one has ``finish``, and the stop string if one ended the text.
    """

    text: str
    tokens: tuple[Placed[Sampled], ...]
    sampled: int
    finish: FinishReason | None
    stopped_by: str | None = None
    thought: str = ""
    calls: tuple[GivenPart, ...] = ()
    """Parts that continue a call precede the text."""
    read_tokens: int | None = None
    """The number of prompt tokens computed so far; if set, nothing else is added."""
    cached: int = 0
    """The number of prompt tokens from the cache; known in the last part, and with ``read_tokens``."""
    draft_counts: DraftCounts = NO_DRAFTS_COUNTED
    """Known in the last part."""

    @property
    def is_not_empty(self) -> bool:
        """Whether it adds to what the client reads."""
        return bool(self.text or self.thought or self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenChoice:
    """A complete choice; ``text`` is without the choice's echo."""

    choice: Choice
    text: str
    tokens: tuple[Placed[Sampled], ...]
    sampled: int
    finish: FinishReason
    stopped_by: str | None
    thought: str
    calls: tuple[GivenCall, ...]
    cached: int
    draft_counts: DraftCounts = NO_DRAFTS_COUNTED

    @classmethod
    def of(cls, choice: Choice, parts: Sequence[Written]) -> WrittenChoice:
        """Return all ``parts`` of ``choice`` together."""
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
            calls=tuple(whole_calls(part for written in parts for part in written.calls)),
            cached=parts[-1].cached,
            draft_counts=parts[-1].draft_counts,
        )


def cached_tokens(ended: Iterable[tuple[Choice, int]]) -> int:
    """Return the ``cached`` tokens of finished choices, each prompt counted once: with the choice that computed most."""
    minimum: dict[int, int] = {}
    for choice, cached in ended:
        minimum[id(choice.source)] = min(cached, minimum.get(id(choice.source), cached))
    return sum(minimum.values())


def whole_calls(parts: Iterable[GivenPart]) -> Iterator[GivenCall]:
    """Yield the calls in ``parts``, which are in order."""
    for index, group in groupby(parts, key=lambda part: part.index):
        of_call = list(group)
        yield GivenCall(
            index=index,
            id=of_call[0].id,
            name=of_call[0].name,
            arguments="".join(part.arguments for part in of_call),
            is_whole=of_call[-1].is_whole,
        )


async def write(
    backend: Backend,
    vocabulary: TokenPieces,
    job: Job,
    choice: Choice,
    *,
    owner: str = "",
    clock: Callable[[], float],
) -> AsyncGenerator[Written, None]:
    """Yield the parts of ``choice`` of ``owner`` as they become certain; the last one has ``finish``. For a choice of
    no tokens the prompt is computed, and one token that is not shown.

    The backend's generator is closed, and so the sequence freed, before the last part is yielded, and whenever this
    generator is closed or cancelled.

    Raises ``RingError`` if the ring breaks and ``RequestError`` if the backend cannot accept the request.
    """
    transcript: Transcript[Sampled] = Transcript(job.stops)
    written: Callable[..., Written] = _written if job.reading is None else _Read(job.reading)
    shows_control = job.reading is not None and job.reading.shows_control
    piece = vocabulary.piece_or_marker if shows_control else vocabulary.piece
    last: Written | None = None
    cached, draft_counts = 0, NO_DRAFTS_COUNTED
    until_s: float | None = None
    asked = Generate(
        request=0,
        prompt=choice.prompt,
        sampled=[],
        max_tokens=max(1, choice.max_tokens),
        sampling=choice.sampling,
        logprobs=job.logprobs,
        reuses=job.reuses,
        owner=owner,
        priority=job.priority,
        speculates=job.speculates,
        pictures=job.rows_of(choice.source),
    )
    # A choice that waits for others of its request is part of a response that has begun.
    events = backend.generate(asked, may_expire=choice.index == 0)
    async with aclosing(events):
        async for event in events:
            match event:
                case Sampled() if not choice.max_tokens:
                    pass
                case Sampled():
                    released = transcript.feed(piece(event.token), event)
                    end: FinishReason | None = "stop" if transcript.stopped else None
                    if job.decode_limit_s is not None and end is None:
                        until_s = clock() + job.decode_limit_s if until_s is None else until_s
                        end = "length" if "\n" in released.text and clock() > until_s else None
                    part = written(released, sampled=1, finish=end, stopped_by=transcript.stopped_by)
                    if part.finish is not None:
                        last = part
                        break
                    for few in _few_at_once(part):
                        yield few
                case PromptProgress():
                    cached = max(cached, event.reused)
                    if job.reports_progress:
                        read = event.tokens
                        yield Written(text="", tokens=(), sampled=0, finish=None, read_tokens=read, cached=cached)
                case Finished(reason="error"):
                    raise RingError(event.error or "the ring ended the request")
                case Finished(reason="refused"):
                    raise RequestError(
                        event.error or "the response cannot have the requested form", code="invalid_value"
                    )
                case Finished():
                    released = transcript.finish()
                    is_cut = event.reason == "length" or not choice.max_tokens
                    finish: FinishReason = "length" if is_cut and not transcript.stopped else "stop"
                    last = written(released, sampled=0, finish=finish, stopped_by=transcript.stopped_by)
                    draft_counts = DraftCounts(right=event.accepted, wrong=event.drafted - event.accepted)
                    break
    assert last is not None, "the backend ended without Finished"
    last = (
        msgspec.structs.replace(last, cached=cached, draft_counts=draft_counts)
        if cached or draft_counts != NO_DRAFTS_COUNTED
        else last
    )
    for few in _few_at_once(last):
        yield few


def _few_at_once(part: Written) -> Iterator[Written]:
    """Yield ``part``, split so that no part has too many tokens."""
    while len(part.tokens) > MAX_TOKENS_AT_ONCE:
        yield Written(text="", tokens=part.tokens[:MAX_TOKENS_AT_ONCE], sampled=0, finish=None)
        part = msgspec.structs.replace(part, tokens=part.tokens[MAX_TOKENS_AT_ONCE:])
    yield part


def _written(
    released: Released[Sampled], *, sampled: int, finish: FinishReason | None, stopped_by: str | None
) -> Written:
    return Written(text=released.text, tokens=released.entries, sampled=sampled, finish=finish, stopped_by=stopped_by)


class _Read:
    """Like ``_written``, for a response in which calls and thoughts are detected.

    The first complete call ends the response if one is enough, and so does a call that repeats the one before it. An
    incomplete call turns ``stop`` into ``length``, unless a stop string cut it.
    """

    def __init__(self, reading: CompletionReading) -> None:
        self._reader, self._several = reading.reader(), reading.several
        self._calls = _Calls()

    def __call__(
        self, released: Released[Sampled], *, sampled: int, finish: FinishReason | None, stopped_by: str | None
    ) -> Written:
        pieces = [self._reader.feed(released.text)]
        if finish is not None:
            pieces.append(self._reader.finish())
        heard, calls = list[GivenPart](), self._calls
        for each in pieces:
            for part in each.calls:
                if (self._several or not calls.whole) and not calls.repeats:
                    heard += calls.hear(part)
            if each.text.strip():
                calls.forget()
        if finish is not None:
            heard += calls.rest()
        is_enough = finish is None and (calls.repeats or (calls.whole and not self._several))
        if calls.given and (finish == "stop" or is_enough):
            is_cut = calls.whole < calls.given
            finish = "tool_calls" if not is_cut else "length" if stopped_by is None else "stop"
        return Written(
            text="".join(each.text for each in pieces),
            tokens=released.entries,
            sampled=sampled,
            finish=finish,
            stopped_by=stopped_by,
            thought="".join(each.thought for each in pieces),
            calls=tuple(heard),
        )


class _Calls:
    """The calls of a response: ``given`` ones, of which ``whole`` are complete. A call that may repeat the one before
    it is held back. If it does repeat it, it is dropped, and the response ``repeats`` itself."""

    def __init__(self) -> None:
        self.given = self.whole = 0
        self.repeats = False
        self._id = self._name = self._arguments = ""
        self._before: tuple[str, str] | None = None
        self._held: list[GivenPart] = []

    def hear(self, part: CallPart) -> list[GivenPart]:
        """Return the calls to send with ``part``."""
        if part.name is not None:
            self.given, self._id, self._name = self.given + 1, f"call_{secrets.token_hex(12)}", part.name
            self._arguments, self._before = "", None if self._held else self._before
        self.whole += part.is_whole
        self._arguments += part.arguments
        self._held.append(
            GivenPart(
                index=self.given - 1,
                id=self._id,
                name=self._name,
                arguments=part.arguments,
                begins=part.name is not None,
                is_whole=part.is_whole,
            )
        )
        emitted = (self._name, self._arguments)
        if part.is_whole and emitted == self._before:
            self.given, self.whole, self.repeats, self._held = self.given - 1, self.whole - 1, True, []
        if self._may_repeat() and not part.is_whole:
            return []
        if part.is_whole:
            self._before = emitted
        return self.rest()

    def rest(self) -> list[GivenPart]:
        """Return what was held back of each call, in one part."""
        held, self._held = self._held, []
        by_call = [list(parts) for _, parts in groupby(held, key=lambda part: part.index)]
        return [
            replace(
                parts[0],
                arguments="".join(part.arguments for part in parts),
                is_whole=parts[-1].is_whole,
            )
            for parts in by_call
        ]

    def forget(self) -> None:
        """Note that text follows the last call, so the next call does not directly follow it."""
        if not self._held:
            self._before = None

    def _may_repeat(self) -> bool:
        return self._before is not None and (
            self._name == self._before[0] and self._before[1].startswith(self._arguments)
        )
