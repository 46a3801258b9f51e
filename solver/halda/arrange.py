"""Manual windows: turn layers per round into a route."""

from __future__ import annotations

from collections.abc import Sequence

from halda.plan import Infeasible, Plan, Window
from halda.profile import ModelProfile


def arrange(
    devices: Sequence[str],
    layers_per_round: Sequence[int],
    *,
    rounds: int,
    model: ModelProfile,
) -> Plan:
    """Return the plan in which device ``i`` computes ``layers_per_round[i]`` layers in each of ``rounds`` rounds.

    The head (``devices[0]``) also has the tail window with the remaining layers. If these are too few, the head's
    window of the last round gives up some. Raises ``Infeasible`` when the windows do not fit the model.
    """
    assert len(devices) == len(layers_per_round)
    total = len(model.layers)
    if rounds < 1 or min(layers_per_round) < 1:
        raise Infeasible("every window needs at least one layer, and there is at least one round")
    taken = rounds * sum(layers_per_round)
    if taken > total:
        raise Infeasible(
            f"the windows take {taken} layers ({rounds} x {'+'.join(map(str, layers_per_round))}); "
            f"{model.name} has {total}"
        )
    if len(devices) == 1:
        whole = Window(device=devices[0], first=0, last=total, gpu_layers=0)
        return Plan(rounds=1, route=(whole,), output_on_gpu=False, streaming=(), left_out=())
    sizes = [(device, size) for _ in range(rounds) for device, size in zip(devices, layers_per_round, strict=True)]
    tail = total - taken
    if tail < model.tail_layers:
        missing = -(-(model.tail_layers - tail) // model.cut_multiple) * model.cut_multiple
        tail += missing
        last_of_head = (rounds - 1) * len(devices)
        head, size = sizes[last_of_head]
        # A device sends to one next device, so a head between two others keeps a window in every round.
        minimum = 0 if rounds > 1 and len(devices) == 2 else 1
        if size - missing < minimum:
            raise Infeasible(
                f"the windows take {taken if taken < total else f'all {total}'} layers; the tail window on {head} needs "
                f"{tail}: give {head} a larger window or another device a smaller one"
            )
        sizes[last_of_head] = (head, size - missing)
    route, first = [], 0
    for device, size in [*sizes, (devices[0], tail)]:
        if size:
            route.append(Window(device=device, first=first, last=first + size, gpu_layers=0))
            first += size
    _check_cuts(route, model)
    return Plan(rounds=rounds, route=tuple(route), output_on_gpu=False, streaming=(), left_out=())


def _check_cuts(route: Sequence[Window], model: ModelProfile) -> None:
    for window in route:
        if window.first and window.first not in model.cut_points:
            more = f" and {model.cut_offset} more" if model.cut_offset else ""
            raise Infeasible(
                f"a window of {model.architecture} may begin only at a multiple of {model.cut_multiple} layers{more}, "
                f"not at layer {window.first}"
            )
