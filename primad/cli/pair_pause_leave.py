"""``primad pair``, ``leave``, ``pause`` and ``resume``: requests to the daemon of this home folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from primad.cli.options import Home
from primad.cli.output import err, out, print_json
from primad.cli.progress import RichReporter
from primad.errors import ClusterError, ConfigError, Stopped
from primad.settings.config import Config, check_address, load_config

if TYPE_CHECKING:
    from primad.daemon.owner import OwnerPause
    from primad.network.admin import AdminReply, AdminRequest

LEAVE_S = 60.0
"""Timeout: before a hand-over others may have to load layers."""
BRING_S = 60.0
"""Timeout: a daemon looks up to five times for the device that shows a code."""


def pair(
    home: Home = None,
    code: Annotated[
        str | None, typer.Option(help="Pair with the device that shows this code.", show_default=False)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="With --code, if multicast is blocked: the host:port that the other device shows next to it.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the code as JSON.")] = False,
) -> None:
    """Show a code for another device to pair with this one, or enter the code that another device shows.

    Uses the 'primad serve' or 'primad join' that runs here; entering a code works without one too. Each code is good
    for one device and ten minutes.

    Examples:

        primad pair

        primad pair --code 7-lamp-river

        primad pair --home /tmp/second
    """
    if code is not None:
        if json:
            raise ConfigError("--json: prints this device's code; leave it or --code out")
        _bring(home, code, device)
        return
    if device is not None:
        raise ConfigError(f"--device {device}: needs the other device's --code too; give it, or leave --device out")
    from primad.network.admin import OpenPairing, PairingCode

    answer = _ask(home, OpenPairing())
    if not isinstance(answer, PairingCode):
        _unexpected(answer)
    if json:
        shown = {"code": answer.code, "expires_s": round(answer.expires_s, 1)}
        print_json(shown | {"port": answer.port, "addresses": answer.addresses})
        return
    _report_line(f"code {answer.code}, good for {_minutes(answer.expires_s)}; on the other device type:")
    _report_line(f"  primad join --code {answer.code}")
    _report_line("or, if primad runs there already:")
    _report_line(f"  primad pair --code {answer.code}")
    _report_line("if multicast is blocked, add the address of this device:")
    for place in answer.addresses or [f"ADDRESS:{answer.port}"]:
        _report_line(f"  primad join --code {answer.code} --device {place}")


def _bring(home: Path | None, code: str, device: str | None) -> None:
    """Have the daemon of ``home`` pair with the device that shows ``code``, or pair here if none runs."""
    from primad.network.admin import BringCode, is_running
    from primad.trust.words import parse_code

    parse_code(code)
    if device is not None:
        device = check_address(device, "--device")
    config = load_config({"home": home})
    if is_running(config.home):
        _do(home, BringCode(code=code, at=device), BRING_S)
    else:
        _pair_here(config, code, device)


def _pair_here(config: Config, code: str, device: str | None) -> None:
    from primad.daemon.pairing_service import pair as bring
    from primad.daemon.run import own_node, run
    from primad.trust.trust import HEAD

    _check_owner(config.home)
    with own_node(config) as node:

        async def bring_code() -> None:
            other = await bring(node, code, device, lambda _: None, HEAD)
            _report_line(f"{config.name} is paired with {other.device} (no primad runs here now)")

        try:
            run(bring_code())
        except Stopped as exc:  # this is no daemon
            raise KeyboardInterrupt from exc


def _check_owner(folder: Path) -> None:
    """Refuse files that a service could not read because root wrote them."""
    if not hasattr(os, "geteuid") or not folder.is_dir():
        return
    owner = folder.stat().st_uid
    if os.geteuid() == 0 and owner != 0:
        raise ConfigError(
            f"--home {folder}: belongs to user {owner}, and no primad runs with it; start its service first"
        )


def leave(home: Home = None) -> None:
    """Hand over this device's layers, then end its 'primad join'. Ctrl-C there does the same.

    Examples:

        primad leave

        primad leave --home /tmp/second
    """
    from primad.network.admin import Leave

    _do(home, Leave(), LEAVE_S)


def pause(home: Home = None) -> None:
    """Compute nothing on this device until 'primad resume', even after a restart. The others continue without it.

    Examples:

        primad pause

        primad pause --home /tmp/second
    """
    from primad.network.admin import Pause, is_running

    folder = load_config({"home": home}).home
    if is_running(folder) or not folder.is_dir():
        _do(home, Pause(), LEAVE_S)
    else:
        _report_line(f"{_kept(folder).pause()} (no primad runs here now)")


def resume(home: Home = None) -> None:
    """Compute again after 'primad pause'.

    Examples:

        primad resume

        primad resume --home /tmp/second
    """
    from primad.network.admin import Resume, is_running

    folder = load_config({"home": home}).home
    if is_running(folder) or not folder.is_dir():
        _do(home, Resume())
    else:
        _report_line(f"{_kept(folder).resume()} (no primad runs here now)")


def _kept(folder: Path) -> OwnerPause:
    """The pause that the next daemon of ``folder`` finds."""
    from primad.daemon.owner import OwnerPause

    return OwnerPause(folder, pause_on_battery=False, changed=lambda _: None)


def _do(home: Path | None, request: AdminRequest, timeout_s: float | None = None) -> None:
    from primad.network.admin import Done

    answer = _ask(home, request, timeout_s)
    if not isinstance(answer, Done):
        _unexpected(answer)
    _report_line(answer.text)


def _ask(home: Path | None, request: AdminRequest, timeout_s: float | None = None) -> AdminReply:
    """The daemon's reply. Raises ``ClusterError`` if none runs or it refuses."""
    from primad.network.admin import ASK_S, Refusal, ask

    folder = load_config({"home": home}).home
    with RichReporter(err).waiting("asking the daemon that runs here"):
        answer = ask(folder, request, timeout_s or ASK_S)
    if isinstance(answer, Refusal):
        raise ClusterError(answer.reason)
    return answer


def _unexpected(answer: AdminReply) -> NoReturn:
    raise ClusterError(f"the running primad sent {type(answer).__name__}; restart it with this version")


def _report_line(line: str) -> None:
    out.print(line)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
