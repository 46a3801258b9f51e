"""``primad pair``, ``leave``, ``pause`` and ``resume``: what the daemon of this home folder is asked to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from primad.cli.options import Home
from primad.cli.output import out
from primad.errors import ClusterError
from primad.settings.config import load_config

if TYPE_CHECKING:
    from primad.daemon.owner import OwnerPause
    from primad.network.admin import AdminAnswer, AdminRequest

LEAVE_S = 60.0
"""Handing over may mean that others load layers first."""


def pair(home: Home = None) -> None:
    """Show a code by which another device pairs with this one, for good.

    Asks the 'primad serve' or 'primad join' that runs here. Each code is good for one device and a few minutes.

    Examples:

        primad pair

        primad pair --home /tmp/second
    """
    from primad.network.admin import OpenPairing, PairingCode

    answer = _ask(home, OpenPairing())
    if not isinstance(answer, PairingCode):
        _unexpected(answer)
    _say(f"code {answer.code}, good for {_minutes(answer.expires_s)}; on the other device type:")
    _say(f"  primad join --code {answer.code}")
    _say("where multicast is blocked add the address of this device:")
    _say(f"  primad join --code {answer.code} --device ADDRESS:{answer.port}")


def leave(home: Home = None) -> None:
    """Hand over what this device computes, then end its 'primad join'. Ctrl-C there does the same.

    Examples:

        primad leave

        primad leave --home /tmp/second
    """
    from primad.network.admin import Leave

    _do(home, Leave(), LEAVE_S)


def pause(home: Home = None) -> None:
    """Let this device compute nothing until 'primad resume', also after a restart. The others go on without it.

    Examples:

        primad pause

        primad pause --home /tmp/second
    """
    from primad.network.admin import Pause, is_running

    folder = load_config({"home": home}).home
    if is_running(folder) or not folder.is_dir():
        _do(home, Pause(), LEAVE_S)
    else:
        _say(f"{_kept(folder).pause()} (no primad runs here now)")


def resume(home: Home = None) -> None:
    """Let this device compute again after 'primad pause'.

    Examples:

        primad resume

        primad resume --home /tmp/second
    """
    from primad.network.admin import Resume, is_running

    folder = load_config({"home": home}).home
    if is_running(folder) or not folder.is_dir():
        _do(home, Resume())
    else:
        _say(f"{_kept(folder).resume()} (no primad runs here now)")


def _kept(folder: Path) -> OwnerPause:
    """The pause that the next daemon of ``folder`` finds."""
    from primad.daemon.owner import OwnerPause

    return OwnerPause(folder, pause_on_battery=False, changed=lambda _: None)


def _do(home: Path | None, request: AdminRequest, timeout_s: float | None = None) -> None:
    from primad.network.admin import Done

    answer = _ask(home, request, timeout_s)
    if not isinstance(answer, Done):
        _unexpected(answer)
    _say(answer.text)


def _ask(home: Path | None, request: AdminRequest, timeout_s: float | None = None) -> AdminAnswer:
    """The daemon's answer. Raises ``ClusterError`` when none runs or it refuses."""
    from primad.network.admin import ASK_S, Refusal, ask

    answer = ask(load_config({"home": home}).home, request, timeout_s or ASK_S)
    if isinstance(answer, Refusal):
        raise ClusterError(answer.reason)
    return answer


def _unexpected(answer: AdminAnswer) -> NoReturn:
    raise ClusterError(f"the primad that runs here answered {type(answer).__name__}; start it again with this version")


def _say(line: str) -> None:
    out.print(line)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
