"""``primad chat``: a conversation with a running endpoint, streamed to the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx
from rich.console import Console

from primad.errors import ClusterError

CONNECT_TIMEOUT_S: Final = 5.0


def converse(
    url: str, prompt: str | None, *, system: str | None, options: Mapping[str, Any], out: Console, err: Console
) -> None:
    """Answer ``prompt``, or hold a conversation until the input ends. Raises ``ClusterError`` when the endpoint fails."""
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    try:
        client = httpx.Client(base_url=url, timeout=timeout)
    except (httpx.InvalidURL, ValueError) as exc:
        raise ClusterError(f"--url {url}: is no address of an endpoint; try http://127.0.0.1:8080") from exc
    with client:
        if prompt is None:
            err.print("end with Ctrl-D", style="dim")
        while True:
            try:
                question = prompt if prompt is not None else out.input("> ")
            except EOFError:
                return
            if question.strip():
                messages.append({"role": "user", "content": question})
                answer = ""
                for piece in _stream(client, url, messages, options):
                    out.print(piece, end="", markup=False)
                    answer += piece
                out.print()
                messages.append({"role": "assistant", "content": answer})
            if prompt is not None:
                return


def _stream(
    client: httpx.Client, url: str, messages: list[dict[str, str]], options: Mapping[str, Any]
) -> Iterator[str]:
    body = {"messages": messages, "stream": True, **options}
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                raise ClusterError(f"{url}: {_error(response)}")
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: ") or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ClusterError(f"{url}: {chunk['error'].get('message', 'the answer broke off')}")
                for choice in chunk.get("choices", []):
                    yield choice.get("delta", {}).get("content") or ""
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise ClusterError(f"{url}: {exc or type(exc).__name__}; is 'primad serve' running there?") from exc
    except (json.JSONDecodeError, AttributeError) as exc:
        raise ClusterError(f"{url}: answers, but not as an OpenAI endpoint does") from exc


def _error(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return f"answered {response.status_code}; is it a primad endpoint?"
