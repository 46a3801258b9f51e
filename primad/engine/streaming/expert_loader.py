"""Streaming by expert: carries out what a ``Pool`` of experts decides.

The computing thread reports what each layer's router picked (``pick``) and waits for those experts that are not in
memory; it reads them itself, all concurrently, since it has nothing else to do. Another thread reads the next layer's
likely experts while the disk is idle, and pauses while picked ones are read; it also refills the pool where the system
evicted experts, and saves from time to time how often each was used.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from primad.engine.streaming.expert_usage import UsageFolder
from primad.engine.streaming.experts import Expert, LayerExperts, Picks, Pool
from primad.engine.streaming.pages import COLD, IDLE_S, PIECE_BYTES, FileRange, Pages, ReadCall, Slices
from primad.errors import EngineError
from primad.settings.timings import StreamingTimings

logger = logging.getLogger(__name__)

SAVE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A tensor of ``count`` experts of equal size, stored one after the other in ``whole``."""

    whole: FileRange
    count: int


@dataclass(frozen=True, slots=True)
class ExpertFiles:
    """The expert tensors of one layer (none: it has no experts); ``key`` identifies its weights across runs."""

    key: str
    tensors: tuple[ExpertTensor, ...]

    @property
    def size(self) -> int:
        """Bytes of all experts."""
        return sum(tensor.whole.size for tensor in self.tensors)

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.tensors[0].count


