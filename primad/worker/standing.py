"""The states of the worker's stages for its head: one for each stage, and the number of the last change."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from primad.network.messages import Broken, StageState, StageStates

MAX_REFUSED: Final = 8
"""Number of remembered refusals."""


class Standing:
    """The state of each stage, and of refusals until they are released; ``revision`` counts the changes."""

    def __init__(self) -> None:
        self.revision = 0
        self._states: dict[int, StageState] = {}
        self._refused: list[int] = []

    @property
    def epochs(self) -> list[int]:
        """Epochs with a state."""
        return list(self._states)

    def message(self) -> StageStates:
        """Return the message for the head."""
        return StageStates(revision=self.revision, states=list(self._states.values()))

    def is_linked(self, epoch: int) -> bool:
        """Whether the stage in ``epoch`` sends its steps to the next device."""
        return self._states[epoch].linked

    def begin(self, epoch: int) -> None:
        """Add a stage that begins in ``epoch``."""
        self._put(StageState(epoch=epoch, loaded=None, linked=False, broken=None))

    def refuse(self, epoch: int, broken: Broken) -> None:
        """Add a refusal for ``epoch``: no stage starts there."""
        if len(self._refused) >= MAX_REFUSED:
            self.end(self._refused[0])
        self._put(StageState(epoch=epoch, loaded=None, linked=False, broken=broken))
        self._refused.append(epoch)

    def change(self, epoch: int, **changes: Any) -> None:
        """Change the state of the stage in ``epoch``, which has begun and not ended."""
        self._put(msgspec.structs.replace(self._states[epoch], **changes))

    def end(self, epoch: int) -> None:
        """Remove the state of ``epoch``."""
        if self._states.pop(epoch, None) is not None:
            self._refused = [other for other in self._refused if other != epoch]
            self.revision += 1

    def _put(self, state: StageState) -> None:
        self._states[state.epoch] = state
        self.revision += 1
