"""The route of OpenAI's Responses (https://platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from primad.api.answering.job import Job
from primad.api.dialects.openai.routes import EVENTS
from primad.api.dialects.responses import prepared as preparations
from primad.api.dialects.responses.responses import ResponseBody, ResponseStream
from primad.api.dialects.responses.schema import ResponsesRequest
from primad.api.http.dialect import Dialect, Route
from primad.api.http.endpoint import Endpoint, ModelEndpoint, json_response
from primad.api.http.errors import error_body
from primad.api.http.framing import EVENT_STREAM, NamedEvent, named_event
from primad.api.http.wanted import Choosing
from primad.errors import PrimadError

_EVENTS: Final = replace(EVENTS, message=named_event, end=b"")


class _Routes:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def count(self, request: Request) -> Response:
        """Return the number of tokens of a conversation, even if it is too long."""
        return json_response(await self._endpoint.serving(request).prepare(preparations.count))

    async def respond(self, request: Request) -> Response:
        """Continue a conversation."""
        serving = self._endpoint.serving(request)
        prepared = await serving.prepare(preparations.respond)
        response = ResponseStream(
            id=f"resp_{secrets.token_hex(16)}",
            created=int(time.time()),
            model=prepared.model,
            echoed=prepared.echoed,
            prompt_tokens=prepared.job.prompt_tokens,
        )
        if prepared.stream:
            return self._endpoint.stream(self._stream(serving, prepared.job, response), _EVENTS)
        completed = await serving.whole(prepared.job)
        return json_response(response.whole(completed[0]))

    async def _stream(
        self, serving: ModelEndpoint, job: Job, response: ResponseStream
    ) -> AsyncGenerator[NamedEvent, None]:
        begun = False
        async with aclosing(serving.write(job, job.choices[0])) as written:
            try:
                async for part in written:
                    if not begun:
                        begun = True
                        for event in response.opening():
                            yield event
                    for event in response.events(part):
                        yield event
            except PrimadError as exc:
                if not begun:
                    raise
                yield response.failed(exc)


def _routes(endpoint: Endpoint) -> Sequence[Route]:
    here = _Routes(endpoint)
    return (
        Route(
            path="/v1/responses/input_tokens",
            handler=here.count,
            asks="ResponsesRequest",
            responses="InputTokens",
            chooses=Choosing(),
        ),
        *(
            Route(
                path=path,
                handler=here.respond,
                asks="ResponsesRequest",
                responses="ResponseBody",
                stream_type=EVENT_STREAM,
                chooses=Choosing(framing=lambda _: _EVENTS),
            )
            for path in ("/v1/responses", "/responses")
        ),
    )


DIALECT: Final = Dialect(
    routes=_routes,
    prefixes=(),
    error_body=error_body,
    error_name="ErrorBody",
    requests=(ResponsesRequest,),
    responses=(ResponseBody,),
)
