"""``/metrics`` in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats).

Requests, tokens and times are counted as they happen. Figures of the ring's devices are fetched for each scrape through
the backend's ``status``, which bounds the time and serves concurrent scrapes with one query. A device is shown only by
its name and figures: no key, no address, no text. A device's counters restart with each ring process that it starts or
opens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from primad import __version__
from primad.api.answering.generation import Written
from primad.api.http.connection import SEND_BODY
from primad.api.http.status import (
    DeviceStatus,
    DraftFigures,
    EmbeddingStatus,
    KvStatus,
    MemoryFigures,
    ModelStatus,
    RingFigures,
    StatusBody,
    TokenCounts,
)
from primad.errors import PrimadError, RequestError
from primad.settings.old_names import METRICS

MEDIA_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
LEFT: Final = 499
"""The status of a request whose client left before the response."""
OLD_NAME: Final = "The metric's old name; the version after the next removes it."
OTHER: Final = "other"
"""Groups every other path, so that a client cannot create unlimited series."""
_FIRST_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_NEXT_S: Final = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2, 4, 8, 16, 32)
_AT_ONCE: Final = 64
_PRESSURE: Final = {"calm": 0, "some": 1, "high": 2}

_Figure = Callable[[DeviceStatus], float | None]


def _ring(figure: Callable[[RingFigures], float | None]) -> _Figure:
    """Return a figure of a device's ring process; None if the process did not reply."""
    return lambda device: None if device.ring is None else figure(device.ring)


def _memory(figure: Callable[[MemoryFigures], float | None]) -> _Figure:
    return lambda device: figure(device.memory)


_GAUGES: Final[tuple[tuple[str, str, _Figure], ...]] = (
    ("answered", "Whether its ring process responded in time (1) or not (0).", lambda device: device.ring is not None),
    ("layers", "Layers on this device.", lambda device: device.layers),
    ("daemon_rss_bytes", "Memory of its daemon.", lambda device: device.daemon_rss_bytes),
    ("rss_bytes", "Memory of its ring process, shared file pages included.", _ring(lambda ring: ring.rss_bytes)),
    ("private_bytes", "Memory of its ring process without shared pages.", _ring(lambda ring: ring.private_bytes)),
    ("resident_layers", "Resident layers.", _memory(lambda memory: memory.resident)),
    ("streamed_layers", "Streamed layers, counted in whole layers.", _memory(lambda memory: memory.streamed)),
    (
        "streams_output",
        "Whether the output matrix streams (1) or not (0).",
        _memory(lambda memory: memory.streams_output),
    ),
    ("read_ahead_bytes", "Read-ahead of streamed layers.", _memory(lambda memory: memory.read_ahead_bytes)),
    ("resident_bytes", "Size of the resident layers.", _memory(lambda memory: memory.resident_bytes)),
    ("streamed_bytes", "Size of the streamed layers.", _memory(lambda memory: memory.streamed_bytes)),
    (
        "pressure_level",
        "Memory pressure: 0 calm, 1 some, 2 high.",
        _memory(lambda memory: _PRESSURE.get(memory.pressure or "")),
    ),
)
_COUNTERS: Final[tuple[tuple[str, str, _Figure], ...]] = (
    ("steps", "Visits of steps to its windows.", _ring(lambda ring: ring.steps)),
    ("compute_seconds", "Compute time.", _ring(lambda ring: ring.compute_s)),
    ("refused_messages", "Messages it refused.", _ring(lambda ring: ring.refused_messages)),
    ("read_bytes", "Weights read from disk.", _memory(lambda memory: memory.read_bytes)),
    ("stall_seconds", "Time that steps waited for weights.", _memory(lambda memory: memory.stall_s)),
)


_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
_EMBEDDING: Final[tuple[tuple[_Family, str, str, Callable[[EmbeddingStatus], float | None]], ...]] = (
    (GaugeMetricFamily, "alive", "Whether the embedding process runs (1) or not (0).", lambda each: each.alive),
    (GaugeMetricFamily, "rss_bytes", "Memory of the embedding process.", lambda each: each.rss_bytes),
    (GaugeMetricFamily, "waiting", "Waiting and running embedding requests.", lambda each: each.waiting),
    (CounterMetricFamily, "starts", "Starts of the embedding process.", lambda each: each.starts),
    (CounterMetricFamily, "requests", "Embedding requests.", lambda each: each.requests),
    (CounterMetricFamily, "errors", "Embedding requests that ended with an error.", lambda each: each.errors),
    (CounterMetricFamily, "tokens", "Tokens of embedded texts.", lambda each: each.tokens),
    (CounterMetricFamily, "compute_seconds", "Compute time of the embedding process.", lambda each: each.compute_s),
)


