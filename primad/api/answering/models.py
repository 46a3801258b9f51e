"""The models that a server offers, as the HTTP API requires them of the daemon: which there are, loading, unloading."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from primad.api.answering.backend import Backend
from primad.library.pull_progress import PullProgress as PullProgress


class ModelState(StrEnum):
    """Whether a model can answer; as llama-server calls it."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    """It is planned or loaded, or waits for another model to make room."""
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"
    """Loading it failed, or its file is broken; ``OfferedModel.detail`` says why. A request tries again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedModel:
    """A model that requests may name, as it is now. Texts are empty if unknown, times are in seconds.

    ``detail`` is one line about its state. While it loads, ``progress`` is 0 to 1 and ``expected_s`` is how long it will
    still take, None if unknown. A loaded one that nobody uses is unloaded at ``expires_at_s`` (Unix time), None for
    never. ``memory_bytes`` is what it takes of each device.
    """

    id: str
    aliases: tuple[str, ...] = ()
    created: int = 0
    path: str = ""
    size_bytes: int = 0
    architecture: str = ""
    parameters: str = ""
    quantisation: str = ""
    trained_context_tokens: int | None = None
    state: ModelState = ModelState.UNLOADED
    detail: str = ""
    progress: float | None = None
    expected_s: float | None = None
    expires_at_s: float | None = None
    pinned: bool = False
    embeds: bool = False
    """Whether it makes embeddings, not text; its backend is ``Embeddings`` as well then."""
    sees: bool = False
    hears: bool = False
    """Whether an encoder is there for it that takes pictures, and one that takes sound."""
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    vram_bytes: int = 0
    """How much of it is memory of GPUs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its own name, then its aliases."""
        return (self.id, *self.aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForecast:
    """What a model gives, or would give if it were loaded beside those that are, while they are idle; ``goes`` are those
    that would make room for it. Speeds are of one request, the first token is that after ``prompt_tokens``."""

    tokens_per_s: float
    ttft_ms: float
    prompt_tokens: int
    context_tokens: int
    devices: tuple[str, ...]
    streamed_bytes: int = 0
    goes: tuple[str, ...] = ()


Waiting = Callable[[OfferedModel], None]
"""Hears of a model that a request waits for, whenever its state or progress changes."""


class Models(Protocol):
    """The models of a server. Names are matched as ``primad.library`` does; all methods raise ``RequestError``: 404 with
    the names that there are for an unknown one, 400 with the reason for one that cannot be used."""

    @property
    def switches(self) -> bool:
        """Whether requests choose among models; a server with one fixed model does not look at their names first."""

    async def look(self) -> None:
        """Look for files that are new or vanished, unless somebody did a moment ago."""

    def offered(self) -> Sequence[OfferedModel]:
        """All models, the loaded ones first, as they were when somebody looked last."""

    def loaded(self) -> Mapping[str, Backend]:
        """The backends of loaded models, and of a fixed one always, by ``OfferedModel.id``."""

    def use(
        self,
        name: str | None,
        *,
        owner: str = "",
        keep_alive_s: float | None = None,
        waiting: Waiting = lambda _: None,
    ) -> AbstractAsyncContextManager[Backend]:
        """The backend of the model ``name``, loaded first if it is not, in the order of such requests; it stays loaded
        meanwhile. None is the model that was used last, or the only one.

        Afterwards it stays for ``keep_alive_s`` without a request (None: as the owner's setting says, 0: it is unloaded
        at once, less: for ever). A client that leaves the wait costs the others nothing. Raises ``RingError`` if it cannot
        be loaded, ``RequestError`` with 429 if too many wait, or this one waited longer than the owner allows.
        """

    async def load(self, name: str) -> None:
        """Begin to load ``name``, as a request would; nobody waits."""

    async def unload(self, name: str) -> None:
        """Unload ``name`` once its requests have ended; new ones load it again. Returns when its devices hold nothing of
        it."""

    async def forecast(self, name: str) -> ModelForecast:
        """What ``name`` would give, which takes seconds to plan; one at a time, else a ``RequestError`` (429). Raises
        ``PrimadError`` if there is no plan."""

    def changes(self) -> AsyncIterator[OfferedModel]:
        """Each model whenever its state or progress changes, from now on."""

    def free_bytes(self) -> int | None:
        """The space on the disk that ``pull`` writes to, None if unknown."""

    def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """Download a model of the hub (``hf:owner/repo:Q4_K_M``, or without ``hf:``); it is offered from then on."""

    async def delete(self, name: str) -> None:
        """Unload a model that ``pull`` downloaded and delete its files. Models of other programs' stores are refused."""
