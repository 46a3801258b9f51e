"""The models that a server offers, as the HTTP API requires them of the daemon: their list, loading, unloading."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from primad.api.answering.backend import Backend
from primad.library.pull_progress import PullProgress as PullProgress


class ModelState(StrEnum):
    """Whether a model can serve requests, in llama-server's words."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    """The model is planned or loaded now, or waits for another model to make room."""
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"
    """Loading failed, or the model's file is broken; ``OfferedModel.detail`` says why. The next request tries again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedModel:
    """The current state of a model that requests may name. Texts are empty if unknown, times are in seconds.

    ``detail`` is one line about its state. While it loads, ``progress`` is 0 to 1 and ``expected_s`` is the remaining
    time, None if unknown. A loaded model that is not in use is unloaded at ``expires_at_s`` (Unix time), None for
    never. ``memory_bytes`` is the memory it takes of each device.
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
    """Whether it makes embeddings, not text; its backend then is ``Embeddings`` as well."""
    sees: bool = False
    hears: bool = False
    """Whether the model has an encoder for pictures (``sees``) and one for sound (``hears``)."""
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    vram_bytes: int = 0
    """The part of its size that is in GPU memory."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its own name, then its aliases."""
        return (self.id, *self.aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForecast:
    """The speeds that a model has, or would have if it were loaded next to the loaded ones while those are idle;
    ``goes`` lists the models that would be unloaded for it. Speeds are those of one request; the TTFT is for
    ``prompt_tokens``."""

    tokens_per_s: float
    ttft_ms: float
    prompt_tokens: int
    context_tokens: int
    devices: tuple[str, ...]
    streamed_bytes: int = 0
    goes: tuple[str, ...] = ()


Waiting = Callable[[OfferedModel], None]
"""Called with the model that a request waits for, whenever its state or progress changes."""


class Models(Protocol):
    """The models of a server. Names are matched as ``primad.library`` does. All methods raise ``RequestError``: 404
    with the available names for an unknown one, 400 with the reason for a model that cannot be used."""

    @property
    def switches(self) -> bool:
        """Whether requests choose among models; a server with one fixed model does not look at their names first."""

    async def look(self) -> None:
        """Look for new or vanished files, unless that was done a moment ago."""

    def offered(self) -> Sequence[OfferedModel]:
        """Return all models, the loaded ones first, as of the latest ``look``."""

    def loaded(self) -> Mapping[str, Backend]:
        """Return the backends of loaded models, and always of a fixed one, by ``OfferedModel.id``."""

    def use(
        self,
        name: str | None,
        *,
        owner: str = "",
        keep_alive_s: float | None = None,
        waiting: Waiting = lambda _: None,
    ) -> AbstractAsyncContextManager[Backend]:
        """Hold the backend of the model ``name``, which is loaded first if necessary, in the order of such requests,
        and stays loaded inside this context. None means the model that was used last, or the only one.

        Afterwards the model stays for ``keep_alive_s`` without a request (None: as the owner's setting says, 0: it is
        unloaded immediately, negative: for ever). A client that stops waiting does not affect the others. Raises
        ``RingError`` if the model cannot be loaded, ``RequestError`` with 429 if too many requests wait, or this one
        waited longer than the owner allows.
        """

    async def load(self, name: str) -> None:
        """Begin to load ``name``, as a request would, and return without waiting."""

    async def unload(self, name: str) -> None:
        """Unload ``name`` once its requests have ended; new requests load it again. Returns when its devices hold
        nothing of it."""

    async def forecast(self, name: str) -> ModelForecast:
        """Return the forecast for ``name``. Planning takes seconds; one at a time, otherwise raises ``RequestError``
        (429). Raises ``PrimadError`` if there is no plan."""

    def changes(self) -> AsyncIterator[OfferedModel]:
        """Yield each model whenever its state or progress changes, from now on."""

    def free_bytes(self) -> int | None:
        """Return the free space on the disk that ``pull`` writes to, None if unknown."""

    def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """Download a model of the hub (``hf:owner/repo:Q4_K_M``, or without ``hf:``); it is offered from then on."""

    async def delete(self, name: str) -> None:
        """Unload a model that ``pull`` downloaded and delete its files. Models of other programs' stores are refused."""
