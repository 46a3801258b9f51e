"""Loads the windows of a ring process: an ``Open`` becomes windows of llama.cpp."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from primad.engine.devices import free_bytes
from primad.engine.embedding_adapter import EmbeddingAdapter
from primad.engine.llama.embedding import TokenEmbedding
from primad.engine.llama.windows import FirstWindow, MiddleWindow, ShareWindow, TailWindow, WholeModel
from primad.engine.protocol import EngineOptions, GroupExchange, HiddenWindow, RouteWindow, WindowSource
from primad.engine.streaming.streams import StreamedWindow, Streams
from primad.engine.streaming.units import WindowUnits, units_of_model, units_of_window
from primad.errors import EngineError
from primad.gguf.adapter import open_adapter
from primad.gguf.architectures.layers import block_count, layer_count
from primad.gguf.header import Header, read_header
from primad.gguf.model import open_model
from primad.gguf.windows import control_tokens
from primad.kv.kv_writer import KvWriter
from primad.kv.store import KvStore
from primad.ring.chunks import Chunking
from primad.ring.gpu_room import load_what_fits
from primad.ring.head import Head
from primad.ring.messages import GpuLoaded, HeadPart, Open, StepLimits
from primad.ring.scheduler.scheduler import Scheduler
from primad.ring.scheduler.state import SchedulerState
from primad.ring.speculation.lookup import PromptLookup
from primad.ring.speculation.predicted import PredictedDrafters
from primad.ring.speculation.speculation import BeginsDrafter

OnLoaded = Callable[[int], None]
"""Gets the number of windows that are loaded."""
OnGpuLoaded = Callable[[GpuLoaded], None]
"""Gets what is on the GPU, if anything is to be."""
_Window = FirstWindow | MiddleWindow | TailWindow | WholeModel


def limits_of(
    ring: int, epoch: int, windows: Iterable[int], width: int, options: EngineOptions, *, follows: bool = False
) -> StepLimits:
    """What a process that holds ``windows`` (route indices) accepts in epoch ``epoch`` of ring ``ring``; one that
    ``follows`` the first rank of its group receives steps of the first window too."""
    return StepLimits(
        ring=ring,
        epoch=epoch,
        # The route's first window takes tokens, which no message carries.
        windows=frozenset(windows) - (set() if follows else {0}),
        width=width,
        rows=options.rows,
        context=options.context,
        sequences=options.numbers,
        states=options.states,
    )


def limits_of_open(opening: Open) -> StepLimits:
    """The limits of a process that ``opening`` opens."""
    windows = (window.window for window in opening.windows)
    follows = opening.group is not None and opening.group.rank > 0
    return limits_of(opening.ring, opening.epoch, windows, opening.width, opening.options, follows=follows)


def _streams(opening: Open, header: Header | None) -> Streams:
    """Manages the units of all windows except those that llama.cpp copies; ``header`` is given for a whole model."""

    predicts = opening.head is not None and opening.head.predicts

    def units(window: WindowSource) -> WindowUnits | None:
        if window.extra_buffers:
            return None
        if header is None:
            return units_of_window(window, predicts=predicts)
        return units_of_model(header, window, predicts=predicts)

    return Streams(
        (
            StreamedWindow(index=window.window, assignment=window.assignment, units=units(window))
            for window in opening.windows
        ),
        read_ahead_bytes=opening.read_ahead_bytes,
        lock=opening.options.lock,
        usage=Path(opening.usage) if opening.usage is not None else None,
    )


@contextmanager
def _released_on_error(windows: Collection[_Window]) -> Iterator[None]:
    """Release the windows already loaded when another one cannot be: loading may be tried again."""
    try:
        yield
    except EngineError:
        for window in windows:
            window.release()
        raise


def open_kv_writer(opening: Open, windows: Iterable[RouteWindow]) -> KvWriter | None:
    """The writer of this process's KV cells; None without a folder for them, or if a window cannot export them.

    The daemon keeps the store within its limit.
    """
    windows = list(windows)
    if opening.cells is None or not all(window.kv_supported for window in windows):
        return None
    return KvWriter(KvStore(Path(opening.cells)), [shape for window in windows for shape in window.kv_shapes])


def share_scratch(windows: Collection[_Window]) -> None:
    """Have only one of several windows fill its scratch memory at a time."""
    if len(windows) > 1:
        for window in windows:
            window.share_scratch()


def open_worker(
    opening: Open, loaded: OnLoaded, on_gpu: OnGpuLoaded, exchange: GroupExchange | None = None
) -> tuple[dict[int, HiddenWindow], Streams]:
    """Load a worker's windows; return them by route index, and what streams. It leads the group of ``exchange``, if
    any.

    Raises ``EngineError`` when llama.cpp cannot load one.
    """
    return load_what_fits(opening, lambda each: _open_worker(each, loaded, exchange), on_gpu, free_bytes)


def _open_worker(
    opening: Open, loaded: OnLoaded, exchange: GroupExchange | None
) -> tuple[dict[int, HiddenWindow], Streams]:
    windows: dict[int, MiddleWindow] = {}
    streams = _streams(opening, None)
    with streams.loading(), _released_on_error(windows.values()):
        for window in opening.windows:
            windows[window.window] = MiddleWindow(window, opening.options, exchange)
            loaded(len(windows))
    share_scratch(windows.values())
    streams.begin(windows)
    return dict(windows), streams


def open_follower(
    opening: Open, loaded: OnLoaded, on_gpu: OnGpuLoaded, exchange: GroupExchange
) -> tuple[dict[int, RouteWindow], Streams]:
    """The shares of a rank other than the first, by route index. Raises ``EngineError`` when llama.cpp cannot load
    one."""
    return load_what_fits(opening, lambda each: _open_follower(each, loaded, exchange), on_gpu, free_bytes)


def _open_follower(opening: Open, loaded: OnLoaded, exchange: GroupExchange) -> tuple[dict[int, RouteWindow], Streams]:
    windows: dict[int, MiddleWindow | ShareWindow] = {}
    streams = _streams(opening, None)
    with streams.loading(), _released_on_error(windows.values()):
        for window in opening.windows:
            if window.window == opening.route - 1:
                tail = ShareWindow(window, opening.options, frozenset(), exchange=exchange)
                windows[window.window] = tail
            else:
                windows[window.window] = MiddleWindow(window, opening.options, exchange)
            loaded(len(windows))
    share_scratch(windows.values())
    streams.begin(windows)
    return dict(windows), streams


def open_head(
    opening: Open,
    loaded: OnLoaded,
    on_gpu: OnGpuLoaded,
    drafter: BeginsDrafter = PromptLookup,
    exchange: GroupExchange | None = None,
) -> tuple[Head, Streams]:
    """Load the head with its windows; return it, and what streams. A ``drafter`` makes its drafts. It leads the group
    of ``exchange``, if any.

    Raises ``ModelError`` and ``EngineError`` when the model cannot be loaded.
    """
    return load_what_fits(opening, lambda each: _open_head(each, loaded, drafter, exchange), on_gpu, free_bytes)


def _open_head(
    opening: Open, loaded: OnLoaded, drafter: BeginsDrafter, exchange: GroupExchange | None
) -> tuple[Head, Streams]:
    part = opening.head
    assert part is not None
    header = open_model(Path(part.model))
    ends = frozenset(part.ends)
    windows: dict[int, FirstWindow | MiddleWindow] = {}
    tail: TailWindow | WholeModel | None = None
    embedding = _embedding(part, header) if opening.route > 1 or exchange is not None else None
    streams = _streams(opening, header if opening.route == 1 and not opening.windows[0].layers else None)
    with streams.loading(), _released_on_error(windows.values()):
        for window in opening.windows:
            options = opening.options
            if exchange is not None and window.window == opening.route - 1:
                tail = ShareWindow(
                    window,
                    options,
                    ends,
                    vocabulary=part.vocabulary,
                    exchange=exchange,
                    embedding=embedding,
                    takes_tokens=opening.route == 1,
                    file=header.path,
                )
            elif opening.route == 1:
                tail = WholeModel(
                    window,
                    options,
                    ends,
                    vocabulary=part.vocabulary,
                    file=header.path,
                    predicting=_predicting(header),
                    predicts=part.predicts,
                )
            elif window.window == 0:
                assert embedding is not None
                windows[0] = FirstWindow(window, options, embedding, exchange)
            elif window.window == opening.route - 1:
                tail = TailWindow(
                    window,
                    options,
                    ends,
                    vocabulary=part.vocabulary,
                    file=header.path,
                    predicting=_predicting(read_header(Path(window.metadata))),
                    predicts=part.predicts,
                    embedding=embedding,
                )
            else:
                windows[window.window] = MiddleWindow(window, options)
            loaded(len(windows) + (tail is not None))
    assert tail is not None
    share_scratch((*windows.values(), tail))
    streams.begin({**windows, opening.route - 1: tail})
    controls = control_tokens(header)
    chunking = Chunking(
        rows=part.chunk_rows,
        minimum=part.min_rows,
        begins=lambda token: token in controls,
        pieces=part.pieces,
        step_rows=opening.options.rows,
    )
    kv_writer = open_kv_writer(opening, (*windows.values(), tail))
    if tail.predictor is not None:
        drafter = PredictedDrafters(tail.predictor, time.monotonic)
    head = Head(
        windows=windows,
        tail=tail,
        route=opening.route,
        limits=limits_of_open(opening),
        scheduler=Scheduler(
            SchedulerState(
                context=opening.options.context,
                chunking=chunking,
                depth=part.depth,
                chunks=part.chunks,
                sequences=opening.options.sequences,
                at_once=part.at_once,
                batching=part.batching,
                keep_rows=part.keep_rows if kv_writer is not None else None,
                states=part.states,
                state_rows=part.state_rows if kv_writer is not None else None,
                drafting=part.drafting,
                drafter=drafter,
            )
        ),
        step_timeout_s=opening.step_timeout_s,
        clock=time.monotonic,
        kv_writer=kv_writer,
        predictor=tail.predictor,
    )
    return head, streams


def _predicting(header: Header) -> int:
    """Number of layers of the model, or window, that are for multi-token prediction."""
    return block_count(header) - layer_count(header)


def _embedding(part: HeadPart, header: Header) -> TokenEmbedding:
    """The token embedding, which may be in its own file. Raises ``ModelError``."""
    table = header if part.embedding is None else read_header(Path(part.embedding))
    return TokenEmbedding.of(header, table, _embedding_adapters(part, header))


def _embedding_adapters(part: HeadPart, header: Header) -> list[EmbeddingAdapter]:
    """The adapters of the token embedding, in the order in which llama.cpp adds them."""
    adapters = [open_adapter(Path(each.path), each.scale, header) for each in part.adapters]
    return [EmbeddingAdapter(each) for each in reversed(adapters) if each.embedding is not None and each.scale]
