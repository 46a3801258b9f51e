"""What the head wants of one worker, and the message that asks for each thing.

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

Messages are lost only with a connection that is reset (see ``network/messages.py``). So after a reconnection the head
sends the whole table once, after the messages that it could not send meanwhile, and otherwise sends nothing twice.
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
    """The table. Times are numbers of pings: ping ``next_ping`` is sent after everything asked so far."""

    def __init__(self) -> None:
        self._asked: dict[int | type[Wish], Wish] = {}
        """By the epoch, or by the kind of message."""
        self._unseen: dict[int, tuple[int, bool]] = {}
        """Epochs with a ``Load`` that no state has shown yet: the ping whose reply should show it, and whether a reply
        failed to."""

    def ask(self, message: HeadMessage, next_ping: int) -> None:
        """Record ``message``, which is being sent."""
        match message:
            case Load(epoch=epoch) | Link(epoch=epoch) | LinkGroup(epoch=epoch) | Release(epoch=epoch):
                self._asked[epoch] = message
                self._unseen.pop(epoch, None)
                if isinstance(message, Load):
                    self._unseen[epoch] = next_ping, False
            case ReleaseDraft(epoch=epoch):
                asked = self._asked.get(LoadDraft)
                if not isinstance(asked, LoadDraft) or asked.epoch == epoch:  # else another ring's is wanted
                    self._asked[LoadDraft] = message
            case Introduce() | MeasureLinks() | LoadDraft() | Dismiss():
                self._asked[type(message)] = message

    def measured(self) -> None:
        """Links need not be measured any more."""
        self._asked.pop(MeasureLinks, None)

    def ask_again(self, next_ping: int) -> list[Wish]:
        """Return all messages, in their order; they are sent now, as the connection was made again."""
        self._unseen = dict.fromkeys(self._unseen, (next_ping, False))
        return list(self._asked.values())

    def compare(self, epochs: Collection[int]) -> list[Release]:
        """Return the releases for stages that are not wanted, of a worker that has stages in ``epochs``."""
        for epoch in epochs:
            self._unseen.pop(epoch, None)
        released = [asked.epoch for asked in self._asked.values() if isinstance(asked, Release)]
        for epoch in set(released).difference(epochs):
            del self._asked[epoch]
        return [Release(epoch=epoch) for epoch in epochs if epoch not in self._asked]

    def ignored(self, number: int, next_ping: int) -> list[int]:
        """Return the epochs whose ``Load`` began no stage; the states compared last replied to ping ``number``.

        An epoch is only reported after the reply to one more ping: the first reply may overtake the news of a
        reconnection.
        """
        late = {epoch: missed for epoch, (ping, missed) in self._unseen.items() if number >= ping}
        for epoch, missed in late.items():
            if missed:
                del self._unseen[epoch]
            else:
                self._unseen[epoch] = next_ping, True
        return [epoch for epoch, missed in late.items() if missed]
