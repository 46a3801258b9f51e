"""Describes a step of the membership core for people: pure, from the states before and after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from primad.membership.transitions import is_spoken_to
from primad.membership.types import Effect, Fail, GiveUp, OwnerLine, Purpose, Serve, State


class NewsKind(StrEnum):
    """The kind of news."""

    JOINED = "joined"
    GONE = "gone"
    RING = "ring"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class News:
    """One line of news."""

    kind: NewsKind
    text: str


def news(before: State, after: State, effects: Iterable[Effect]) -> Iterator[News]:
    """Yield the news of a step from ``before`` to ``after``, in order."""
    gone = {}
    for name, device in after.devices.items():
        known = before.devices.get(name)
        was_there = known is not None and is_spoken_to(known)
        if is_spoken_to(device) and not was_there:
            yield News(NewsKind.JOINED, f"{name} joined")
        elif known is not None and was_there and not is_spoken_to(device):
            how = "left" if known.leaving else "is gone"
            gone[name] = f"{name} {how}" + (f": {device.reason}" if device.reason else "")
    yield from (News(NewsKind.GONE, line) for line in gone.values())
    for effect in effects:
        match effect:
            case OwnerLine(text) if text not in gone.values():
                yield News(NewsKind.NOTE, text)
            case Serve(epoch):
                yield News(NewsKind.RING, f"{_members(after)} form ring {epoch}{_why(before)}")
            case Fail(reason) | GiveUp(reason):
                yield News(NewsKind.NOTE, reason)


def _members(state: State) -> str:
    members = sorted(state.serving.members) if state.serving is not None else []
    return ", ".join([state.settings.head, *members])


def _why(before: State) -> str:
    """Return the reason for the ring, unless it is the first."""
    attempt = before.attempt
    if attempt is None or attempt.why is Purpose.FIRST:
        return ""
    return f", because of {attempt.why.value}"
