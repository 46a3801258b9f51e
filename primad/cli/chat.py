"""``primad chat``: a conversation with a running endpoint, streamed to the terminal."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from primad.cli.conversation import (
    COMMANDS,
    AskedQuestion,
    Conversation,
    Piece,
    Received,
    ShownPicture,
    shown,
    split_command,
)
from primad.cli.drawing import Drawing
from primad.cli.endpoint import (
    HeadName,
    Key,
    Reached,
    Url,
    check_let_in,
    connected,
    error_in,
    in_our_words,
    opened,
    reached,
)
from primad.cli.line_input import is_typed, line_reader
from primad.cli.output import err, out
from primad.cli.progress import RichReporter
from primad.engine.pictures.headers import check_picture
from primad.engine.pictures.messages import MAX_BYTES
from primad.errors import ClusterError, printable
from primad.settings.config import load_config


def chat(
    prompt: Annotated[str | None, typer.Argument(help="One question; without it, a conversation.")] = None,
    url: Url = None,
    head: HeadName = None,
    api_key: Key = None,
    model: Annotated[
        str | None, typer.Option(help="The model to chat with, as 'primad models' lists it.", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 to 2.", min=0, max=2, show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Makes responses repeatable.", min=0, show_default=False)] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum tokens of a response.", min=1, show_default=False)
    ] = None,
) -> None:
    """Chat with the head that runs on this device, or with the one at --url.

    Ctrl-C ends a response, Ctrl-D the conversation; Alt-Enter, or a backslash before Enter, starts another line. /help
    shows the commands: /image, /system, /regenerate, /clear, /save.

    Examples:

        primad chat

        primad chat "Why is the sky blue?" --temperature 0

        primad chat --url http://127.0.0.1:9000 --system "Answer in French."
    """
    options = {"model": model, "temperature": temperature, "seed": seed, "max_tokens": max_tokens}
    chosen = {key: value for key, value in options.items() if value is not None}
    there = reached(url, head, api_key)
    with asyncio.Runner() as runner:
        talk = Talk(runner, there, Conversation(system or ""), chosen)
        if prompt is not None:
            talk.ask(prompt)
            return
        err.print(_greeting(there, model), style="dim")
        _converse(talk)


_GREETING_S: Final = 10.0
_OK: Final = 200


class Talk:
    """Sends requests to the endpoint ``there`` and draws the responses."""

    def __init__(
        self, runner: asyncio.Runner, there: Reached, conversation: Conversation, options: dict[str, Any]
    ) -> None:
        self._runner, self._options = runner, options
        self._there = there
        self.conversation = conversation
        self.received, self._dim, self._open = Received(), False, False

    def ask(self, question: AskedQuestion | str) -> None:
        """Ask and draw the response. Raises ``ClusterError``, or ``KeyboardInterrupt``; the partial response is
        kept."""
        self.received, self._dim, self._open = Received(), False, False
        messages = [
            {key: _text(value) if isinstance(value, str) else value for key, value in message.items()}
            for message in self.conversation.asking(_text(question) if isinstance(question, str) else question)
        ]
        try:
            self._runner.run(self._answer({"messages": messages, "stream": True, **self._options}))
        finally:
            if self._open:
                out.print()
            self.conversation.answered(self.received.text)

    async def _answer(self, body: dict[str, Any]) -> None:
        import httpx

        client = opened(httpx.AsyncClient, self._there, None)
        drawing = Drawing(self._draw)
        body["stream_options"] = {"include_usage": True}
        if err.is_terminal:
            body["return_progress"] = True
        try:
            with contextlib.ExitStack() as waiting:
                show = waiting.enter_context(RichReporter(err).waiting("waiting for the response"))
                async with client, client.stream("POST", "/v1/chat/completions", json=body) as response:
                    if response.status_code != 200:
                        await response.aread()
                        raise ClusterError(error_in(response))
                    async for line in response.aiter_lines():
                        drawing.add(self._taken(line, waiting, show))
            if not self.received.is_whole:
                raise ClusterError("the response was cut off")
        except ClusterError as exc:
            raise ClusterError(f"{self._there.url}: {printable(str(exc), 1000)}") from exc
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:
            raise in_our_words(self._there, exc) from exc
        finally:
            drawing.finish()

    def _taken(self, line: str, waiting: contextlib.ExitStack, show: Callable[[str], None]) -> list[Piece]:
        """Handle ``line`` of the stream. The first piece ends the waiting display."""
        pieces = self.received.take(line, time.monotonic())
        if pieces:
            waiting.close()
        elif self.received.read and not self.received.pieces:
            show(self.received.read)
        return pieces

    def _draw(self, piece: Piece) -> None:
        if piece.is_thought and not out.is_terminal:
            return  # a file or another program gets the response
        if self._dim and not piece.is_thought:
            out.print("\n")
        self._dim, self._open = piece.is_thought, True
        out.print(shown(piece.text), end="", style="dim" if piece.is_thought else None)


def _text(typed: str) -> str:
    """Decode input typed in a locale without UTF-8: its bytes were kept, and are mostly UTF-8."""
    return typed.encode(errors="surrogateescape").decode(errors="replace")


def _greeting(there: Reached, model: str | None) -> str:
    """Name the ``model`` to talk to, by default the served one.

    Raises ``ClusterError`` before anything is typed if there is no model, or several of which none is loaded.
    """
    with connected(there, _GREETING_S) as client:
        models = client.get("/v1/models")
        check_let_in(there.url, models.status_code)
        health = client.get("/health")
    try:
        listed = models.json()["data"]
        names = [str(each["id"]) for each in listed]
        is_open = len(names) > 1 and listed[0].get("status", {}).get("value") == "unloaded"
        waits = "" if health.status_code == _OK else f"; not serving yet: {health.json()['detail']}"
    except (ValueError, KeyError, TypeError) as exc:
        raise ClusterError(f"{there.url}: {error_in(models)}") from exc
    if model is None and is_open:
        raise ClusterError(f"{there.url}: offers {', '.join(map(printable, names))}; choose one with --model")
    return f"{model or (names[0] if names else 'no model yet')} at {there.url}{waits}"


def _converse(talk: Talk) -> None:
    """Read questions until the end of the input or a signal."""
    is_ending = False

    def end(number: int, frame: Any) -> None:
        nonlocal is_ending
        is_ending = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGTERM, end)
    read = line_reader(load_config({}).home)
    err.print("end with Ctrl-D; /help shows the commands" if is_typed() else "end with Ctrl-D", style="dim")
    while True:
        try:
            line = read()
            if line.strip() and not _obey(talk, line):
                return
        except EOFError:
            return
        except KeyboardInterrupt:
            if is_ending or not is_typed():
                raise
            err.print("end with Ctrl-D", style="dim")


def _obey(talk: Talk, line: str) -> bool:
    """Run the command or question ``line``; False at the end."""
    found = split_command(line)
    if found is None:
        _ask(talk, line.strip())
        return True
    command, rest = found
    conversation = talk.conversation
    match command:
        case "/quit":
            return False
        case "/system" if rest:
            conversation.system = rest
        case "/system":
            err.print(conversation.system or "there is no system message", style="dim")
        case "/image":
            _show(conversation, rest)
        case "/clear":
            conversation.clear()
        case "/save":
            _save(conversation, rest)
        case "/regenerate":
            question = conversation.again()
            if question is None:
                err.print("no question yet", style="dim")
            else:
                _ask(talk, question)
        case _:
            if command != "/help":
                err.print(
                    f"{printable(command)}: no such command; put a space before a question that starts with a slash"
                )
            for name, what in COMMANDS.items():
                err.print(f"{name} {what}", style="dim")
    return True


def _ask(talk: Talk, question: AskedQuestion | str) -> None:
    """Ask ``question``. Neither an error nor Ctrl-C ends the conversation."""
    try:
        talk.ask(question)
    except ClusterError as exc:
        err.print(f"{exc}; /regenerate asks again")
    finally:
        if out.is_terminal and talk.received.pace():
            err.print(talk.received.pace(), style="dim")


def _show(conversation: Conversation, name: str) -> None:
    if not name:
        err.print("/image FILE: name the file")
        return
    try:
        path = _dropped(name)
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        check_picture(data)
    except (OSError, RuntimeError, ValueError) as exc:
        err.print(f"/image {printable(name)}: {exc}; choose another file")
        return
    url = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
    conversation.pictures.append(ShownPicture(path.name, url))
    err.print(f"{printable(name)} goes with the next question", style="dim")


def _dropped(name: str) -> Path:
    """The file ``name``, also as a terminal writes a file dropped on it: in quotes, or with backslashes."""
    path = Path(name).expanduser()
    if not path.exists():
        with contextlib.suppress(ValueError):  # a quote that does not end
            words = shlex.split(name)
            return Path(words[0]).expanduser() if len(words) == 1 else path
    return path


def _save(conversation: Conversation, name: str) -> None:
    if not name:
        err.print("/save FILE: name the file")
        return
    try:
        Path(name).expanduser().write_text(conversation.written(name), encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as exc:
        err.print(f"/save {printable(name)}: {exc}; choose another file")
    else:
        err.print(f"saved as {printable(name)}", style="dim")
