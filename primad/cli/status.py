"""``primad status``: the state of a running head and its devices, next to the plan's predictions."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from primad.cli.endpoint import HeadName, Key, KeyRefusedError, Reached, Url, check_let_in, connected, reached
from primad.cli.output import err, tables, write_json
from primad.cli.progress import RichReporter
from primad.cli.watched import Look, watched
from primad.errors import ClusterError, printable
from primad.settings.quantities import show_bytes, show_count, show_expiry, show_ms, show_speed

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx
    from rich.console import RenderableType
    from rich.table import Table

    from primad.api.http.status import (
        DeviceStatus,
        DraftFigures,
        EmbeddingStatus,
        KvStatus,
        MemoryFigures,
        ModelStatus,
        PicturesStatus,
        PlannedFigures,
        StatusBody,
    )

ANSWER_TIMEOUT_S: Final = 15.0
"""The head waits five seconds for its devices."""
EVERY_S: Final = 1.0
_PLAIN_WIDTH: Final = 160
"""Columns if there is no terminal."""
_UNKNOWN: Final = "?"


def status(
    url: Url = None,
    head: HeadName = None,
    api_key: Key = None,
    json: Annotated[bool, typer.Option("--json", help="Print the endpoint's JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second, until Ctrl-C.")] = False,
) -> None:
    """Show the state of a running head and its devices: layers, memory, disk reads, memory pressure.

    Bytes read and stalls are means per token; the plan's predictions are below each device. --watch adds the ring's
    speed, hops and events, like the page.

    Examples:

        primad status

        primad status --watch

        primad status --json --url http://127.0.0.1:9000
    """
    if not tables.is_terminal:
        tables.width = max(tables.width, _PLAIN_WIDTH)
    there = reached(url, head, api_key)
    if watch and not json:
        _watch(_ask_once(there), lambda: _ask_once(reached(url, head, api_key) if there.is_own else there))
        return
    with connected(there, ANSWER_TIMEOUT_S) as client:
        if json:
            _print_json(client, there.url, watch=watch)
        else:
            with RichReporter(err).waiting("asking the devices"):
                raw = _ask(client, there.url)[1]
            tables.print(render(raw))


def _print_json(client: httpx.Client, url: str, *, watch: bool) -> None:
    """Print one line per status."""
    while True:
        write_json(_ask(client, url)[0].strip() + "\n")
        sys.stdout.flush()
        if not watch:
            return
        time.sleep(EVERY_S)


def _watch(first: StatusBody, ask: Callable[[], StatusBody]) -> None:
    """Update in place on a terminal, print one status after another elsewhere. A head that goes away is retried until
    it returns."""
    from rich.live import Live

    shown = _Watched(Look(first, _now_s()))
    if not tables.is_terminal:
        while True:
            tables.print(shown.drawn)
            time.sleep(EVERY_S)
            shown.ask(ask)
    with Live(shown.drawn, console=tables, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            time.sleep(EVERY_S)
            shown.ask(ask)
            live.update(shown.drawn, refresh=True)


class _Watched:
    """The display of a head: ``drawn``, or why it is not updated."""

    def __init__(self, first: Look) -> None:
        self._before: Look | None = None
        self.drawn: RenderableType
        self._draw(first)

    def ask(self, ask: Callable[[], StatusBody]) -> None:
        """Update. Raises ``ClusterError`` only if waiting is useless: the endpoint requires another key."""
        from rich.text import Text

        try:
            self._draw(Look(ask(), _now_s()))
        except KeyRefusedError:
            raise
        except ClusterError as exc:
            self.drawn = Text(f"{exc} (retrying every second, until Ctrl-C)")

    def _draw(self, now: Look) -> None:
        from rich.console import Group

        self.drawn = Group(render(now.status), *watched(now, self._before))
        self._before = now


def _ask_once(there: Reached) -> StatusBody:
    with connected(there, ANSWER_TIMEOUT_S) as client:
        return _ask(client, there.url)[1]


def _now_s() -> float:
    return time.monotonic()


def _ask(client: httpx.Client, url: str) -> tuple[str, StatusBody]:
    """The endpoint's status, raw and parsed. Raises ``ClusterError`` if no head responds."""
    import msgspec

    from primad.api.http.status import decoder
    from primad.settings.old_names import with_new_keys

    response = client.get("/status")
    check_let_in(url, response.status_code)
    if response.status_code != 200:
        raise ClusterError(f"{url}: returned {response.status_code}; is it a head, 'primad serve'?")
    try:
        return response.text, decoder.decode(with_new_keys(response.content))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ClusterError(f"{url}: responds, but not like a head of this version of primad: {printable(exc)}") from exc


