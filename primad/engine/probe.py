"""Are llama.cpp's extra buffers (AMX, repacked weights) safe and faster here? A child process tries them.

On some builds they crash (LLAMA issue 20824: GCC before 12.4 on a CPU with AMX), on some machines they make decode faster
and prefill slower, for some types they change nothing. So a window of one real layer is timed with and without them, each
in a process of its own; a crash or a hang is an answer too. What counts is the time of a typical exchange,
``PROMPT_ROWS`` rows of prompt and ``ANSWER_TOKENS`` tokens of answer. The answer is kept in the home folder, since it
depends only on the machine, the build, the threads and the types and shapes of the layer.
"""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from primad.engine.protocol import EngineOptions, Rows, WindowFiles
from primad.errors import EngineError
from primad.gguf.layers import LayerTensor
from primad.system.measuring_lock import measuring

logger = logging.getLogger(__name__)

PROMPT_ROWS: Final = 512
ANSWER_TOKENS: Final = 128
WORTH: Final = 0.97
"""Extra buffers double the memory that a window holds: below 3 % they are not worth it."""
TIMEOUT_S: Final = 120.0
_DECODE_RUNS: Final = 24
_PREFILL_RUNS: Final = 3
_SWEEP_BYTES: Final = 96 << 20
"""Read between two decode steps: one layer alone would stay in the caches, where a model's layers never are."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is to time: one window, from hidden states of ``width``; ``vocabulary`` is 0 unless it is the tail."""

    files: WindowFiles
    options: EngineOptions
    width: int
    vocabulary: int
    extra_buffers: bool


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Medians in seconds: a decode step of one row, and prefill per row."""

    decode_s: float
    prefill_row_s: float

    @property
    def exchange_s(self) -> float:
        """Seconds of a typical exchange."""
        return PROMPT_ROWS * self.prefill_row_s + ANSWER_TOKENS * self.decode_s


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a typical exchange without and with extra buffers; None where they are not safe."""

    plain_s: float
    extra_s: float | None


class StopFlag:
    """Ends a probe from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self.is_set = False

    def set(self) -> None:
        """Kill the trial that runs; let none begin."""
        with self._lock:
            self.is_set = True
            if self._child is not None:
                self._child.kill()

    def watch(self, child: subprocess.Popen[bytes]) -> None:
        """Have ``set`` kill ``child``."""
        with self._lock:
            self._child = child
            if self.is_set:
                child.kill()


def is_worth_it(layer: Verdict, layers: int, tail: Verdict | None = None) -> bool:
    """Whether extra buffers pay for a window of ``layers`` layers; ``tail`` is a one-layer tail among them."""
    if layer.extra_s is None or (tail is not None and tail.extra_s is None):
        return False
    hidden = layers - (tail is not None)
    plain = hidden * layer.plain_s + (tail.plain_s if tail is not None else 0)
    extra = hidden * layer.extra_s + (tail.extra_s or 0 if tail is not None else 0)
    return extra < WORTH * plain


def probe(trial: Trial, tensors: tuple[LayerTensor, ...], build: str, memory: Path, stop: StopFlag) -> Verdict:
    """The verdict for the window of ``trial``, from ``memory`` (a JSON file) or measured now (a few seconds).

    Raises ``EngineError`` when the window does not even run without extra buffers, or when ``stop`` was set.
    """
    key = _key(trial, tensors, build)
    known = _read(memory)
    if key in known:
        return known[key]
    with measuring(lambda: stop.is_set):
        plain = _measure(msgspec.structs.replace(trial, extra_buffers=False), stop)
        if isinstance(plain, str):
            raise EngineError(f"llama.cpp cannot compute a window of this model: {plain}")
        extra = _measure(msgspec.structs.replace(trial, extra_buffers=True), stop)
    if stop.is_set:
        raise EngineError("stopped while trying extra buffers")  # and nothing is remembered
    if isinstance(extra, str):
        logger.warning("extra buffers are not safe on this device and stay off: %s", extra)
    verdict = Verdict(plain_s=plain.exchange_s, extra_s=None if isinstance(extra, str) else extra.exchange_s)
    memory.write_bytes(msgspec.json.format(msgspec.json.encode(_read(memory) | {key: verdict}), indent=2))
    return verdict


def _key(trial: Trial, tensors: tuple[LayerTensor, ...], build: str) -> str:
    # The number in front grows when the way of measuring changes.
    shapes = sorted({(tensor.name, tensor.type, tensor.shape) for tensor in tensors})
    facts = (2, build, trial.options.threads, trial.options.batch_threads, trial.vocabulary > 0, shapes)
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _read(memory: Path) -> dict[str, Verdict]:
    try:
        return msgspec.json.decode(memory.read_bytes(), type=dict[str, Verdict])
    except (OSError, msgspec.DecodeError):
        return {}


def _measure(trial: Trial, stop: StopFlag) -> Timing | str:
    """Time one window in a child; the timing, or in one line how the child ended.

    The child has a session of its own: Ctrl-C in a terminal must not end it, which would look like a crash.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "primad.engine.probe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        start_new_session=True,
    ) as child:
        stop.watch(child)
        try:
            timing, errors = child.communicate(msgspec.json.encode(trial), TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            return f"a trial did not end within {TIMEOUT_S:g} s"
    if child.returncode == 0:
        return msgspec.json.decode(timing, type=Timing)
    said = errors.decode("utf-8", errors="replace").strip().splitlines()
    return f"a trial ended with code {child.returncode}" + (f": {said[-1]}" if said else "")


def _run(trial: Trial) -> Timing:
    import numpy as np  # only the child loads it and llama.cpp

    from primad.engine.llama import MiddleWindow, TailWindow

    window: MiddleWindow | TailWindow
    if trial.vocabulary:
        window = TailWindow(
            trial.files,
            trial.options,
            frozenset(),
            vocabulary=trial.vocabulary,
            extra_buffers=trial.extra_buffers,
        )
    else:
        window = MiddleWindow(trial.files, trial.options, width=trial.width, extra_buffers=trial.extra_buffers)
    rows = min(PROMPT_ROWS, trial.options.rows, trial.options.context - _DECODE_RUNS - 1)
    sweep = np.ones(_SWEEP_BYTES // 8, np.uint64)
    hidden = np.random.default_rng(0).standard_normal((rows, trial.width), np.float32)

    def step(count: int, position: int) -> float:
        content = hidden[:count]
        outputs = [False] * (count - 1) + [True]
        start = time.perf_counter()
        window.forward(
            Rows(
                content=content,
                positions=list(range(position, position + count)),
                sequences=[[0]] * count,
                outputs=outputs,
            )
        )
        return time.perf_counter() - start

    prefill, decode = [], []
    for _ in range(_PREFILL_RUNS):
        window.kv_remove(0, 0, -1)
        prefill.append(step(rows, 0))
    for i in range(_DECODE_RUNS):
        sweep.sum()
        decode.append(step(1, rows + i))
    return Timing(decode_s=statistics.median(decode), prefill_row_s=statistics.median(prefill) / rows)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_run(msgspec.json.decode(sys.stdin.buffer.read(), type=Trial))))
