"""What the HTTP API requires of the daemon, as protocols: the consumer defines the interface, the daemon implements it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Protocol, TypeVar

import msgspec

from primad.ring.messages import Generate, GenerationEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class FillInTokens:
    """The fill-in-the-middle tokens of a model: ``before`` precedes the text before the gap, ``after`` the text after
    it, and ``middle`` asks for the missing text. ``file`` starts another file, if there is such a token."""

    before: int
    after: int
    middle: int
    file: int | None = None


class TokenPieces(Protocol):
    """The served model's tokens as text, and what its file says about chat. Every method is quick."""

    @property
    def size(self) -> int:
        """The number of tokens; token ids are ``0 <= id < size``."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja source in the model file (``tokenizer.chat_template``), or None."""

    @property
    def bos(self) -> str:
        """Text of the beginning-of-sequence token, "" when the model has none."""

    @property
    def eos(self) -> str:
        """Text of the end-of-sequence token, "" when the model has none."""

    def piece(self, token: int) -> bytes:
        """The raw bytes that ``token`` adds to the text; b"" for a special token."""

    def piece_or_marker(self, token: int) -> bytes:
        """Like ``piece``, but return the name of a control token, unless it ends responses."""

    def name(self, token: int) -> str:
        """A printable name of any token, including special ones (for log-probabilities)."""


