"""Runs the encoder of pictures on another device, where the plan has it there.

The device fetches the encoder's file like layers, while this device encodes. Then pictures go to it over the control
link in parts, and their embeddings come back. If it is lost, paused, short of memory or fails, this device encodes
until the other can again. An encoded picture is kept with its request, so the text of a response does not depend on
where its pictures were encoded.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Final

import msgspec

from primad.daemon.encoder_child import TIMEOUT_S
from primad.engine.pictures.checks import check_encoded
from primad.engine.pictures.messages import EncodedPicture, EncoderFailed, PictureRefused, PictureReply
from primad.errors import ClusterError, PrimadError, ProtocolError, printable
from primad.gguf.layers import LayerCut
from primad.gguf.whole_file import cut_file, without_weights
from primad.gguf.windows import vocabulary_size
from primad.head.members.worker_link import WorkerLink
from primad.head.model.service import Service
from primad.network.contacts import Contact
from primad.network.messages import (
    MAX_MESSAGE_BYTES,
    PICTURE_CHUNK_BYTES,
    EncodedChunk,
    EncodedWanted,
    LoadMmproj,
    MmprojState,
    PictureChunk,
    ReleaseMmproj,
)
from primad.planning.encoder_place import PICTURE_BYTES, EncoderPlace
from primad.system.tasks import Tasks, in_thread
from primad.system.wire import decoded

logger = logging.getLogger(__name__)

AGAIN_S: Final = (30.0, 600.0)
"""Pause before a device that failed is asked again: the first one, and the longest. A device that reconnects is asked
immediately."""
REPLY_S: Final = 20.0
"""Timeout for the reply to a part; for the last part of a picture the time of encoding is added."""
MAX_TIMES: Final = 10
"""A picture whose file is no larger than the plan's may take this many times the planned time; then this device encodes
it."""
_MORE_BYTES: Final = 1 << 20
"""Bytes reserved in a message for everything but a model's metadata."""
_numbers = count(1)
_decoder = msgspec.msgpack.Decoder(PictureReply)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInputs:
    """What the encoder of ``service`` needs of its rings: its ``place`` in the plan; ``find``, which returns a device
    by name if it may be used; ``sources`` of layers for a device; the name of this device; and a reporter of lines for
    the owner."""

    service: Service
    place: Callable[[], EncoderPlace | None]
    find: Callable[[str], WorkerLink | None]
    sources: Callable[[WorkerLink], Awaitable[list[Contact]]]
    own: str
    report_line: Callable[[str], None]


class RemoteEncoder:
    """Implements ``EncodesElsewhere`` with the device of ``inputs``."""

    def __init__(self, inputs: EncoderInputs) -> None:
        self._inputs = inputs
        self._session: _Session | None = None
        self._failed: WorkerLink | None = None
        self._not_before_s = 0.0
        self._pause_s = AGAIN_S[0]
        self._cut: LayerCut | None = None
        self._tasks = Tasks()

    @property
    def own_gpu(self) -> str:
        """As in ``EncodesElsewhere``."""
        place = self._inputs.place()
        return place.gpu if place is not None and place.device == self._inputs.own else ""

    @property
    def device(self) -> str | None:
        """The device that encodes now; None: this one."""
        return self._session.worker.name if self._session is not None and self._session.is_ready else None

    def find_layer(self, digest: str) -> LayerCut | None:
        """Return the encoder's file, if ``digest`` is its digest."""
        return self._cut if self._cut is not None and self._cut.ref().digest == digest else None

    async def encode(self, data: bytes) -> EncodedPicture | PictureRefused | None:
        """Return the encoding of the file ``data`` by the other device; None while that is not ready. Raises
        ``PrimadError``."""
        await self.follow_plan()
        wanted, session = self._wanted(), self._session
        if session is None:
            if wanted is not None and self._may_ask(wanted[0]):
                self._session = _Session(*wanted, self._inputs.service)
                self._tasks.start(self._load(self._session))
            return None
        if not session.is_ready:
            return None
        try:
            found = await session.encode(data)
        except PrimadError as exc:
            if self._session is session:  # it was not ended meanwhile
                await self._lose(session, str(exc))
            raise ClusterError(f"{session.worker.name}: {exc}") from exc
        self._failed = None
        return found

    async def follow_plan(self) -> None:
        """End the session with a device that is not to encode any more, after a new plan or a pause, so that it holds
        nothing."""
        session, wanted = self._session, self._wanted()
        if session is None:
            return
        if wanted is None or (session.worker, session.gpu) != (wanted[0], wanted[1].gpu):
            await self.end()

    async def end(self) -> None:
        """End the session; a picture that is being encoded fails."""
        await self._tasks.close()
        session, self._session = self._session, None
        if session is not None:
            session.lost("it is not needed any more")
            await session.end()

    def _wanted(self) -> tuple[WorkerLink, EncoderPlace] | None:
        """Return the device that is to encode, and the encoder's place on it; None: this device, or the other cannot be
        used."""
        place = self._inputs.place()
        if place is None or place.device == self._inputs.own:
            return None
        worker = self._inputs.find(place.device)
        return None if worker is None else (worker, place)

    def _may_ask(self, worker: WorkerLink) -> bool:
        return self._failed is not worker or asyncio.get_running_loop().time() >= self._not_before_s

    async def _load(self, session: _Session) -> None:
        inputs = self._inputs
        try:
            await session.load(await self._message(session), await inputs.sources(session.worker))
        except PrimadError as exc:
            await self._lose(session, str(exc))
        else:
            inputs.report_line(f"{session.worker.name} encodes images")

    async def _message(self, session: _Session) -> LoadMmproj:
        service = self._inputs.service
        path, (minimum, maximum) = service.encoder.path, service.options.image_tokens
        assert path is not None
        if self._cut is None:
            self._cut = await in_thread(lambda: cut_file(path).hashed())
        metadata, hole_bytes = await in_thread(without_weights, service.model.header)
        if len(metadata) > MAX_MESSAGE_BYTES - _MORE_BYTES:
            raise ClusterError("the model's tokens are too many to send")
        return LoadMmproj(
            number=session.number,
            file=self._cut.ref(),
            metadata=metadata,
            hole_bytes=hole_bytes,
            gpu=session.gpu,
            memory_bytes=service.encoder.memory_bytes,
            sources=[],
            min_tokens=minimum,
            max_tokens=maximum,
        )

    async def _lose(self, session: _Session, why: str) -> None:
        self._pause_s = min(2 * self._pause_s, AGAIN_S[1]) if self._failed is session.worker else AGAIN_S[0]
        self._failed, self._not_before_s = session.worker, asyncio.get_running_loop().time() + self._pause_s
        if self._session is session:
            self._session = None
        await session.end()
        self._inputs.report_line(f"{session.worker.name} does not encode images: {why}; this device does")


