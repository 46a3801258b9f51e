"""Loads windows, on the head and on a worker: prepares the layer files, places the windows, starts the ring process,
opens it.

Only the source of missing layers differs: the head cuts them out of its model file, a worker fetches them; for a model
on a hub each device downloads its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from halda import DeviceProfile
from primad.daemon.layer_files import lease_layers, place_windows, release_files
from primad.daemon.loaded_process import LoadedProcess, LoadKey
from primad.daemon.node import Node
from primad.daemon.ring_process import RingProcess
from primad.engine.protocol import EngineOptions, WindowSource
from primad.errors import LoadAgainError
from primad.gguf.header import read_header
from primad.gguf.layers import LayerRef
from primad.layers.fetch import missing_layers
from primad.network.messages import Load
from primad.ring.messages import HeadPart, Open
from primad.system.niceness import apply_nice
from primad.system.tasks import in_thread

GetLayers = Callable[[Sequence[LayerRef], Callable[[int], None]], Awaitable[None]]
"""Puts missing layers into the cache, and reports bytes as they arrive; in total the size of those layers."""


class WindowLoad:
    """One load of windows by this daemon, as ``load`` asks for it. ``number`` distinguishes its files from those of
    other loads.

    Call ``prepare``, then ``start``; the ``LoadedProcess`` then owns the files. Call ``release`` if no process was
    started. ``head`` is for the head's own load. A plan of one window is the whole model: its window has no layer files
    if the model file is local. ``embedding`` is the layer file of the token embedding if there is no model file to look
    it up in.
    """

    def __init__(
        self,
        load: Load,
        number: int,
        node: Node,
        profile: DeviceProfile,
        head: HeadPart | None = None,
        embedding: LayerRef | None = None,
    ) -> None:
        self.number = number
        self.downloaded: dict[str, bytes] = {}
        """The tree of each layer that had no digest before, by the name of its origin."""
        self.options = EngineOptions(
            context=load.context,
            sequences=load.sequences,
            rows=load.rows,
            threads=profile.cpu.threads,
            batch_threads=profile.cpu.batch_threads,
            kv_type=load.kv_type,
            lock=node.config.lock,
            flash=load.flash,
            small_windows=load.small_windows,
            states=load.states,
            rollback=load.rollback,
            rope=load.rope,
            gpu="" if profile.gpu is None else profile.gpu.id,
            other_gpus=tuple(gpu.id for gpu in profile.other_gpus),
            offloading_gpu=next((gpu.id for gpu in reversed(profile.gpus) if gpu.prefill_offload), ""),
            branches=head.drafting.branches if head is not None and head.drafting is not None else 0,
        )
        self._gpus = len(profile.gpus)
        self._load, self._head, self._embedding = load, head, embedding
        self._place, self._config, self._gpu_care = node.workspace, node.config, node.gpu_care

    @property
    def layers(self) -> list[LayerRef]:
        """All layer files of this load, some of them more than once."""
        own = [] if self._embedding is None else [self._embedding]
        return [*own, *(ref for plan in self._load.windows for ref in plan.spec.files)]

    def named(self, name: str, digest: str, tree: bytes) -> None:
        """Record that the layer of origin ``name`` has ``digest``, by which it is called and leased from now on."""
        self.downloaded[name] = tree
        if all(ref.digest != name for ref in self.layers):
            return  # it had its digest before

        def called(ref: LayerRef) -> LayerRef:
            return LayerRef(digest, ref.size_bytes, ref.tensors) if ref.digest == name else ref

        windows = [
            replace(plan, spec=replace(plan.spec, layers=tuple(map(called, plan.spec.layers))))
            for plan in self._load.windows
        ]
        self._load = replace(self._load, windows=windows)
        self._embedding = None if self._embedding is None else called(self._embedding)
        lease_layers(self._place, self.number, self.layers)

    async def prepare(self, get: GetLayers, progress: Callable[[int, int], None]) -> None:
        """Have all layers in the cache, leased: ``get`` brings missing ones. ``progress`` gets bytes done and total
        bytes.

        Raises what ``get`` raises.
        """
        cache = self._place.cache
        lease_layers(self._place, self.number, self.layers)
        missing = await missing_layers(cache, {ref.digest: ref for ref in self.layers}.values())
        total, done = sum(ref.size_bytes for ref in missing), 0

        def arrived(size: int) -> None:
            nonlocal done
            done += size
            progress(min(done, total), total)

        if missing:
            await get(missing, arrived)
        cache.touch({ref.digest for ref in self.layers})

    def key(self) -> LoadKey:
        """Return what the ring process will have loaded."""
        load = self._load
        return LoadKey(
            windows=tuple(plan.content for plan in load.windows),
            width=load.width,
            options=self.options,
            keeps=load.keeps,
        )

    async def start(self, key: LoadKey) -> LoadedProcess:
        """Start a ring process that loads the windows; its ``events`` report how it goes.

        Raises ``PrimadError`` if a disk fails, no process can be started, or a GPU was left out since the plan was
        made.
        """
        used = [len(plan.assignment.on_each_gpu) for plan in self._load.windows if plan.assignment.uses_gpu]
        if max(used, default=0) > self._gpus:
            raise LoadAgainError("a GPU was left out since the plan was made; another one is made without it")
        windows = await in_thread(self._place_windows)
        uses_gpu = bool(used)
        ring = await RingProcess.start(
            self._place.run / f"ring-{self.number}.log",
            threads=max(self.options.threads, self.options.batch_threads),
            place=self._load.place,
            gpu=uses_gpu,
        )
        apply_nice(ring.pid, self._config.nice)
        process = LoadedProcess(ring, self._place, self.number, key, self._gpu_care if uses_gpu else None)
        try:
            await process.send(self._opening(windows))
        except BaseException:  # if this is cancelled, no other code ends the process
            await process.close()
            raise
        return process

    def release(self) -> None:
        """Release the files."""
        release_files(self._place, self.number)

    def _place_windows(self) -> list[WindowSource]:
        load, head = self._load, self._head
        if head is not None and load.route == 1 and not load.windows[0].spec.layers:
            (plan,) = load.windows
            return [
                WindowSource(
                    window=0,
                    metadata=head.model,
                    layers=(),
                    assignment=plan.assignment,
                    extra_buffers=plan.extra_buffers,
                    adapters=head.adapters,
                )
            ]
        windows = place_windows(self._place, load.windows, self.number)
        for window in windows:
            read_header(Path(window.metadata))  # the head wrote it, so check it before llama.cpp reads it
        return windows

    def _opening(self, windows: list[WindowSource]) -> Open:
        load, cache = self._load, self._place.cache
        head = self._head
        if head is not None and self._embedding is not None:
            head = replace(head, embedding=str(cache.path(self._embedding.digest)))
        return Open(
            ring=load.ring,
            epoch=load.epoch,
            windows=windows,
            route=load.route,
            width=load.width,
            host=self._config.host,
            head=head,
            step_timeout_s=load.step_timeout_s,
            options=self.options,
            read_ahead_bytes=load.read_ahead_bytes,
            usage=str(self._place.usage),
            cells=str(self._place.kv.folder) if load.keeps else None,
            group=load.group,
        )
