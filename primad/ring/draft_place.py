"""Where the model of ``--draft`` drafts for this head: in a process beside its ring process, or on another device.

What another device drafts comes through the daemons of both, over the link that they have anyway, encrypted as all else on
it. It is as good as a process of this device a little further away: nobody waits for it, and where it is lost the drafting
goes on here.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import structs

from primad.errors import RingError
from primad.ring.messages import DraftPlaceName, HeadPart, RequestDrafts, RingCommand
from primad.ring.speculation.draft_link import DraftingLink
from primad.ring.speculation.draft_model import ModelDrafters
from primad.ring.speculation.messages import Drafted, TextTask
from primad.system.children.channel import RingChannel


class DraftPlace:
    """Where the model drafts, if there is one: in a process of this one, or on a device that is reached through the daemon.

    If it does not while the ring computes, it has no use for more drafts than a step has.
    """

    def __init__(self, part: HeadPart, channel: RingChannel[RingCommand]) -> None:
        self._channel = channel
        drafting = part.drafting
        self._model, self._overlaps = part.draft, drafting is None or drafting.overlaps
        if self._model is not None and drafting is not None and not self._overlaps:
            self._model = structs.replace(self._model, maximum=max(1, drafting.rows - 1))
        self._link: DraftingLink | None = None
        self.drafters: ModelDrafters | None = None
        if self._model is None:
            return
        if part.drafts_elsewhere:
            self.drafters = ModelDrafters(self._ask, overlaps=self._overlaps)
            self.drafters.end()  # until it is ready
        else:
            self._link = DraftingLink(self._model, overlaps=self._overlaps)
            self.drafters = self._link.drafters

    def _ask(self, task: TextTask) -> None:
        self._channel.notify(RequestDrafts(task))

    @property
    def connection(self) -> int | None:
        """What is readable when the process of this one has something to say."""
        return None if self._link is None else self._link.connection

    def arrived(self, sockets: Collection[object]) -> None:
        """Some of what is watched is readable."""
        if self._link is not None and self._link.connection in sockets:
            self._link.receive()

    def move(self, place: DraftPlaceName) -> None:
        """From now on it drafts there."""
        if self._model is None or self.drafters is None:
            raise RingError("a head without a draft model was told where that is")
        self.close()
        match place:
            case "here":
                self._link = DraftingLink(self._model, overlaps=self._overlaps, drafters=self.drafters)
            case "elsewhere":
                self.drafters.move(self._ask)
            case "nowhere":
                self.drafters.end()

    def heard(self, drafted: Drafted) -> None:
        """The device elsewhere drafts so."""
        if self.drafters is not None and self._link is None:
            self.drafters.heard(drafted)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._link is not None:
            self._link.close()
            self._link = None
