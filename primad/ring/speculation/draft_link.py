"""The head's side of the draft process. Nothing ever waits for it, and no request needs it.

If it ends, hangs or cannot be started, its tokens are not drafted; nothing else changes.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from typing import IO

import msgspec

from primad.errors import ProtocolError
from primad.ring.speculation.draft_model import ModelDrafters
from primad.ring.speculation.messages import MAX_UNREPORTED_BYTES, Drafted, DraftModel, DraftTask
from primad.system.children.channel import RingChannel, frame
from primad.system.children.child import begin_child
from primad.system.gpus import NO_GPU

logger = logging.getLogger(__name__)


class DraftingLink:
    """A draft process with ``model``, and the ``drafters`` that get its drafts: new ones, unless some are given.

    Unless its work ``overlaps`` with the ring's, it gets no tasks while the ring computes.
    """

    def __init__(self, model: DraftModel, *, overlaps: bool = True, drafters: ModelDrafters | None = None) -> None:
        self.drafters = drafters or ModelDrafters(self._notify, overlaps=overlaps)
        self._process: subprocess.Popen[bytes] | None = None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._unreported = bytearray()
        self._channel: RingChannel[Drafted] = RingChannel(ours, msgspec.msgpack.Decoder(Drafted))
        try:
            with theirs:
                self._process = begin_drafting(theirs, None)
        except OSError as exc:
            self._end(f"cannot be started: {exc.strerror or exc}")
        self._notify(model)
        if drafters is not None and self._channel.is_open:
            drafters.move(self._notify)

    @property
    def connection(self) -> int | None:
        """The descriptor that becomes readable when the process sends something; None when it is gone."""
        return self._channel.connection.fileno() if self._channel.is_open else None

    def _notify(self, task: DraftTask) -> None:
        if not self._channel.is_open:
            return
        self._unreported += frame(task)
        try:
            del self._unreported[: self._channel.connection.send(self._unreported)]
        except BlockingIOError:
            if len(self._unreported) > MAX_UNREPORTED_BYTES:
                self._end("accepts nothing more")
        except OSError:
            self._end("ended")

    def receive(self) -> None:
        """Read its messages; call this when ``connection`` is readable."""
        try:
            heard = self._channel.commands()
        except ProtocolError as exc:
            self._end(f"sent an invalid message: {exc}")
            return
        if heard:
            self.drafters.heard(heard[-1])  # the last message has all drafts
        if not self._channel.is_open:
            self._end("ended")

    def _end(self, why: str) -> None:
        self._channel.is_open = False
        self.drafters.end()
        logger.warning("the draft process %s; requests continue without it", why)
        self.close()

    def close(self) -> None:
        """End the process, which has nothing to clean up."""
        self._channel.is_open = False
        self._channel.connection.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def begin_drafting(theirs: socket.socket, errors: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """Start the draft process, as ``begin_child`` does: without a GPU, and not bound to cores, which a ring may
    have."""
    variables = {**os.environ, **NO_GPU, "OMP_PROC_BIND": "false"}
    return begin_child("primad.ring.speculation.process", theirs, variables, errors)
