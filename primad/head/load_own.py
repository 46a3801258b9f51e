"""The head's own part in a ring: cut its layers, decide on extra buffers, start its ring process."""

from __future__ import annotations

from functools import partial

from primad.daemon.loading import (
    copy_layers,
    missing_layers,
    open_window,
    open_windows,
    place_windows,
    streamed_of,
    whole_model,
)
from primad.daemon.owner import apply_nice
from primad.engine.protocol import EngineOptions
from primad.gguf.windows import WindowSpec, token_embedding
from primad.head.extra_buffers import TRIALS, choose_extra_buffers
from primad.head.ring_inputs import RingParts
from primad.layers.fetch import in_thread
from primad.ring.messages import Open, OpenWindow
from primad.ring.spawn import RingProcess


async def start_own(parts: RingParts, specs: list[WindowSpec]) -> tuple[RingProcess, int]:
    """The head's ring process, told to load the windows ``specs``, and how many those are; without any the whole model.

    Raises ``PrimadError`` when a disk refuses or llama.cpp cannot compute the model.
    """
    options = EngineOptions(
        context=parts.options.context_tokens,
        sequences=1,
        rows=parts.options.rows,
        threads=parts.profile.cpu.threads,
        batch_threads=parts.profile.cpu.batch_threads,
        kv_type=parts.options.kv_type,
        lock=parts.config.lock,
    )
    if specs:
        await _cut(parts, specs)
    windows = await _windows(parts, specs, options)
    process = await RingProcess.start(
        parts.place.run / f"ring-{parts.options.epoch}.log", threads=max(options.threads, options.batch_threads)
    )
    apply_nice(process.pid, parts.config.nice)
    try:
        await process.send(
            Open(
                ring=parts.options.session,
                epoch=parts.options.epoch,
                windows=windows,
                route=len(parts.plan.route),
                width=token_embedding(parts.header).shape[0],
                model=str(parts.header.path),
                host=parts.config.host,
                depth=len(parts.plan.devices),
                step_timeout_s=parts.options.step_timeout_s,
                options=options,
                slots=parts.plan.streaming_of(parts.plan.head).slots,
                room_bytes=parts.room_bytes(parts.plan.head),
                usage=str(parts.place.usage),
            )
        )
    except BaseException:  # cancelled over it, nobody else would end the process
        await process.close()
        raise
    return process, len(windows)


async def _cut(parts: RingParts, specs: list[WindowSpec]) -> None:
    """Cut the head's own layers out of the model file into its cache."""
    cache = parts.place.cache
    cache.hold(parts.owner, {ref.digest for spec in specs for ref in spec.layers})
    missing = await missing_layers(cache, (ref for spec in specs for ref in spec.layers))
    total, done = sum(ref.size_bytes for ref in missing), 0
    assert parts.cutter is not None

    def copied(size: int) -> None:
        nonlocal done
        done += size
        parts.reporter.progress(parts.plan.head, "copy", done, total)

    await copy_layers(parts.cutter, cache, missing, copied)
    cache.touch({ref.digest for spec in specs for ref in spec.layers})


async def _windows(parts: RingParts, specs: list[WindowSpec], options: EngineOptions) -> list[OpenWindow]:
    plan = parts.plan
    extra = await _extra_buffers(parts, options)
    streamed = streamed_of(plan, plan.head)
    if not specs:
        whole = whole_model(parts.header.path, plan)
        return [open_window(0, whole, extra[0], streamed[0])]
    gpu_layers = [window.gpu_layers for _, window in plan.windows_of(plan.head)]
    files = await in_thread(
        partial(place_windows, output_on_gpu=plan.output_on_gpu), parts.place, specs, gpu_layers, parts.options.epoch
    )
    return open_windows(specs, files, extra, streamed)


async def _extra_buffers(parts: RingParts, options: EngineOptions) -> list[bool]:
    """For each of the head's windows, whether it uses extra buffers."""
    windows = [window for _, window in parts.plan.windows_of(parts.plan.head)]
    if parts.options.extra_buffers != "auto":
        return [parts.options.extra_buffers == "on"] * len(windows)

    def advance(done: int) -> None:
        parts.reporter.progress(parts.plan.head, "probe", done, TRIALS)

    return await choose_extra_buffers(
        parts.place, parts.header, windows, options, advance, limits=parts.config.limits, tried=parts.tried
    )
