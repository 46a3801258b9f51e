"""The real thing: daemons in their own processes, found by mDNS, queried through the official client."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Annotated, Literal

import httpx
import pydantic
import pytest

from tests.e2e.cluster import (
    HTTP,
    PATIENCE_S,
    PRIMAD,
    Head,
    all_joined,
    environment,
    heading,
    joined,
    ring,
    ring_process,
    run_primad,
    serving,
    stopped,
    wait_until,
)
from tests.e2e.streams import CompletionOverError, in_the_middle
from tests.lazily import Lazily
from tests.ports import free_port

openai = Lazily("openai")

pytestmark = pytest.mark.slow

MODEL = "quick-15-layers"
CONTEXT = 1024
HELLO = [{"role": "user", "content": "Name three colours."}]
STORY = "Once upon a time, in a village by the sea,"


def client_of(head: Head) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{head.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


@dataclass(frozen=True)
class Served:
    """Two workers and a head that serve, and the results of the health check before that."""

    cluster: str
    head: Head
    client: openai.OpenAI
    healths: list[tuple[int, str]]

    def complete(self, prompt: str = STORY, *, max_tokens: int = 24, temperature: float = 0, **options):
        return self.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=temperature, **options
        )

    def chat(self, *, max_tokens: int = 16, temperature: float = 0, **options):
        return self.client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=max_tokens, temperature=temperature, **options
        )


@pytest.fixture(scope="module")
def served(quick_model: Path, module_home) -> Iterator[Served]:
    cluster, workers = f"serve-{time.time_ns():x}", [module_home("first"), module_home("second")]
    arguments = ("--wait", 2, "--use-all", "--context", CONTEXT)
    with heading(quick_model, module_home("head"), cluster, *arguments) as head:
        healths: list[tuple[int, str]] = []

        def has_status(status: int) -> bool:
            assert head.run.process.poll() is None, head.run.output
            healths.append(head.health())
            return healths[-1][0] == status

        wait_until(lambda: has_status(503), "it waits for devices")
        with all_joined(workers, cluster):
            wait_until(lambda: has_status(200), "it serves")
            with client_of(head) as client:
                yield Served(cluster, head, client, healths[:-1])


def test_health_is_503_while_loading_and_200_then(served):
    assert {status for status, _ in served.healths} - {0} == {503}
    assert all(json.loads(text)["status"] == "loading" for status, text in served.healths if status)
    status, text = served.head.health()
    assert (status, json.loads(text)["status"], json.loads(text)["model"]) == (200, "ok", MODEL)


def test_the_layers_of_each_device_are_printed(served):
    for device in ("head", "first", "second"):
        served.head.run.wait_for(rf"^{device}: \d+ layers? \(")
    assert "Traceback" not in served.head.run.output


def test_structured_output_matches_the_clients_pydantic_model(served):
    class Ship(pydantic.BaseModel):
        name: Annotated[str, pydantic.Field(max_length=12)]
        masts: Literal[1, 2, 3]
        cargo: Annotated[list[Literal["tea", "silk"]], pydantic.Field(max_length=3)]

    asked = {"model": MODEL, "messages": HELLO, "response_format": Ship, "max_tokens": 900, "seed": 3}
    answer = served.client.chat.completions.parse(**asked)
    for choice in (*answer.choices, *served.client.chat.completions.parse(**asked, n=2).choices):
        assert choice.finish_reason == "stop"
        assert choice.message.parsed.masts in (1, 2, 3)
    with served.client.chat.completions.stream(**asked, logprobs=True) as stream:
        assert stream.get_final_completion().choices[0].message.content == answer.choices[0].message.content


def test_a_keyword_that_cannot_be_guaranteed_is_named(served):
    schema = {"type": "array", "contains": {"type": "string"}}
    with pytest.raises(openai.BadRequestError, match="contains") as caught:
        served.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert caught.value.param == "response_format"


def test_the_printed_number_of_concurrent_requests_is_served(served):
    served.head.run.wait_for(
        r"^(1 request at a time|[24] concurrent requests, each with that context) \(.*--sequences sets it\)(; .*)?$"
    )
    count = int(
        re.search(r"^([124]) (?:request at a time|concurrent requests)", served.head.run.output, re.MULTILINE)[1]
    )
    assert [slot["id"] for slot in HTTP.get(f"{served.head.url}/slots").json()] == list(range(count))
    assert HTTP.get(f"{served.head.url}/props").json()["total_slots"] == count
    assert served.head.status()["sequences"] == count


def test_the_forecast_is_printed_and_shown_next_to_measured_figures(served):
    served.head.run.wait_for(
        r"^forecast: \S+ tokens/s( \(\S+ tokens/s with [24] requests\))?, TTFT \S+ m?s for a prompt of 512 tokens$"
    )
    status = served.head.status()
    assert status["predicted"].keys() == {"tokens_per_s", "tpot_ms", "ttft_ms"}
    assert all(value > 0 for value in status["predicted"].values())
    names = {device["name"] for device in status["devices"]}
    assert {(link["source"], link["target"]) for link in status["links"]} == set(permutations(names, 2))
    assert all(link["round_trip_ms"] > 0 and link["mbit_per_s"] > 0 for link in status["links"])

    def all_work() -> bool:
        links = served.head.status()["links"]
        return all(link["round_trip_ms"] < 1000 and link["mbit_per_s"] > 1 for link in links)

    wait_until(all_work, "every link works")  # one that did not answer in time is measured again


def test_status_and_metrics_include_every_device(served, tmp_path):
    everyone = {"head", "first", "second"}
    served.complete(max_tokens=4)
    wait_until(lambda: of_devices(served, "answered") == dict.fromkeys(everyone, 1.0), "all answer in time")
    steps = all_steps(served)
    assert steps.keys() == everyone
    assert all(count >= 4 for count in steps.values())
    asked = [str(PRIMAD), "status", "--url", served.head.url]
    settings = environment("status", tmp_path)
    reported = subprocess.run(asked, env=settings, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    assert reported.stderr == ""
    assert reported.stdout.startswith(f"serving with 3 devices, {MODEL}, epoch ")
    for device in everyone:
        assert re.search(rf"^{device} +\d+ ", reported.stdout, re.MULTILINE)
    assert len(re.findall(r"^  planned ", reported.stdout, re.MULTILINE)) == 3


def of_devices(served: Served, figure: str) -> dict[str, float]:
    """Return a metric of each device."""
    metrics = httpx.get(f"{served.head.url}/metrics", timeout=PATIENCE_S).text
    found = re.findall(rf'^primad_device_{figure}{{device="(\w+)"}} (\S+)$', metrics, re.MULTILINE)
    return {device: float(value) for device, value in found}


def all_steps(served: Served) -> dict[str, float]:
    """Wait until all devices reply in time; return the number of steps that each has counted."""
    found: dict[str, float] = {}

    def all_answer() -> bool:
        found.clear()
        found.update(of_devices(served, "steps_total"))
        return len(found) == 3

    wait_until(all_answer, "all devices answer in time")
    return found


def test_models(served):
    assert [model.id for model in served.client.models.list()] == [MODEL]
    assert served.client.models.retrieve(MODEL).owned_by == "primad"
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("gpt-5")


def test_chat(served):
    answer = served.chat()
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16
    assert answer.model == MODEL


def test_a_completion_may_end_by_itself(served):
    answer = served.chat(max_tokens=400, temperature=1, seed=1, logit_bias={"2": 9})  # about every tenth token
    assert answer.choices[0].finish_reason == "stop"
    assert 0 < answer.usage.completion_tokens < 400


def counts(usage: openai.types.CompletionUsage) -> dict[str, object]:
    """Without what was reused: the second of two requests finds what the first one left."""
    return usage.model_dump(exclude={"prompt_tokens_details"})


def test_streaming_gives_the_same_text_and_counts(served):
    whole = served.chat()
    chunks = list(served.chat(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert counts(chunks[-1].usage) == counts(whole.usage)
    assert len(chunks) > 8, "it came in pieces"

    text = served.complete().choices[0].text
    pieces = [chunk.choices[0].text for chunk in served.complete(stream=True) if chunk.choices]
    assert "".join(pieces) == text


def test_a_stop_string_that_is_split_over_tokens_never_shows(served):
    whole = served.complete(logprobs=0)
    text, tokens = whole.choices[0].text, whole.choices[0].logprobs.tokens
    whole_ones = [len(token) > 2 and not token.startswith("bytes:") for token in tokens]
    joint = next(i for i in range(6, len(tokens)) if all(whole_ones[i - 1 : i + 1]))
    stop = tokens[joint - 1][-2:] + tokens[joint][:2]
    expected = text[: text.index(stop)]
    for stops in (stop, ["never said", stop]):
        answer = served.complete(stop=stops)
        assert answer.choices[0].text == expected
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens <= joint + 1
        chunks = list(served.complete(stop=stops, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
    # Half of it, at the end of the answer, is text like any other.
    held = served.complete(max_tokens=joint, stop=stop)
    assert held.choices[0].text == text_of(tokens[:joint])


def text_of(tokens: list[str]) -> str:
    """The text of tokens as log-probabilities name them: those that are no characters by their bytes."""
    parts = [
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) if token.startswith("bytes:") else token.encode()
        for token in tokens
    ]
    return b"".join(parts).decode(errors="replace")


def test_seed(served):
    def text(seed: int) -> str:
        return served.complete(temperature=1.2, seed=seed).choices[0].text

    first = text(1)
    assert text(1) == first
    assert len({first, text(2), text(3)}) == 3


def test_logprobs(served):
    answer = served.chat(logprobs=True, top_logprobs=5).choices[0]
    content = answer.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == answer.message.content
    for entry in content:
        assert len(entry.top_logprobs) == 5
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert sum(10 ** (value / 2.302585092994046) for value in values) <= 1 + 1e-9
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)

    plain = served.complete(logprobs=3).choices[0]
    assert text_of(plain.logprobs.tokens) == plain.text
    assert all(len(top) == 3 for top in plain.logprobs.top_logprobs)


def test_several_choices(served):
    answer = served.complete(n=2, temperature=1.2, seed=11, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text != answer.choices[1].text
    assert answer.usage.completion_tokens == 24
    single = served.complete(temperature=1.2, seed=11, max_tokens=12)
    assert single.choices[0].text == answer.choices[0].text
    assert single.usage.prompt_tokens == answer.usage.prompt_tokens


def test_the_whole_context_is_used_and_no_more(served):
    prompt = [100] * (CONTEXT - 6)
    answer = served.complete(prompt, max_tokens=100, logit_bias={"0": -100, "2": -100})
    assert answer.usage.prompt_tokens == CONTEXT - 6
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage.completion_tokens <= 6
    with pytest.raises(openai.BadRequestError) as refused:
        served.complete([100] * CONTEXT)
    assert refused.value.code == "context_length_exceeded"


def test_a_bad_request_is_refused_and_the_next_one_served(served):
    with pytest.raises(openai.BadRequestError):
        served.complete(temperature=9)
    with pytest.raises(openai.NotFoundError):
        served.client.completions.create(model="gpt-5", prompt="Hi")
    assert served.complete(max_tokens=1).usage.completion_tokens == 1


def test_a_client_that_leaves_frees_the_sequence(served):
    # Left alone, this answer would take the ring for a thousand steps.
    more = {"temperature": 1, "stream": True, "speculate": False, "logit_bias": {"0": -100, "2": -100}}
    body = {"prompt": STORY, "max_tokens": 4000, **more}
    is_left = False
    while not is_left:  # it was over before
        before, tokens = all_steps(served), tokens_of(served)
        is_left = leaves(served, body)
    assert served.complete("Hi", max_tokens=2).usage.completion_tokens > 0
    after, tokens = all_steps(served), tokens_of(served) - tokens
    visits = served.head.status()["rounds"] * (tokens + CONTEXT / 4)
    assert max(after[device] - before[device] for device in ("first", "second")) < visits


def leaves(served: Served, body: dict[str, object]) -> bool:
    """Leave an answer in its middle; whether it was not over before."""
    ring_of_head = ring_process(served.head.run)
    with ExitStack() as stack:
        with httpx.stream("POST", f"{served.head.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()
            for _ in range(6):
                next(lines)
            is_middle = stack.enter_context(stopped(ring_of_head)) and served.head.answers()
        wait_until(lambda: not served.head.answers(), "the head hears that its client left")
    return is_middle


def tokens_of(served: Served) -> float:
    """How many tokens of answers were sampled so far, also of those that a client left."""
    metrics = httpx.get(f"{served.head.url}/metrics", timeout=PATIENCE_S).text
    return float(re.search(r"^primad_completion_tokens_total (\S+)$", metrics, re.MULTILINE)[1])


def test_two_concurrent_requests_have_the_texts_of_single_ones(served):
    def long(**options):
        return served.complete(max_tokens=150, logit_bias={"0": -100, "2": -100}, **options)

    def short() -> str:
        return served.complete("The capital of France is", max_tokens=8).choices[0].text

    alone = long().choices[0].text, short()
    while (found := both(served.head, lambda: long(stream=True), short)) is None:
        continue
    assert found == alone


def both(head: Head, long: Callable[[], openai.Stream], short: Callable[[], str]) -> tuple[str, str] | None:
    """Return the texts of a stream and of a request that begins within it; None if the stream was over before."""
    ring = ring_process(head.run)
    count = min(2, head.status()["sequences"])  # with one sequence, the other request waits for it
    chunks = iter(long())
    text = next(chunks).choices[0].text
    with ThreadPoolExecutor(1) as pool:
        try:
            with in_the_middle(head, ring):
                other = pool.submit(short)
                wait_until(lambda: head.open_requests() == count, "both are open")
        except CompletionOverError:
            assert list(chunks)
            return None
        return text + "".join(chunk.choices[0].text for chunk in chunks), other.result()


def test_devices_lists_the_devices_in_sight(served):
    """The command looks for two seconds, so on a busy machine it is repeated."""
    roles = {"head": "head", "first": "worker", "second": "worker"}
    looks: list[list[dict]] = []

    def all_in_sight(*arguments: object) -> bool:
        looks.append(json.loads(run_primad("devices", "--json", *map(str, arguments)).stdout))
        return roles.keys() <= {device["device"] for device in looks[-1] if device["cluster"] == served.cluster}

    wait_until(all_in_sight, "all are listed")
    ours = {device["device"]: device for device in looks[-1] if device["cluster"] == served.cluster}
    assert {name: device["role"] for name, device in ours.items()} == roles
    assert ours["head"]["port"] == served.head.port
    assert all(device["addresses"] == ["127.0.0.1"] for device in ours.values())
    wait_until(lambda: all_in_sight("--cluster", served.cluster), "all of this cluster are listed")
    assert {device["cluster"] for device in looks[-1]} == {served.cluster}


def test_chat_command(served):
    arguments = ("--url", served.head.url, "--temperature", "0", "--max-tokens", "16")
    run = run_primad("chat", HELLO[0]["content"], *arguments)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == served.chat().choices[0].message.content + "\n"


def greedy(head: Head, **options) -> str:
    with client_of(head) as client:
        answer = client.completions.create(model=MODEL, prompt=STORY, max_tokens=24, temperature=0, **options)
    return answer.choices[0].text


def test_windows_by_hand(served, quick_model, new_home, cluster):
    homes = [new_home("head"), new_home("worker")]
    with ring(quick_model, homes, cluster, "--windows", "2,4", "--rounds", 2) as (head, _):
        assert greedy(head) == served.complete().choices[0].text
        head.run.wait_for(r"^head: 7 layers \(0-1, 6-7, 12-14\)$")
        head.run.wait_for(r"^worker: 8 layers \(2-5, 8-11\)$")


def test_a_device_that_only_slows_the_ring_is_left_out(served, quick_model, new_home, cluster):
    """Both processes share the cores of one machine, so the head alone is faster."""
    with (
        joined(new_home("worker"), cluster) as worker,
        serving(quick_model, new_home("head"), cluster, "--wait", 1) as head,
    ):
        assert greedy(head) == served.complete().choices[0].text
        head.run.wait_for(r"^head: 15 layers \(0-14\)$")
        head.run.wait_for(r"^worker is left out: ")
        worker.wait_for(r"^head head(-2)?: worker is left out: ")  # another head of this user may be called so, too


def test_no_worker_in_sight(served, quick_model, new_home, cluster):
    with serving(quick_model, new_home("head"), cluster) as head:
        assert greedy(head) == served.complete().choices[0].text
        head.run.wait_for(r"^head: 15 layers \(0-14\)$")


def test_a_device_named_by_address(served, quick_model, new_home, cluster):
    """The device belongs to another cluster, so mDNS alone would not find it, and it starts after the head."""
    port = free_port()
    with heading(quick_model, new_home("head"), cluster, "--device", f"127.0.0.1:{port}", "--use-all") as head:
        head.run.wait_for("^waiting for 1 of 1 devices: ")
        with joined(new_home("worker"), f"{cluster}-other", "--port", port) as worker:
            head.wait_serving()
            assert greedy(head) == served.complete().choices[0].text
            head.run.wait_for(r"^worker: \d+ layers?")
            # The named device goes away: the endpoint continues with the remaining devices.
            worker.send_signal(signal.SIGKILL)
            head.run.wait_for("^worker is gone: ")
            assert greedy(head) == served.complete().choices[0].text
            head.run.wait_for(r"^head: 15 layers \(0-14\)$")
            assert head.health()[0] == 200
