"""Access to a head's HTTP server: the options of ``primad serve`` for it, and their rules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final

import typer

from primad.errors import ConfigError, printable
from primad.settings.config import is_loopback

MIN_KEY_CHARS: Final = 16
MAX_KEY_CHARS: Final = 512
_KEY: Final = re.compile(rf"[!-~]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}")
NOT_ENCRYPTED: Final = "the HTTP endpoint is not encrypted; anyone on the network can read the traffic and keys"
_HOST: Final = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9._-]{0,252})")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*]{1,255}")

AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        help="A name that clients use for this server, such as desk.lan or *.local; repeatable.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingOptions:
    """Access to the HTTP server."""

    PANEL: ClassVar[str] = "Access"

    api_key: Annotated[
        str | None,
        typer.Option(
            help="Clients need this key. The process list shows it; the variable hides it.",
            envvar="PRIMAD_API_KEY",
            show_default=False,
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="Clients need a key from this file, written by 'primad key add'.", show_default=False),
    ] = None
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Serve anyone who can reach the address of --host.")] = (
        False
    )
    allow_host: AllowHost = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Allow web pages of this origin, such as http://desk.lan:3000; repeatable.",
            show_default=False,
        ),
    ] = None


def check_asking(options: AskingOptions, host: str) -> None:
    """Raise ``ConfigError`` unless the options say consistently who may use a server at ``host``."""
    has_keys = options.api_key is not None or options.api_key_file is not None
    if has_keys and options.no_auth:
        raise ConfigError("--no-auth: contradicts --api-key and --api-key-file; leave one of them out")
    if options.api_key is not None and not _KEY.fullmatch(options.api_key):
        raise ConfigError(
            f"--api-key: a key has {MIN_KEY_CHARS} to {MAX_KEY_CHARS} letters, digits and signs without spaces; "
            "'primad key add' makes a good one"
        )
    if not has_keys and not options.no_auth and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: anyone who reaches this address could use it; give --api-key KEY or --api-key-file "
            "FILE ('primad key add' writes one), or --no-auth"
        )


def warning(options: AskingOptions, host: str) -> str | None:
    """A warning to the owner of a server at ``host``, in one line; None if there is none."""
    if is_loopback(host):
        return None
    if options.no_auth:
        return (
            f"--host {host}: the HTTP endpoint has no password and no encryption; anyone who reaches this address "
            "can use it and read the traffic"
        )
    return f"--host {host}: {NOT_ENCRYPTED}"


def allowed_hosts(names: Sequence[str] | None) -> tuple[str, ...]:
    """The names of ``--allow-host``. Raises ``ConfigError`` for an invalid one."""
    hosts = tuple(host.lower().removesuffix(".") for host in names or ())
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"--allow-host {printable(host)}: give a name without port or path, such as desk.lan or *.local"
            )
    return hosts


def cors_origins(options: AskingOptions) -> tuple[str, ...]:
    """The origins of ``--cors-origin``. Raises ``ConfigError`` for an invalid one."""
    origins = tuple(origin.lower().removesuffix("/") for origin in options.cors_origin or ())
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origin {printable(origin)}: give scheme, name and port, such as http://desk.lan:3000; "
                "all origins at once are not allowed"
            )
    return origins
