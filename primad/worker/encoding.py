"""Encodes pictures for a head, on a worker that has the encoder's file and all of the model except its weights.

There is one encoder for each model that the head serves. Its file is fetched like layers, into the same cache. The head
encodes by itself whenever this device cannot, so encoding stops as soon as this device's owner needs the memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq.asyncio

from primad.daemon.encoder_child import EncoderChild
from primad.daemon.layer_files import release_files
from primad.daemon.node import Node
from primad.daemon.reporter import ReportLine
from primad.engine.pictures.messages import EncoderFailed, LoadEncoder, PictureReply
from primad.errors import ClusterError, PrimadError
from primad.gguf.whole_file import write_file, write_with_hole
from primad.network.messages import (
    PICTURE_CHUNK_BYTES,
    EncodedChunk,
    EncodedWanted,
    LoadMmproj,
    MmprojState,
    PictureChunk,
)
from primad.system.niceness import apply_nice
from primad.system.tasks import Tasks, in_thread
from primad.system.wire import encode
from primad.worker.spare import bring_layers, check_room, until_memory_is_short
from primad.worker.stages import NotifyHead

logger = logging.getLogger(__name__)

NICE = 10
"""Layers take precedence over pictures."""
MAX_ENCODERS = 8
"""Maximum number of encoders, each of another model; short memory ends them sooner."""


@dataclass(slots=True)
class _Loading:
    """An encoder that is loaded or being fetched; the picture being received, and the last reply."""

    load: LoadMmproj
    task: asyncio.Task[None] | None = None
    child: EncoderChild | None = None
    file: bytearray = field(default_factory=bytearray)
    reply: bytes = b""
    asked: Tasks = field(default_factory=Tasks)

    @property
    def state(self) -> MmprojState:
        return MmprojState(number=self.load.number, ready=self.child is not None)


class EncodingService:
    """Encodes for the head that ``notify`` reaches; ``number`` returns a number that is unique among this worker's
    loads."""

    def __init__(
        self,
        node: Node,
        *,
        context: zmq.asyncio.Context,
        number: Callable[[], int],
        notify: NotifyHead,
        report_line: ReportLine,
    ) -> None:
        self._node, self._context = node, context
        self._number, self._notify, self._report_line = number, notify, report_line
        self._loadings: dict[int, _Loading] = {}

    async def load(self, load: LoadMmproj, threads: int) -> None:
        """Load the encoder of ``load`` for this number of ``threads``, and notify the head of its state."""
        current = self._loadings.get(load.number)
        if current is None or current.load != load:
            await self.release(load.number)
            if len(self._loadings) >= MAX_ENCODERS:
                await self._notify(MmprojState(number=load.number, ready=False, error="it encodes for other models"))
                return
            current = self._loadings[load.number] = _Loading(load)
            current.task = asyncio.create_task(self._work(current, threads))
        await self._notify(current.state)

    async def take(self, part: PictureChunk) -> None:
        """Receive a part of a picture; encode it after the last one."""
        current = self._ready(part.number)
        if current is None or part.offset not in (0, len(current.file)):
            await self._notify(MmprojState(number=part.number, ready=False, error="its encoder is not loaded here"))
            return
        if not part.offset:
            current.file.clear()
        current.file += part.data
        if len(current.file) < part.size:
            await self._notify(EncodedChunk(number=part.number, picture=part.picture))
        else:
            data = bytes(current.file)
            current.file.clear()
            current.asked.start(self._encode(current, part.picture, data))

    async def give(self, wanted: EncodedWanted) -> None:
        """Send a part of an encoded picture."""
        current = self._ready(wanted.number)
        if current is not None:
            await self._send(current, wanted.picture, wanted.offset)

    async def release(self, number: int) -> None:
        """Release load ``number``."""
        current = self._loadings.pop(number, None)
        if current is not None and current.task is not None:
            await current.asked.close()
            current.task.cancel()
            await asyncio.wait([current.task])

    async def end(self) -> None:
        """Release all encoders."""
        for number in list(self._loadings):
            await self.release(number)

    async def stop(self, why: str) -> None:
        """Stop encoding, and notify the head of ``why``."""
        for number in list(self._loadings):
            await self.release(number)
            await self._stopped(number, why)

    def _ready(self, number: int) -> _Loading | None:
        current = self._loadings.get(number)
        return current if current is not None and current.child else None

    async def _encode(self, current: _Loading, picture: int, data: bytes) -> None:
        assert current.child is not None
        try:
            reply: PictureReply = await current.child.encode(data)
        except PrimadError as exc:
            reply = EncoderFailed(str(exc))
        current.reply = await in_thread(encode, reply)
        await self._send(current, picture, 0)

    async def _send(self, current: _Loading, picture: int, offset: int) -> None:
        size, data = len(current.reply), current.reply[offset : offset + PICTURE_CHUNK_BYTES]
        await self._notify(
            EncodedChunk(number=current.load.number, picture=picture, size=size, offset=min(offset, size), data=data)
        )

    async def _work(self, current: _Loading, threads: int) -> None:
        number = self._number()
        error = "it was stopped"
        try:
            load = await self._fetch(current.load, number, threads)
            current.child = EncoderChild(load, began=self._began)
            self._report_line("encoding images for the head")
            await self._notify(current.state)
            await until_memory_is_short()
        except PrimadError as exc:
            error = str(exc)
        finally:
            if current.child is not None:
                await current.child.close()
            release_files(self._node.workspace, number)
            if self._loadings.get(current.load.number) is current:  # it was not released
                del self._loadings[current.load.number]
                await self._stopped(current.load.number, error)

    async def _stopped(self, number: int, why: str) -> None:
        self._report_line(f"stops encoding images: {why}")
        await self._notify(MmprojState(number=number, ready=False, error=why))

    def _began(self, pid: int) -> None:
        apply_nice(pid, max(self._node.config.nice, NICE))

    async def _fetch(self, load: LoadMmproj, number: int, threads: int) -> LoadEncoder:
        """Fetch the encoder's file and the model without weights. Raises ``PrimadError``."""
        if not load.gpu:
            await check_room(load.memory_bytes)
        await bring_layers(self._node, self._context, number, [load.file], load.sources)
        place = self._node.workspace
        model, encoder = (place.run / f"window-{number}-{each}.gguf" for each in ("seeing", "mmproj"))
        try:
            await in_thread(_write, load, place.cache.path(load.file.digest), model, encoder)
        except OSError as exc:
            raise ClusterError(f"{encoder}: cannot be written: {exc.strerror or exc}; make room there") from exc
        return LoadEncoder(
            path=str(encoder),
            model=str(model),
            threads=threads,
            min_tokens=load.min_tokens,
            max_tokens=load.max_tokens,
            gpu=load.gpu,
        )


def _write(load: LoadMmproj, layer: Path, model: Path, encoder: Path) -> None:
    write_file(load.file, layer, encoder)
    write_with_hole(model, load.metadata, load.hole_bytes)
