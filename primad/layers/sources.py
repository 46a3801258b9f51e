"""Sources of layer chunks from a hub: the hub itself, or the head, which relays chunks and stores none."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from primad.errors import ProtocolError
from primad.gguf.hub_ranges import HubError, HubRanges, own_hubs
from primad.gguf.layers import LayerRef, chunk_size
from primad.gguf.origins import LayerOrigin, RemoteFile
from primad.gguf.ranged_cutter import read_chunk
from primad.layers.source_link import SourceError, SourceLink, Transfers, reach
from primad.network.contacts import Contact
from primad.network.layer_messages import CHUNK_BYTES, Chunk, FetchChunk, NoChunk
from primad.settings.timings import LayerTimings
from primad.system.tasks import to_its_end


class WantedLayer(NamedTuple):
    """A layer to download: its ``ref`` in windows, and its source."""

    ref: LayerRef
    origin: LayerOrigin

    @property
    def is_hashed(self) -> bool:
        """Whether any device has fetched it before, so that its digest is known."""
        return self.ref.digest != self.origin.name


class ChunkSource(Protocol):
    """One connection to a source of chunks."""

    @property
    def name(self) -> str:
        """The name of the source."""

    async def chunk(self, layer: WantedLayer, number: int) -> bytes:
        """Chunk ``number`` of ``layer``. Raises ``HubError``."""

    async def close(self) -> None:
        """Close it."""


class HubSource:
    """The hub itself, over a separate connection."""

    def __init__(self, files: Sequence[RemoteFile], token: str | None, timings: LayerTimings) -> None:
        self.name = "the hub"
        self._files = files
        self._ranges = HubRanges(
            own_hubs(),
            token,
            connect_timeout_s=timings.hub_connect_timeout_s,
            silence_timeout_s=timings.hub_silence_timeout_s,
        )

    async def chunk(self, layer: WantedLayer, number: int) -> bytes:
        """As ``ChunkSource``."""
        reading = asyncio.to_thread(read_chunk, self._ranges, self._files, layer.origin, layer.ref, number)
        return await to_its_end(reading, self._ranges.abort)

    async def close(self) -> None:
        """Close it."""
        self._ranges.close()


class HeadSource:
    """The head ``source``, which relays chunks from the hub; ``names`` are the origins that will be requested."""

    def __init__(self, transfers: Transfers, source: Contact, names: Sequence[str]) -> None:
        self.name = source.device
        self._transfers, self._source, self._names = transfers, source, names
        self._stack = AsyncExitStack()
        self._link: SourceLink | None = None

    async def chunk(self, layer: WantedLayer, number: int) -> bytes:
        """As ``ChunkSource``."""
        name, size = layer.origin.name, chunk_size(layer.ref.size_bytes, number)
        try:
            link = await self._connected()
            await link.ask(FetchChunk(digest=name, offset=number * CHUNK_BYTES, size=size))
            answer, data = await link.answer(self._transfers.timings.hub_passing_timeout_s)
        except (SourceError, ProtocolError) as exc:
            await self.close()
            raise HubError(str(exc), again=True) from exc
        match answer:
            case NoChunk(digest=digest, reason=reason) if digest == name:
                raise HubError(f"cannot pass it on: {reason}", again=True)
            case Chunk(digest=digest, offset=offset) if (digest, offset) == (name, number * CHUNK_BYTES) and data:
                if len(data) == size:
                    return bytes(data)
        await self.close()
        raise HubError("sent a different piece than requested", again=False)

    async def _connected(self) -> SourceLink:
        if self._link is not None:
            return self._link
        link, _ = await self._stack.enter_async_context(reach(self._transfers, self._source, self._names))
        self._link = link
        return link

    async def close(self) -> None:
        """Close it; outstanding requests get no reply."""
        self._link = None
        await self._stack.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRoutes:
    """Routes for chunks: from the hub's ``files``; if that fails, through the ``head``, unless this device is the head."""

    files: Sequence[RemoteFile]
    token: str | None
    head: Contact | None
    transfers: Transfers

    def makers(self, names: Sequence[str]) -> list[Callable[[], ChunkSource]]:
        """Functions that open connections, best first."""
        found: list[Callable[[], ChunkSource]] = [lambda: HubSource(self.files, self.token, self.transfers.timings)]
        head = self.head
        if head is not None:
            found.append(lambda: HeadSource(self.transfers, head, names))
        return found


def own_token() -> str | None:
    """This owner's token for the hub, if one is in the environment; a head's token is never sent to other devices."""
    return os.environ.get("HF_TOKEN") or None
