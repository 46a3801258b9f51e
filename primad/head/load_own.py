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
from primad.head.ring_inputs import RingInputs
from primad.layers.fetch import in_thread
from primad.ring.messages import Open, OpenWindow
from primad.ring.spawn import RingProcess


async def start_own(inputs: RingInputs, specs: list[WindowSpec]) -> tuple[RingProcess, int]:
    """The head's ring process, told to load the windows ``specs``, and how many those are; without any the whole model.

    Raises ``PrimadError`` when a disk refuses or llama.cpp cannot compute the model.
    """
    options = EngineOptions(
        context=inputs.options.context_tokens,
        sequences=1,
        rows=inputs.options.rows,
        threads=inputs.profile.cpu.threads,
        batch_threads=inputs.profile.cpu.batch_threads,
        kv_type=inputs.options.kv_type,
        lock=inputs.config.lock,
    )
    if specs:
        await _cut(inputs, specs)
    windows = await _windows(inputs, specs, options)
    process = await RingProcess.start(
        inputs.place.run / f"ring-{inputs.options.epoch}.log", threads=max(options.threads, options.batch_threads)
    )
    apply_nice(process.pid, inputs.config.nice)
    try:
        await process.send(
            Open(
                ring=inputs.options.session,
                epoch=inputs.options.epoch,
                windows=windows,
                route=len(inputs.plan.route),
                width=token_embedding(inputs.header).shape[0],
                model=str(inputs.header.path),
                host=inputs.config.host,
                depth=len(inputs.plan.devices),
                step_timeout_s=inputs.options.step_timeout_s,
                options=options,
                slots=inputs.plan.streaming_of(inputs.plan.head).slots,
                room_bytes=inputs.room_bytes(inputs.plan.head),
                usage=str(inputs.place.usage),
            )
        )
    except BaseException:  # cancelled over it, nobody else would end the process
        await process.close()
        raise
    return process, len(windows)


async def _cut(inputs: RingInputs, specs: list[WindowSpec]) -> None:
    """Cut the head's own layers out of the model file into its cache."""
    cache = inputs.place.cache
    cache.lease(inputs.owner, {ref.digest for spec in specs for ref in spec.layers})
    missing = await missing_layers(cache, (ref for spec in specs for ref in spec.layers))
    total, done = sum(ref.size_bytes for ref in missing), 0
    assert inputs.cutter is not None

    def copied(size: int) -> None:
        nonlocal done
        done += size
        inputs.reporter.progress(inputs.plan.head, "copy", done, total)

    await copy_layers(inputs.cutter, cache, missing, copied)
    cache.touch({ref.digest for spec in specs for ref in spec.layers})


async def _windows(inputs: RingInputs, specs: list[WindowSpec], options: EngineOptions) -> list[OpenWindow]:
    plan = inputs.plan
    extra = await _extra_buffers(inputs, options)
    streamed = streamed_of(plan, plan.head)
    if not specs:
        whole = whole_model(inputs.header.path, plan)
        return [open_window(0, whole, extra[0], streamed[0])]
    gpu_layers = [window.gpu_layers for _, window in plan.windows_of(plan.head)]
    files = await in_thread(
        partial(place_windows, output_on_gpu=plan.output_on_gpu), inputs.place, specs, gpu_layers, inputs.options.epoch
    )
    return open_windows(specs, files, extra, streamed)


async def _extra_buffers(inputs: RingInputs, options: EngineOptions) -> list[bool]:
    """For each of the head's windows, whether it uses extra buffers."""
    windows = [window for _, window in inputs.plan.windows_of(inputs.plan.head)]
    if inputs.options.extra_buffers != "auto":
        return [inputs.options.extra_buffers == "on"] * len(windows)

    def advance(done: int) -> None:
        inputs.reporter.progress(inputs.plan.head, "probe", done, TRIALS)

    return await choose_extra_buffers(
        inputs.place, inputs.header, windows, options, advance, limits=inputs.config.limits, tried=inputs.tried
    )
