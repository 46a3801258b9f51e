"""A conversation without terminal or network: its turns, commands, and the pieces and rate of a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from primad.errors import ClusterError
from primad.settings.quantities import show_count, show_speed

COMMANDS: Final = {
    "/image": "FILE show an image with the next question",
    "/system": "[TEXT] set the system message; without text, show it",
    "/regenerate": "regenerate the last response",
    "/clear": "clear the conversation, except the system message",
    "/save": "FILE save the conversation (as JSON if the name ends in .json)",
    "/help": "show these commands",
    "/quit": "end, as Ctrl-D does",
}


@dataclass(frozen=True, slots=True)
class ShownPicture:
    """A file to show, by its name and as a data URL."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question, with the pictures that it is about."""

    text: str
    pictures: tuple[ShownPicture, ...] = ()

    def message(self) -> dict[str, Any]:
        """The question as an API message."""
        if not self.pictures:
            return {"role": "user", "content": self.text}
        shown = [{"type": "image_url", "image_url": {"url": each.url}} for each in self.pictures]
        return {"role": "user", "content": [*shown, {"type": "text", "text": self.text}]}

    def written(self) -> str:
        """The question as text."""
        return "".join(f"[{each.name}]\n" for each in self.pictures) + self.text


@dataclass(slots=True)
class Conversation:
    """The conversation: ``turns`` are questions with their answers. ``unanswered`` is a question without an answer, and
    ``pictures`` are for the next one."""

    system: str = ""
    turns: list[tuple[AskedQuestion, str]] = field(default_factory=list)
    unanswered: AskedQuestion | None = None
    pictures: list[ShownPicture] = field(default_factory=list)

    def asking(self, question: AskedQuestion | str) -> list[dict[str, Any]]:
        """Return the messages that ask ``question`` after all earlier turns. It is unanswered until ``answered`` is
        called."""
        if isinstance(question, str):
            question, self.pictures = AskedQuestion(question, tuple(self.pictures)), []
        self.unanswered = question
        return [*self.messages(), question.message()]

    def messages(self) -> list[dict[str, Any]]:
        """The turns as the API's messages."""
        entry: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in self.turns:
            entry += [question.message(), {"role": "assistant", "content": answer}]
        return entry

    def answered(self, answer: str) -> None:
        """Record the response, which may be partial; an empty text does not count."""
        if self.unanswered is not None and answer:
            self.turns.append((self.unanswered, answer))
            self.unanswered = None

    def again(self) -> AskedQuestion | None:
        """Remove and return the last question; None before the first."""
        if self.unanswered is not None:
            return self.unanswered
        return self.turns.pop()[0] if self.turns else None

    def clear(self) -> None:
        """Clear everything but the system message."""
        self.turns.clear()
        self.pictures.clear()
        self.unanswered = None

    def written(self, name: str) -> str:
        """The conversation as the content of the file ``name``."""
        if name.lower().endswith(".json"):
            return json.dumps({"messages": self.messages()}, ensure_ascii=False, indent=2) + "\n"
        lines = [("system", self.system)] if self.system else []
        for question, answer in self.turns:
            lines += [("user", question.written()), ("assistant", answer)]
        return "\n".join(f"{role}:\n{text}\n" for role, text in lines)


def split_command(line: str) -> tuple[str, str] | None:
    """The command in ``line`` and its argument; None for a question. A space before a slash makes it a question."""
    if not line.startswith("/"):
        return None
    command, _, rest = line.partition(" ")
    return command.strip(), rest.strip()


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text: a thought or a part of the answer."""

    text: str
    is_thought: bool = False


@dataclass(slots=True)
class Received:
    """The received part of a response, with times in seconds on any scale."""

    text: str = ""
    pieces: int = 0
    tokens: int | None = None
    first_s: float = 0.0
    last_s: float = 0.0
    read: str = ""
    """Prompt progress, for people; "" if the endpoint has not reported it."""
    is_whole: bool = False

    def take(self, line: str, now: float) -> list[Piece]:
        """Parse one line of the stream. Raises ``ClusterError`` for an error of the server or an invalid line."""
        data = line.removeprefix("data: ")
        if not line.startswith("data: "):
            return []
        if data == "[DONE]":
            self.is_whole = True
            return []
        try:
            return self._take(json.loads(data), now)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as exc:
            raise ClusterError("it responds, but not like an OpenAI endpoint") from exc

    def _take(self, chunk: Mapping[str, Any], now: float) -> list[Piece]:
        if "error" in chunk:
            raise ClusterError(str(chunk["error"].get("message") or "the response was cut off"))
        if progress := chunk.get("prompt_progress"):
            self.read = f"processing the prompt: {int(progress['processed'])} of {int(progress['total'])} tokens"
        usage = chunk.get("usage")
        if usage:
            self.tokens = int(usage["completion_tokens"])
        found = []
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            thought, text = delta.get("reasoning_content") or "", delta.get("content") or ""
            found += [Piece(thought, is_thought=True)] if thought else []
            found += [Piece(text)] if text else []
            self.text += text
        if found:
            self.first_s = now if not self.pieces else self.first_s
            self.last_s, self.pieces = now, self.pieces + 1
        return found

    def pace(self) -> str:
        """The number of tokens, and their rate after the first; "" before the first."""
        tokens = self.pieces if self.tokens is None else self.tokens
        took_s = self.last_s - self.first_s
        if not tokens:
            return ""
        count = show_count(tokens, "token")
        return f"{count}, {show_speed((tokens - 1) / took_s)}" if tokens > 1 and took_s > 0 else count


def shown(text: str) -> str:
    """``text`` without characters that control the terminal."""
    return "".join(char for char in text if char in "\n\t" or not (ord(char) < 32 or 127 <= ord(char) < 160))
