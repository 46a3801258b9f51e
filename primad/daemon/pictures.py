"""The head's side of its process for pictures: start it with the first one, ask it, start it again after a crash, end it
when nobody has sent one for a while.

What a picture became is kept, so that one in the next turn of a conversation is not encoded again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from primad.engine.pictures.headers import check_sent
from primad.engine.pictures.messages import (
    EncodedPicture,
    EncodePicture,
    EncoderFailed,
    EncoderReady,
    LoadEncoder,
    PictureRefused,
    PictureReply,
    PictureTask,
)
from primad.errors import EngineError, RequestError, RingError
from primad.system.children.asked_child import AskedChild
from primad.system.children.spawn import environment
from primad.system.tasks import Tasks, to_its_end
from primad.system.turn_lock import TurnLock

TIMEOUT_S: Final = 120.0
"""The process is taken to hang when a picture takes longer."""
IDLE_S: Final = 300.0
"""The process ends after so long without a picture."""
KEPT_BYTES: Final = 128 << 20
"""Of what pictures became."""

_CLOSED: Final = "the model is unloaded, or primad is stopping"
_PROCESS: Final = "the process for pictures"
_decoder = msgspec.msgpack.Decoder(PictureReply)
logger = logging.getLogger(__name__)


class PictureService:
    """Encodes pictures for ``model`` with the encoder file ``path``, one at a time, callers in turn.

    ``image_tokens`` are the fewest and the most of a picture (0: as the file says). ``began`` hears of each process.
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
    ) -> None:
        minimum, maximum = image_tokens
        self._load_task = LoadEncoder(
            path=str(path), model=str(model), threads=threads, min_tokens=minimum, max_tokens=maximum
        )
        self._began, self._timeout_s, self._idle_s, self._room = began, timeout_s, idle_s, kept_bytes
        self._child: AskedChild | None = None
        self._kept = OrderedDict[str, EncodedPicture]()
        self._turn = TurnLock()
        self._ending: asyncio.TimerHandle | None = None
        self._tasks = Tasks()
        self._closed = False
        self._reported: set[str] = set()
        """What the encoder failed with, which the owner is told once."""
        self.starts = self.encoded = 0

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return None if self._child is None else self._child.pid

    async def encode(self, data: bytes, called: str, owner: str = "") -> EncodedPicture:
        """What the file ``data`` becomes, which its request, of ``owner``, has ``called`` so.

        Raises ``RequestError`` for one that is no picture or too large a one, ``EngineError`` where the encoder cannot be
        loaded, ``RingError`` when its process ended or hung; the next picture starts it again.
        """
        check_sent(data, called)  # of the header alone, so that no process is asked, nor started, for nothing
        digest = hashlib.sha256(data).hexdigest()
        if (found := self._found(digest)) is not None:
            return found
        async with self._turn.held(owner):
            if (found := self._found(digest)) is not None:  # encoded meanwhile
                return found
            if self._closed:
                raise RingError(_CLOSED)
            reply = await to_its_end(self._encoded(data))  # one whose client left costs others no process
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
        if self._child is None or not self._child.is_alive:
            await self._load()
        reply = await self._ask(EncodePicture(data))
        self._ending = asyncio.get_running_loop().call_later(self._idle_s, lambda: self._tasks.start(self._end_idle()))
        if isinstance(reply, EncodedPicture):
            self.encoded += 1
            self._keep(reply)
        assert isinstance(reply, EncodedPicture | PictureRefused)
        return reply

    async def _end_idle(self) -> None:
        if not self._turn.is_held:
            await self._end()

    def _keep(self, picture: EncodedPicture) -> None:
        self._kept[picture.digest] = picture
        while self._kept and sum(each.content_bytes for each in self._kept.values()) > self._room:
            self._kept.popitem(last=False)

    async def close(self) -> None:
        """End the process, whatever it does, for good."""
        self._closed = True
        if self._ending is not None:
            self._ending.cancel()
        await self._tasks.close()
        await self._end()
        async with self._turn.held(""):  # one that had just begun to start it
            await self._end()

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end()

    async def _load(self) -> None:
        await self._end()
        variables = environment({"OMP_PROC_BIND": "false"} | os.environ, self._load_task.threads, 0)
        self._child = await AskedChild.start("primad.engine.pictures.process", variables, _PROCESS)
        if self._closed:
            await self._end()
            raise RingError(_CLOSED)
        self.starts += 1
        self._began(self._child.pid)
        assert isinstance(await self._ask(self._load_task), EncoderReady)

    async def _ask(self, task: PictureTask) -> PictureReply:
        """Whoever fails before the reply is there ends the process too: the reply would be taken for another's."""
        assert self._child is not None
        try:
            reply: PictureReply = _decoder.decode(await self._child.answer(task, _PROCESS, self._timeout_s))
        except BaseException:
            await self._end()
            raise
        if isinstance(reply, EncoderFailed):
            await self._end()
            if reply.error not in self._reported:
                self._reported.add(reply.error)
                logger.warning("%s: %s", self._load_task.path, reply.error)
            raise EngineError(reply.error)
        return reply
