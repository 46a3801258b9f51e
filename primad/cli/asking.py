"""Who may ask a head's HTTP server: the options of ``primad serve`` that say so, and what they must say together."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

import typer

from primad.errors import ConfigError, printable

_HOST: Final = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9._-]{0,252})")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*]{1,255}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingOptions:
    """Who may ask."""

    PANEL: ClassVar[str] = "Who may ask"

    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name by which clients reach this server, as in desk.lan or *.local; repeat it for more.",
            show_default=False,
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Web pages of this origin may ask, as in http://desk.lan:3000; repeat it for more.",
            show_default=False,
        ),
    ] = None


def allowed_hosts(options: AskingOptions) -> tuple[str, ...]:
    """The names of ``--allow-host``. Raises ``ConfigError`` for what is none."""
    hosts = tuple(host.lower().removesuffix(".") for host in options.allow_host or ())
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"--allow-host {printable(host)}: give a name without port or path, as in desk.lan or *.local"
            )
    return hosts


def cors_origins(options: AskingOptions) -> tuple[str, ...]:
    """The origins of ``--cors-origin``. Raises ``ConfigError`` for what is none."""
    origins = tuple(origin.lower().removesuffix("/") for origin in options.cors_origin or ())
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origin {printable(origin)}: give scheme, name and port, as in http://desk.lan:3000; "
                "all origins at once are not allowed"
            )
    return origins
