"""Timings of a response, in llama-server's form. Pure: the time is passed in."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class CompletionTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Timings of a response: the prompt until the first token, including waiting, then the tokens after it.

    ``cache_n`` tokens of the prompt came from the cache, ``prompt_n`` were computed. The rates of ``predicted_n``
    tokens exclude the first token, and are 0 if there are no others.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


@dataclass(slots=True, kw_only=True)
class CompletionClock:
    """Times a response that has ``predicted`` tokens so far; times are in seconds on any scale."""

    prompt_tokens: int
    begun_s: float
    first_s: float | None = None
    predicted: int = 0
    cached: int = 0

    def count(self, sampled: int, cached: int, now_s: float) -> None:
        """Count more tokens, and set the number of ``cached`` prompt tokens, if known."""
        self.predicted += sampled
        self.cached = max(self.cached, cached)
        if sampled and self.first_s is None:
            self.first_s = now_s

    def took_s(self, now_s: float) -> tuple[float, float]:
        """Return the seconds until the first token, and from there until now."""
        first_s = now_s if self.first_s is None else self.first_s
        return first_s - self.begun_s, now_s - first_s

    def timings(self, now_s: float) -> CompletionTimings:
        """Return the timings until now."""
        prompt_s, decode_s = self.took_s(now_s)
        computed, later = self.prompt_tokens - self.cached, max(self.predicted - 1, 0)
        return CompletionTimings(
            cache_n=self.cached,
            prompt_n=computed,
            prompt_ms=1000 * prompt_s,
            prompt_per_token_ms=_ratio(1000 * prompt_s, computed),
            prompt_per_second=_ratio(computed, prompt_s),
            predicted_n=self.predicted,
            predicted_ms=1000 * decode_s,
            predicted_per_token_ms=_ratio(1000 * decode_s, later),
            predicted_per_second=_ratio(later, decode_s),
        )


def _ratio(amount: float, parts: float) -> float:
    return amount / parts if parts > 0 else 0.0
