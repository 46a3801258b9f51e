"""Whatever is asked that the OpenAPI document allows, or nearly allows, no dialect answers other than the document says."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, settings
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
SCHEMA = schemathesis.openapi.from_dict(APP.openapi())
SCHEMA.app = APP
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@SCHEMA.parametrize()
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_the_document_says(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS, headers={"host": "127.0.0.1"})
