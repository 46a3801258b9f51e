"""The work that a request needs, whatever its dialect: prompts as token ids, budgets, sampling. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import msgspec
import numpy as np

from primad.api.answering.backend import ModelSettings, Vocabulary
from primad.api.answering.pictures import PicturePlace
from primad.api.answering.reading import CompletionReading
from primad.engine.pictures.messages import EncodedPicture
from primad.errors import RequestError, printable
from primad.ring.messages import Sampling
from primad.ring.pictures import PictureRows, placed

SEEDS: Final = 2**32 - 1
"""llama.cpp seeds are 32 bits wide, and the largest means "choose one", so seeds are taken modulo this."""
FinishReason = Literal["stop", "length", "tool_calls"]


class Prompt(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Token ids (int32, little-endian) to continue by at most ``max_tokens`` (0: only computed, for the cache);
    ``echo`` is returned before each response. Ids below 0 represent embeddings of ``pictures``."""

    ids: bytes
    max_tokens: int
    echo: str
    pictures: tuple[PicturePlace, ...] = ()

    @cached_property
    def tokens(self) -> list[int]:
        """The token ids; built on demand, since a request may have many prompts."""
        tokens: list[int] = np.frombuffer(self.ids, "<i4").tolist()
        return tokens

    @property
    def size(self) -> int:
        """The number of token ids."""
        return len(self.ids) // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One response to generate: continue a prompt by at most ``max_tokens``; ``echo`` is text to return before it."""

    index: int
    source: Prompt
    sampling: Sampling

    @property
    def prompt(self) -> list[int]:
        """The token ids to continue."""
        return self.source.tokens

    @property
    def max_tokens(self) -> int:
        """Limit of the tokens to generate."""
        return self.source.max_tokens

    @property
    def echo(self) -> str:
        """Text to return before the response."""
        return self.source.echo


class Job(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All work of a request: each of ``prompts`` continued ``n`` times, with seeds that start at the seed of
    ``sampling``.

    ``reading`` says what to detect in each response, None for nothing. With ``reports_progress`` a stream reports
    prompt progress. Cached tokens are computed again unless the job ``reuses`` them. ``priority`` and ``speculates``
    are as in ``ring.messages``. ``decode_limit_s`` after its first token a response ends with the next line, None:
    never. ``seen`` are the pictures of its prompts, by digest.
    """

    prompts: tuple[Prompt, ...]
    n: int = 1
    sampling: Sampling
    stops: tuple[str, ...]
    logprobs: int | None
    reading: CompletionReading | None
    reports_progress: bool
    reuses: bool
    priority: int
    speculates: bool = True
    decode_limit_s: float | None = None
    seen: dict[str, EncodedPicture] = {}

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """The choices to generate: the ``n`` of the first prompt, then those of the second, and so on."""
        return tuple(
            Choice(
                index=place * self.n + number,
                source=prompt,
                sampling=msgspec.structs.replace(self.sampling, seed=(self.sampling.seed + number) % SEEDS),
            )
            for place, prompt in enumerate(self.prompts)
            for number in range(self.n)
        )

    def rows_of(self, prompt: Prompt) -> list[PictureRows]:
        """Return the embeddings of the pictures of ``prompt``."""
        return [rows for place in prompt.pictures for rows in placed(self.seen[place.digest], place.first)[1]]

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts, each prompt counted once regardless of its choices."""
        return sum(prompt.size for prompt in self.prompts)


def check_model(name: str | None, served: Sequence[ModelSettings]) -> None:
    """Raise ``RequestError`` (404) with the ``served`` models' names, unless ``name`` is one of them, or empty."""
    names = [name for model in served for name in model.all_names]
    if name and not any(model.is_called(name) for model in served):
        these = f"these are: {', '.join(names)}; --alias and --any-model add others" if names else "none is served yet"
        raise RequestError(
            f"the model '{printable(name, 200)}' is not served here; {these}",
            status=404,
            code="model_not_found",
            param="model",
        )


def check_tokens(tokens: list[int], vocabulary: Vocabulary, *, at: str) -> None:
    """Raise ``RequestError`` that names the field ``at`` unless the model has all ``tokens``."""
    largest = max(tokens, default=0)
    if largest >= vocabulary.size:
        raise RequestError(f"token id {largest} is outside the vocabulary of {vocabulary.size}", param=at)


class PreparedTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Texts to embed, or lists of token ids, from the field ``param``; ``numbered`` if it holds a list of them."""

    model: str | None
    texts: list[str | list[int]]
    param: str
    numbered: bool = False
    dimensions: int | None = None
    cuts: bool = False
    as_base64: bool = False

    def called(self, index: int) -> str:
        """Return the name of text ``index`` in errors."""
        return f"{self.param}[{index}]" if self.numbered else self.param
