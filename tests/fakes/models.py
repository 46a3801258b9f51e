"""A strict fake of a server's models: the test decides how long each takes to load, and what happens meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from primad.api.answering.any_model import AnyVocabulary
from primad.api.answering.backend import Backend, Health
from primad.api.answering.models import ModelForecast, ModelState, OfferedModel, Waiting
from primad.api.http.offered import find_offered
from primad.errors import RequestError, RingError
from primad.library.pull_progress import PullProgress
from tests.fakes.backend import ByteVocabulary, FakeBackend, replies
from tests.fakes.embeddings import FakeEmbeddings


def backend_of(name: str, *texts: Any, template: str | None = None) -> FakeBackend:
    """A backend whose model is called ``name``, and outputs its name unless ``texts`` are given."""
    backend = FakeBackend(replies(*(texts or (name,))), vocabulary=ByteVocabulary(chat_template=template))
    assert backend.served is not None
    backend.served = replace(backend.served, id=name, sequences=4)
    return backend


class EmbeddingBackend(FakeBackend, FakeEmbeddings):
    """The backend of an embedding model."""

    def __init__(self, name: str) -> None:
        FakeBackend.__init__(self, replies())
        FakeEmbeddings.__init__(self)
        assert self.served is not None
        self.name, self.served = name, replace(self.served, id=name)


def without_model() -> FakeBackend:
    """The server itself, while no model is loaded."""
    backend = FakeBackend(replies(), vocabulary=AnyVocabulary())
    backend.served, backend.state = None, Health(serving=True, taken=True, detail="2 models are offered")
    return backend


class FakeModels:
    """``backends`` by name. A model with a gate in ``gates`` loads when the gate opens, others at once; ``failing``
    ones cannot be loaded."""

    switches = True

    def __init__(self, *backends: FakeBackend) -> None:
        self.backends = {each.served.id: each for each in backends if each.served is not None}
        self.state = {
            name: OfferedModel(
                id=name,
                created=1_700_000_000,
                size_bytes=1000,
                architecture="llama",
                embeds=isinstance(backend, EmbeddingBackend),
            )
            for name, backend in self.backends.items()
        }
        self.gates: dict[str, asyncio.Event] = {}
        self.failing: set[str] = set()
        self.uses: list[tuple[str, float | None, str]] = []
        """Name, ``keep_alive_s`` and owner of each use that began."""
        self.users: Counter[str] = Counter()
        self.waiting: list[tuple[str, Waiting]] = []
        self.waits: asyncio.Queue[str] = asyncio.Queue()
        """Each model that a request starts waiting for."""
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        """Each model whose use ended, or whose request stopped waiting."""
        self.heard: list[asyncio.Queue[OfferedModel]] = []
        self.files: Sequence[PullProgress] = ()
        self.pulled: list[str] = []
        self.deleted: list[str] = []
        self.looks = 0

    async def look(self) -> None:
        self.looks += 1

    def offered(self) -> list[OfferedModel]:
        return sorted(self.state.values(), key=lambda each: each.state is not ModelState.LOADED)

    def loaded(self) -> Mapping[str, Backend]:
        return {name: self.backends[name] for name, each in self.state.items() if each.state is ModelState.LOADED}

    def change(self, name: str, **changes: Any) -> None:
        """Change a model, and notify all waiting requests and listeners."""
        self.state[name] = replace(self.state[name], **changes)
        for waits_for, heard in self.waiting:
            if waits_for == name:
                heard(self.state[name])
        for queue in self.heard:
            queue.put_nowait(self.state[name])

    @asynccontextmanager
    async def use(
        self,
        name: str | None,
        *,
        owner: str = "",
        keep_alive_s: float | None = None,
        waiting: Waiting = lambda _: None,
    ) -> AsyncGenerator[Backend, None]:
        self.loop = asyncio.get_running_loop()
        found = self._last() if name is None else find_offered(name, self.offered()).id
        self.uses.append((found, keep_alive_s, owner))
        self.users[found] += 1
        try:
            await self._ready(found, waiting)
            yield self.backends[found]
        finally:
            self.users[found] -= 1
            self.ended.put_nowait(found)
            if keep_alive_s == 0 and not self.users[found] and found in self.loaded():
                self.change(found, state=ModelState.UNLOADED)

    def _last(self) -> str:
        names = [name for name, _, _ in self.uses] or list(self.loaded())
        if not names:
            raise RequestError("name a model", param="model")
        return names[-1]

    async def _ready(self, name: str, waiting: Waiting) -> None:
        if self.state[name].state is ModelState.LOADED:
            return
        waits = (name, waiting)
        self.waiting.append(waits)
        try:
            self.change(name, state=ModelState.LOADING, progress=0.0, expected_s=12.0)
            self.waits.put_nowait(name)
            if name in self.gates:
                await self.gates[name].wait()
            if name in self.failing:
                self.change(name, state=ModelState.FAILED, detail="no device has room", progress=None)
                raise RingError(f"{name} cannot be loaded: no device has room")
            self.change(name, state=ModelState.LOADED, progress=None, expected_s=None)
        finally:
            self.waiting.remove(waits)

    async def load(self, name: str) -> None:
        self.change(find_offered(name, self.offered()).id, state=ModelState.LOADED)

    async def unload(self, name: str) -> None:
        found = find_offered(name, self.offered()).id
        assert not self.users[found], "a test waits for its requests first"
        self.change(found, state=ModelState.UNLOADED)

    async def forecast(self, name: str) -> ModelForecast:
        found = find_offered(name, self.offered())
        goes = tuple(each for each in self.loaded() if each != found.id)
        return ModelForecast(
            tokens_per_s=12.5, ttft_ms=800.0, prompt_tokens=512, context_tokens=4096, devices=("desk", "nas"), goes=goes
        )

    async def changes(self) -> AsyncIterator[OfferedModel]:
        queue: asyncio.Queue[OfferedModel] = asyncio.Queue()
        self.heard.append(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self.heard.remove(queue)

    def free_bytes(self) -> int | None:
        return 50_000_000_000

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        if "/" not in name:
            raise RequestError(f"{name}: name it as owner/repo:Q4_K_M", param="model")
        for each in self.files:
            yield each
        self.pulled.append(name)

    async def delete(self, name: str) -> None:
        self.deleted.append(find_offered(name, self.offered()).id)