class _Session:
    """One load of the encoder on ``worker``."""

    def __init__(self, worker: WorkerLink, place: EncoderPlace, service: Service) -> None:
        self.worker, self.gpu, self.number = worker, place.gpu, next(_numbers)
        self._usual_s = min(TIMEOUT_S, MAX_TIMES * place.picture_s or TIMEOUT_S)
        self._width, self._vocabulary = service.model.profile.width, vocabulary_size(service.model.header)
        self._pictures = count(1)
        self._picture = 0
        self._heard = asyncio.Event()
        self._chunks = list[EncodedChunk]()
        self._error = ""
        self.is_ready = False

    def hear(self, message: MmprojState | EncodedChunk) -> None:
        """Handle a message of the device."""
        if isinstance(message, MmprojState):
            self.is_ready, self._error = message.ready and not message.error, message.error
        elif message.picture == self._picture:
            self._chunks.append(message)
        self._heard.set()

    def lost(self, reason: str) -> None:
        """The device is gone, or may have lost its load."""
        self.is_ready, self._error = False, self._error or reason
        self._heard.set()

    async def load(self, message: LoadMmproj, sources: list[Contact]) -> None:
        """Have the device load what ``message`` describes, and wait until it is ready. Raises ``PrimadError``."""
        self.worker.encodes_for(self)
        await self.worker.send(msgspec.structs.replace(message, sources=sources))
        await self._next(REPLY_S)  # an older version does not reply
        while not self.is_ready:
            await self._next(None)

    async def encode(self, data: bytes) -> EncodedPicture | PictureRefused:
        """Return the encoding of the file ``data``. Raises ``PrimadError``."""
        self._picture = next(self._pictures)
        reply, size = EncodedChunk(number=0, picture=0), len(data)
        is_usual = self._picture > 1 and size <= PICTURE_BYTES  # the first one waits for the encoder's weights
        encoding_s = self._usual_s if is_usual else TIMEOUT_S
        for offset in range(0, size, PICTURE_CHUNK_BYTES):
            part = data[offset : offset + PICTURE_CHUNK_BYTES]
            is_last = offset + len(part) == size
            reply = await self._ask(
                PictureChunk(number=self.number, picture=self._picture, size=size, offset=offset, data=part),
                encoding_s + REPLY_S if is_last else REPLY_S,
            )
        found = bytearray(reply.data)
        while len(found) < reply.size:
            wanted = EncodedWanted(number=self.number, picture=self._picture, offset=len(found))
            part_of = await self._ask(wanted, REPLY_S)
            if (part_of.size, part_of.offset) != (reply.size, len(found)) or not part_of.data:
                raise ProtocolError("it sent a different part of an image's embeddings than requested")
            found += part_of.data
        return await in_thread(self._checked, bytes(found), data)

    def _checked(self, found: bytes, data: bytes) -> EncodedPicture | PictureRefused:
        reply: PictureReply = decoded(_decoder, found, "an encoded image")
        match reply:
            case EncodedPicture():
                digest = hashlib.sha256(data).hexdigest()
                check_encoded(reply, digest, width=self._width, vocabulary=self._vocabulary)
                return reply
            case PictureRefused(error):
                return PictureRefused(printable(error))
            case EncoderFailed(error):
                raise ClusterError(printable(error))
            case _:
                raise ProtocolError("it sent something other than an encoded image")

    async def _ask(self, message: PictureChunk | EncodedWanted, timeout_s: float) -> EncodedChunk:
        self._chunks.clear()
        await self.worker.send(message)
        while not self._chunks:
            await self._next(timeout_s)
        return self._chunks[-1]

    async def _next(self, timeout_s: float | None) -> None:
        """Wait for the next message. Raises ``ClusterError``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._heard.wait()
        except TimeoutError:
            raise ClusterError(f"it did not reply within {timeout_s:g} s") from None
        self._heard.clear()
        if self._error:
            raise ClusterError(self._error)

    async def end(self) -> None:
        """Tell the device that it need not encode any more."""
        self.worker.forget_encoding(self)
        try:
            await self.worker.send(ReleaseMmproj(number=self.number))
        except ClusterError:
            logger.debug("%s is gone and encodes no more", self.worker.name)
