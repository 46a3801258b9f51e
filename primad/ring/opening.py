"""Load the windows of a ring process: what ``Open`` says becomes windows of llama.cpp."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from primad.engine.llama import FirstWindow, MiddleWindow, TailWindow, TokenEmbedding, Vocabulary, WholeModel
from primad.engine.protocol import EngineOptions, HiddenWindow, LogitsWindow
from primad.gguf.architectures import embedding_scale
from primad.gguf.model import open_model
from primad.gguf.windows import token_embedding
from primad.ring.head import Head
from primad.ring.messages import Limits, Open
from primad.ring.scheduler import Scheduler

Loaded = Callable[[int], None]
"""Hears how many windows are loaded."""


def limits_of(ring: int, epoch: int, windows: Iterable[int], width: int, options: EngineOptions) -> Limits:
    """What a process that holds ``windows`` (route indices) accepts in epoch ``epoch`` of ring ``ring``."""
    return Limits(
        ring=ring,
        epoch=epoch,
        # The route's first window takes tokens, which no message carries.
        windows=frozenset(windows) - {0},
        width=width,
        rows=options.rows,
        context=options.context,
        sequences=options.sequences,
    )


def limits_of_open(opening: Open) -> Limits:
    """``limits_of`` what ``opening`` asks for."""
    windows = (window.window for window in opening.windows)
    return limits_of(opening.ring, opening.epoch, windows, opening.width, opening.options)


def open_worker(opening: Open, loaded: Loaded) -> dict[int, HiddenWindow]:
    """A worker's windows by route index. Raises ``EngineError`` when llama.cpp cannot load one."""
    windows: dict[int, HiddenWindow] = {}
    for window in opening.windows:
        windows[window.window] = MiddleWindow(
            window.files, opening.options, width=opening.width, extra_buffers=window.extra_buffers
        )
        loaded(len(windows))
    return windows


def open_head(opening: Open, loaded: Loaded) -> Head:
    """The head with its windows. Raises ``ModelError`` and ``EngineError`` when the model cannot be loaded."""
    assert opening.model is not None
    header = open_model(Path(opening.model))
    vocabulary = Vocabulary(Path(opening.model))
    ends, size = vocabulary.ends, vocabulary.size
    vocabulary.release()
    windows: dict[int, HiddenWindow] = {}
    tail: LogitsWindow | None = None
    for window in opening.windows:
        if opening.route == 1:
            tail = WholeModel(window.files, opening.options, ends, vocabulary=size, extra_buffers=window.extra_buffers)
        elif window.window == 0:
            embedding = TokenEmbedding(token_embedding(header), embedding_scale(header))
            windows[0] = FirstWindow(window.files, opening.options, embedding, extra_buffers=window.extra_buffers)
        elif window.window == opening.route - 1:
            tail = TailWindow(window.files, opening.options, ends, vocabulary=size, extra_buffers=window.extra_buffers)
        else:
            windows[window.window] = MiddleWindow(
                window.files, opening.options, width=opening.width, extra_buffers=window.extra_buffers
            )
        loaded(len(windows) + (tail is not None))
    assert tail is not None
    return Head(
        windows=windows,
        tail=tail,
        route=opening.route,
        limits=limits_of_open(opening),
        scheduler=Scheduler(context=opening.options.context, rows=opening.options.rows, depth=opening.depth),
        step_timeout_s=opening.step_timeout_s,
        clock=time.monotonic,
    )
