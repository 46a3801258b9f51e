"""What the head wants of one worker: for each thing the message that asks for it.

=====================  ======================  ===============================  ==================================
wanted                 asked for by            until                            a worker that has it
=====================  ======================  ===============================  ==================================
trust in other devices ``Introduce``           another list replaces it         takes the same list
a stage in an epoch    ``Load``, then ``Link`` it is released                   keeps it: loading, linked or broken
                       or ``LinkGroup``
no stage in an epoch   ``Release``             ``StageStates`` come without it  does nothing
its links, measured    ``MeasureLinks``        ``LinksMeasured`` comes          continues to measure the same links
a draft model          ``LoadDraft``           it is released                   keeps it, and reports its state
no draft model         ``ReleaseDraft``        another one is wanted            does nothing
its end                ``Dismiss``             the link is closed               does nothing
=====================  ======================  ===============================  ==================================

Messages are lost only with a connection that is reset (see ``network/messages.py``). So the head sends the whole table
once when the connection was made again, after what it could not send meanwhile, and otherwise nothing twice.
"""

from __future__ import annotations

from collections.abc import Collection

from primad.network.messages import (
    Dismiss,
    HeadMessage,
    Introduce,
    Link,
    LinkGroup,
    Load,
    LoadDraft,
    MeasureLinks,
    Release,
    ReleaseDraft,
)

Wish = Introduce | Load | Link | LinkGroup | Release | MeasureLinks | LoadDraft | ReleaseDraft | Dismiss


class WantedState:
    """The table. Times are numbers of pings: ``next_ping`` is sent after what was asked so far."""

    def __init__(self) -> None:
        self._asked: dict[int | type[Wish], Wish] = {}
        """By the epoch, or by the kind of message."""
        self._unseen: dict[int, tuple[int, bool]] = {}
        """Epochs with a ``Load`` that no state has shown yet: the ping whose reply should, and whether one did not."""

    def ask(self, message: HeadMessage, next_ping: int) -> None:
        """``message`` is sent now."""
        match message:
            case Load(epoch=epoch) | Link(epoch=epoch) | LinkGroup(epoch=epoch) | Release(epoch=epoch):
                self._asked[epoch] = message
                self._unseen.pop(epoch, None)
                if isinstance(message, Load):
                    self._unseen[epoch] = next_ping, False
            case ReleaseDraft(epoch=epoch):
                asked = self._asked.get(LoadDraft)
                if not isinstance(asked, LoadDraft) or asked.epoch == epoch:  # another ring's is wanted still
                    self._asked[LoadDraft] = message
            case Introduce() | MeasureLinks() | LoadDraft() | Dismiss():
                self._asked[type(message)] = message

    def measured(self) -> None:
        """Links need not be measured any more."""
        self._asked.pop(MeasureLinks, None)

    def ask_again(self, next_ping: int) -> list[Wish]:
        """The connection was made again: all of it is sent now, in this order."""
        self._unseen = dict.fromkeys(self._unseen, (next_ping, False))
        return list(self._asked.values())

    def compare(self, epochs: Collection[int]) -> list[Release]:
        """The worker has stages in these ``epochs``: those to release, since nobody wants them."""
        for epoch in epochs:
            self._unseen.pop(epoch, None)
        released = [asked.epoch for asked in self._asked.values() if isinstance(asked, Release)]
        for epoch in set(released).difference(epochs):
            del self._asked[epoch]
        return [Release(epoch=epoch) for epoch in epochs if epoch not in self._asked]

    def ignored(self, number: int, next_ping: int) -> list[int]:
        """Ping ``number`` was answered in the states that were compared last: epochs whose ``Load`` began no stage.

        It takes the reply to one more ping: the first may overtake the news that the connection was made again.
        """
        late = {epoch: missed for epoch, (ping, missed) in self._unseen.items() if number >= ping}
        for epoch, missed in late.items():
            if missed:
                del self._unseen[epoch]
            else:
                self._unseen[epoch] = next_ping, True
        return [epoch for epoch, missed in late.items() if missed]
