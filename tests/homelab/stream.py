"""A chat completion while it streams: each token with its time, and the end."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

from tests.homelab.running import PATIENCE_S, Running


class Stream:
    """One streamed completion; ``running`` is ``client.py chat``. All times are of ``time.monotonic``.

    Events with text count as tokens, since the head sends one per token.
    """

    def __init__(self, running: Running) -> None:
        self._running = running

    def _printed(self) -> list[dict[str, Any]]:
        return [json.loads(line) for _, line in list(self._running.lines) if line.startswith("{")]

    def _texts(self) -> list[tuple[float, str]]:
        found = []
        for printed in self._printed():
            for choice in printed.get("event", {}).get("choices", []):
                if text := choice.get("delta", {}).get("content"):
                    found.append((float(printed["at"]), str(text)))
        return found

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(text for _, text in self._texts())

    @property
    def times(self) -> list[float]:
        """The time of each token."""
        return [at for at, _ in self._texts()]

    @property
    def read_share(self) -> float:
        """Return the computed share of the prompt; needs ``return_progress``."""
        reported = [printed["event"].get("prompt_progress") for printed in self._printed() if "event" in printed]
        return max((each["processed"] / each["total"] for each in reported if each), default=0.0)

    @property
    def status(self) -> int | None:
        """The HTTP status; None before the response."""
        return next((int(printed["status"]) for printed in self._printed() if "status" in printed), None)

    @property
    def retry_after(self) -> str | None:
        """The ``Retry-After`` header."""
        return next((printed["retry_after"] for printed in self._printed() if "status" in printed), None)

    @property
    def finish_reason(self) -> str | None:
        """The finish reason; None if the completion has not ended, or ended with an error."""
        for printed in self._printed():
            for choice in printed.get("event", {}).get("choices", []):
                if choice.get("finish_reason"):
                    return str(choice["finish_reason"])
        return None

    @property
    def error(self) -> dict[str, Any] | None:
        """OpenAI's error object, if there was one."""
        return next(
            (printed["event"]["error"] for printed in self._printed() if "error" in printed.get("event", {})), None
        )

    @property
    def end(self) -> str | None:
        """``done``, ``closed`` or the connection's error; None while it is open."""
        return next((str(printed["end"]) for printed in self._printed() if "end" in printed), None)

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two tokens; 0 if there are fewer than two."""
        return max((later - earlier for earlier, later in itertools.pairwise(self.times)), default=0.0)

    def recovered_s(self, since: float) -> float | None:
        """Return the time from ``since`` to the end of the longest gap that ended later; None without later tokens.

        The first token after ``since`` may have been under way before, so it does not count by itself.
        """
        gaps = [(later - earlier, later) for earlier, later in itertools.pairwise(self.times) if later > since]
        return max(gaps)[1] - since if gaps else None

    def wait_tokens(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait for ``count`` tokens. Fails if the stream ends first."""
        deadline = time.monotonic() + timeout_s
        while len(self.times) < count:
            assert self.end is None, f"it ended ({self.end}) after {len(self.times)} tokens: {self.error}"
            left = deadline - time.monotonic()
            assert left > 0, f"{len(self.times)} of {count} tokens within {timeout_s:g} s"
            self._running.wait_news(min(left, 0.5))

    def leave(self) -> None:
        """Disconnect."""
        self._running.end()

    def wait_end(self, timeout_s: float = PATIENCE_S) -> str:
        """Wait for the end of the stream; return ``end``."""
        self._running.wait_for('"end"', timeout_s)
        assert self.end is not None
        return self.end


def settled(stream: Stream) -> bool:
    """Whether a stream ended as every stream must: with a finish_reason or with an error, never silently.

    A finish_reason is followed by [DONE]; after an error [DONE] may be missing.
    """
    if stream.error is not None:
        return stream.finish_reason is None and stream.end in ("done", "closed")
    return stream.finish_reason is not None and stream.end == "done"
