"""A whole ring in one variable: a head and its workers, with a queue instead of a socket for every link.

Messages cross a link as the bytes that a socket would carry and are judged with ``decode_route`` on arrival. A random
generator decides which core moves next: links keep their order, and nothing else is guaranteed. A device may or may not
process skips before it computes earlier steps.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from primad.engine.protocol import GREEDY, EngineOptions, Hidden, HiddenWindow, LogitsWindow, Sampling
from primad.kv.keys import KvBlock
from primad.ring.chunks import Chunking, ChunkSize, Pieces
from primad.ring.grouping import Batching
from primad.ring.head import MASKS_LOOK_S, Head, HeadEvent, Notify, Send
from primad.ring.messages import Cancel, Finished, Generate, Sampled, Skip, Step, StepLimits, decode_route
from primad.ring.scheduler.scheduler import Scheduler
from primad.ring.scheduler.state import SchedulerState
from primad.ring.speculation.drafter import Drafting
from primad.ring.speculation.lookup import PromptLookup
from primad.ring.speculation.predicted import PredictedDrafters
from primad.ring.speculation.speculation import BeginsDrafter
from primad.ring.worker import Worker
from primad.system.wire import encode
from tests.fakes.engine import WIDTH, FakeHiddenWindow, FakeLogitsWindow, FakeModel
from tests.fakes.kv_writer import FakeKvWriter
from tests.fakes.predictor import FakePredictor

STEP_TIMEOUT_S = 180.0


def chunks_of(rows: int) -> Chunking:
    """Chunks of ``rows`` rows, whatever the tokens."""
    return Chunking(rows=rows, minimum=rows, begins=never)


def never(_: int) -> bool:
    """No token begins a message."""
    return False


def begins_message(token: int) -> bool:
    """Whether ``token`` is one of the tokens that begin a message."""
    return token < 8


def generate(
    request: int,
    prompt: Sequence[int],
    *,
    sampled: Sequence[int] = (),
    tokens: int = 8,
    sampling: Sampling = GREEDY,
    logprobs: int | None = None,
    root: str = "",
    blocks: Sequence[KvBlock] = (),
    replays_rows: bool = True,
    chunks: ChunkSize | None = None,
) -> Generate:
    """A generation of at most ``tokens`` tokens, of which an earlier ring has ``sampled`` some and kept ``blocks``."""
    return Generate(
        request=request,
        prompt=list(prompt),
        sampled=list(sampled),
        max_tokens=tokens,
        sampling=sampling,
        logprobs=logprobs,
        root=root,
        blocks=list(blocks),
        replays_rows=replays_rows,
        chunks=chunks,
    )


class FakeRing:
    """``rounds[r][d]`` layers for device ``d`` in round ``r``, then ``tail`` for the head; device 0 is the head.

    Without rounds the head computes the whole model of ``tail`` layers. ``now_s`` is the head's clock. Prompt chunks of
    at least ``minimum`` rows end before a token that ``begins_message``. Each device has a KV writer for its
    ``layers``. With ``states``, the number that are kept, the KV cache cannot be cut back; with ``state_rows`` it needs
    a state to continue. With an odd ``seed`` masks are late. A ``predictor`` drafts from the tail's states.
    """

    def __init__(
        self,
        rounds: Sequence[Sequence[int]],
        tail: int,
        *,
        rows: int = 512,
        context: int = 4096,
        depth: int = 2,
        ends: frozenset[int] = frozenset(),
        minimum: int | None = None,
        sequences: int = 1,
        batching: Batching | None = None,
        pieces: Pieces | None = None,
        keep_rows: int | None = None,
        states: int = 0,
        state_rows: int | None = None,
        kv_writers: Sequence[FakeKvWriter] = (),
        seed: int = 0,
        step_rows: int = 0,
        drafting: Drafting | None = None,
        drafter: BeginsDrafter = PromptLookup,
        predictor: FakePredictor | None = None,
    ) -> None:
        states += drafting.states if drafting is not None and states else 0
        owners = [device for sizes in rounds for device in range(len(sizes))] + [0]
        cuts = [0, *accumulate([size for sizes in rounds for size in sizes] + [tail])]
        options = EngineOptions(
            context=context,
            sequences=sequences,
            rows=max(rows, sequences, step_rows),
            threads=1,
            batch_threads=1,
            kv_type="f16",
            lock=False,
            branches=drafting.branches if drafting is not None else 0,
            rollback=drafting.rows - 1 if drafting is not None and states else 0,
        )
        self.model = FakeModel(
            cuts[-1], ends, has_state=states > 0, needs_state=state_rows is not None, options=options
        )
        if seed % 2:
            looks = random.Random(seed)
            self.model.late = lambda _: looks.choice((0, 0, 1, 2, 3, 9, 40))
        self.now_s = 100.0
        self.events: list[HeadEvent] = []
        self.windows: list[FakeHiddenWindow | FakeLogitsWindow] = []
        held: list[dict[int, HiddenWindow]] = [{} for _ in range(max(owners) + 1)]
        for index, (owner, (first, last)) in enumerate(zip(owners[:-1], list(pairwise(cuts))[:-1], strict=True)):
            window = self.model.first(last) if index == 0 else self.model.middle(first, last)
            held[owner][index] = window
            self.windows.append(window)
        end = self.model.tail(cuts[-2]) if rounds else self.model.whole()
        self.windows.append(end)
        tail_window: LogitsWindow = end
        if predictor is not None:
            predictor.follow(self.model, end)
            drafter = PredictedDrafters(predictor, lambda: self.now_s)
        self.limits = [
            StepLimits(
                ring=7,
                epoch=3,
                windows=frozenset(i for i, owner in enumerate(owners) if owner == device),
                width=WIDTH,
                rows=options.rows,
                context=context,
                sequences=options.numbers,
                states=states,
            )
            for device in range(len(held))
        ]
        chunking = Chunking(
            rows=rows,
            minimum=minimum or rows,
            begins=begins_message if minimum else never,
            pieces=pieces,
            step_rows=step_rows,
        )
        self.scheduler = Scheduler(
            SchedulerState(
                context=context,
                chunking=chunking,
                depth=depth,
                sequences=sequences,
                batching=batching,
                keep_rows=keep_rows,
                states=states,
                state_rows=state_rows,
                drafting=drafting,
                drafter=drafter,
            )
        )
        self.chunking, self.keep_rows = chunking, keep_rows
        self.kv_writers = [*kv_writers, *(FakeKvWriter() for _ in held)][: len(held)]
        self.layers = [
            {layer for i, window in enumerate(self.windows) if owners[i] == device for layer in window.layers}
            for device in range(len(held))
        ]
        self.head = Head(
            windows=held[0],
            tail=tail_window,
            route=len(owners),
            limits=self.limits[0],
            scheduler=self.scheduler,
            step_timeout_s=STEP_TIMEOUT_S,
            clock=lambda: self.now_s,
            kv_writer=self.kv_writers[0],
            predictor=predictor,
        )
        self.workers = [
            Worker(windows, kv_writer) for windows, kv_writer in zip(held[1:], self.kv_writers[1:], strict=True)
        ]
        self.links: list[deque[tuple[bytes, bytes]]] = [deque() for _ in held]
        self._random = random.Random(seed)

    def move(self) -> bool:
        """Let one core take one message, or the head one turn; False if nothing moves any more."""
        ready = [device for device, link in enumerate(self.links) if link]
        movers = [*ready, None]
        self._random.shuffle(movers)
        if any(self._turn() if device is None else self._deliver(device) for device in movers):
            return True
        waits_until_s = self.scheduler.waits_until_s
        if waits_until_s is None:
            self.now_s += MASKS_LOOK_S
            return self.head.wait_s() <= MASKS_LOOK_S
        self.now_s = waits_until_s
        return True

    def run(self) -> None:
        """Move until everything is quiet."""
        while self.move():
            pass
        assert self.scheduler.is_idle, "the ring went quiet with work left"
        assert self.head.wait_s() == float("inf")

    def ask(self, request: Generate) -> tuple[list[int], Finished]:
        """The tokens of one generation, and how it ended."""
        self.head.submit(request)
        self.run()
        return self.answer(request.request)

    def answer(self, request: int) -> tuple[list[int], Finished]:
        """The tokens and the end of the finished generation ``request``."""
        reported = [
            event for event in self.events if isinstance(event, Sampled | Finished) and event.request == request
        ]
        *sampled, finished = reported
        assert isinstance(finished, Finished)
        assert all(isinstance(event, Sampled) for event in sampled)
        return [event.token for event in sampled if isinstance(event, Sampled)], finished

    def reported(self, request: int) -> int:
        """The number of events of ``request``."""
        return sum(isinstance(event, Sampled | Finished) and event.request == request for event in self.events)

    def cancel(self, request: int) -> None:
        self.head.cancel(Cancel(request))

    def _turn(self) -> bool:
        outcome = self.head.turn()
        match outcome:
            case None:
                return False
            case Send(step, hidden):
                self._send(0, step, hidden)
            case Skip():
                self._overtake(0, outcome)
            case Notify(events):
                self.events += events
        return True

    def _deliver(self, device: int) -> bool:
        if self._random.random() < 0.7:
            self._take_skips(device)
        if not self.links[device]:
            return True
        header, payload = self.links[device].popleft()
        step = decode_route(header, len(payload), self.limits[device])
        if isinstance(step, Skip):
            self._skip(device, step)
            return True
        hidden = np.frombuffer(payload, np.float32).reshape(step.payload_shape)
        if device == 0:
            self.head.receive(step, hidden)
        else:
            self._send(device, *self.workers[device - 1].receive(step, hidden))
        return True

    def _send(self, device: int, step: Step, hidden: Hidden) -> None:
        assert hidden.dtype == np.float32
        assert hidden.shape == step.payload_shape
        self.links[(device + 1) % len(self.links)].append((encode(step), hidden.tobytes()))

    def _overtake(self, device: int, skip: Skip) -> None:
        if self._random.random() < 0.9:  # it may fail to arrive
            self.links[(device + 1) % len(self.links)].append((encode(skip), b""))

    def _skip(self, device: int, skip: Skip) -> None:
        if device:
            self.workers[device - 1].skip(skip)
            self._overtake(device, skip)

    def _take_skips(self, device: int) -> None:
        """Take all waiting skips, and compute nothing yet."""
        waiting = list(self.links[device])
        self.links[device].clear()
        for header, payload in waiting:
            # A message with payload is a step, which is judged when it is computed.
            message = None if payload else decode_route(header, len(payload), self.limits[device])
            if isinstance(message, Skip):
                self._skip(device, message)
            else:
                self.links[device].append((header, payload))
