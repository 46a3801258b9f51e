"""Every number in a request gets 200, or 400 with the name of its field. llama.cpp gets no number that it lacks memory
for or that it cannot represent. The fields come from the OpenAPI document, new ones included.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from primad.api.answering.backend import FillInTokens, SamplingDefaults
from primad.api.app import create_app
from primad.api.dialects.ollama.job import NAMES
from primad.api.http.connection import decoded
from primad.api.http.dialect import COMPONENT
from primad.api.page.admin_api import DeviceLimit
from primad.errors import RequestError
from tests.fakes.backend import ByteVocabulary, FakeBackend, replies
from tests.fakes.embeddings import FakeEmbeddings
from tests.fakes.http import PATIENCE_S, in_memory, post
from tests.shell.test_http_no_500 import LIKELY

NUMBERS = (
    *("0", "-1", "-2", "2147483647", "2147483648", "4294967296", "9223372036854775807", "18446744073709551616"),
    *("-9223372036854775809", "0.5", "1e-30", "1e-320", "1e308", "-1e308", "1e400", "NaN", "-Infinity", "9" * 5000),
    *("true", '"1"', json.dumps("9" * 5000), "[]", "[9223372036854775808]"),
)
HARDEST = ("2147483647", "1e-320", "1e400")
"""For a field that another path has as well."""
Place = tuple[str | int, ...]
DOCUMENT = create_app(FakeBackend(replies())).openapi()
COMPONENTS = DOCUMENT["components"]["schemas"]
POSTS = sorted(path for path, methods in DOCUMENT["paths"].items() if "post" in methods)
OWN = [path for path in POSTS if f"/v1{path}" not in POSTS]
"""Paths that are not aliases of others."""
PLAIN = "{{ messages[-1].content }}"
FILL_IN = ByteVocabulary(chat_template=PLAIN, fill_in=FillInTokens(before=1, after=2, middle=3, file=None))


def resolved(schema: Any) -> dict[str, Any]:
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    return schema if reference is None else COMPONENTS[reference.removeprefix(COMPONENT.format(""))]


def members(schema: Any) -> list[dict[str, Any]]:
    schema = resolved(schema)
    return [resolved(each) for each in schema.get("anyOf", schema.get("oneOf", [schema]))]


def numbers_of(schema: Any, place: Place = (), base: Any = None) -> Iterator[tuple[Place, str, str]]:
    """Places where a number or any value may stand, the document's schema there, and ``base`` (default: the minimum of
    ``schema``) as JSON with ``NUMBER`` there.
    """
    kinds = members(schema)
    if any(each.get("type") in ("integer", "number") or each.keys() <= {"title", "default"} for each in kinds):
        yield place, json.dumps(resolved(schema), sort_keys=True), "NUMBER"
    for each in kinds:
        for name, inner in each.get("properties", {}).items():
            others = {key: value for key, value in (base or minimum(each)).items() if key != name}
            for found, printed, text in numbers_of(inner, (*place, name)):
                yield (
                    found,
                    printed,
                    "{"
                    + "".join(f"{json.dumps(k)}: {json.dumps(v)}, " for k, v in others.items())
                    + (f"{json.dumps(name)}: {text}}}"),
                )
        for key, at, form in (("items", 0, "[{}]"), ("additionalProperties", "7", '{{"7": {}}}')):
            if isinstance(each.get(key), dict):
                for found, printed, text in numbers_of(each[key], (*place, at)):
                    yield found, printed, form.format(text)


def minimum(schema: Any) -> Any:
    """A small value that the document allows."""
    schema = members(schema)[0]
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    match schema.get("type"):
        case "object":
            return {name: minimum(schema["properties"][name]) for name in schema.get("required", ())}
        case "array":
            return [minimum(schema["items"])]
        case kind:
            return {"string": "x", "integer": 1, "number": 1, "boolean": True}.get(kind)


def bodies(path: str, seen: set[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Bodies for ``path``, each with the top-level field that holds the number."""
    schema = resolved(DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])
    base = LIKELY.get(path.removesuffix("/input_tokens")) or minimum(schema)
    for place, printed, text in numbers_of(schema, base=base):
        known = (str(place[-1]), printed) in seen
        seen.add((str(place[-1]), printed))
        for number in HARDEST if known else NUMBERS:
            yield str(place[0]), text.replace("NUMBER", number)
    if "options" in schema["properties"]:
        for option in (name for name in NAMES.values() if name.startswith("options.")):
            for number in NUMBERS:
                inner = f'{{"{option.removeprefix("options.")}": {number}}}'
                yield option, json.dumps(base)[:-1] + f', "options": {inner}}}'


