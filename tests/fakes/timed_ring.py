"""The fake ring with a simulated clock: the gain and cost of drafts, the same on every machine.

A device computes one visit at a time, which takes as long as its rows cost; a message takes ``hop_s``. Skips are
processed before waiting steps are computed, as on a real device, and skipped steps take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from primad.engine.protocol import Rows
from primad.ring.head import Notify, Send
from primad.ring.messages import Sampled, Skip, Step, decode_route
from primad.system.wire import encode
from tests.fakes.ring import FakeRing

WAKES_S = 0.001
"""The interval at which a waiting head looks for drafts."""


class TimedRing(FakeRing):
    """A ring in which a visit of n rows takes ``visit_s`` times ``costs[n - 1]`` (the last one for more rows), and a
    visit to window i ``shares[i]`` times that (all 1 by default).

    A call of its predictor takes ``predicts_s``. The head's own visits take ``busy()`` times as long, for a drafter
    that uses its cores. ``reported_s`` has the time of each reported token.
    """

    def __init__(
        self,
        devices: int,
        *,
        visit_s: float = 0.01,
        hop_s: float = 0.0,
        costs: Sequence[float] = (1.0,),
        shares: Sequence[float] = (),
        busy: Callable[[], float] = lambda: 1.0,
        predicts_s: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__([[1] * devices] if devices > 1 else [], 1, **options)
        self._visit_s, self._hop_s, self._costs, self._busy = visit_s, hop_s, costs, busy
        self._free_s = [0.0] * devices
        self._due_s: list[list[tuple[float, bytes, bytes]]] = [[] for _ in range(devices)]
        self.now_s = 0.0
        self.reported_s: list[float] = []
        if (predictor := options.get("predictor")) is not None:
            setattr(predictor, "predict", self._taking(predictor.predict, predicts_s))  # noqa: B010
        owners = [*range(devices), 0] if devices > 1 else [0]
        for owner, window, share in zip(owners, self.windows, shares or (1.0,) * len(owners), strict=True):
            setattr(window, "forward", self._timed(window.forward, share, is_head=owner == 0))  # noqa: B010

    def _timed(self, forward: Callable[[Rows], Any], share: float, *, is_head: bool) -> Callable[[Rows], Any]:
        def timed(rows: Rows) -> Any:
            count = len(rows.positions)
            cost = self._costs[min(count, len(self._costs)) - 1]
            self.now_s += self._visit_s * share * cost * (self._busy() if is_head else 1.0)
            return forward(rows)

        return timed

    def _taking(self, predict: Callable[..., Any], predicts_s: float) -> Callable[..., Any]:
        def timed(*given: Any, **options: Any) -> Any:
            self.now_s += predicts_s
            return predict(*given, **options)

        return timed

    def finish(self) -> float:
        """Run until everything is quiet; the seconds from the first reported token to the last."""
        while self._next():
            pass
        assert self.scheduler.is_idle, "the ring went quiet with work left"
        return self.reported_s[-1] - self.reported_s[0]

    def _next(self) -> bool:
        """Let the device that can move first do so; the head receives messages before it computes."""
        self.now_s = self._free_s[0]
        self._take(0)
        if self._head_turn():
            return True
        due = [(max(self._free_s[i], each[0][0]), i) for i, each in enumerate(self._due_s) if each]
        if not due:
            if self.scheduler.waits_until_s is None:
                return False
            self._free_s[0] += min(WAKES_S, self.scheduler.waits_until_s - self.now_s)
            return True
        at_s, device = min(due)
        self.now_s = at_s
        if device == 0:
            self._free_s[0] = at_s  # it waited
        else:
            self._work(device)
        return True

    def _head_turn(self) -> bool:
        """Let the head take a turn, unless another device would move earlier and could affect it."""
        others = [max(self._free_s[i], each[0][0]) for i, each in enumerate(self._due_s) if each and i]
        if others and min(others) < self.now_s:
            return False
        outcome = self.head.turn()
        match outcome:
            case None:
                return False
            case Send(step, hidden):
                self._put(0, step, hidden.tobytes())
            case Skip():
                self._put(0, outcome, b"")
            case Notify(events):
                self.events += events
                self.reported_s += [self.now_s for event in events if isinstance(event, Sampled)]
        self._free_s[0] = self.now_s
        return True

    def _take(self, device: int) -> None:
        """Take all messages that reached ``device`` by now: steps on the head, skips on others."""
        for message in [each for each in self._due_s[device] if each[0] <= self.now_s]:
            if device and message[2]:
                continue  # a step, which is judged when it is computed
            step = decode_route(message[1], len(message[2]), self.limits[device])
            if isinstance(step, Skip):
                self._due_s[device].remove(message)
                if device:
                    self.workers[device - 1].skip(step)
                    self._put(device, step, b"")
            elif device == 0:
                self._due_s[0].remove(message)
                self.head.receive(step, np.frombuffer(message[2], np.float32).reshape(step.payload_shape))

    def _work(self, device: int) -> None:
        self._take(device)
        if not self._due_s[device] or self._due_s[device][0][0] > self.now_s:
            return
        _, header, payload = self._due_s[device].pop(0)
        step = decode_route(header, len(payload), self.limits[device])
        assert isinstance(step, Step)
        hidden = np.frombuffer(payload, np.float32).reshape(step.payload_shape)
        following, out = self.workers[device - 1].receive(step, hidden)
        self._free_s[device] = self.now_s
        self._put(device, following, out.tobytes())

    def _put(self, device: int, message: Step | Skip, payload: bytes) -> None:
        following = (device + 1) % len(self._due_s)
        self._due_s[following].append((self.now_s + self._hop_s, encode(message), payload))