def render(status: StatusBody) -> RenderableType:
    """``status`` for people."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(_title(status), style="bold")]
    if status.devices:
        parts.append(_table(status))
    parts += [Text(line) for line in (*map(_model_line, filter(_is_held, status.models)), *_notes(status))]
    return Group(*parts)


def _is_held(model: ModelStatus) -> bool:
    """Whether it is loaded, about to be, or failed to load."""
    return model.state != "unloaded"


def _model_line(model: ModelStatus) -> str:
    """One of several models: its state, its memory, and when it is unloaded."""
    from primad.api.http.offered import state_line

    words = [state_line(model)]
    if model.memory_bytes:
        words.append(
            f"{show_bytes(sum(model.memory_bytes.values()))} on {', '.join(map(printable, model.memory_bytes))}"
        )
    if model.pinned:
        words.append("stays")
    elif model.expires_at_s is not None:
        words.append(show_expiry(model.expires_at_s - time.time()))
    return ", ".join(words)


def _title(status: StatusBody) -> str:
    words = [printable(status.detail)]
    if status.model is not None and not status.models:
        words.append(printable(status.model))
    if status.epoch is not None:
        words.append(f"epoch {status.epoch}")
    if status.rounds is not None:
        words.append(f"{show_count(status.rounds, 'round')} per token")
    if status.sequences is not None and status.sequences > 1:
        words.append(f"{status.sequences} concurrent requests")
    if status.predicted is not None:
        words.append(f"forecast: {show_speed(status.predicted.tokens_per_s)}")
    return ", ".join(words)


def _notes(status: StatusBody) -> list[str]:
    """Notes below the table: silent devices, devices outside the ring, and errors of the forecast."""
    from primad.api.http.status import wrong_line

    silent = [f"{printable(device.name)}: {_why_silent(device)}" for device in status.devices if device.ring is None]
    there = {device.name for device in status.devices}
    left_out = {each.device: each.reason for each in status.left_out}
    others = [
        f"{printable(member.device)}: {printable(member.phase)}"
        + (f", {printable(why)}" if (why := member.reason or left_out.get(member.device)) else "")
        for member in status.cluster
        if member.device not in there
    ]
    others += [
        f"{printable(member.device)}: relays requests at {printable(member.api)}"
        for member in status.cluster
        if member.api
    ]
    measured = status.measured
    wrong = [wrong_line(measured)] if measured is not None and measured.wrong is not None else []
    kept = [] if status.kv is None else _kept(status.kv)
    kept += [] if status.checked is None else [printable(status.checked)]
    kept += [] if status.drafts is None or not status.drafts.drafted else [_drafts(status.drafts)]
    kept += [] if status.pictures is None or not status.pictures.encoded else [_pictures(status.pictures)]
    return silent + others + wrong + kept + ([] if status.embedding is None else [_embedding(status.embedding)])


def _why_silent(device: DeviceStatus) -> str:
    return "computes a long step, such as a prompt; its figures follow" if device.computes else "timed out"


def _kept(kv: KvStatus) -> list[str]:
    """Replication and recovery of the KV cache."""
    lines = [
        f"{printable(copy.device)}: its KV cache is not replicated, {printable(copy.why)}"
        for copy in kv.copies
        if copy.replica is None
    ]
    where = ", ".join(f"{printable(copy.device)}'s by {printable(copy.replica)}" for copy in kv.copies if copy.replica)
    if where:
        lines.append(
            f"KV cache replicated: {where}; {show_bytes(kv.replicated_bytes)} now, {kv.lag_tokens} tokens behind"
        )
    if kv.restores:
        lines.append(
            f"{kv.restores} times a ring resumed requests of another one: {kv.restored_tokens} tokens were restored "
            f"within {kv.restore_s:.1f} s, {kv.computed_again_tokens} recomputed"
        )
    return lines


def _drafts(drafts: DraftFigures) -> str:
    """Outcome of draft tokens."""
    return (
        f"{drafts.drafted} draft tokens: {drafts.accepted / drafts.drafted:.0%} accepted, "
        f"{drafts.skipped / drafts.drafted:.0%} skipped; {drafts.tokens_per_pass:.2f} tokens per ring pass"
        + (f"; draft model on {printable(drafts.model_on)}" if drafts.model_on is not None else "")
    )


def _pictures(pictures: PicturesStatus) -> str:
    """Where pictures are encoded."""
    where = "" if pictures.device is None else f"; {printable(pictures.device)} encodes"
    return f"{show_count(pictures.encoded, 'image')} encoded, {pictures.encoded_elsewhere} by other devices{where}"


def _embedding(embedding: EmbeddingStatus) -> str:
    held = "" if embedding.rss_bytes is None else f", {show_bytes(embedding.rss_bytes)}"
    errors = "" if not embedding.errors else f", {embedding.errors} of them with errors"
    return (
        f"{printable(embedding.model)} for embeddings: {'alive' if embedding.alive else 'not running'}{held}, "
        f"{embedding.requests} requests{errors}, {embedding.tokens} tokens in {embedding.compute_s:.1f} s"
    )


def _table(status: StatusBody) -> Table:
    """Two rows per device: measured and planned."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False, header_style="bold")
    table.add_column("device", overflow="fold")
    for column in (
        "layers\n",
        "resident\nlayers",
        "streamed\nlayers",
        "read\nahead",
        "read\nper token",
        "stall\nper token",
        "pressure\n",
        "memory\n",
    ):
        table.add_column(column, justify="right", overflow="fold")
    for device in status.devices:
        table.add_row(*map(Text, _is(device)))
        if device.predicted.resident is not None:
            table.add_row(*(Text(cell, style="dim") for cell in _planned(device)))
    return table