_KV: Final[tuple[tuple[_Family, str, str, Callable[[KvStatus], float]], ...]] = (
    (
        GaugeMetricFamily,
        "replicated_bytes",
        "Replicated KV cache of requests.",
        lambda kv: kv.replicated_bytes,
    ),
    (GaugeMetricFamily, "lag_tokens", "Tokens whose KV cache is not replicated yet.", lambda kv: kv.lag_tokens),
    (CounterMetricFamily, "restores", "Rings that resumed requests of an earlier one.", lambda kv: kv.restores),
    (
        CounterMetricFamily,
        "restored_tokens",
        "Tokens of those requests whose KV cache was restored.",
        lambda kv: kv.restored_tokens,
    ),
    (CounterMetricFamily, "restore_seconds", "Time to restore them.", lambda kv: kv.restore_s),
    (
        CounterMetricFamily,
        "computed_again_tokens",
        "Tokens of those requests that were recomputed.",
        lambda kv: kv.computed_again_tokens,
    ),
    (
        CounterMetricFamily,
        "found_tokens",
        "Prompt tokens found in the prefix cache.",
        lambda kv: kv.found_tokens,
    ),
)


_DRAFTS: Final[tuple[tuple[_Family, str, str, Callable[[DraftFigures], float]], ...]] = (
    (CounterMetricFamily, "tokens", "Draft tokens.", lambda drafts: drafts.drafted),
    (CounterMetricFamily, "accepted_tokens", "Accepted draft tokens.", lambda drafts: drafts.accepted),
    (
        CounterMetricFamily,
        "skipped_tokens",
        "Draft tokens that were skipped before they were computed to the end.",
        lambda drafts: drafts.skipped,
    ),
    (
        GaugeMetricFamily,
        "tokens_per_pass",
        "Tokens per ring pass of a request.",
        lambda drafts: drafts.tokens_per_pass,
    ),
)


class Metrics:
    """All figures of one app, in its own registry. ``clock`` gives seconds on any scale. If there are ``several``
    models, requests and tokens are also counted by model."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, several: bool = False) -> None:
        self._clock = clock
        self._paths: frozenset[str] = frozenset()
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "primad_http_requests",
            "HTTP requests by path and status; 499: the client left before.",
            ["path", "code"],
            registry=self._registry,
        )
        self._responses = Counter(
            "primad_answers",
            "Requests by outcome: stop, length, tool_calls, error, refused, or left (the client disconnected).",
            ["end"],
            registry=self._registry,
        )
        self._open = Gauge("primad_answers_open", "Running and waiting requests.", registry=self._registry)
        self._prompt_tokens = Counter("primad_prompt_tokens", "Prompt tokens.", registry=self._registry)
        self._cached = Counter(
            "primad_cached_tokens",
            "Prompt tokens from the prefix cache.",
            registry=self._registry,
        )
        self._sampled = Counter("primad_completion_tokens", "Generated tokens.", registry=self._registry)
        self._first = Histogram(
            "primad_time_to_first_token_seconds",
            "Time from accepting a request to its first token, including waiting.",
            buckets=_FIRST_S,
            registry=self._registry,
        )
        self._next = Histogram(
            "primad_time_per_output_token_seconds",
            "Time between tokens of a request.",
            buckets=_NEXT_S,
            registry=self._registry,
        )
        self._noted_s: list[float] = []
        self._noted_tokens = 0
        self._of_model = tuple(
            Counter(f"primad_model_{name}", text, ["model"], registry=self._registry)
            for name, text in (
                ("answers", "Requests of a model that have ended."),
                ("prompt_tokens", "Prompt tokens of a model."),
                ("completion_tokens", "Generated tokens of a model."),
            )
            if several
        )
        self._ring = _Ring()
        self._registry.register(self._ring)

    def know(self, paths: Iterable[str]) -> None:
        """Count requests of these ``paths`` by path, all others together."""
        self._paths |= frozenset(paths)

    @property
    def answers_open(self) -> int:
        """The number of running and waiting requests."""
        return int(self._registry.get_sample_value("primad_answers_open") or 0)

    def tokens(self) -> TokenCounts:
        """Return the numbers of prompt and completion tokens so far."""
        self._count_noted()
        return TokenCounts(
            prompt=int(self._registry.get_sample_value("primad_prompt_tokens_total") or 0),
            completion=int(self._registry.get_sample_value("primad_completion_tokens_total") or 0),
            answers_open=self.answers_open,
        )

    def render(self, status: StatusBody) -> bytes:
        """Return all metrics, with the ring's ``status``."""
        self._count_noted()
        self._ring.status = status
        return generate_latest(self._registry)

    def count(self, path: str, code: int) -> None:
        """Count a response with status ``code``."""
        if path.startswith("/v1/models/"):
            path = "/v1/models/{id}"
        elif path.startswith("/page/"):
            path = "/page/{name:path}"
        elif path not in self._paths:
            path = OTHER
        self._requests.labels(path, str(code)).inc()

    def _note(self, sampled: int, took_s: float, *, is_first: bool) -> None:
        """Count tokens that took ``took_s``. The registry is slow, so times are passed to it in batches."""
        self._noted_tokens += sampled
        if is_first:
            self._first.observe(took_s)
        else:
            self._noted_s.append(took_s)
            if len(self._noted_s) >= _AT_ONCE:
                self._count_noted()

    def _count_noted(self) -> None:
        for took_s in self._noted_s:
            self._next.observe(took_s)
        self._noted_s.clear()
        self._sampled.inc(self._noted_tokens)
        self._noted_tokens = 0

    async def metered(
        self, written: AsyncGenerator[Written, None], prompt_tokens: int, model: str = ""
    ) -> AsyncGenerator[Written, None]:
        """Yield the parts of ``written`` by ``model``, counted and timed; closing this generator closes ``written``."""
        end: str | None = None
        sampled = 0
        before_s, is_first = self._clock(), True
        self._prompt_tokens.inc(prompt_tokens)
        self._open.inc()
        try:
            async with aclosing(written):
                async for part in written:
                    if part.sampled:
                        now_s, sampled = self._clock(), sampled + part.sampled
                        self._note(part.sampled, now_s - before_s, is_first=is_first)
                        before_s, is_first = now_s, False
                    if part.finish is not None:
                        self._cached.inc(part.cached)
                    end = part.finish
                    yield part
        except RequestError:
            end = "refused"
            raise
        except PrimadError:
            end = "error"
            raise
        except (GeneratorExit, asyncio.CancelledError):
            end = end or "left"
            raise
        finally:
            self._open.dec()
            self._responses.labels(end or "error").inc()
            if self._of_model:
                for counter, more in zip(self._of_model, (1, prompt_tokens, sampled), strict=True):
                    counter.labels(model).inc(more)


