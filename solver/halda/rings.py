"""Find the best plan with one head and one chunk size: over rounds, ring orders and participating devices.

The head alone comes first, then rings of k = 1, 2, ... rounds. Before k rounds are solved, a relaxed program without
all that more rounds could improve (waiting for slots, equal rounds) bounds all remaining k: more rounds only add hops,
so the search mostly ends after a few. Where layers differ, the even layout is itself only a bound; the rest is settled
by exact cuts, one ring order at a time.

Before all rings come the plans that are quick to make (``cuts.py``): a program only searches for better ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from typing import Any, Final

import pulp

from halda.cuts import good_cuts
from halda.evaluate import Objective, Prediction, evaluate, is_regular, residency, stream
from halda.instance import Instance
from halda.milp.build import EVEN_MS, Program, build
from halda.milp.layouts import Layout, cut_layout, even_layout, fixed_layout, new_problem, single_device_layout
from halda.milp.time import TIE
from halda.orders import (
    EXACT_DEVICES,
    RingOrder,
    device_sequences,
    exact_orders,
    good_order,
    hops_around,
    induced_orders,
    min_hops,
)
from halda.plan import Infeasible, LeftOut, Plan, Window, on_gpus_of
from halda.profile import KV_TYPES
from halda.solution import Solution
from halda.solving import Outcome, run
from halda.time_limit import TimeLimit
from halda.variables import MS

NEAR: Final = 1.1
"""Quick plans are skipped whose price exceeds the best objective of other questions by this factor."""
SAME: Final = 1e-9
"""Relative difference below which values count as equal."""
PROVEN: Final = 1e-6
"""Relative gap below which a plan counts as the best."""
EXACT_CUTS: Final = 160
"""Binaries up to which windows are cut exactly where layers differ; beyond that the gap is reported."""
_HOP_TRIALS: Final = 3
_CUTS_TRIED: Final = 5
_ORDERS_OF: Final = 5
_MIN_S: Final = 0.05
_FIRST_S: Final = 5.0
_LONG_S: Final = 1.5
"""Time limit of a program when there are too many devices to try all orders. By then its plans and its bound are near
the best."""
_STEEP_S: Final = 1000.0
"""Objective from which the program's figures range from milliseconds to hours."""
_SHORT_S: Final = 0.8
"""Time limit of the search for what is short; it continues until there is a result."""
_ELASTIC_ORDERS: Final = 6
_MIN_BYTES: Final = 0.5
"""Smaller amounts are within the solver's tolerance of zero."""
_POLISHED: Final = 3
"""Number of quick plans whose streaming is settled by a program of its own."""
_KEPT_OF_ROUNDS: Final = 4
"""Quick plans per number of rounds, the cheapest by price, for which streaming is worked out."""
_FAR_PRICE: Final = 1.5
"""Plans are skipped whose price exceeds the cheapest with as many rounds or fewer by this factor."""
_NEAR_ROUNDS: Final = 2
"""Usual maximum difference in rounds between the best plans of similarly good questions."""
_WORSE_ROUNDS: Final = 4
"""After this number of further rounds without a better price no quick plans with more rounds are made."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What is searched for with every head: the objective, required devices, other chunk sizes, and whether to fill the
    ring."""

    objective: Objective
    require: frozenset[str]
    chunks: tuple[int, ...]
    fills: bool


