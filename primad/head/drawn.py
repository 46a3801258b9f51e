"""What workers say of the layers that they fetched from a hub, which nobody had fetched before."""

from __future__ import annotations

from collections.abc import Mapping

from primad.errors import ModelError
from primad.gguf.ranged_cutter import RangedCutter
from primad.head.blame import ParticipationError
from primad.head.members.participation import Participation


def learn_drawn(cutter: RangedCutter | None, workers: Mapping[str, Participation]) -> None:
    """Know from now on by their digests the layers that ``workers`` fetched.

    Raises ``ParticipationError`` for one that says another thing of a layer than was known of it.
    """
    if cutter is None:
        return
    for name, worker in workers.items():
        for each in worker.drawn:
            try:
                known = cutter.learn(each.name, each.tree)
            except ModelError as exc:
                raise ParticipationError(f"{name}: {exc}", name, "fetch") from exc
            if known is not None:
                raise ParticipationError(
                    f"{name}: fetched other bytes for layer {known[:12]} than another device did, so one of the two was not "
                    "given what the hub has; 'primad rm' the model here and serve it anew",
                    name,
                    "fetch",
                )
