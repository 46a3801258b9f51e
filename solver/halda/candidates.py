"""Plans that are quick to make: what a search begins with, and which numbers of rounds it looks at first.

Where layers differ and stream, the program of one number of rounds alone may take all the time there is. So for each number
of rounds k some rings get windows in simple proportions (equal, by memory, by speed), as many layers on GPUs as fit, and as
little streaming as they need. The best numbers of rounds are then improved layer by layer. All of them have equal rounds and
a tail, as the programs' plans have: a search that proves its answer the best proves it against the same plans.

Rounds serve streaming only, and more of them take more memory. So where nothing streams in the best ring of one round, no
more rounds are tried, nor where nothing fits in one round or two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from halda.arrange import apportion, arrange
from halda.evaluate import Objective, evaluate, residency
from halda.instance import Instance
from halda.orders import good_order
from halda.plan import Plan

_TRIALS: Final = 300
"""Most plans that are evaluated for their proportions, so that many devices and layers take no longer than some tenths of a
second; as many again at most for improving the best."""
_IMPROVED: Final = 3
_RINGS: Final = 2
"""Rings that are tried with more than two rounds."""
_ALL_MOVES: Final = 4
"""Members up to which layers are moved from any to any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that holds all limits, and the seconds of the objective."""

    value_s: float
    plan: Plan


class _Shape(NamedTuple):
    """Members in ring order, the head first, and how many blocks (layers that no window may divide) each has in a round."""

    rounds: int
    ring: tuple[int, ...]
    blocks: tuple[int, ...]


class _Rank(NamedTuple):
    """What makes one plan better than another: first what it is short of, then the objective."""

    short_bytes: int
    value_s: float


_NEVER: Final = _Rank(1 << 62, float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """A plan with its rank; ``busy_s`` is the longer of windows and disk of each member, in ring order."""

    rank: _Rank
    plan: Plan
    busy_s: tuple[float, ...]


def candidates(instance: Instance, objective: Objective, required: frozenset[int]) -> list[Candidate]:
    """The best plan found for each number of rounds, the best of all first. Members ``required`` take part in all."""
    trials = _Trials(instance, objective)
    rings = _rings(instance, required)
    for rounds in range(1, trials.blocks // 2 + 1):
        if rounds == 2 and not trials.streams():
            break
        if rounds == 3:
            if not trials.any_fits():
                break
            rings = trials.best_rings(_RINGS)
        for ring in rings:
            for blocks in _proportions(instance, ring, trials.blocks, rounds):
                if trials.made < _TRIALS:
                    trials.rank(_Shape(rounds, ring, blocks))
    if trials.streams():
        for shape in trials.best()[:_IMPROVED]:
            _improve(trials, shape)
    found = [(trials.rank(shape), trials.plan(shape)) for shape in trials.best()]
    return [Candidate(value_s=rank.value_s, plan=plan) for rank, plan in found if not rank.short_bytes]


class _Trials:
    """What was tried, each plan evaluated once."""

    def __init__(self, instance: Instance, objective: Objective) -> None:
        model = instance.model
        self._instance = instance
        self._objective: Objective = objective
        self.blocks = (len(model.layers) - 1) // model.cut_multiple
        """Blocks that rounds may have in all: the tail has at least a layer."""
        self._tried: dict[_Shape, _Tried | None] = {}

    @property
    def made(self) -> int:
        """How many plans were evaluated."""
        return len(self._tried)

    def rank(self, shape: _Shape) -> _Rank:
        """How good the plan of this shape is."""
        if shape not in self._tried:
            self._tried[shape] = self._made(shape)
        found = self._tried[shape]
        return found.rank if found is not None else _NEVER

    def plan(self, shape: _Shape) -> Plan:
        """The plan of a shape that was tried."""
        found = self._tried[shape]
        assert found is not None
        return found.plan

    def busiest(self, shape: _Shape, count: int) -> list[int]:
        """The places of the ring whose windows or disks take longest, in a shape that was tried."""
        found = self._tried[shape]
        assert found is not None
        ranked = sorted(range(len(shape.ring)), key=lambda place: -found.busy_s[place])
        return ranked[:count]

    def best(self) -> list[_Shape]:
        """The best shape of each number of rounds, the best of all first."""
        best: dict[int, _Shape] = {}
        for shape in self._by_rank():
            best.setdefault(shape.rounds, shape)
        return list(best.values())

    def best_rings(self, count: int) -> list[tuple[int, ...]]:
        """The best rings."""
        return list(dict.fromkeys(shape.ring for shape in self._by_rank()))[:count]

    def any_fits(self) -> bool:
        """Whether any plan holds all limits."""
        return any(found is not None and not found.rank.short_bytes for found in self._tried.values())

    def streams(self) -> bool:
        """Whether the best plan streams, or would have to."""
        best = self._by_rank()[:1]
        return not best or self.rank(best[0]).short_bytes > 0 or bool(self.plan(best[0]).streaming)

    def _by_rank(self) -> list[_Shape]:
        return sorted((shape for shape, found in self._tried.items() if found is not None), key=self.rank)

    def _made(self, shape: _Shape) -> _Tried | None:
        """The plan of a shape; None where it streams what the question does not allow."""
        instance, model = self._instance, self._instance.model
        names = [instance.devices[m].device for m in shape.ring]
        layers = [blocks * model.cut_multiple for blocks in shape.blocks]
        plan = residency(_on_gpus(arrange(names, layers, rounds=shape.rounds, model=model), instance), instance)
        if plan.streams_output and not instance.output_streams:
            return None
        prediction = evaluate(plan, instance)
        short = sum(short.short_bytes for short in prediction.short)
        return _Tried(
            rank=_Rank(short, prediction.objective_s(self._objective, instance.workload.answer_tokens)),
            plan=plan,
            busy_s=tuple(max(device.window_s, device.disk_s) for device in prediction.devices),
        )


def _rings(instance: Instance, required: frozenset[int]) -> list[tuple[int, ...]]:
    """All members, and those with the most memory or speed, some more at a time; always with those ``required``."""
    others = range(1, len(instance.devices))
    found = [tuple(others)]
    for worth in (_memory(instance, 1), _speed(instance)):
        ranked = sorted(others, key=lambda m: (m not in required, -worth[m]))
        count = max(1, len(required - {0}))
        while count < len(ranked):
            found.append(tuple(sorted(ranked[:count])))
            count += -(-count // 3)
    return list(dict.fromkeys(good_order(instance, (0, *members)).members for members in dict.fromkeys(found)))


def _memory(instance: Instance, rounds: int) -> list[float]:
    """Bytes that each member has for layers in a ring of so many rounds."""
    found = []
    for m, member in enumerate(instance.members):
        windows = rounds + (m == 0)
        own = instance.runtime_bytes(windows) + (0 if m else instance.head_bytes(windows) + instance.model.output_bytes)
        vram = 0 if member.shares_memory else max(0, member.vram_limit - instance.gpu_runtime_bytes(windows))
        found.append(max(1.0, member.ram_limit - own + vram))
    return found


def _speed(instance: Instance) -> list[float]:
    """Layers a second of each member, on the GPU where there is one."""
    return [
        1 / max(1e-12, sum(member.decode.gpu if member.has_gpu else member.decode.cpu)) for member in instance.members
    ]


def _proportions(instance: Instance, ring: Sequence[int], blocks: int, rounds: int) -> Iterator[tuple[int, ...]]:
    """Blocks a round for the members of ``ring`` out of all ``blocks``: equal, by memory and by speed, the tail counted in.

    With the shortest tail and with one that is a block a round longer.
    """
    memory, speed = _memory(instance, rounds), _speed(instance)
    for worth in ([1.0] * len(instance.devices), memory, speed):
        whole = sum(worth[m] for m in ring)
        shares = [worth[m] / whole * (blocks + 1) for m in ring]
        for total in (blocks // rounds, blocks // rounds - 1):
            if total >= len(ring):
                tail = blocks + 1 - rounds * total
                weights = [max(1, round(1000 * (share - (0 if place else tail)))) for place, share in enumerate(shares)]
                yield tuple(apportion(weights, total, least=[1] * len(ring)))


def _on_gpus(plan: Plan, instance: Instance) -> Plan:
    """``plan`` with as many layers on GPUs as fit: the tail and the output matrix first, then as many in each round."""
    free = {
        member.name: member.vram_limit - instance.gpu_runtime_bytes(plan.rounds + (m == 0))
        for m, member in enumerate(instance.members)
        if member.has_gpu
    }
    if not free:
        return plan
    held = [instance.kinds[kind].size_bytes + instance.kv_bytes[kind] for kind in instance.kind_of]
    tail, on_gpu = plan.route[-1], {}
    if plan.head in free:
        size = instance.model.output_bytes + sum(held[layer] for layer in tail.layers)
        if size <= free[plan.head]:
            on_gpu[len(plan.route) - 1] = len(tail.layers)
            free[plan.head] -= size
    for name in plan.devices:
        if name not in free:
            continue
        windows = [(i, window) for i, window in plan.windows_of(name) if i < len(plan.route) - 1]
        count = len(windows[0][1].layers)
        while count and sum(sum(held[window.last - count : window.last]) for _, window in windows) > free[name]:
            count -= 1
        on_gpu |= {i: count for i, _ in windows}
    route = tuple(replace(window, gpu_layers=on_gpu.get(i, 0)) for i, window in enumerate(plan.route))
    return replace(plan, route=route, output_on_gpu=route[-1].gpu_layers > 0)


def _improve(trials: _Trials, shape: _Shape) -> None:
    """Move a block a round from one member to another, or to and from the tail, as long as that is better."""
    most = trials.made + _TRIALS // _IMPROVED
    better = True
    while better and trials.made < most:
        around = [shape, *_moves(trials, shape)]
        best = min(around, key=trials.rank)
        better, shape = best != shape, best


def _moves(trials: _Trials, shape: _Shape) -> Iterator[_Shape]:
    places = range(len(shape.ring))
    for giver in places if len(places) <= _ALL_MOVES else trials.busiest(shape, 2):
        if shape.blocks[giver] == 1:
            continue
        for taker in (*places, None):
            if taker != giver:
                yield _moved(shape, giver, taker)
    if shape.rounds * (sum(shape.blocks) + 1) <= trials.blocks:
        for taker in places:
            yield _moved(shape, None, taker)


def _moved(shape: _Shape, giver: int | None, taker: int | None) -> _Shape:
    """The shape with a block moved; None stands for the tail."""
    blocks = list(shape.blocks)
    if giver is not None:
        blocks[giver] -= 1
    if taker is not None:
        blocks[taker] += 1
    return shape._replace(blocks=tuple(blocks))
