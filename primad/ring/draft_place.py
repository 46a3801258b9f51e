"""Where the model of ``--draft`` drafts for this head: in a process next to its ring process, or on another device.

Drafts of another device come through both daemons, over the link that they have anyway, encrypted as everything on it.
Such a device is like a local process a little further away: nothing waits for it, and if it is lost drafting continues
here.
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
    """Runs the draft model, if there is one: in a process of this device, or on another device through the daemon.

    A model that does not draft while the ring computes needs no more drafts than a step has.
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
        """The descriptor that becomes readable when the local draft process sends something."""
        return None if self._link is None else self._link.connection

    def arrived(self, sockets: Collection[object]) -> None:
        """Note that some of the watched descriptors are readable."""
        if self._link is not None and self._link.connection in sockets:
            self._link.receive()

    def move(self, place: DraftPlaceName) -> None:
        """Draft at ``place`` from now on."""
        if self._model is None or self.drafters is None:
            raise RingError("a head without a draft model was given a place for one")
        self.close()
        match place:
            case "here":
                self._link = DraftingLink(self._model, overlaps=self._overlaps, drafters=self.drafters)
            case "elsewhere":
                self.drafters.move(self._ask)
            case "nowhere":
                self.drafters.end()

    def heard(self, drafted: Drafted) -> None:
        """Take drafts of the model on another device."""
        if self.drafters is not None and self._link is None:
            self.drafters.heard(drafted)

    def close(self) -> None:
        """End the draft process, if there is one."""
        if self._link is not None:
            self._link.close()
            self._link = None
