"""The head's pictures: each is encoded once, by the device that the plan names or otherwise by this one, and kept.

Encoded pictures are kept, so that the next turn of a conversation does not encode its pictures again. The process for
pictures ends after a while without any.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from primad.daemon.encoder_child import CLOSED, TIMEOUT_S, EncoderChild
from primad.engine.pictures.headers import check_sent
from primad.engine.pictures.messages import EncodedPicture, LoadEncoder, PictureRefused
from primad.errors import PrimadError, RequestError, RingError
from primad.system.children.asked_child import twice
from primad.system.tasks import Tasks, to_its_end
from primad.system.turn_lock import TurnLock

IDLE_S: Final = 300.0
"""The process ends after this time without a picture."""
KEPT_BYTES: Final = 128 << 20
"""Maximum bytes of encoded pictures that are kept."""
logger = logging.getLogger(__name__)


class EncodesElsewhere(Protocol):
    """Another device that may encode."""

    @property
    def own_gpu(self) -> str:
        """The GPU on which this device is to encode; empty: on its processor."""

    @property
    def device(self) -> str | None:
        """The device that encodes now; None: this one."""

    async def encode(self, data: bytes) -> EncodedPicture | PictureRefused | None:
        """Return the encoding of the file ``data``; None if no other device encodes. Raises ``PrimadError`` if one
        failed."""

    async def end(self) -> None:
        """Stop encoding for now."""


class _Here:
    own_gpu, device = "", None

    async def encode(self, _: bytes) -> None:
        return None

    async def end(self) -> None:
        pass


class PictureService:
    """Encodes pictures for ``model`` with the encoder file ``path``, one at a time, callers in turn.

    ``image_tokens`` are the minimum and maximum of tokens per picture (0: as the file says). ``began`` gets the id of
    each process. Pictures are encoded here if another device, ``elsewhere``, cannot encode them.
    """

    def __init__(
        self,
        path: Path,
        model: Path,
        *,
        threads: int,
        image_tokens: tuple[int, int] = (0, 0),
        began: Callable[[int], None] = lambda _: None,
        timeout_s: float = TIMEOUT_S,
        idle_s: float = IDLE_S,
        kept_bytes: int = KEPT_BYTES,
        elsewhere: EncodesElsewhere | None = None,
    ) -> None:
        minimum, maximum = image_tokens
        load = LoadEncoder(path=str(path), model=str(model), threads=threads, min_tokens=minimum, max_tokens=maximum)
        self._child = EncoderChild(load, began=began, timeout_s=timeout_s)
        self._elsewhere: EncodesElsewhere = elsewhere or _Here()
        self._idle_s, self._room = idle_s, kept_bytes
        self._kept = OrderedDict[str, EncodedPicture]()
        self._turn = TurnLock()
        self._ending: asyncio.TimerHandle | None = None
        self._tasks = Tasks()
        self._closed = self._distrusts_gpu = False
        self.encoded = self.encoded_elsewhere = 0

    @property
    def pid(self) -> int | None:
        """The process id, while there is a process."""
        return self._child.pid

    @property
    def starts(self) -> int:
        """Number of processes started so far."""
        return self._child.starts

    def status(self) -> dict[str, Any]:
        """For ``/status``: which device encodes now, and how many pictures were encoded, here and by other devices."""
        return {
            "device": self._elsewhere.device,
            "alive": self.pid is not None,
            "encoded": self.encoded,
            "encoded_elsewhere": self.encoded_elsewhere,
        }

    async def encode(self, data: bytes, called: str, owner: str = "") -> EncodedPicture:
        """Encode the file ``data``, which its request, of ``owner``, calls ``called``.

        Raises ``RequestError`` if it is not a picture or too large, ``EngineError`` if the encoder cannot be loaded,
        ``RingError`` if its process ended twice or hung; the next picture starts it again.
        """
        check_sent(data, called)  # checks the header only, so that no process is asked or started in vain
        digest = hashlib.sha256(data).hexdigest()
        if (found := self._found(digest)) is not None:
            return found
        async with self._turn.held(owner):
            if (found := self._found(digest)) is not None:  # encoded meanwhile
                return found
            if self._closed:
                raise RingError(CLOSED)
            reply = await to_its_end(self._encoded(data))  # a client that leaves must not cost others the process
            if isinstance(reply, PictureRefused):
                raise RequestError(f"{called}: {reply.error}", param=called)
            return reply

    def _found(self, digest: str) -> EncodedPicture | None:
        if digest in self._kept:
            self._kept.move_to_end(digest)
        return self._kept.get(digest)

    async def _encoded(self, data: bytes) -> EncodedPicture | PictureRefused:
        if self._ending is not None:
            self._ending.cancel()
        reply = await self._by_another(data)
        if reply is None:
            reply = await self._here(data)
        self._ending = asyncio.get_running_loop().call_later(self._idle_s, lambda: self._tasks.start(self._end_idle()))
        if isinstance(reply, EncodedPicture):
            self.encoded += 1
            self._keep(reply)
        return reply

    async def _by_another(self, data: bytes) -> EncodedPicture | PictureRefused | None:
        try:
            reply = await self._elsewhere.encode(data)
        except PrimadError as exc:
            logger.warning("an image is encoded here: %s", exc)
            return None
        self.encoded_elsewhere += isinstance(reply, EncodedPicture)
        return reply

    async def _here(self, data: bytes) -> EncodedPicture | PictureRefused:
        """Encode on this device, on its processor if its GPU failed before."""
        gpu = "" if self._distrusts_gpu else self._elsewhere.own_gpu
        if gpu != self._child.load.gpu:
            await self._child.end()
            self._child.load = msgspec.structs.replace(self._child.load, gpu=gpu)
        try:
            return await twice(partial(self._child.encode, data))
        except PrimadError as exc:
            if not gpu or self._closed:
                raise
            logger.warning("images are encoded on the CPU from now on: %s", exc)
            self._distrusts_gpu = True
            return await self._here(data)

    async def _end_idle(self) -> None:
        if not self._turn.is_held:
            await self._elsewhere.end()
            await self._child.end()

    def _keep(self, picture: EncodedPicture) -> None:
        self._kept[picture.digest] = picture
        while self._kept and sum(each.content_bytes for each in self._kept.values()) > self._room:
            self._kept.popitem(last=False)

    async def close(self) -> None:
        """End the process for good, whatever it is doing."""
        self._closed = True
        if self._ending is not None:
            self._ending.cancel()
        await self._tasks.close()
        await self._elsewhere.end()
        await self._child.close()
        async with self._turn.held(""):  # a request that had just begun to start it
            await self._child.close()
