"""Requests that choose among several models, in every dialect, over fake models whose loading a test controls."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from primad.api.answering.backend import ModelNames
from primad.api.answering.models import ModelState
from primad.api.app import create_app
from primad.api.http.access import Admission, Door
from primad.api.http.keys import ApiKey, digest_of
from primad.library.pull_progress import PullProgress
from primad.settings.timings import ApiTimings
from tests.fakes.backend import FakeBackend
from tests.fakes.embeddings import FakeEmbeddings
from tests.fakes.http import PATIENCE_S, BareClient, served
from tests.fakes.models import EmbeddingBackend, FakeModels, backend_of, without_model
from tests.lazily import Lazily
from tools.lab.mmproj import noise

ollama, openai = Lazily("ollama"), Lazily("openai")

OWNER, KEY = "the-owner's-key-is-long", "a-key-of-some-length"
AT_ONCE = ApiTimings(admitted_s=0.0, keepalive_s=3600.0)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
HELLO = [{"role": "user", "content": "Hi"}]
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 16},
    "/completion": {"prompt": "Hi"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "Hi"},
}
WITHOUT_FILL_IN = [path for path in DIALECTS if path != "/infill"]
every = pytest.mark.parametrize("path", WITHOUT_FILL_IN)


def two() -> FakeModels:
    return FakeModels(backend_of("one", template=PLAIN), backend_of("org/two:Q4_K_M", "two", template=PLAIN))


def app_of(models: FakeModels, backend: FakeBackend | None = None, **more: Any) -> Any:
    return create_app(
        backend or without_model(),
        models=models,
        timings=AT_ONCE,
        admission=more.pop("admission", Admission(owner_key=OWNER)),
        **more,
    )


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await work()

    return asyncio.run(bounded())


def request(app: Any, method: str, path: str, **request: Any) -> httpx.Response:
    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, **request)

    return run(once)


def post(models: FakeModels, path: str, **body: Any) -> httpx.Response:
    return request(app_of(models), "POST", path, json=body)


@every
@pytest.mark.parametrize("streams", [True, False])
def test_each_request_goes_to_the_model_that_it_names(path, streams):
    models = two()
    for name, text in (("two", "two"), ("ONE", "one"), ("org/two", "two")):
        answer = post(models, path, model=name, stream=streams, **DIALECTS[path])
        assert answer.status_code == 200, answer.text
        assert text in _text_of(answer.text), answer.text
    assert [name for name, _, _ in models.uses] == ["org/two:Q4_K_M", "one", "org/two:Q4_K_M"]
    assert [len(each.calls) for each in models.backends.values()] == [1, 2]
    assert not models.users.total()


def _text_of(body: str) -> str:
    """The text of a response, streamed or not."""
    texts: list[str] = []

    def collect(value: Any, key: str = "") -> None:
        match value:
            case dict():
                for name, each in value.items():
                    collect(each, name)
            case list():
                for each in value:
                    collect(each, key)
            case str() if key in ("content", "text", "delta", "response"):
                texts.append(value)

    for line in body.splitlines():
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            collect(json.loads(data))
    return "".join(texts)


@every
def test_a_request_without_a_model_gets_the_last_used_one_if_its_dialect_allows_that(path):
    models = two()
    post(models, "/v1/completions", model="two", prompt="Hi", max_tokens=1)
    answer = post(models, path, stream=False, **DIALECTS[path])
    requires_name = path.startswith(("/api/", "/v1/messages"))
    assert answer.status_code == (400 if requires_name else 200), answer.text
    assert len(models.uses) == (1 if requires_name else 2)


@every
def test_an_unknown_model_is_a_404_that_names_those_that_there_are(path):
    models = two()
    for streams in (True, False):
        answer = post(models, path, model="tow", stream=streams, **DIALECTS[path])
        assert answer.status_code == 404, answer.text
        assert "one, org/two:Q4_K_M" in answer.text
    assert models.uses == []


def test_every_name_is_accepted_with_the_owners_option():
    models = two()
    app = app_of(models, names=ModelNames(any_model=True))
    for name, text in (("two", "two"), ("gpt-4o", "two"), ("one", "one"), ("gpt-4o", "one")):
        assert text in _text_of(request(app, "POST", "/v1/completions", json={"model": name, "prompt": "Hi"}).text)


def test_built_in_model_names_of_clients_mean_the_last_used_model():
    models = two()
    post(models, "/v1/completions", model="two", prompt="Hi", max_tokens=1)
    body = {**DIALECTS["/v1/messages"], "model": "claude-opus-9"}
    assert "two" in request(app_of(models), "POST", "/v1/messages", json=body).text


@every
def test_a_stream_reports_the_load_of_its_model_and_then_continues(path):
    async def main() -> None:
        models = two()
        models.gates["one"] = asyncio.Event()
        client = BareClient(path, model="one", stream=True, return_progress=True, **DIALECTS[path])
        async with asyncio.TaskGroup() as group:
            group.create_task(app_of(models)(client.scope, client.receive, client.send))
            assert await models.waits.get() == "one"
            begin = await client.got.get()
            assert begin["status"] == 200
            assert dict(begin["headers"])[b"x-primad-expected-s"] == b"12"
            first = (await client.got.get())["body"]
            models.change("one", progress=0.5, expected_s=6.0)
            second = (await client.got.get())["body"]
            _check_news(path, first, "0 %", 0.0)
            _check_news(path, second, "50 %", 0.5)
            models.gates["one"].set()
            assert await models.ended.get() == "one"
        body = b"".join(message["body"] for message in _rest(client))
        assert "one" in _text_of(body.decode())

    run(main)


def _check_news(path: str, data: bytes, shown: str, progress: float) -> None:
    if path.startswith("/api/"):
        line = json.loads(data)
        assert (line["done"], line["model"]) == (False, "one")
    elif path in ("/v1/responses", "/v1/messages"):
        assert data.startswith(b": one: loading, ")
        assert shown.encode() in data
    else:
        event = json.loads(data.removeprefix(b"data: "))
        assert (event["load_progress"]["status"], event["load_progress"]["value"]) == ("loading", progress)


def _rest(client: BareClient) -> list[dict[str, Any]]:
    return [client.got.get_nowait() for _ in range(client.got.qsize())]


def test_a_client_that_does_not_read_progress_gets_comments():
    async def main() -> None:
        models = two()
        models.gates["one"] = asyncio.Event()
        client = BareClient("/v1/completions", model="one", stream=True, prompt="Hi")
        async with asyncio.TaskGroup() as group:
            group.create_task(app_of(models)(client.scope, client.receive, client.send))
            assert (await client.got.get())["status"] == 200
            assert (await client.got.get())["body"] == b": one: loading, 0 %, about 12 s left\n\n"
            models.gates["one"].set()

    run(main)


@every
@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_its_wait(path, streams):
    async def main() -> None:
        models = two()
        models.gates["one"] = asyncio.Event()
        client = BareClient(path, model="one", stream=streams, **DIALECTS[path])
        async with asyncio.TaskGroup() as group:
            group.create_task(app_of(models)(client.scope, client.receive, client.send))
            await models.waits.get()
            client.left.set()
            assert await models.ended.get() == "one"
        assert models.waiting == []
        assert models.backends["one"].calls == []

    run(main)


@pytest.mark.parametrize("streams", [True, False])
def test_a_model_is_in_use_until_the_response_has_ended_even_if_the_client_left(streams):
    async def main() -> None:
        may_continue = asyncio.Event()
        models = FakeModels(backend_of("one", "a", may_continue))
        client = BareClient("/v1/completions", model="one", stream=streams, prompt="Hi")
        async with asyncio.TaskGroup() as group:
            group.create_task(app_of(models)(client.scope, client.receive, client.send))
            await models.waits.get()
            if streams:
                while b'"text":"a"' not in (await client.got.get()).get("body", b""):
                    assert models.users["one"] == 1
            client.left.set()
            assert await models.ended.get() == "one"
        assert all(each.closed.is_set() for each in models.backends["one"].calls)

    run(main)


@every
def test_a_model_that_cannot_be_loaded_is_a_503_or_ends_a_stream_that_has_begun(path):
    models = two()
    models.failing.add("one")
    answer = post(models, path, model="one", stream=False, **DIALECTS[path])
    assert answer.status_code == 503
    assert "no device has room" in answer.text

    async def main() -> None:
        models = two()
        models.failing.add("one")
        models.gates["one"] = asyncio.Event()
        client = BareClient(path, model="one", stream=True, **DIALECTS[path])
        async with asyncio.TaskGroup() as group:
            group.create_task(app_of(models)(client.scope, client.receive, client.send))
            assert (await client.got.get())["status"] == 200
            models.gates["one"].set()
        assert b"no device has room" in _rest(client)[-2]["body"]

    run(main)


def test_a_body_that_cannot_be_read_is_refused_by_its_dialect_and_loads_nothing():
    models = two()
    for body in (b"{", b"[]", b'{"model": 5}', b'{"model": "' + b"x" * 600 + b'"}', b"\xff"):
        for path in DIALECTS:
            answer = request(app_of(models), "POST", path, content=body)
            assert answer.status_code == 400, (path, body, answer.text)
    assert (models.uses, models.loaded()) == ([], {})
    models.change("one", state=ModelState.LOADED)
    answer = request(app_of(models), "POST", "/v1/completions", content=b'{"model": 5}')
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert models.uses == []


@pytest.mark.parametrize("wrong", [b'"temperature": NaN', b'"keep_alive": 1e999', b'"user": "\\ud800"'])
@pytest.mark.parametrize("stream", [b"true", b"false"])
@every
def test_a_body_that_only_its_dialect_can_read_does_not_reach_another_model(path, stream, wrong):
    models = two()
    models.change("one", state=ModelState.LOADED)
    rest = json.dumps(DIALECTS[path])[1:].encode()
    request(
        app_of(models), "POST", path, content=b'{"model": "two", "stream": ' + stream + b", " + wrong + b", " + rest
    )
    assert not models.backends["one"].calls


WRONG: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"temperature": -1},
        {"messages": []},
        {"messages": [{"role": "boss", "content": "Hi"}]},
        {"max_tokens": "many"},
        {"grammar": "root ::= ("},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "colour"}}}},
        {"tools": [{"type": "function"}]},
        {"logit_bias": {"5": 1e9}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///a.png"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "bm8gcGljdHVyZQ=="}}]}]},
    ],
    "/v1/completions": [{"top_p": 7}, {"prompt": []}, {"json_schema": {"type": "colour"}}],
    "/v1/responses": [{"input": 5}, {"text": {"format": {"type": "json_schema", "schema": {"type": "colour"}}}}],
    "/v1/messages": [{"max_tokens": 0}, {"messages": []}],
    "/completion": [{"min_p": "low"}, {"n_predict": "many"}],
    "/infill": [{"input_extra": [{"text": 5}]}],
    "/api/chat": [{"options": {"temperature": "hot"}}, {"format": {"type": "colour"}}],
    "/api/generate": [{"options": {"top_k": "few"}}],
    "/v1/embeddings": [{"input": []}, {"input": "Hi", "dimensions": 0}],
    "/v1/rerank": [{"query": "Hi"}],
    "/api/embed": [{"input": 5}],
    "/tokenize": [{"content": {}}],
    "/v1/messages/count_tokens": [{"messages": 5}],
}


@pytest.mark.parametrize("path", WRONG)
def test_a_request_that_every_model_refuses_is_refused_before_loading(path):
    models = FakeModels(backend_of("one", template=PLAIN), EmbeddingBackend("vectors"))
    name = "vectors" if "embed" in path or "rerank" in path else "one"
    for number, wrong in enumerate(WRONG[path]):
        answer = post(models, path, **{"model": name, "stream": number % 2 == 0} | DIALECTS.get(path, {}) | wrong)
        assert answer.status_code == 400, (wrong, answer.text)
    assert (models.uses, models.loaded()) == ([], {})


def test_a_picture_for_a_model_that_is_not_loaded_is_encoded_once_it_is():
    picture = {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(noise(1)).decode()}"},
    }
    for sees, status in ((True, 200), (False, 400)):
        models = two()
        one = models.backends["one"]
        one.served = replace(one.served, sees=sees)
        answer = post(models, "/v1/chat/completions", model="one", messages=[{"role": "user", "content": [picture]}])
        assert (answer.status_code, len(models.uses)) == (status, 1), answer.text
        assert [any(token < 0 for token in call.prompt) for call in one.calls] == [True] * sees


def test_a_request_that_only_some_models_refuse_is_checked_by_the_named_one():
    cases = {
        "/v1/chat/completions": {"messages": [{"role": "assistant", "content": ""}], "logit_bias": {"200000": 1}},
        "/v1/completions": {"prompt": [200000], "samplers": ["temperature", "min_p"]},
        "/infill": DIALECTS["/infill"],
        "/detokenize": {"tokens": [200000]},
    }
    for path, body in cases.items():
        models = two()
        assert post(models, path, model="two", **body).status_code == 400
        assert [name for name, _, _ in models.uses] == ["org/two:Q4_K_M"], path


def test_text_paths_use_the_model_of_their_body_or_query():
    models = two()
    for path, body in (
        ("/tokenize", {"content": "Hi"}),
        ("/detokenize", {"tokens": [72]}),
        ("/apply-template", {"messages": HELLO}),
        ("/v1/chat/completions/input_tokens", {"messages": HELLO}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
        ("/v1/responses/input_tokens", {"input": "Hi"}),
    ):
        assert post(models, path, model="one", **body).status_code == 200
        if "messages/" not in path:
            assert request(app_of(models), "POST", path, params={"model": "two"}, json=body).status_code == 200
    assert {name for name, _, _ in models.uses} == {"one", "org/two:Q4_K_M"}


def test_looking_at_a_model_does_not_load_it():
    models = two()
    app = app_of(models)
    assert request(app, "GET", "/props").json()["role"] == "router"
    assert request(app, "GET", "/slots").json() == []
    answer = request(app, "GET", "/props?model=two")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_loaded")
    assert request(app, "GET", "/props?model=three").status_code == 404
    for name in ("one", "two"):
        request(app, "POST", "/completion", json={"model": name, "prompt": "Hi"})
    assert request(app, "GET", "/props").json()["model_alias"] == "org/two:Q4_K_M"
    assert request(app, "GET", "/props?model=one").json()["model_alias"] == "one"
    assert len(request(app, "GET", "/slots?model=one").json()) == 4
    assert len(models.uses) == 2


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollamas_keep_alive_reaches_the_model(path):
    models = two()
    for given, seconds in (
        ("5m", 300), ("1h30m", 5400), (30, 30), ("30", 30), (0.5, 0.5), (-1, -1), ("-1m", -1), ("-1", -1), (None, None),
    ):  # fmt: skip
        assert post(models, path, model="one", keep_alive=given, **DIALECTS[path]).status_code == 200
        assert models.uses[-1][1] == seconds, given
    assert post(models, path, model="one", keep_alive=0, **DIALECTS[path]).status_code == 200
    assert models.loaded() == {}
    for wrong in ("soon", "5 m", True, [1], "x" * 100):
        assert post(models, path, model="one", keep_alive=wrong, **DIALECTS[path]).status_code == 400


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/api/embed", "/api/embeddings"])
def test_embeddings_use_the_named_embedding_model(path):
    body = {"input": "sea", "prompt": "sea", "query": "sea", "documents": ["ship"]}
    models = FakeModels(backend_of("one"), EmbeddingBackend("bge"), EmbeddingBackend("org/gte:Q8_0"))
    assert post(models, path, model="gte", **body).status_code == 200
    assert [name for name, _, _ in models.uses] == ["org/gte:Q8_0"]
    for name, status in (("one", 400), ("three", 404)):
        answer = post(models, path, model=name, **body)
        assert (answer.status_code, "bge" in answer.text) == (status, True)
    if path.startswith("/v1/"):
        assert post(models, path, **body).status_code == 400
        assert post(FakeModels(EmbeddingBackend("bge")), path, **body).status_code == 200
        assert post(two(), path, **body).json()["error"]["code"] == "no_embedding_model"
    separate = request(app_of(models, embeddings=FakeEmbeddings()), "POST", path, json=body | {"model": "small"})
    assert separate.status_code == 200
    assert len(models.uses) == 1


@every
def test_an_embedding_model_writes_no_text(path):
    models = FakeModels(backend_of("one", template=PLAIN), EmbeddingBackend("embedder"))
    answer = post(models, path, **DIALECTS[path], model="embedder")
    assert answer.status_code == 400
    assert "is an embedding model" in answer.text
    assert not models.uses


def test_an_empty_request_that_looks_like_one_with_text_only_loads():
    for body in ({"messages": [], "prompt": "Hi"}, {"prompt": "Hi"}):
        assert post(two(), "/api/chat", model="one", **body).json()["done_reason"] == "load"
    content = b'{"model": "one", "messages": [' + b" " * 100 + b"]}"
    assert request(app_of(two()), "POST", "/api/chat", content=content).json()["done_reason"] == "load"


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollamas_empty_request_loads_a_model_and_unloads_it(path):
    models = two()
    answer = post(models, path, model="one:latest")
    assert (answer.json()["done_reason"], list(models.loaded())) == ("load", ["one"])
    for empty in ({"prompt": "", "messages": []}, {}):
        models.change("one", state=ModelState.LOADED)
        answer = post(models, path, model="one", keep_alive=0, **empty)
        assert (answer.json()["done_reason"], models.loaded()) == ("unload", {})
    assert post(models, path, model="three", keep_alive=0).status_code == 404
    assert len(models.uses) == 1


def test_models_are_loaded_and_unloaded_as_llama_servers_router_does():
    models = two()
    app = app_of(models)
    assert request(app, "POST", "/models/load", json={"model": "two"}).json() == {"success": True}
    assert list(models.loaded()) == ["org/two:Q4_K_M"]
    assert request(app, "POST", "/models/unload", json={"model": "two"}).json() == {"success": True}
    assert models.loaded() == {}
    assert request(app, "POST", "/models/load", json={"model": "three"}).status_code == 404
    for wrong in ({}, {"model": 5}, [], {"model": ""}):
        assert request(app, "POST", "/models/unload", json=wrong).status_code == 400


def test_changes_of_models_are_events_until_the_server_ends():
    async def main() -> None:
        models = two()
        app = app_of(models)
        client = BareClient("/models/sse")
        client.scope["method"] = "GET"
        async with asyncio.TaskGroup() as group:
            group.create_task(app(client.scope, client.receive, client.send))
            assert (await client.got.get())["status"] == 200
            models.change("one", state=ModelState.LOADING, progress=0.25)
            event = json.loads((await client.got.get())["body"].removeprefix(b"data: "))
            progress = {"stages": ["text_model"], "current": "text_model", "value": 0.25}
            data = {"status": "loading", "progress": progress}
            assert event == {"model": "one", "event": "model_status", "data": data}
            app.state.close()
        assert models.heard == []

    run(main)


def test_models_are_listed_with_their_state_and_figures():
    models = two()
    models.change("one", state=ModelState.LOADED, memory_bytes={"desk": 600, "mini": 500}, expires_at_s=2e9)
    models.change(
        "org/two:Q4_K_M", trained_context_tokens=8192, aliases=("two",), parameters="7B", quantisation="Q4_K_M"
    )
    app = app_of(models)
    loaded, other = request(app, "GET", "/v1/models").json()["data"]
    assert (loaded["id"], loaded["status"], loaded["meta"]["n_ctx"]) == (
        "one",
        {"value": "loaded", "expires_at": 2e9},
        4096,
    )
    assert (other["id"], other["status"], other["aliases"]) == ("org/two:Q4_K_M", {"value": "unloaded"}, ["two"])
    assert (other["meta"], other["capabilities"]) == ({"n_ctx_train": 8192, "size": 1000}, ["completion"])
    assert request(app, "GET", "/v1/models/two").json() == other
    assert request(app, "GET", "/v1/models/org/two:Q4_K_M").json() == other
    assert request(app, "GET", "/v1/models/three").status_code == 404
    anthropic = {"anthropic-version": "2023-06-01"}
    assert [each["id"] for each in request(app, "GET", "/v1/models", headers=anthropic).json()["data"]] == [
        "one",
        "org/two:Q4_K_M",
    ]
    tags = request(app, "GET", "/api/tags").json()["models"]
    assert [each["name"] for each in tags] == ["one:latest", "org/two:Q4_K_M"]
    assert tags[1]["details"]["quantization_level"] == "Q4_K_M"
    [running] = request(app, "GET", "/api/ps").json()["models"]
    assert (running["size"], running["expires_at"][:4], running["context_length"]) == (1100, "2033", 4096)
    shown = request(app, "POST", "/api/show", json={"model": "two"}).json()
    assert shown["model_info"]["llama.context_length"] == 8192
    assert request(app, "POST", "/api/show", json={"name": "one:latest"}).json()["template"] == PLAIN
    assert models.uses == []


def test_the_owner_and_keys_with_that_right_download_and_delete():
    models = two()
    models.files = [
        PullProgress(file="x.gguf", done_bytes=5, total_bytes=10),
        PullProgress(file="x.gguf", done_bytes=9),
    ]
    keys = [
        ApiKey(name="plain", digest=digest_of(KEY)),
        ApiKey(name="other", digest=digest_of(KEY + "2"), manages=True),
        ApiKey(name="own", digest=digest_of(OWNER)),
    ]
    app = app_of(models, admission=Admission(door=Door(lambda: keys), owner_key=OWNER))
    body = {"model": "hf.co/owner/repo:Q4_K_M"}
    for key, status in ((KEY, 403), (KEY + "2", 200), (OWNER, 200)):
        answer = request(app, "POST", "/api/pull", json=body, headers={"x-api-key": key})
        assert answer.status_code == status
        lines = [json.loads(line) for line in answer.text.splitlines()]
        deleted = request(
            app, "DELETE", "/api/delete", content=json.dumps({"model": "one"}), headers={"x-api-key": key}
        )
        assert deleted.status_code == status
    assert [line["status"] for line in lines] == ["pulling manifest", "pulling x.gguf", "pulling x.gguf", "success"]
    assert (lines[1]["completed"], lines[1]["total"], "total" in lines[2]) == (5, 10, False)
    assert lines[1]["digest"] == lines[2]["digest"]
    assert (models.pulled, models.deleted) == (["owner/repo:Q4_K_M"] * 2, ["one"] * 2)
    owner = {"x-api-key": OWNER}
    assert request(app, "POST", "/api/pull", json=body | {"stream": False}, headers=owner).json() == {
        "status": "success"
    }
    assert request(app, "POST", "/api/pull", json={"model": "llama3"}, headers=owner).status_code == 400
    assert request(app_of(models), "POST", "/api/pull", json=body).status_code == 403


def test_the_server_is_well_without_a_loaded_model():
    models = two()
    app = app_of(models)
    health = request(app, "GET", "/health")
    assert (health.status_code, health.json()["model"]) == (200, None)
    assert request(app, "GET", "/status").json()["serving"] is True
    request(app, "POST", "/completion", json={"model": "one", "prompt": "Hi"})
    assert request(app, "GET", "/health").json()["model"] == "one"


def test_metrics_and_the_status_know_each_model():
    models = two()
    app = app_of(models)
    request(app, "POST", "/completion", json={"model": "two", "prompt": "Hi"})
    models.change("org/two:Q4_K_M", memory_bytes={"desk": 600})
    lines = request(app, "GET", "/metrics").text.splitlines()
    for line in (
        'primad_model_loaded{model="one"} 0.0',
        'primad_model_loaded{model="org/two:Q4_K_M"} 1.0',
        'primad_model_memory_bytes{device="desk",model="org/two:Q4_K_M"} 600.0',
        'primad_model_answers_total{model="org/two:Q4_K_M"} 1.0',
        'primad_model_completion_tokens_total{model="org/two:Q4_K_M"} 3.0',
    ):
        assert line in lines, line
    states = {each["id"]: each["state"] for each in request(app, "GET", "/status").json()["models"]}
    assert states == {"org/two:Q4_K_M": "loaded", "one": "unloaded"}
    request(app, "POST", "/completion", json={"model": "one", "prompt": "Hi"})
    for query, model in (("", "one"), ("?model=two", "org/two:Q4_K_M")):
        assert request(app, "GET", f"/status{query}").json()["model"] == model
    assert request(app, "GET", "/status?model=three").status_code == 404


def test_ollamas_client_switches_lists_pulls_and_unloads():
    async def main() -> None:
        models = two()
        models.files = [PullProgress(file="x.gguf", done_bytes=5, total_bytes=10)]
        more = {"models": models, "admission": Admission(owner_key=OWNER)}
        async with served(without_model(), **more) as url:
            client = ollama.AsyncClient(host=url, headers={"authorization": f"Bearer {OWNER}"})
            assert [model.model for model in (await client.list()).models] == ["one:latest", "org/two:Q4_K_M"]
            assert (await client.ps()).models == []
            for name, text in (("one", "one"), ("org/two:Q4_K_M", "two")):
                parts = [part.message.content async for part in await client.chat(name, HELLO, stream=True)]
                assert "".join(parts) == text
            assert [model.model for model in (await client.ps()).models] == ["one:latest", "org/two:Q4_K_M"]
            assert (await client.generate("one", keep_alive=0)).done_reason == "unload"
            assert [model.model for model in (await client.ps()).models] == ["org/two:Q4_K_M"]
            assert (await client.show("one")).details.family == "llama"
            lines = [line async for line in await client.pull("hf.co/owner/repo:Q4_K_M", stream=True)]
            assert [line.status for line in lines] == ["pulling manifest", "pulling x.gguf", "success"]
            assert (await client.delete("one")).status == "success"
            with pytest.raises(ollama.ResponseError, match="there are: org/two"):
                await client.chat("three", HELLO)
            await client._client.aclose()

    run(main)


def test_openais_client_switches_models():
    async def main() -> None:
        models = two()
        async with (
            served(without_model(), models=models) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            assert [model.id async for model in client.models.list()] == ["one", "org/two:Q4_K_M"]
            for name, text in (("one", "one"), ("org/two:Q4_K_M", "two")):
                answer = await client.chat.completions.create(model=name, messages=HELLO)
                assert (answer.choices[0].message.content, answer.model) == (text, name)
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="three", messages=HELLO)

    run(main)


def test_a_server_of_one_model_has_no_paths_for_several():
    models = two()
    models.switches = False
    app = app_of(models, backend_of("one"))
    assert request(app, "POST", "/models/load", json={"model": "one"}).status_code == 404
    assert request(app, "POST", "/api/pull", json={"model": "a/b"}).status_code == 404
    assert request(app, "POST", "/v1/completions", json={"prompt": "Hi"}).status_code == 200
    assert models.uses == []


def test_a_picture_waits_for_its_model_which_may_see():
    models = two()
    made = models.backends["one"]
    made.served = replace(made.served, sees=True)
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(noise(1)).decode()}"}}
    body = {"messages": [{"role": "user", "content": [image]}]}
    answer = post(models, "/v1/chat/completions", model="one", **body)
    assert answer.status_code == 200, answer.text
    assert len(made.calls[0].pictures) == 1
    refused = post(models, "/v1/chat/completions", model="two", **body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_pictures")
    image["image_url"]["url"] = "https://example.org/a.png"
    assert post(models, "/v1/chat/completions", model="one", **body).json()["error"]["code"] == "no_fetching"
    assert models.uses[-1][0] == "one", "the model decides whether to fetch"


def test_a_picture_by_url_is_left_to_its_model():
    models = two()
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    body = {"messages": [{"role": "user", "content": [image]}]}
    assert "one" not in models.loaded()
    models.backends["one"].served = replace(models.backends["one"].served, sees=True)
    answer = post(models, "/v1/chat/completions", model="one", **body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_fetching")
    assert models.uses[-1][0] == "one"