class Counted:
    """Counts every HTTP request of ``app``, including those that another middleware refuses."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        code: int | None = None

        async def noting(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        scope[SEND_BODY] = send
        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            code = LEFT if code is None else code
            raise
        finally:  # without a response it is our own error, which outer middleware handles
            self._metrics.count(scope["path"], 500 if code is None else code)
            del scope[SEND_BODY]  # it refers to the scope: a cycle for the garbage collector


class _Ring(Collector):
    """The ring and its devices as of ``status``."""

    def __init__(self) -> None:
        self.status = StatusBody(serving=False, detail="", model=None)

    def collect(self) -> Iterator[Metric]:
        for metric in self._collected():
            yield metric
            if (old := METRICS.get(metric.name)) is not None:
                beside = Metric(old, OLD_NAME, metric.type)
                for each in metric.samples:
                    beside.add_sample(old, each.labels, each.value)
                yield beside

    def _collected(self) -> Iterator[Metric]:
        status = self.status
        build = InfoMetricFamily("primad", "Version and served model.")
        build.add_metric([], {"version": __version__, "model": status.model or ""})
        yield build
        yield GaugeMetricFamily(
            "primad_serving", "Whether requests can be served (1) or not (0).", value=status.serving
        )
        yield GaugeMetricFamily("primad_ring_devices", "Devices in the serving ring.", value=len(status.devices))
        if status.epoch is not None:
            yield GaugeMetricFamily("primad_ring_epoch", "The epoch of the serving plan.", value=status.epoch)
        if status.rounds is not None:
            yield GaugeMetricFamily("primad_ring_rounds", "Rounds per token.", value=status.rounds)
        phases = GaugeMetricFamily("primad_cluster_devices", "Other devices by state.", labels=["phase"])
        for phase in sorted({member.phase for member in status.cluster}):
            phases.add_metric([phase], sum(member.phase == phase for member in status.cluster))
        yield phases
        for name, text, figure in _GAUGES:
            yield _filled(GaugeMetricFamily(f"primad_device_{name}", text, labels=["device"]), status, figure)
        for name, text, figure in _COUNTERS:
            yield _filled(CounterMetricFamily(f"primad_device_{name}", text, labels=["device"]), status, figure)
        if status.kv is not None:
            for kind, name, text, kept in _KV:
                yield kind(f"primad_kv_{name}", text, value=kept(status.kv))
        if status.drafts is not None:
            for kind, name, text, became in _DRAFTS:
                yield kind(f"primad_draft_{name}", text, value=became(status.drafts))
        if status.models:
            yield from _of_models(status.models)
        if status.embedding is not None:
            for kind, name, text, figure_of in _EMBEDDING:
                if (value := figure_of(status.embedding)) is not None:
                    yield kind(f"primad_embedding_{name}", text, value=value)


def _of_models(models: Iterable[ModelStatus]) -> Iterator[Metric]:
    loaded = GaugeMetricFamily("primad_model_loaded", "Whether a model is loaded (1) or not (0).", labels=["model"])
    memory = GaugeMetricFamily(
        "primad_model_memory_bytes", "Memory of a loaded model on a device.", labels=["model", "device"]
    )
    for model in models:
        loaded.add_metric([model.id], model.state == "loaded")
        for device, size_bytes in model.memory_bytes.items():
            memory.add_metric([model.id, device], size_bytes)
    yield loaded
    yield memory


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, status: StatusBody, figure: _Figure
) -> GaugeMetricFamily | CounterMetricFamily:
    for device in status.devices:
        value = figure(device)
        if value is not None:
            family.add_metric([device.name], value)
    return family
