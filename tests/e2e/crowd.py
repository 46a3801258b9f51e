"""Many concurrent clients of one head, which read to the end, slowly, for a while, or not at all."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx
import psutil

from tests.e2e.cluster import HTTP, PATIENCE_S, Head, steady_processes, wait_until

PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "In a village by the sea there lived a baker. " * 6,
    "One, two,",
)
LEFT_S = 0.2
"""Maximum time after which an impatient client disconnects."""
SLOW_S = 0.02
"""Maximum pause of a slow reader before each chunk."""


class Crowd:
    """Clients of ``url``; ``ends`` counts finished requests by the behaviour of their client."""

    def __init__(self, url: str, *, seed: int) -> None:
        self._url = url
        self._random = random.Random(seed)
        self.ends: Counter[str] = Counter()

    async def ask(self, requests: int, clients: int) -> None:
        """Send ``requests`` requests, at most ``clients`` at a time."""
        behaviours: Sequence[Callable[[httpx.AsyncClient], Awaitable[None]]]
        behaviours = (self.whole, self.streamed, self.slow, self.leaves, self.gives_up, self.choices)
        turns = asyncio.Semaphore(clients)
        limits = httpx.Limits(max_connections=clients, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client, asyncio.TaskGroup() as group:

            async def one(way: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
                async with turns:
                    await way(client)
                    self.ends[way.__name__] += 1

            for _ in range(requests):
                group.create_task(one(self._random.choice(behaviours)))

    def _body(self, **fields: object) -> dict[str, object]:
        prompt, seed = self._random.choice(PROMPTS), self._random.randrange(1000)
        return {"prompt": prompt, "max_tokens": self._random.randint(1, 24), "seed": seed, **fields}

    async def whole(self, client: httpx.AsyncClient) -> None:
        answer = await client.post(f"{self._url}/v1/completions", json=self._body())
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")

    async def choices(self, client: httpx.AsyncClient) -> None:
        answer = await client.post(f"{self._url}/v1/completions", json=self._body(n=3, max_tokens=8))
        assert answer.status_code == 200, answer.text
        assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]

    async def streamed(self, client: httpx.AsyncClient) -> None:
        await self._read(client, pieces=1 << 30, pause_s=0)

    async def slow(self, client: httpx.AsyncClient) -> None:
        await self._read(client, pieces=1 << 30, pause_s=SLOW_S)

    async def leaves(self, client: httpx.AsyncClient) -> None:
        await self._read(client, pieces=self._random.randint(0, 8), pause_s=0)

    async def gives_up(self, _: httpx.AsyncClient) -> None:
        # Not with httpx: a client cancelled while it connects may leave a socket of this process open.
        body, url = json.dumps(self._body()), httpx.URL(self._url)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc.decode()}\r\nContent-Type: application/json\r\n"
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        await asyncio.sleep(self._random.uniform(0, LEFT_S))
        writer.close()
        await writer.wait_closed()

    async def _read(self, client: httpx.AsyncClient, *, pieces: int, pause_s: float) -> None:
        lines: list[str] = []
        async with client.stream("POST", f"{self._url}/v1/completions", json=self._body(stream=True)) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    lines.append(line.removeprefix("data: "))
                if len(lines) > pieces:
                    return
                await asyncio.sleep(self._random.uniform(0, pause_s))
        assert lines[-1] == "[DONE]", lines
        assert json.loads(lines[-2])["choices"][0]["finish_reason"] in ("stop", "length")


@dataclass(frozen=True)
class Resources:
    """What all processes of a head use, except solver processes."""

    descriptors: int
    threads: int
    private_bytes: int


def resources_of(head: Head) -> Resources:
    """Wait until ``head`` has no open responses and no connections of clients; return what it uses."""

    def settled() -> bool:
        if "primad_answers_open 0.0" not in HTTP.get(f"{head.url}/metrics").text:
            return False
        wait_until(lambda: not _connections(head), "no connection of a client is open")
        return True

    wait_until(settled, "no answer is open")
    return _resources_of(steady_processes(head.run))


def _connections(head: Head) -> list[object]:
    ours = psutil.Process(head.run.process.pid).net_connections("tcp")
    return [each for each in ours if each.laddr.port == head.port and each.status != psutil.CONN_LISTEN]


def _resources_of(processes: Sequence[psutil.Process]) -> Resources:
    return Resources(
        descriptors=sum(process.num_fds() for process in processes),
        threads=sum(process.num_threads() for process in processes),
        private_bytes=sum(process.memory_full_info().uss for process in processes),
    )
