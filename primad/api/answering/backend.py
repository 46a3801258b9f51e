"""The HTTP API's requirements of the daemon, as protocols: the consumer owns the interface, the daemon implements it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Protocol, TypeVar

import msgspec

from primad.ring.messages import Generate, GenerationEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class FillInTokens:
    """The fill-in-the-middle tokens of a model: the first precedes the text ``before`` the gap, the second the text
    ``after`` it, and the third asks for the ``middle``. ``file`` starts another file, if there is such a token."""

    before: int
    after: int
    middle: int
    file: int | None = None


class TokenPieces(Protocol):
    """The served model's tokens as text, and what its file says about chat. Every method is quick."""

    @property
    def size(self) -> int:
        """Number of tokens; token ids are ``0 <= id < size``."""

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
        """Like ``piece``, but for a control token its name, unless it ends responses."""

    def name(self, token: int) -> str:
        """A printable name of any token, including special ones (for log-probabilities)."""


class Vocabulary(TokenPieces, Protocol):
    """Tokens and the tokenizer. Its work grows with a request and its code may crash, so only the text process has
    one."""

    @property
    def fill_in(self) -> FillInTokens | None:
        """The tokens for filling gaps in texts, or None."""

    @property
    def longest_chars(self) -> int | None:
        """The most characters that one token stands for; None if a text may lose some before it is tokenized."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of ``text``, with llama.cpp's meaning of the two flags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNames:
    """Other names for the model: ``aliases``, or with ``any_model`` every name."""

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
    """How the model behind the API is served. ``created`` is in Unix seconds; ``context_tokens`` bounds prompt plus
    response; ``tool_parser`` names the format of its calls, or is ``auto``. With ``context_shift`` the oldest messages
    of a conversation that is too long are dropped. Up to ``sequences`` requests run at once; if that ``is_exact``, each
    is what it would be alone. Where it neither ``sees`` pictures nor ``hears`` sound, ``lacks_encoder`` says why,
    and what to do. It ``fetches`` pictures from URLs where the owner said so."""

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
    lacks_encoder: str = "the model has no encoder for pictures"

    @property
    def all_names(self) -> tuple[str, ...]:
        """Its own name, then its aliases."""
        return (self.id, *self.names.aliases)

    def is_called(self, name: str) -> bool:
        """Whether a client that sends ``name`` means this model."""
        return self.names.any_model or name in self.all_names

    @property
    def settings(self) -> ModelSettings:
        """Only these facts."""
        return ModelSettings(**{each.name: getattr(self, each.name) for each in fields(ModelSettings)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel(ModelSettings):
    """The model for the daemon: its tokens as text."""

    vocabulary: TokenPieces


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel(ModelSettings):
    """The model for the text process: with its tokenizer, and the token ids of pictures that were ``seen``, by digest."""

    vocabulary: Vocabulary
    seen: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Facts besides the body for preparing a request. ``model`` is None if there is none; ``seed`` is used if the
    request has none, ``now`` is the clock of chat templates."""

    model: TextModel | None
    seed: int
    now: datetime

    @property
    def served(self) -> TextModel:
        """The model, which was known when the request was accepted."""
        assert self.model is not None, "this preparation needs the model"
        return self.model


Prepared = TypeVar("Prepared", bound=msgspec.Struct)
Preparation = Callable[[bytes, Asking], Prepared]
"""Turns a request's body into all that the daemon needs to serve it. Raises ``RequestError`` and ``ModelError``.

With pictures that were not seen yet it raises ``PicturesWantedError``, and runs again once they were. It is a pure function
that runs in the text process. Its annotation names the result: a struct of plain data.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether requests are computed now or soon, and one line about the state.

    They are also ``taken`` if they have to wait longer: requests resume once devices serve again.
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
        """As above."""

    @property
    def max_text_tokens(self) -> int:
        """As above."""

    def status(self) -> Mapping[str, Any]:
        """``EmbeddingStatus`` as plain data."""

    async def embed(
        self, texts: Sequence[str | list[int]], called: Callable[[int], str], *, cuts: bool = False, owner: str = ""
    ) -> tuple[list[bytes], int]:
        """For each of ``texts`` a vector of length 1, as float32, little-endian; and the total number of tokens.

        Errors name a text as it is ``called``. A text that is too long is truncated if ``cuts``. Owners take turns.
        Raises ``RequestError`` for texts that cannot be embedded or a full queue (429), ``RingError`` after a crash.
        """


class Backend(Protocol):
    """The daemon as the API sees it."""

    def health(self) -> Health:
        """The current state."""

    def model(self) -> ServedModel | None:
        """The served model, or None until it is known."""

    async def prepare(
        self, preparation: Preparation[Prepared], body: bytes, served: ModelSettings | None, *, owner: str = ""
    ) -> Prepared:
        """The result of ``preparation`` for ``body`` and the model ``served``; this loop continues meanwhile.

        Raises what it raises, ``RequestError`` if it takes too much time or memory (400) or too many requests wait
        (429), and ``RingError`` if there is no process for it.
        """

    async def status(self) -> dict[str, Any]:
        """The ring's part of ``api.status.StatusBody`` as plain data; empty without a ring.

        Takes seconds at most; concurrent calls share one query.
        """

    def generate(self, asked: Generate, *, may_expire: bool = True) -> AsyncGenerator[GenerationEvent, None]:
        """Any number of ``PromptProgress``, then of ``Sampled``, and finally exactly one ``Finished``.

        The prompt has 1 to ``context_tokens - 1`` tokens and ``max_tokens`` is at least 1; prompt and response together
        fit the context. The backend chooses the request's number and its KV blocks. A request that ``may_expire`` waits for
        others at most as long as this server's owner allows. ``aclose()``, even while it waits, cancels the request in
        the ring and frees its sequence.

        Raises ``RingError`` when the ring breaks and ``RequestError`` when it cannot take the request (a full queue, or
        it waited too long: status 429). A ``Finished`` whose reason is ``error`` means the same as ``RingError``, one
        with ``refused`` as ``RequestError``.
        """