def names_field(text: str, field: str) -> bool:
    return field.split(".")[-1] in text or "JSON" in text or "nested" in text


async def send(client: httpx.AsyncClient, path: str, body: str) -> httpx.Response:
    return await client.post(path, content=body, headers={"content-type": "application/json"})


async def test_every_number_of_every_dialect_is_accepted_or_refused_by_name():
    tried: dict[str, int] = {}
    backend = FakeBackend(replies("a"), vocabulary=FILL_IN, context_tokens=64)
    seen: set[tuple[str, str]] = set()
    async with asyncio.timeout(PATIENCE_S), in_memory(backend, embeddings=FakeEmbeddings()) as client:
        for path in OWN:
            for field, body in bodies(path, seen):
                response = await send(client, path, body)
                description = f"{path} {body[:300]}: {response.status_code} {response.text[:300]}"
                assert response.status_code in (200, 400, 404), description
                assert response.status_code != 400 or names_field(response.text, field), description
                assert len(response.content) < 100_000, description
                tried[field] = tried.get(field, 0) + 1
    assert {"temperature", "repeat_last_n", "dry_penalty_last_n", "seed", "top_logprobs", "best_of"} <= tried.keys()
    assert {"logit_bias", "id_slot", "keep_alive", "options.num_predict", "options.repeat_last_n"} <= tried.keys()
    assert {"thinking", "dimensions", "top_n", "max_output_tokens", "n_predict", "tokens"} <= tried.keys()


@pytest.mark.parametrize("tokens", [-1, 64, 65, 2**31 - 1])
def test_samplers_look_back_at_most_the_context_whatever_the_request_sets(tokens):
    backend = FakeBackend(replies("a"), context_tokens=64)
    assert backend.served is not None
    backend.served = replace(backend.served, sampling=SamplingDefaults(penalty_tokens=tokens))
    for more in ({}, {"repeat_last_n": tokens}, {"dry_penalty_last_n": tokens}):
        assert post(backend, "/v1/completions", prompt="Hi", dry_multiplier=1, **more).status_code == 200
        assert (backend.calls[-1].sampling.penalty_tokens, backend.calls[-1].sampling.dry_tokens) == (64, 64)


@pytest.mark.parametrize(
    "path", ["/v1/models/{}", "/v1/models?limit={}&after={}", "/slots?id={}", "/api/tags?n={}", "/{}"]
)
async def test_numbers_in_paths_queries_and_headers_make_no_500(path):
    async with asyncio.timeout(PATIENCE_S), in_memory(FakeBackend(replies("a"))) as client:
        for number in NUMBERS:
            safe = number if len(number) < 1000 else number[:1000]
            headers = dict.fromkeys(("x-stainless-retry-count", "x-priority", "retry-after", "date", "age"), safe)
            for answer in (
                await client.get(path.format(httpx.URL(path="/" + safe).raw_path.decode()[1:], safe), headers=headers),
                await client.get("/v1/models", headers={"x-forwarded-for": safe, "forwarded": f"for={safe}"}),
            ):
                assert answer.status_code < 500, (path, number[:50])


def test_a_memory_limit_is_a_valid_number_of_bytes():
    for number in ("-1", "1e400", "NaN", '"1"', "true", "0.5", str(2**51), "9" * 400, "9" * 5000, "[]"):
        with pytest.raises(RequestError):
            decoded(f'{{"device": "attic", "ram_bytes": {number}}}'.encode(), DeviceLimit)
