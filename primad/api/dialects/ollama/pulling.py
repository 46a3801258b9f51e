"""Ollama's paths that download and delete models: only for the owner and for keys with that right."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from primad.api.answering.models import Models
from primad.api.dialects.ollama.job import plain
from primad.api.dialects.ollama.responses import digest_of
from primad.api.http.connection import while_connected
from primad.api.http.dialect import Route
from primad.api.http.endpoint import Endpoint, json_response
from primad.api.http.framing import Framing
from primad.api.http.named_model import named_model
from primad.library.pull_progress import PullProgress

_HUBS: Final = ("https://", "hf.co/", "huggingface.co/")
SUCCESS: Final = "success"


class PullLine(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a download; the last line says ``success``. Each file has another ``digest``."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class PullPaths:
    """The routes that download and delete models."""

    def __init__(self, endpoint: Endpoint, models: Models, framing: Framing) -> None:
        self._endpoint, self._models, self._framing = endpoint, models, framing

    def routes(self) -> tuple[Route, ...]:
        """Return both routes."""
        return (
            Route(
                path="/api/pull",
                handler=self.pull,
                asks="NamedModel",
                responses="PullLine",
                streamed=("PullLine",),
                stream_type=self._framing.media_type,
            ),
            Route(path="/api/delete", handler=self.delete, methods=("DELETE",), asks="NamedModel"),
        )

    async def pull(self, request: Request) -> Response:
        """Download a model from the hub. A client that leaves stops the download; the same request resumes it."""
        self._endpoint.check_owner(request)
        asked = await named_model(request, self._endpoint.timings.body_timeout_s)
        lines = self._lines(hub_name(asked.called))
        if asked.stream is not False:
            return self._endpoint.stream(lines, self._framing)
        return json_response(await while_connected(request.receive, _last(lines)))

    async def delete(self, request: Request) -> Response:
        """Unload a downloaded model and delete its files."""
        self._endpoint.check_owner(request)
        asked = await named_model(request, self._endpoint.timings.body_timeout_s)
        await while_connected(request.receive, self._models.delete(plain(asked.called)))
        return Response()

    async def _lines(self, name: str) -> AsyncGenerator[PullLine, None]:
        has_begun = False
        async with aclosing(self._models.pull(name)) as pulled:  # stops the download when its client leaves
            async for progress in pulled:
                if not has_begun:
                    has_begun = True
                    yield PullLine(status="pulling manifest")
                yield _line(progress)
        yield PullLine(status=SUCCESS)


async def _last(lines: AsyncGenerator[PullLine, None]) -> PullLine:
    last = PullLine(status=SUCCESS)
    async for line in lines:
        last = line
    return last


def _line(progress: PullProgress) -> PullLine:
    total = UNSET if progress.total_bytes is None else progress.total_bytes
    return PullLine(
        status=f"pulling {progress.file}",
        digest=f"sha256:{digest_of(progress.file)}",
        total=total,
        completed=progress.done_bytes,
    )


def hub_name(name: str) -> str:
    """Return the name of a hub model, given as Ollama's clients write it (``hf.co/owner/repo:Q4_K_M``)."""
    for hub in _HUBS:
        name = name.removeprefix(hub)
    return plain(name)
