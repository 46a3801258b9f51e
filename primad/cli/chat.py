"""``primad chat``: a conversation with a running endpoint, streamed to the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from primad.cli.endpoint import HeadName, Url, connected, endpoint_url
from primad.cli.output import err, out
from primad.errors import ClusterError

if TYPE_CHECKING:
    import httpx


def chat(
    prompt: Annotated[str | None, typer.Argument(help="One question; without it, a conversation.")] = None,
    url: Url = None,
    head: HeadName = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 to 2.", min=0, max=2, show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Makes an answer repeatable.", min=0, show_default=False)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.", min=1, show_default=False)] = None,
) -> None:
    """Talk to a running endpoint.

    Examples:

        primad chat

        primad chat "Why is the sky blue?" --temperature 0

        primad chat --url http://127.0.0.1:9000 --system "Answer in French."
    """
    options = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens}
    chosen = {key: value for key, value in options.items() if value is not None}
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    url = endpoint_url(url, head)
    with connected(url, None) as client:
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
                for piece in _stream(client, url, messages, chosen):
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
            if response.status_code != 200:
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
    except (json.JSONDecodeError, AttributeError) as exc:
        raise ClusterError(f"{url}: answers, but not as an OpenAI endpoint does") from exc


def _error(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return f"answered {response.status_code}; is it a primad endpoint?"