class Vocabulary(TokenPieces, Protocol):
    """Tokens and the tokenizer. Tokenizing takes longer for longer requests and its code may crash, so only the text
    process has one."""

    @property
    def fill_in(self) -> FillInTokens | None:
        """The tokens for filling gaps in texts, or None."""

    @property
    def longest_chars(self) -> int | None:
        """The most characters that one token represents; None if a text may lose some before it is tokenized."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the token ids of ``text``; the two flags are llama.cpp's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNames:
    """Other names for the model: ``aliases``; with ``any_model`` every name is accepted."""

    aliases: tuple[str, ...] = ()
    any_model: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the model file says about itself, for clients that show it; None and "" if unknown."""

    architecture: str = ""
    basename: str = ""
    quantization: str = ""
    parameters: int | None = None
    size_bytes: int | None = None
    trained_context_tokens: int | None = None
    width: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Sampling defaults: those of llama.cpp's programs, unless the model file has others."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    penalty_tokens: int = 64
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """How the model behind the API is served.

    ``created`` is in Unix seconds. ``context_tokens`` bounds prompt plus response. ``tool_parser`` names the format of
    its calls, or is ``auto``. With ``context_shift`` the oldest messages of a conversation that is too long are
    dropped. Up to ``sequences`` requests run concurrently; if ``is_exact``, each gives the same output as alone. If the
    model neither ``sees`` pictures nor ``hears`` sound, ``lacks_encoder`` says why, and what to do. It ``fetches``
    pictures from URLs if the owner allowed it.
    """

    id: str
    created: int
    context_tokens: int
    sampling: SamplingDefaults = SamplingDefaults()
    facts: ModelFacts = ModelFacts()
    names: ModelNames = ModelNames()
    tool_parser: str = "auto"
    context_shift: bool = False
    sequences: int = 1
    is_exact: bool = True
    sees: bool = False
    hears: bool = False
    fetches: bool = False
    lacks_encoder: str = "the model has no encoder for images"

    @property
    def all_names(self) -> tuple[str, ...]:
        """Its own name, then its aliases."""
        return (self.id, *self.names.aliases)

    def is_called(self, name: str) -> bool:
        """Whether a client that sends ``name`` means this model."""
        return self.names.any_model or name in self.all_names

    @property
    def settings(self) -> ModelSettings:
        """Return only the settings, without the tokens."""
        return ModelSettings(**{each.name: getattr(self, each.name) for each in fields(ModelSettings)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel(ModelSettings):
    """The model for the daemon: settings, and tokens as text."""

    vocabulary: TokenPieces


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel(ModelSettings):
    """The model for the text process: with its tokenizer, and the token ids of pictures already encoded (``seen``), by
    digest."""

    vocabulary: Vocabulary
    seen: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What preparing a request needs besides its body. ``model`` is None if there is none; ``seed`` is used if the
    request has none; ``now`` is the clock of chat templates."""

    model: TextModel | None
    seed: int
    now: datetime

    @property
    def served(self) -> TextModel:
        """Return the model, which was known when the request was accepted."""
        assert self.model is not None, "this preparation needs the model"
        return self.model


Prepared = TypeVar("Prepared", bound=msgspec.Struct)
Preparation = Callable[[bytes, Asking], Prepared]
"""Turns a request's body into everything the daemon needs to serve it. Raises ``RequestError`` and ``ModelError``.

If pictures are not encoded yet, it raises ``PicturesWantedError`` and runs again once they are. It is a pure function
that runs in the text process. Its annotation names the result: a struct of plain data.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether requests are computed now or soon (``serving``), and one line about the state.

    Requests are also ``taken`` if they have to wait longer: they resume once devices serve again.
    """

    serving: bool
    taken: bool
    detail: str


class Embeddings(Protocol):
    """The model of ``serve --embedding``, called ``name``; ``created`` is in Unix seconds.

    A text has at most ``max_text_tokens``, a vector has ``width`` numbers; both are 0 until they are known.
    """

    name: str
    created: int

    @property
    def width(self) -> int:
        """Numbers of a vector; 0 until known."""

    @property
    def max_text_tokens(self) -> int:
        """Limit of a text's tokens; 0 until known."""

    def status(self) -> Mapping[str, Any]:
        """Return ``EmbeddingStatus`` as plain data."""

    async def embed(
        self, texts: Sequence[str | list[int]], called: Callable[[int], str], *, cuts: bool = False, owner: str = ""
    ) -> tuple[list[bytes], int]:
        """Return for each of ``texts`` a vector of length 1, as float32, little-endian; and the total number of tokens.

        Errors name a text by ``called(index)``. With ``cuts`` a text that is too long is truncated. Owners take turns.
        Raises ``RequestError`` for texts that cannot be embedded or a full queue (429), ``RingError`` after a crash.
        """


class Backend(Protocol):
    """The daemon as the API sees it."""

    def health(self) -> Health:
        """Return the current state."""

    def model(self) -> ServedModel | None:
        """Return the served model, or None until it is known."""

    async def prepare(
        self, preparation: Preparation[Prepared], body: bytes, served: ModelSettings | None, *, owner: str = ""
    ) -> Prepared:
        """Return the result of ``preparation`` for ``body`` and the model ``served``, computed in another process.

        Raises what ``preparation`` raises, ``RequestError`` if it takes too much time or memory (400) or too many
        requests wait (429), and ``RingError`` if there is no process for it.
        """

    async def status(self) -> dict[str, Any]:
        """Return the ring's part of ``api.status.StatusBody`` as plain data; empty without a ring.

        Takes seconds at most; concurrent calls share one query.
        """

    def generate(self, asked: Generate, *, may_expire: bool = True) -> AsyncGenerator[GenerationEvent, None]:
        """Yield any number of ``PromptProgress``, then of ``Sampled``, and finally exactly one ``Finished``.

        The prompt has 1 to ``context_tokens - 1`` tokens and ``max_tokens`` is at least 1; prompt and response together
        fit the context. The backend chooses the request's number and its KV blocks. A request that ``may_expire`` waits
        in the queue at most as long as this server's owner allows. ``aclose()``, even while it waits, cancels the
        request in the ring and frees its sequence.

        Raises ``RingError`` when the ring breaks and ``RequestError`` when it cannot take the request (429: a full
        queue, or it waited too long). A ``Finished`` whose reason is ``error`` means the same as ``RingError``, one
        with ``refused`` the same as ``RequestError``.
        """