class ExpertLoader:
    """The experts of all ``layers`` of a ring process, by unit. Call ``start`` once llama.cpp has loaded them.

    ``lock`` pins experts to memory while the pool holds them. ``arrive``, ``pick`` and ``depart`` belong to the
    computing thread; any thread may call the others.
    """

    def __init__(
        self,
        layers: Mapping[int, ExpertFiles],
        pool_bytes: int,
        usage: UsageFolder,
        *,
        lock: bool,
        timings: StreamingTimings = StreamingTimings(),
    ) -> None:
        self.units = frozenset(layers)
        """The units that contain these experts."""
        self._files = tuple(layers[unit] for unit in sorted(layers))
        self._usage, self._lock, self._timings = usage, lock, timings
        self._slices = [[Slices(tensor.whole, tensor.count) for tensor in layer.tensors] for layer in self._files]
        self._pool = Pool(
            [LayerExperts(layer.count, layer.size // layer.count) for layer in self._files],
            pool_bytes,
            [usage.load(layer.key, layer.count) for layer in self._files],
        )
        self._first = self._pool.fill()
        self._loaded: list[Pages] = []
        self._condition = threading.Condition()
        self._arriving: set[Expert] = set()
        self._next: tuple[int, int] | None = None
        self._urgent = False
        self._reported: set[int] = set()
        self._error: EngineError | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        self._next_look = 0
        self._saved_s = self._looked_s = self._departed_s = time.monotonic()
        self.asked_bytes = 0
        """Bytes read so far."""
        self.picked_bytes = 0
        """The part of ``asked_bytes`` that a step waited for."""
        self.evicted_bytes = 0
        """Bytes that the system evicted so far."""

    @property
    def pool(self) -> Pool:
        """The pool of experts in memory."""
        return self._pool

    def loaded_pages(self) -> list[Pages]:
        """Return the pages to release after loading; open until ``start`` or ``close``.

        These are all experts: the system keeps pages that were read together in large groups, and drops only whole
        groups, so an expert that stays would keep its neighbours. Experts that are read one by one come in single
        pages.
        """
        self._loaded = [Pages([tensor.whole for tensor in files.tensors]) for files in self._files]
        return self._loaded

    def start(self) -> None:
        """Read the most used experts and start to read ahead.

        Raises ``EngineError`` where one is not mapped or cannot be locked.
        """
        self._close_loaded()
        for layer in self._slices:
            for tensor in layer:
                tensor.find()
        self.asked_bytes = sum(self._read_at_once([expert]) for expert in self._first)
        self._pin(self._first)
        self._thread = threading.Thread(target=self._run, name="expert loader", daemon=True)
        self._thread.start()

    # ---- the computing thread ------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Prepare for a window."""
        if time.monotonic() - self._departed_s > IDLE_S:
            with self._condition:
                for layer in range(len(self._files)):
                    self._look_at(layer)

    def pick(self, layer: int, picks: Picks) -> None:
        """Report the experts that the router of ``layer`` picked, one row a token; returns when they are in memory.

        Raises ``EngineError`` when they cannot be read.
        """
        with self._condition:
            if self._error is not None:
                raise self._error
            self._reported.add(layer)
            if not len(picks):
                return
            change = self._pool.pick(layer, picks)
            needed = list(change.read)
            if self._arriving:
                picked = set(picks.ravel().tolist())
                needed += [each for each in self._arriving if each[0] == layer and each[1] in picked]
            self._next = ((layer + 1) % len(self._files), len(picks))
            self._release(change.release)
            self._urgent = bool(needed)
            if not needed:
                self._condition.notify_all()
                return
        try:
            read_bytes = self._read_at_once(needed)
            with self._condition:
                self.asked_bytes += read_bytes
                self.picked_bytes += read_bytes
                self._try_to_pin(needed)
        finally:
            with self._condition:
                self._urgent = False
                self._condition.notify_all()

    def depart(self, layers: Iterable[int]) -> bool:
        """Finish a window with these layers. Returns whether all of them reported their picks.

        A layer that did not has read its experts by page faults; those not held are released.
        """
        with self._condition:
            unreported = set(layers) - self._reported
            self._reported.clear()
            self._departed_s = time.monotonic()
            self._release(self._pool.depart())
            for layer in unreported:
                held = self._pool.held(layer)
                self._release([(layer, number) for number in range(len(held)) if not held[number]])
        return not unreported

    # ---- any thread ----------------------------------------------------------------------------------------------------

    def resize(self, pool_bytes: int) -> None:
        """Hold at most ``pool_bytes`` from now on."""
        with self._condition:
            self._release(self._pool.resize(pool_bytes))
            self._condition.notify_all()

    def close(self) -> None:
        """End the thread, save the experts' usage, and close the files."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._save()
        self._close_loaded()
        for layer in self._slices:
            for tensor in layer:
                tensor.close()

    def _close_loaded(self) -> None:
        for pages in self._loaded:
            pages.close()
        self._loaded = []

    # ---- carried out ---------------------------------------------------------------------------------------------------

    def _pieces(self, expert: Expert) -> Iterable[ReadCall]:
        layer, number = expert
        return (piece for tensor in self._slices[layer] for piece in tensor.pieces(number))

    def _read_at_once(self, experts: Iterable[Expert]) -> int:
        """Ask the disk for all before waiting for any; return the bytes that were read."""
        pieces = [piece for expert in experts for piece in self._pieces(expert)]
        missing = [(piece, piece.missing()) for piece in pieces]
        for piece, gone in missing:
            if gone:
                piece.ask()
        for piece in pieces:
            piece.read()
        return sum(gone for _, gone in missing)

    def _pin(self, experts: Iterable[Expert]) -> None:
        """Lock those of ``experts``, which are in memory, that the pool holds. Raises ``EngineError``."""
        if not self._lock:
            return
        for layer, number in experts:
            if self._pool.held(layer)[number]:
                for tensor in self._slices[layer]:
                    tensor.lock(number)

    def _try_to_pin(self, experts: Iterable[Expert]) -> None:
        """Do as ``_pin``, but only warn on failure: it is no reason to fail a running request."""
        try:
            self._pin(experts)
        except EngineError as exc:
            logger.warning("%s; experts are not locked from now on", exc)
            self._lock = False

    def _release(self, experts: Iterable[Expert]) -> None:
        for layer, number in experts:
            held = self._pool.held(layer)
            for tensor in self._slices[layer]:
                tensor.release(number, held)

    def _look_at(self, layer: int) -> None:
        """Drop the experts of a layer that the system evicted."""
        held = self._pool.held(layer)
        gone = np.max([tensor.missing() for tensor in self._slices[layer]], axis=0)
        lost = [int(e) for e in np.flatnonzero(held & (gone > COLD)) if (layer, int(e)) not in self._arriving]
        if lost:
            self._pool.lost(layer, lost)
            self.evicted_bytes += len(lost) * self._pool.layers[layer].bytes_each

    def _save(self) -> None:
        for files, usage in zip(self._files, self._pool.usages, strict=True):
            self._usage.save(files.key, usage)
        self._usage.bound()

    # ---- the loader thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except EngineError as exc:
            self._error = exc
        except Exception as exc:
            logger.exception("the expert loader ended")
            self._error = EngineError(f"reading experts ahead failed: {exc}")

    def _turn(self) -> None:
        with self._condition:
            target = self._next
            experts = self._likely()
            ahead = bool(experts)
            experts = experts or self._pool.fill(PIECE_BYTES)
            self._arriving |= set(experts)
        for place, expert in enumerate(experts):
            if not self._read_ahead(expert, target if ahead else None):
                self._give_up(experts[place:])
                return
        if experts:
            return
        now = time.monotonic()
        if now - self._saved_s > SAVE_S:
            self._saved_s = now
            self._save()
        with self._condition:
            if now - self._looked_s > self._timings.look_every_s > now - self._departed_s and not self._urgent:
                self._looked_s = now
                self._next_look = (self._next_look + 1) % len(self._files)
                self._look_at(self._next_look)
            if not self._closing and self._next == target:
                self._condition.wait(IDLE_S)

    def _likely(self) -> tuple[Expert, ...]:
        """Return what to read for the layer that picks next."""
        if self._next is None:
            return ()
        layer, rows = self._next
        change = self._pool.ahead(layer, rows, self._files[layer].size)
        self._release(change.release)
        return change.read

    def _read_ahead(self, expert: Expert, target: tuple[int, int] | None) -> bool:
        """Read one expert. Returns False where a step overtook it, or the ``target`` for which it is read."""
        with self._condition:
            self._condition.wait_for(lambda: not self._urgent or self._closing)
            if self._closing or (target is not None and self._next != target):
                return False
        read_bytes = self._read_at_once([expert])
        with self._condition:
            self.asked_bytes += read_bytes
            self._arriving.discard(expert)
            if self._pool.held(expert[0])[expert[1]]:
                self._try_to_pin([expert])
            else:  # it was dropped before it was read
                self._release([expert])
        return True

    def _give_up(self, experts: Sequence[Expert]) -> None:
        """Drop these, except those that a step has picked and so read meanwhile."""
        with self._condition:
            self._arriving -= set(experts)
            for layer, number in experts:
                if self._pool.unless_picked(layer, number):
                    self._release([(layer, number)])
