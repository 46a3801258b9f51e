"""``primad doctor``: its options, and how findings are printed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.text import Text

from primad.cli.options import Cluster, Home, OnInterface
from primad.cli.output import err, out, print_json
from primad.cli.progress import RichReporter
from primad.errors import PrimadError
from primad.settings.config import DEFAULT_HTTP_PORT, load_config

if TYPE_CHECKING:
    from primad.doctor.findings import Finding
    from primad.doctor.peers import KnownTrust

_MARKS: Final = {"ok": ("ok", "green"), "note": ("-", "cyan"), "warning": ("!", "yellow"), "error": ("x", "bold red")}
_COLUMN: Final = 4


def doctor(
    home: Home = None,
    host: Annotated[
        str | None, typer.Option(help="Address that daemons listen on [default: as configured].", show_default=False)
    ] = None,
    interface: OnInterface = None,
    cluster: Cluster = None,
    port: Annotated[
        int | None, typer.Option(help="Control port [default: 7770].", min=1, max=65_535, show_default=False)
    ] = None,
    http_port: Annotated[int, typer.Option(help="Port of the HTTP server.", min=1, max=65_535)] = DEFAULT_HTTP_PORT,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find what could keep this device from serving, and what to type next. Takes a few seconds.

    The exit code is 1 if there is an error, else 0.

    Examples:

        primad doctor

        primad doctor --interface eth0

        primad doctor --json
    """
    from primad.doctor.examine import Subject, examine
    from primad.network.addresses import chosen_interfaces, read_interfaces, resolved_host

    config = load_config({"home": home, "host": host, "interface": interface, "cluster": cluster, "port": port})
    chosen_interfaces(read_interfaces(), config.interface)  # a typing error is an error here, not a finding
    own_key, trust = _trust(config.home)
    subject = Subject(
        home=config.home,
        host=resolved_host(config.host),
        interface=config.interface,
        cluster=config.cluster,
        control_port=config.port,
        http_port=http_port,
        devices=config.devices,
        threads=config.threads,
        own_key=own_key,
        trust=trust,
        models=config.models,
    )
    with RichReporter(err).waiting("checking this device and discovered ones"):
        findings = asyncio.run(examine(subject))
    if json:
        print_json(findings)
    else:
        for line in lines(findings):
            out.print(line)
    raise typer.Exit(1 if any(found.level == "error" for found in findings) else 0)


def lines(findings: Sequence[Finding]) -> list[Text]:
    """The report: one line per finding, grouped by check, with the next command below each problem."""
    found = []
    for check, group in groupby(findings, key=lambda finding: finding.check):
        found.append(Text(check, style="bold"))
        for finding in group:
            mark, style = _MARKS[finding.level]
            found.append(Text.assemble(" " * _COLUMN, (mark.ljust(_COLUMN), style), finding.text))
            if finding.next is not None:
                found.append(Text.assemble(" " * 2 * _COLUMN, ("next: ", "dim"), finding.next))
    errors, warnings = (sum(finding.level == level for finding in findings) for level in ("error", "warning"))
    found.append(Text(f"{_count(errors, 'error')}, {_count(warnings, 'warning')}", style="bold"))
    return found


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _trust(home: Path) -> tuple[str, KnownTrust]:
    """This device's public key and its trust; before it has a key, "" and the daemons of this user.

    An identity that others can read is not loaded: it is a finding, and loading it would silently repair it.
    """
    from primad.cli.sight import report
    from primad.doctor.peers import KnownTrust
    from primad.doctor.storage import gather_identity, judge_identity
    from primad.trust.identity import load_identity
    from primad.trust.local_trust import LocalTrust, default_folder
    from primad.trust.trust import TrustStore

    facts = gather_identity(home)
    if facts is not None and judge_identity(facts)[0].level == "ok":
        try:
            identity = load_identity(home)
            store, reported = TrustStore(home, identity), report(home)
            return identity.public, KnownTrust(
                trusts=store.trusts,
                revoked=store.revoked(),
                introduced=reported.introduced,
                revoked_by=reported.revoked_by,
                refused=reported.refused,
            )
        except PrimadError as exc:
            err.print(f"warning: {exc}")
    return "", KnownTrust(trusts=LocalTrust(default_folder()).knows)
