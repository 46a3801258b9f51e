"""``primad join``: its options, checked before anything is measured, loaded or received."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import typer

from primad.cli.asking import NOT_ENCRYPTED, AllowHost, allowed_hosts
from primad.cli.commands import CONFIG_FILE, HelpAll
from primad.cli.grouped import flags, grouped, names_of
from primad.cli.options import DeviceOptions, OnInterface, OwnerOptions, check_interface
from primad.cli.output import daemon_command, err
from primad.cli.progress import RichReporter
from primad.errors import ConfigError
from primad.settings.config import (
    DEFAULT_HTTP_PORT,
    LOOPBACK,
    check_address,
    check_host,
    is_loopback,
    load_config,
)

if TYPE_CHECKING:
    from primad.relay.place import ApiPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class PairingOptions:
    """Pairing with a head."""

    PANEL: ClassVar[str] = "The first time"

    code: Annotated[
        str | None, typer.Option(help="The code that the head shows, the first time.", show_default=False)
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="With --code, if multicast is blocked: the host:port that the head shows next to it.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Where a worker listens for heads."""

    PANEL: ClassVar[str] = "Network"

    host: Annotated[
        str | None, typer.Option(help="Address to listen on [default: all of this machine].", show_default=False)
    ] = None
    port: Annotated[
        int | None, typer.Option(help="Control port [default: 7770, or any when it is taken].", show_default=False)
    ] = None
    interface: OnInterface = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LenderOptions(OwnerOptions):
    """Limits of a worker."""

    pause_on_battery: Annotated[
        bool | None,
        typer.Option(
            "--pause-on-battery/--no-pause-on-battery",
            help="Compute nothing while this device runs on battery.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOptions:
    """The API of the head, also on this device."""

    PANEL: ClassVar[str] = "HTTP server"

    api: Annotated[
        bool, typer.Option("--api", help="Serve the head's HTTP API on this device, by relaying each request to it.")
    ] = False
    api_host: Annotated[str, typer.Option(help="With --api: address of the HTTP server.")] = LOOPBACK
    api_port: Annotated[int, typer.Option(help="With --api: port of the HTTP server.", min=0, max=65_535)] = (
        DEFAULT_HTTP_PORT
    )
    allow_host: AllowHost = None


JOIN_SHOWN: Final = (
    *("code", "device", "api"),
    *("name", "max_ram", "max_vram", "max_disk", "gpu", "nice", "pause_on_battery"),
)
"""Options that ``--help`` shows."""
JOIN_TABLE: Final = names_of(ApiOptions)
"""Options allowed in the configuration file, in addition to the keys of the device."""


@grouped
@daemon_command()
def join(
    called: typer.Context,
    device: DeviceOptions,
    pairing: PairingOptions,
    network: ListenOptions,
    owner: LenderOptions,
    api: ApiOptions,
    help_all: HelpAll = False,
) -> None:
    """Let a head use this device: announce it, wait for work, compute until stopped.

    The first time use the code that 'primad serve' or 'primad pair' shows on the head; later none is needed.

    Examples:

        primad join --code 7-lamp-river

        primad join

        primad join --api --api-host 0.0.0.0

        primad join --max-ram 8GB --max-disk 40GB --nice 10 --pause-on-battery

        primad join --home /tmp/second --name second --port 7781 --host 127.0.0.1
    """
    del help_all
    place = _check_pairing(pairing)
    config = load_config(flags(device, network, owner), stored=called.meta[CONFIG_FILE])
    check_interface(config)
    relayed = _relayed(api)
    from primad.worker.join import join as run_join

    run_join(config, RichReporter(err), code=pairing.code, pair_at=place, api=relayed)


def _relayed(options: ApiOptions) -> ApiPlace | None:
    """Where requests for the head are accepted; None if they are not. Raises ``ConfigError``."""
    from primad.relay.place import ApiPlace

    check_host(options.api_host, "--api-host")
    hosts = allowed_hosts(options.allow_host)
    if not options.api:
        return None
    if not is_loopback(options.api_host):
        err.print(f"warning: --api-host {options.api_host}: {NOT_ENCRYPTED}")
    return ApiPlace(host=options.api_host, port=options.api_port, allowed_hosts=hosts)


def _check_pairing(pairing: PairingOptions) -> str | None:
    """The address to pair at, if given. Raises ``ConfigError``."""
    if pairing.code is not None:
        from primad.trust.words import parse_code

        parse_code(pairing.code)
    if pairing.device is None:
        return None
    if pairing.code is None:
        raise ConfigError(f"--device {pairing.device}: needs the head's --code too; give it, or leave --device out")
    return check_address(pairing.device, "--device")