class Search:
    """One search: its best plan, the time left, and the lower bound of all plans."""

    def __init__(
        self,
        question: Instance,
        goal: Goal,
        budget: TimeLimit,
        *,
        is_one_round: bool = False,
    ) -> None:
        self.question = self._instance = question
        self._is_one_round = is_one_round
        self._objective: Objective = goal.objective
        self._required = frozenset(m for m, device in enumerate(question.devices) if device.device in goal.require)
        self._budget = budget
        self._below_s = math.inf
        self.is_begun = self._has_quick = False
        self._quick: list[tuple[float, int, tuple[Window, ...]]] = []
        self._best: tuple[float, Plan] | None = None
        self._best_is_quick = False
        self._open_bound_s = float("inf")
        self._min_s = 0.0
        """Lower bound of rings with at least the number of rounds examined last."""

    @property
    def found(self) -> bool:
        """Whether a plan below the bound was found."""
        return self._best is not None

    @property
    def bound_s(self) -> float:
        """Known lower bound of all plans."""
        return min(self._best_s, self._open_bound_s)

    @property
    def quick_s(self) -> float:
        """Objective of the best plan so far."""
        return math.inf if self._best is None else self._best[0]

    @property
    def quick_rounds(self) -> int:
        """Rounds of the best plan so far; 0 without one."""
        return 0 if self._best is None else self._best[1].rounds

    def run(self, budget: TimeLimit, below_s: float = math.inf, near_rounds: int = 0) -> None:
        """Search for the best plan with an objective below ``below_s``; quick plans as in ``begin``."""
        self._budget, self._below_s, self.is_begun = budget, below_s, True
        if not self._required - {0} and not self._is_one_round:
            self._single_device()
        if len(self._instance.devices) > 1:
            orders = (
                exact_orders(self._instance, self._objective) if len(self._instance.devices) <= EXACT_DEVICES else None
            )
            is_unlikely = orders is None or (below_s < math.inf and not self._has_quick)
            if is_unlikely and not self._may_win(1, orders):
                return  # with many devices a futile search takes seconds
            self.begin(below_s, near_rounds)
            self._polish()
            first = 1 if self._is_one_round else max(1, self.quick_rounds)
            self._rounds(first, orders)
            if first > 1:
                self._rounds(1, orders)
            if self._is_one_round:
                self._leave_more_rounds(orders)
            else:
                self._more_rounds(orders, {first})

    def _leave_more_rounds(self, orders: Sequence[RingOrder] | None) -> None:
        """Compute only the bound of more rounds: how much better they might be."""
        if self._instance.model.max_rounds > 1 and self._may_win(2, orders):
            self._open_bound_s = min(self._open_bound_s, self._min_s)

    def _more_rounds(self, orders: Sequence[RingOrder] | None, done: set[int]) -> None:
        """Try rings of two or more rounds, first with as many as the best so far: others are then soon known to be
        worse.

        More rounds only add hops and memory to what the bound leaves open: the search ends when the bound cannot win.
        It is computed at numbers of rounds that grow by half, and after each better plan.
        """
        asked_of, ask_at = math.inf, 2
        for rounds in range(2, self._instance.model.max_rounds + 1):
            if rounds == ask_at or self._best_s < asked_of:
                if not self._may_win(rounds, orders):
                    return
                asked_of, ask_at = self._best_s, rounds + max(1, rounds // 2)
            for each in (max(2, self.quick_rounds), rounds) if rounds == 2 else (rounds,):
                if each not in done:
                    done.add(each)
                    self._rounds(each, orders)

    def begin(self, below_s: float = math.inf, near_rounds: int = 0) -> None:
        """Keep the best of the plans that are quick to make: with one round, and with more as long as more rounds help.

        Only plans with an objective below ``below_s`` count, and only near ``near_rounds`` rounds where other
        questions' best plan is known.

        All of them have equal rounds and a tail, like the programs' plans, so a search that proves its result the best
        proves it against the same plans.
        """
        question = self._instance
        self.is_begun = True
        if self._has_quick or len(question.devices) == 1:
            return
        self._below_s = min(self._below_s, below_s)
        self._has_quick, max_rounds = True, 1 if self._is_one_round else question.model.max_rounds
        everyone, best_before_s, worse = range(len(question.devices)), math.inf, 0
        one_a_machine = sorted({host[0] for host in question.hosts} | self._required)
        orders = dict.fromkeys(good_order(question, members).members for members in (everyone, one_a_machine))
        for rounds in range(1, max_rounds + 1):
            if near_rounds and rounds > 1 and abs(rounds - near_rounds) > _NEAR_ROUNDS:
                continue
            if rounds > 1 and self._best is not None and not self._best[1].streaming:
                break  # rounds serve streaming alone
            cuts = good_cuts(question, orders, rounds, self._objective, self._required)
            if not cuts and rounds == 1:
                break  # more rounds take more memory
            best_s = min((price for price, _ in cuts), default=math.inf)
            for price, route in cuts[:_KEPT_OF_ROUNDS]:
                if price <= min(_FAR_PRICE * min(best_s, best_before_s), self._near_s):
                    self._quick.append((price, rounds, route))
                    self._keep(residency(self._plan(rounds, route), question, self._objective_s), is_quick=True)
            worse = 0 if best_s < best_before_s else worse + 1
            best_before_s = min(best_s, best_before_s)
            if worse == _WORSE_ROUNDS:
                break

    def _polish(self) -> None:
        """Settle the streaming of the best quick plans."""
        for price, rounds, route in sorted(self._quick, key=lambda each: each[0])[:_POLISHED]:
            if price <= self._near_s:
                self._offer(rounds, route)

    @property
    def _best_s(self) -> float:
        return min(self._below_s, self.quick_s)

    @property
    def _near_s(self) -> float:
        """Price above which quick plans are skipped. A price counts one prompt chunk, and all of a token."""
        return math.inf if self._objective == "throughput" else NEAR * self._below_s

    def solution(self) -> Solution:
        """Return the best plan."""
        assert self._best is not None
        plan = self._without_needless_streaming(self._best[1])
        prediction = evaluate(plan, self._instance)
        value = self._objective_s(prediction)
        bound = min(value, self._open_bound_s)
        return Solution(
            plan=replace(plan, left_out=self._left_out(plan)),
            prediction=prediction,
            objective=self._objective,
            objective_s=value,
            bound_s=bound,
            proven=bound >= value * (1 - PROVEN),
        )

    def _without_needless_streaming(self, plan: Plan) -> Plan:
        """Return ``plan`` with no device streaming more than its memory requires, if that is no slower.

        In the model, reading while others compute costs nothing, and streaming frees memory; but a disk should not work
        needlessly.
        """
        value = self._objective_s(evaluate(plan, self._instance))
        minimum = stream(plan, self._instance, {})
        for device in [streaming.device for streaming in plan.streaming]:
            others = [streaming for streaming in plan.streaming if streaming.device != device]
            own = [streaming for streaming in minimum.streaming if streaming.device == device]
            streaming = sorted([*others, *own], key=lambda each: plan.devices.index(each.device))
            trial = replace(plan, streaming=tuple(streaming))
            found = evaluate(trial, self._instance)
            is_no_slower = not found.short and self._objective_s(found) <= value * (1 + SAME)
            if is_no_slower and self._read_bytes(trial) < self._read_bytes(plan):
                plan = trial
        return plan

    def _read_bytes(self, plan: Plan) -> int:
        return sum(each.streamed_bytes for each in plan.streaming)

    def _left_out(self, plan: Plan) -> tuple[LeftOut, ...]:
        return tuple(
            LeftOut(device=device.device, reason="the others are faster without it")
            for device in self._instance.devices
            if device.device not in plan.devices
        )

    def _single_device(self) -> None:
        problem, head = new_problem("alone"), self._instance.only([0])
        outcome, program = self._run(problem, single_device_layout(problem, head), head, required=frozenset())
        self._note(outcome)
        if outcome.found:
            total = len(self._instance.model.layers)
            name, found = self._instance.devices[0].device, program.layout.variables
            bounds, whole = [_height(bound) for bound in found["start"]], _height(found["whole"])
            self._offer(1, (Window(device=name, first=0, last=total, **_on_gpus(bounds, whole)),))

    def _may_win(self, rounds: int, orders: Sequence[RingOrder] | None) -> bool:
        """Whether any ring of at least ``rounds`` rounds can beat the best plan so far."""
        problem = new_problem("bound")
        layout = self._even(problem, rounds, orders, loose=True)
        outcome, _ = self._run(problem, layout, max_s=self._max_s(orders))
        self._min_s = max(self._min_s, outcome.bound / MS)
        if self._min_s >= self._best_s * (1 - SAME):
            return False
        if self._budget.left_s <= 0:
            self._open_bound_s = min(self._open_bound_s, self._min_s)
            return False
        return True

    @staticmethod
    def _max_s(orders: Sequence[RingOrder] | None) -> float:
        """Return the time limit of a program over these ring orders; None means too many devices to try all orders."""
        return math.inf if orders is not None else _LONG_S

    def _rounds(self, rounds: int, orders: Sequence[RingOrder] | None) -> None:
        """Search for the best ring of ``rounds`` rounds; what the even layout leaves open is cut exactly, or stays
        open."""
        problem = new_problem(f"rounds_{rounds}")
        layout = self._even(problem, rounds, orders)
        outcome, program = self._run(problem, layout, max_s=self._max_s(orders))
        bound_s, differ = max(self._min_s, outcome.bound / MS), len(self._instance.kinds) > 1
        if outcome.found:
            ring = self._take_even(program)
            if orders is None and bound_s < self._best_s * (1 - SAME):
                self._try_hops(rounds, ring)
            if differ and len(ring) > 1 and bound_s < self._best_s * (1 - SAME):
                self._offer_cuts(rounds, ring)
        if bound_s >= self._best_s * (1 - SAME):
            return
        if differ and self._is_small(rounds):
            self._cut(rounds, orders, bound_s)
        else:
            self._open_bound_s = min(self._open_bound_s, bound_s)

    def _even(
        self,
        problem: Any,
        rounds: int,
        orders: Sequence[RingOrder] | None,
        *,
        loose: bool = False,
        columns: int | None = None,
    ) -> Layout:
        """Return the even layout; without orders, hops count with their lower bound."""
        shares = min_hops(self._instance) if orders is None else None
        return even_layout(problem, self._instance, rounds, orders, loose=loose, columns=columns, shares=shares)

    def _try_hops(self, rounds: int, ring: Sequence[int]) -> None:
        """With many devices: assign the hops of a good ring to its members, solve, and repeat from the result."""
        for _ in range(_HOP_TRIALS):
            shares = hops_around(self._instance, good_order(self._instance, ring))
            problem = new_problem("hops")
            layout = even_layout(problem, self._instance, rounds, None, shares=shares)
            outcome, program = self._run(problem, layout, cutoff=False, max_s=_LONG_S)
            if not outcome.found:
                return
            before, ring = ring, self._take_even(program)
            if set(ring) == set(before):
                return

    def _offer_cuts(self, rounds: int, ring: Sequence[int]) -> None:
        """Where layers differ: offer windows cut for the ring that the even layout chose, in several orders."""
        others = permutations(ring[1:]) if len(ring) <= _ORDERS_OF else [ring[1:]]
        orders = [(0, *order) for order in others]
        for _, route in good_cuts(self._instance, orders, rounds, self._objective, self._required)[:_CUTS_TRIED]:
            self._offer(rounds, route)

    def _is_small(self, rounds: int) -> bool:
        devices, layers = len(self._instance.devices), len(self._instance.model.layers)
        return devices <= EXACT_DEVICES and devices * layers // rounds <= EXACT_CUTS

    def _cut(self, rounds: int, orders: Sequence[RingOrder] | None, bound_s: float) -> None:
        """Settle what the even layout leaves open where layers differ."""
        model, cut = self._instance.model, self._instance.model.cut_multiple
        total = len(model.layers)
        maximum = model.last_cut // (rounds * cut) * cut
        for columns in [total] if rounds == 1 else range(maximum, 0, -cut):
            if rounds > 1:
                problem = new_problem("columns")
                layout = self._even(problem, rounds, orders, columns=columns)
                outcome, program = self._run(problem, layout)
                if outcome.found:
                    self._take_even(program)
                if outcome.bound / MS >= self._best_s * (1 - SAME):
                    continue
            for sequence in device_sequences(self._instance):
                if self._budget.left_s <= 0:
                    self._open_bound_s = min(self._open_bound_s, bound_s)
                    return
                if bound_s >= self._best_s * (1 - SAME):
                    return
                self._cut_in_order(rounds, sequence, columns)

    def _cut_in_order(self, rounds: int, sequence: Sequence[int], columns: int) -> None:
        orders = induced_orders(self._instance, sequence)
        problem = new_problem("cut")
        layout = cut_layout(problem, self._instance, rounds, orders, sequence, columns)
        outcome, program = self._run(problem, layout)
        self._note(outcome)
        if outcome.found:
            order = next(o for o, z in zip(orders, layout.picked, strict=True) if round(z.value()))
            self._offer(rounds, self._cut_route(program, rounds, sequence, order))

    def _cut_route(
        self, program: Program, rounds: int, sequence: Sequence[int], order: RingOrder
    ) -> tuple[Window, ...]:
        """Read the windows from the staircases."""
        found, names = program.layout.variables, [device.device for device in self._instance.devices]
        columns, route, before = found["columns"], [], 0
        shape = []
        for m in sequence:
            end, whole = (_height(found[what][m]) for what in ("end", "whole"))
            if end > before:
                shape.append((m, before, end, _on_gpus([_height(bound) for bound in found["start"][m]], whole)))
            before = end
        assert [m for m, *_ in shape] == list(order.members)
        for r in range(rounds):
            for m, first, last, on_gpus in shape:
                at = r * columns
                route.append(Window(device=names[m], first=at + first, last=at + last, **on_gpus))
        total, tail_first = len(self._instance.model.layers), route[-1].last
        on_gpus = _on_gpus([_height(bound) for bound in found["tail_start"]], _height(found["tail_whole"]))
        return (*route, Window(device=names[0], first=tail_first, last=total, **on_gpus))

    def _take_even(self, program: Program) -> tuple[int, ...]:
        """Make a plan from an even layout's solution. Return its ring."""
        layout, names = program.layout, [device.device for device in self._instance.devices]
        found = layout.variables
        w = [round(pulp.value(value)) for value in found["w"]]
        on_gpus = [_counted(n, a) for n, a in zip(found["n"], found["a"], strict=True)]
        order = self._order(layout, w)
        if len(order) == 1:
            return order
        route, at = [], 0
        for _ in range(layout.rounds):
            for m in order:
                route.append(Window(device=names[m], first=at, last=at + w[m], **on_gpus[m]))
                at += w[m]
        tail = Window(
            device=names[0],
            first=at,
            last=len(self._instance.model.layers),
            **_counted(found["tail_gpu"], found["tail_experts_on_cpu"]),
        )
        self._offer(layout.rounds, (*route, tail))
        return order

    def _order(self, layout: Layout, w: Sequence[int]) -> tuple[int, ...]:
        if layout.picked:
            return next(
                order.members for order, z in zip(layout.orders, layout.picked, strict=True) if round(z.value())
            )
        return good_order(self._instance, [m for m in range(len(w)) if w[m]]).members

    def _offer(self, rounds: int, route: tuple[Window, ...]) -> None:
        """Keep the plan with these windows and their best streaming if it is the best so far."""
        plan, problem = self._plan(rounds, route), new_problem("fixed")
        in_memory = self._in_memory(plan)
        if in_memory is not None:
            self._keep(in_memory, is_quick=False)
            return
        index = {device.device: m for m, device in enumerate(self._instance.devices)}
        members = self._instance.only([index[name] for name in plan.devices])
        outcome, program = self._run(problem, fixed_layout(members, plan), members, required=frozenset())
        if not outcome.found:
            return
        unit = self._instance.largest_layer_bytes
        plan = replace(plan, output_on_gpu=bool(round(program.output_on_gpu.value())))
        read_ahead, minimum = ({}, {})
        for m, name in enumerate(plan.devices):
            if round(program.streams.streams[m].value()):
                read_ahead[name] = round(program.streams.read_ahead[m].value() * unit)
                if self._is_on_shared_machine(name):
                    minimum[name] = math.ceil(program.streams.bytes[m].value() * unit) + 1
        self._keep(stream(plan, self._instance, read_ahead, minimum), is_quick=False)

    def _in_memory(self, plan: Plan) -> Plan | None:
        """Return ``plan`` with the better place for the output matrix if the RAM suffices for all; None if anything
        streams."""
        here = evaluate(plan, self._instance)
        if any(short.what == "RAM" for short in here.short):
            return None
        if plan.output_on_gpu or not self._instance.members[0].has_gpu:
            return plan
        other = replace(plan, output_on_gpu=True)
        there = evaluate(other, self._instance)
        is_better = self._value(there) < self._value(here) * (1 - SAME)
        return other if here.short or (is_better and not there.short) else plan

    def _plan(self, rounds: int, route: tuple[Window, ...]) -> Plan:
        """Return a plan with these windows, without streaming, with prefill offload where the question says.

        The GPUs have as many of the layers as llama.cpp can place there.
        """
        route = tuple(self._openable(window) for window in route)
        on_gpu = route[-1].gpu_layers > 0
        plan = Plan(rounds=rounds, route=route, output_on_gpu=on_gpu, streaming=(), left_out=())
        return plan.with_offload(self._instance.prefill_offload)

    def _openable(self, window: Window) -> Window:
        return window.fewer_on_gpu(self._instance.model.openable(window.layers, window.gpu_layers))

    def _is_on_shared_machine(self, name: str) -> bool:
        """Whether other devices on the machine of ``name`` limit its memory."""
        host = next(device.host for device in self._instance.devices if device.device == name)
        return sum(device.host == host for device in self._instance.devices) > 1

    def _keep(self, plan: Plan, *, is_quick: bool) -> None:
        """Keep ``plan`` if it respects all limits and is the best so far, or as good and preferable."""
        if not is_regular(plan, self._instance):
            return
        prediction = evaluate(plan, self._instance)
        value = self._value(prediction)
        slack = SAME if not is_quick and self._wins_ties(plan.rounds) else -SAME
        if not prediction.short and value < self._best_s * (1 + slack):
            self._best, self._best_is_quick = (value, plan), is_quick

    def _wins_ties(self, rounds: int) -> bool:
        """Whether a program's plan of ``rounds`` rounds replaces an equally good best plan.

        Among plans with equal rounds a program's plan leaves the most memory; a quick one's may not.
        """
        return self._best is not None and (rounds < self._best[1].rounds or self._best_is_quick)

    def _value(self, prediction: Prediction) -> float:
        return self._objective_s(prediction) + TIE * prediction.tpot_s

    def _objective_s(self, prediction: Prediction) -> float:
        return prediction.objective_s(self._objective, self._instance.workload.answer_tokens)

    def _note(self, outcome: Outcome) -> None:
        """Record what an unfinished program leaves open."""
        if not outcome.proven:
            self._open_bound_s = min(self._open_bound_s, outcome.bound / MS)

    def _run(
        self,
        problem: Any,
        layout: Layout,
        question: Instance | None = None,
        required: frozenset[int] | None = None,
        *,
        cutoff: bool = True,
        max_s: float = math.inf,
    ) -> tuple[Outcome, Program]:
        program = build(
            problem,
            question or self._instance,
            layout,
            self._objective,
            self._required if required is None else required,
            elastic=False,
        )
        maximum, is_known = math.inf, self._best_s < math.inf
        if cutoff and is_known:
            slack = self._best_s * MS * SAME
            maximum = self._best_s * MS + (slack + EVEN_MS if self._wins_ties(layout.rounds) else -slack)
        # Without any plan yet a program gets enough time to find one.
        limit_s = max(_MIN_S if is_known else _FIRST_S, min(max_s, self._budget.left_s))
        return run(problem, limit_s, maximum=maximum, is_steep=_STEEP_S < self._best_s < math.inf), program

    def infeasible(self) -> Infeasible:
        """Return which limit is short for the plan of one round that is closest to fitting."""
        shortages = [self._elastic(*program) for program in self._elastic_layouts()]
        found = [shortage for shortage in shortages if shortage is not None]
        if not found:
            return Infeasible("the devices that must take part are more than the model has layers for", short_bytes=0)
        size, text = min(found)
        return Infeasible(text, short_bytes=round(size))

    def _elastic_layouts(self) -> Iterator[tuple[Any, Layout, Instance]]:
        instance = self._instance
        if not self._required - {0}:
            problem, head = new_problem("short_alone"), self._instance.only([0])
            yield problem, single_device_layout(problem, head), head
        if len(instance.devices) == 1 or not instance.model.cut_points:
            return
        if len(instance.kinds) > 1 and self._is_small(1):
            for sequence in device_sequences(instance)[:_ELASTIC_ORDERS]:
                problem, orders = new_problem("short_cut"), induced_orders(instance, sequence)
                columns = len(instance.model.layers)
                yield problem, cut_layout(problem, instance, 1, orders, sequence, columns), instance
            return
        problem = new_problem("short_ring")
        rings = exact_orders(instance, self._objective) if len(instance.devices) <= EXACT_DEVICES else None
        yield problem, even_layout(problem, instance, 1, rings), instance

    def _elastic(self, problem: Any, layout: Layout, question: Instance) -> tuple[float, str] | None:
        required = self._required if len(question.devices) > 1 else frozenset[int]()
        build(problem, question, layout, self._objective, required, elastic=True)
        outcome = run(problem, _SHORT_S)
        if not (outcome.found or outcome.proven):
            outcome = run(problem, max(_FIRST_S, self._budget.seconds))
        if not outcome.found:
            return None
        unit = self._instance.largest_layer_bytes
        shortages = []
        for variable in problem.variables():
            kind, _, rest = variable.name.partition("_")
            if kind == "short" and variable.value() and variable.value() * unit >= _MIN_BYTES:
                what, *members = rest.split("_")
                where = " and ".join(self._named(place) for place in members)
                size = -(-variable.value() * unit // 1)
                shortages.append((size, f"{what} of {where} is short of {max(size / 1e6, 0.1):,.1f} MB"))
        text = "; ".join(sentence for _, sentence in sorted(shortages, reverse=True))
        model, work = self._instance.model, self._instance.workload
        if not shortages:
            return None
        advice = "" if all(sentence.startswith("disk ") for _, sentence in shortages) else self._advice()
        return sum(size for size, _ in shortages), (
            f"no plan for {model.name} with {work.context_tokens} tokens of context for {work.sequences} sequence(s) fits, "
            f"streaming included: {'at the least' if outcome.proven else 'as far as is known'}, {text}{advice}"
        )

    def _named(self, place: str) -> str:
        """Return the name of the member, or of its GPU, for a name of ``add_memory``."""
        m, _, gpu = place.partition("g")
        member = self._instance.members[int(m)]
        return member.gpu_name(int(gpu)) if gpu else member.name

    def _advice(self) -> str:
        """Return advice besides more memory: a smaller KV cache, which never streams."""
        work = self._instance.workload
        size = sum(self._instance.kv_bytes[kind] for kind in self._instance.kind_of)
        if not size:
            return ""
        smaller = KV_TYPES[KV_TYPES.index(work.kv_type) + 1 :]
        other = f" or a KV cache in {' or '.join(smaller)}" if smaller else ""
        return f"; the KV cache ({work.kv_type}) takes {size / 1e6:,.1f} MB in all: a smaller context{other} takes less"


def _height(stairs: Sequence[Any]) -> int:
    return sum(round(step if isinstance(step, int) else step.value()) for step in stairs)


def _counted(on_gpus: Sequence[Any], experts_on_cpu: Sequence[Any]) -> dict[str, Any]:
    """Return the fields of a ``Window`` for its GPUs from the variables of a layout."""
    first, *others = (round(pulp.value(count)) for count in on_gpus)
    experts = sum(round(pulp.value(count)) for count in experts_on_cpu)
    return on_gpus_of(first, others, experts)


def _on_gpus(bounds: Sequence[int], whole: int) -> dict[str, Any]:
    """Return the same from the boundaries between GPUs, the last GPU's first, and the end of the experts on the CPU."""
    first, *others = reversed([high - low for low, high in pairwise(bounds)])
    return on_gpus_of(first, others, whole - bounds[0])
