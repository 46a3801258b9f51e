"""``/metrics``: counts, figures of devices, and a parse by Prometheus' own parser."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from primad.api.answering.backend import Health
from primad.api.answering.generation import Written
from primad.api.http.metrics import MEDIA_TYPE, Metrics
from primad.api.http.status import MemoryFigures, StatusBody
from primad.errors import RequestError, RingError
from tests.fakes.backend import FakeBackend, replies
from tests.fakes.http import PATIENCE_S, BareClient, call, in_memory
from tests.fakes.status import DRAFTS, KV, MEMORY, device, ring

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Scraped:
    """The samples of one scrape."""

    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200
        assert response.headers["content-type"] == MEDIA_TYPE
        self.text = response.text
        self.families = {family.name: family for family in text_string_to_metric_families(response.text)}
        self._samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._samples.get((f"primad_{name}", *sorted(labels.items())))


def scrape(backend: FakeBackend) -> Scraped:
    return Scraped(call(backend, "GET", "/metrics"))


async def after(
    backend: FakeBackend, *requests: tuple[str, str, dict[str, Any]]
) -> tuple[Scraped, list[httpx.Response]]:
    """The scrape after ``requests`` to the same app, and their responses."""
    async with asyncio.timeout(PATIENCE_S), in_memory(backend) as client:
        responses = [await client.request(method, path, **more) for method, path, more in requests]
        return (Scraped(await client.get("/metrics")), responses)


def completion(prompt: str = "Hi", **more: Any) -> tuple[str, str, dict[str, Any]]:
    return "POST", COMPLETIONS, {"json": {"prompt": prompt, **more}}


def test_every_metric_has_its_unit_and_its_words():
    backend = FakeBackend(replies())
    backend.ring = ring(device("desk", role="head"), device("lap"), lap="serving")
    found = scrape(backend)
    assert all(name.startswith("primad") for name in found.families)
    for family in found.families.values():
        assert family.documentation.strip() or family.name.endswith("_created"), family.name
        if family.type == "counter":
            assert all(sample.name.endswith(("_total", "_created")) for sample in family.samples), family.name
    assert not [name for name in found.families if name.endswith(("_ms", "_mb", "_s", "_gb"))]


async def test_requests_tokens_and_times_are_counted():
    found, _ = await after(FakeBackend(replies("abc")), completion("Hey"), completion("Hey", stream=True))
    assert found("http_requests_total", path=COMPLETIONS, code="200") == 2
    assert found("prompt_tokens_total") == 8  # including BOS
    assert found("completion_tokens_total") == 6
    assert found("answers_total", end="stop") == 2
    assert found("answers_open") == 0
    assert found("time_to_first_token_seconds_count") == 2
    assert found("time_per_output_token_seconds_count") == 4
    assert found("time_to_first_token_seconds_sum") > 0


async def test_ttft_is_recorded_separately_from_tpot():
    """Two seconds to the first token, a half and a quarter for the next two; the end does not count."""
    now_s = 100.0

    async def written() -> AsyncGenerator[Written, None]:
        nonlocal now_s
        for took_s, sampled, finish in ((2, 1, None), (0.5, 1, None), (0.25, 1, None), (8, 0, "stop")):
            now_s += took_s
            yield Written(text="", tokens=(), sampled=sampled, finish=finish)

    metrics = Metrics(clock=lambda: now_s)
    assert [part.finish async for part in metrics.metered(written(), 3)] == [None, None, None, "stop"]
    body = metrics.render(StatusBody(serving=True, detail="", model=None))
    found = Scraped(httpx.Response(200, content=body, headers={"content-type": MEDIA_TYPE}))
    assert [found(f"time_to_first_token_seconds_{suffix}") for suffix in ("count", "sum")] == [1, 2]
    assert [found(f"time_per_output_token_seconds_{suffix}") for suffix in ("count", "sum")] == [2, 0.75]
    assert found("time_per_output_token_seconds_bucket", le="0.25") == 1


@pytest.mark.parametrize(
    ("script", "end"),
    [
        (replies("a", RingError("lap is gone")), "error"),
        (replies(RequestError("full", status=429)), "refused"),
        (replies("a", KeyError("ours")), "error"),
    ],
)
async def test_failed_requests_are_counted_by_their_end(script, end):
    found, responses = await after(FakeBackend(script), completion())
    assert found("answers_total", end=end) == 1
    assert found("answers_open") == 0
    assert found("http_requests_total", path=COMPLETIONS, code=str(responses[0].status_code)) == 1


async def test_a_request_that_ends_at_its_limit_counts_as_length():
    found, _ = await after(FakeBackend(replies("abcdef")), completion(max_tokens=2))
    assert found("answers_total", end="length") == 1
    assert found("answers_total", end="left") is None


async def test_a_client_that_leaves():
    from primad.api.app import create_app

    backend = FakeBackend(replies("a", asyncio.Event()))
    app = create_app(backend)
    client = BareClient(COMPLETIONS, prompt="Hi", stream=True)
    async with asyncio.timeout(PATIENCE_S):
        task = asyncio.create_task(app(client.scope, client.receive, client.send))
        while (await client.got.get()).get("body", b"") == b"":
            pass
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as other:
            assert Scraped(await other.get("/metrics"))("answers_open") == 1
            client.left.set()
            await task
            found = Scraped(await other.get("/metrics"))
    assert found("answers_total", end="left") == 1
    assert found("answers_open") == 0
    assert found("completion_tokens_total") == 1


async def test_refusals_are_counted_and_no_client_makes_new_series():
    backend = FakeBackend(replies())
    odd = [("GET", f"/secret/{i}", {}) for i in range(5)] + [("GET", f"/v1/models/m{i}", {}) for i in range(3)]
    found, responses = await after(
        backend, *odd, ("POST", CHAT, {"json": {}}), ("GET", "/", {"headers": {"host": "evil.example"}})
    )
    assert [answer.status_code for answer in responses] == [404] * 8 + [400, 403]
    assert found("http_requests_total", path="other", code="404") == 5
    assert found("http_requests_total", path="/v1/models/{id}", code="404") == 3
    assert found("http_requests_total", path=CHAT, code="400") == 1
    assert found("http_requests_total", path="/", code="403") == 1
    assert "secret" not in found.text


def test_a_web_page_from_elsewhere_reads_no_metrics():
    assert call(FakeBackend(replies()), "GET", "/metrics", headers={"host": "evil.example"}).status_code == 403


def test_figures_of_each_device_are_exported():
    backend = FakeBackend(replies())
    backend.ring = ring(device("desk", role="head"), device("lap"), epoch=7, lap="serving", nas="ready", attic="ready")
    found = scrape(backend)
    assert (found("ring_epoch"), found("ring_rounds"), found("ring_devices"), found("serving")) == (7, 2, 2, 1)
    assert found("cluster_devices", phase="ready") == 2
    figures = {
        "layers": 26,
        "resident_layers": 23,
        "streamed_layers": 3,
        "streams_output": 0,
        "read_ahead_bytes": 2e8,
        "resident_bytes": 2.3e9,
        "streamed_bytes": 3e8,
        "read_bytes_total": 1.2e10,
        "stall_seconds_total": 2.5,
        "compute_seconds_total": 1.5,
        "steps_total": 40,
        "refused_messages_total": 1,
        "pressure_level": 1,
        "rss_bytes": 5e9,
        "private_bytes": 4e8,
        "daemon_rss_bytes": 9e7,
        "answered": 1,
    }
    for name in ("desk", "lap"):
        assert {figure: found(f"device_{figure}", device=name) for figure in figures} == figures


def test_figures_of_the_kv_replication_are_exported():
    backend = FakeBackend(replies())
    backend.ring = ring(device("desk", role="head")) | {"kv": msgspec.to_builtins(KV)}
    found = scrape(backend)
    assert (found("kv_replicated_bytes"), found("kv_lag_tokens"), found("kv_restores_total")) == (4.6e7, 12, 3)
    assert (found("kv_restored_tokens_total"), found("kv_restore_seconds_total")) == (2000, 0.4)
    assert (found("kv_computed_again_tokens_total"), found("kv_found_tokens_total")) == (31, 512)


def test_figures_of_drafts_are_exported():
    backend = FakeBackend(replies())
    backend.ring = ring(device("desk", role="head")) | {"drafts": msgspec.to_builtins(DRAFTS)}
    found = scrape(backend)
    assert (found("draft_tokens_total"), found("draft_accepted_tokens_total")) == (200, 150)
    assert (found("draft_skipped_tokens_total"), found("draft_tokens_per_pass")) == (30, 1.75)


@pytest.mark.parametrize(("pressure", "level"), [("calm", 0), ("some", 1), ("high", 2), ("odd", None), (None, None)])
def test_pressure_is_a_number(pressure, level):
    backend = FakeBackend(replies())
    backend.ring = ring(device("lap", memory=MemoryFigures(pressure=pressure)))
    assert scrape(backend)("device_pressure_level", device="lap") == level


def test_a_device_that_does_not_reply_is_listed_without_figures():
    backend = FakeBackend(replies())
    backend.ring = ring(device("desk"), device("lap", ring=None, memory=MemoryFigures()))
    found = scrape(backend)
    assert (found("device_answered", device="lap"), found("device_layers", device="lap")) == (0, 26)
    assert found("device_read_bytes_total", device="lap") is None
    assert found("device_rss_bytes", device="lap") is None
    assert found("device_read_bytes_total", device="desk") == MEMORY.read_bytes


async def test_a_device_that_left_is_no_longer_exported():
    backend = FakeBackend(replies())
    async with in_memory(backend) as client:
        backend.ring = ring(device("desk"), device("lap"))
        first = Scraped(await client.get("/metrics"))
        backend.ring = ring(device("desk"))
        second = Scraped(await client.get("/metrics"))
    assert 'device="lap"' in first.text
    assert 'device="lap"' not in second.text


def test_before_the_first_ring():
    backend = FakeBackend(replies())
    backend.state, backend.served = Health(serving=False, taken=False, detail="planning"), None
    found = scrape(backend)
    assert (found("serving"), found("ring_devices"), found("ring_epoch")) == (0, 0, None)


def test_a_name_cannot_add_a_line():
    backend = FakeBackend(replies())
    backend.ring = ring(device('a"} 1\nprimad_serving 0\n# \\'))
    found = scrape(backend)
    assert found("serving") == 1
    assert found("device_layers", device='a"} 1\nprimad_serving 0\n# \\') == 26


async def test_two_apps_count_separately():
    first, _ = await after(FakeBackend(replies("a")), completion())
    second, _ = await after(FakeBackend(replies("a")), completion())
    assert first("answers_total", end="stop") == second("answers_total", end="stop") == 1


def test_status_has_the_ring_and_the_health():
    backend = FakeBackend(replies())
    backend.ring = ring(device("desk", role="head"), lap="ready")
    body = call(backend, "GET", "/status").json()
    assert (body["serving"], body["detail"], body["model"], body["epoch"]) == (
        True,
        "serving toy on 1 device",
        "toy",
        4,
    )
    assert body["devices"][0]["memory"]["pressure"] == "some"
    assert body["devices"][0]["predicted"]["bytes_read_per_token"] == 4e8
    assert body["cluster"] == [{"device": "lap", "phase": "ready", "reason": "", "api": ""}]