def _is(device: DeviceStatus) -> list[str]:
    memory, ring = device.memory, device.ring
    unwatched = _UNKNOWN if ring is None else "-"  # without anything to free, pressure is not watched
    pressure = unwatched if memory.pressure is None else printable(memory.pressure, 12)
    rss = _UNKNOWN if ring is None else show_bytes(ring.rss_bytes)
    return [printable(device.name), str(device.layers), *_figures(memory, bool(memory.streams_output)), pressure, rss]


def _planned(device: DeviceStatus) -> list[str]:
    planned = device.predicted
    ram = _UNKNOWN if planned.ram_bytes is None else show_bytes(planned.ram_bytes)
    return ["  planned", "", *_figures(planned), "", ram]


def _figures(figures: MemoryFigures | PlannedFigures, streams_output: bool = False) -> list[str]:
    """The columns of both rows: resident, streamed, read-ahead, read, stall."""
    streamed = _UNKNOWN if figures.streamed is None else f"{figures.streamed}{' + output' * streams_output}"
    read_ahead, read, stall = figures.read_ahead_bytes, figures.bytes_read_per_token, figures.stall_ms_per_token
    return [
        _UNKNOWN if figures.resident is None else str(figures.resident),
        streamed,
        _UNKNOWN if read_ahead is None else show_bytes(read_ahead),
        _UNKNOWN if read is None else show_bytes(read),
        _UNKNOWN if stall is None else show_ms(stall),
    ]
