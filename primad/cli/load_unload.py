"""``primad load`` and ``primad unload``: the models of a running head that offers several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from primad.cli.endpoint import HeadName, Key, Reached, Url, check_let_in, connected, error_in, reached
from primad.cli.offered import ANSWER_TIMEOUT_S, offered_model, offered_models
from primad.cli.output import err, out
from primad.cli.progress import RichReporter
from primad.errors import ClusterError, printable
from primad.settings.quantities import show_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

_DATA: Final = "data:"
OfferedName = Annotated[str, typer.Argument(help="The model, as 'primad models' lists it.", metavar="NAME")]


def load(name: OfferedName, url: Url = None, head: HeadName = None, api_key: Key = None) -> None:
    """Load a model of a running head, and wait until it is loaded. Ctrl-C ends only the wait.

    Examples:

        primad load qwen3-8b
    """
    there = reached(url, head, api_key)
    with connected(there, ANSWER_TIMEOUT_S) as client:
        called = _called(client, there, name)
        with (
            RichReporter(err).waiting(f"{called}: loading") as show,
            client.stream("GET", "/models/sse", timeout=None) as events,
        ):
            _check(there, events)
            _post(client, there, "load", called)
            _wait_loaded(client, there, called, events, show)
    out.print(f"{called}: loaded")


def unload(name: OfferedName, url: Url = None, head: HeadName = None, api_key: Key = None) -> None:
    """Unload a model of a running head once its requests have ended. The next request for it loads it again.

    Examples:

        primad unload qwen3-8b
    """
    there = reached(url, head, api_key)
    with connected(there, ANSWER_TIMEOUT_S) as client:
        called = _called(client, there, name)
        with RichReporter(err).waiting(f"{called}: waiting for its requests to end"):
            _post(client, there, "unload", called, timeout_s=None)
    out.print(f"{called}: unloaded")


def _called(client: httpx.Client, there: Reached, name: str) -> str:
    """The head's name of the model ``name``, or ``name`` itself, which it will refuse. Raises ``ClusterError``."""
    models = offered_models(client, there)
    if any(each.status is None for each in models):
        served = ", ".join(each.id for each in models)
        raise ClusterError(f"{there.url}: serves one model, {printable(served)}, and neither loads nor unloads others")
    found = offered_model(name, models)
    return name if found is None else found.id


def _post(
    client: httpx.Client, there: Reached, what: str, model: str, timeout_s: float | None = ANSWER_TIMEOUT_S
) -> None:
    _check(there, client.post(f"/models/{what}", json={"model": model}, timeout=timeout_s))


def _check(there: Reached, answer: httpx.Response) -> None:
    check_let_in(there.url, answer.status_code)
    if not answer.is_success:
        answer.read()
        raise ClusterError(f"{there.url}: {printable(error_in(answer), 1000)}")


def _wait_loaded(
    client: httpx.Client, there: Reached, called: str, events: httpx.Response, show: Callable[[str], None]
) -> None:
    """Follow ``events`` until the model is loaded. Raises ``ClusterError`` if that fails."""
    if _state(client, there, called)[0] == "loaded":
        return
    begun = False
    for line in events.iter_lines():
        if line.startswith(_DATA):
            state, detail, words = _event(line.removeprefix(_DATA), called)
        elif line.startswith(":"):  # a keep-alive; the current state covers missed events
            state, detail = _state(client, there, called)
            words = ""
        else:
            continue
        if state == "loaded":
            return
        if state == "failed":
            raise ClusterError(f"{called}: cannot be loaded: {printable(detail or 'the head gives no reason', 400)}")
        if state == "unloaded" and begun:
            raise ClusterError(f"{called}: was unloaded again; another client or the head unloaded it")
        begun = begun or state == "loading"
        if words:
            show(f"{called}: {words}")
    raise ClusterError(f"{there.url}: the head ended before {called} was loaded")


def _state(client: httpx.Client, there: Reached, called: str) -> tuple[str, str]:
    """State and detail of the model now."""
    found = offered_model(called, offered_models(client, there))
    return ("", "") if found is None else (found.state, str((found.status or {}).get("detail", "")))


def _event(data: str, called: str) -> tuple[str, str, str]:
    """State, detail and text for people of an event of the model; empty for other events."""
    try:
        event: Any = msgspec.json.decode(data)
        if event["model"] != called:
            return "", "", ""
        about = event["data"]
        share = None if (progress := about.get("progress")) is None else float(progress["value"])
        left_s = None if (expected_s := about.get("expected_s")) is None else float(expected_s)
        parts = [str(about.get("detail") or about["status"]), *show_progress(share, left_s)]
        return str(about["status"]), str(about.get("detail", "")), ", ".join(parts)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError):
        return "", "", ""
