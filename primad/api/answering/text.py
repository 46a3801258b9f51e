"""Turns tokens into text, piece by piece, so that sent text never has to be taken back. Pure.

A token is a run of bytes: a character may be split over several tokens, and so may a stop string. ``Transcript`` takes
tokens and returns text as soon as it is certain:

* Bytes are decoded as UTF-8 incrementally; an incomplete character waits for its remaining bytes. Bytes that cannot
  become a character are U+FFFD, exactly as if the whole text were decoded together.
* The longest end of the text that could begin a stop string is held back. The stop string that is *completed* first
  ends the text (of several completed by the same character, the longest), so that the result does not depend on how
  the text was cut into tokens and no token is sampled in vain. The stop string itself is not part of the text.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

import msgspec

T = TypeVar("T")
MAX_WAITING: Final = 1024
"""Limit of tokens whose position in the text is not certain yet. The bytes of the longest stop string bound them too,
except for control tokens, which have no text and would wait without end."""


class Placed(msgspec.Struct, Generic[T], frozen=True):
    """A token's ``entry``, and the character of the whole text at which the token starts."""

    entry: T
    start_chars: int


class Released(msgspec.Struct, Generic[T], frozen=True):
    """Text that is certain now, and the entries of the tokens whose first character is in the text so far."""

    text: str
    entries: tuple[Placed[T], ...]


class Transcript(Generic[T]):
    """The growing text of one response. ``feed`` it each token in order, then ``finish`` it; stop once ``stopped``.

    ``T`` is whatever the caller wants back with a token's text, in order: for log-probabilities. A token that belongs
    only partly to the text, because a stop string starts inside it, keeps its entry; a token that starts in the stop
    string or after it does not.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops`` are the stop strings, none of them empty."""
        assert all(stops), "a stop string is not empty"
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._released_chars = 0
        self._waiting: deque[Placed[T]] = deque()
        self.stopped_by: str | None = None
        """The stop string that ended the text. Nothing may be fed afterwards."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self.stopped_by is not None

    def feed(self, piece: bytes, entry: T) -> Released[T]:
        """Add one token's bytes (b"" for a special token)."""
        assert not self.stopped, "the text has ended"
        pending = self._decoder.getstate()[0]
        start_chars = self._released_chars + len(self._held) + (0 if _continues(pending, piece) else 1)
        self._waiting.append(Placed(entry, start_chars))
        return self._advance(self._decoder.decode(piece), held_back=True)

    def finish(self) -> Released[T]:
        """Return all text that was held back, at the end of the response."""
        assert not self.stopped, "the text has ended"
        last = self._advance(self._decoder.decode(b"", final=True), held_back=False)
        rest = tuple(self._waiting)
        self._waiting.clear()
        return Released(last.text, last.entries + rest)

    def _advance(self, decoded: str, *, held_back: bool) -> Released[T]:
        text = self._held + decoded
        cut = self._first_stop(text)
        if cut is not None:
            at, self.stopped_by = cut
            text, self._held = text[:at], ""
        else:
            keep = self._possible_stop(text) if held_back else len(text)
            text, self._held = text[:keep], text[keep:]
        self._released_chars += len(text)
        entries = []
        while self._waiting and (
            self._waiting[0].start_chars < self._released_chars or len(self._waiting) > MAX_WAITING
        ):
            entries.append(self._waiting.popleft())
        if self.stopped:
            self._waiting.clear()
        return Released(text, tuple(entries))

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """Return where the stop string that is completed first starts, and which one it is; or None."""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1:] if found else None

    def _possible_stop(self, text: str) -> int:
        """Return where the longest suffix of ``text`` that could start a stop string begins; its length if there is
        none."""
        earliest = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < earliest:
                if stop.startswith(text[at:]):
                    earliest = at
                else:
                    at = text.find(stop[0], at + 1)
        return earliest


def _continues(pending: bytes, piece: bytes) -> bool:
    """Whether ``piece`` starts inside the character that ``pending`` starts; if not, ``pending`` becomes U+FFFD."""
    if not pending:
        return True
    try:
        codecs.getincrementaldecoder("utf-8")().decode(pending + piece[:1])
    except UnicodeDecodeError:
        return False
    return True
