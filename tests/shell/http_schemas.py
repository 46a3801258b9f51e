"""Every dialect answers requests that the OpenAPI document allows, or nearly allows, as the document says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, TypeVar
from urllib.parse import urljoin

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.python import asgi
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from primad.api.answering.backend import ModelNames
from primad.api.app import create_app
from tests.fakes.backend import ByteVocabulary, FakeBackend, replies
from tests.fakes.embeddings import FakeEmbeddings

PLAIN = ByteVocabulary(chat_template="{{ messages[-1].content }}")
APP = create_app(
    FakeBackend(replies("Hé"), vocabulary=PLAIN), names=ModelNames(any_model=True), embeddings=FakeEmbeddings()
)


def second_names() -> list[str]:
    """Paths that are aliases of earlier ones, with the same documentation."""
    document, known, found = APP.openapi()["paths"], {}, []
    for route in APP.routes:
        if (operations := document.get(route.path)) is None:
            continue
        operation = [{**each, "operationId": None} for each in operations.values()]
        if known.setdefault(route.endpoint, operation) is not operation:
            assert known[route.endpoint] == operation, route.path
            found.append(route.path)
    return found


def fields_of(path: str) -> dict[str, Any]:
    """The fields of the body that a path takes, without what the document says about them; empty if it takes none."""
    document = APP.openapi()
    body = document["paths"][path].get("post", {}).get("requestBody")
    if body is None:
        return {}
    reference = body["content"]["application/json"]["schema"]["$ref"]
    fields = document["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    return {name: {**field, "description": "", "title": ""} for name, field in fields.items()}


def same_bodies(aliases: list[str]) -> list[str]:
    """Paths, other than ``aliases``, whose request body has only fields of another one, where they are tried."""
    known = {path: fields_of(path) for path in APP.openapi()["paths"] if path not in aliases}
    found: list[str] = []
    for path, fields in known.items():
        others = (known[other] for other in known if other != path and other not in found)
        if fields and any(fields.items() <= other.items() for other in others):
            found.append(path)
    assert found
    return found


ALIASES = second_names()
SAME_BODIES = same_bodies(ALIASES)
ALL = schemathesis.openapi.from_dict(APP.openapi()).exclude(path=ALIASES)
SCHEMA, SAME = ALL.exclude(path=SAME_BODIES), ALL.include(path=SAME_BODIES)
for schema in (SCHEMA, SAME):
    schema.app = APP


class Client(asgi.ASGIClient):
    """An ASGI client without a session's work for each request: cookies, proxies and redirects."""

    def request(self, method: str, url: str, *, timeout: Any = None, **options: Any) -> requests.Response:
        operation = {key: value for key, value in options.items() if key in REQUEST_OPTIONS}
        prepared = requests.Request(method, urljoin(self.base_url, url), **operation).prepare()
        return self.adapter.send(prepared, timeout=timeout)


REQUEST_OPTIONS = ("headers", "files", "data", "params", "auth", "cookies", "json")
CLIENT = Client(APP)
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
T = TypeVar("T")


class Here:
    """Runs the application in this thread; the client's own thread took half of each request's time."""

    runner = asyncio.Runner()

    def call(self, act: Callable[[], T | Awaitable[T]]) -> T:
        async def acted() -> T:
            found = act()
            return await found if isawaitable(found) else found

        return self.runner.get_loop().run_until_complete(acted())


asgi._get_portal = Here


@SCHEMA.parametrize()
@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_response_matches_the_openapi_document(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS, session=CLIENT, headers={"host": "127.0.0.1"})


@SAME.parametrize()
@settings(
    max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
def test_responses_to_bodies_that_are_all_tried_elsewhere_match_too(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS, session=CLIENT, headers={"host": "127.0.0.1"})
