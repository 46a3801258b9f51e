"""Values that the shell offers on Tab. It does not use the network.

Names are those that this device already knows. If nothing can be read nothing is offered: Tab shows no errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

import typer

from primad.errors import PrimadError
from primad.settings.config import load_config


def one_of(*words: str) -> Callable[[str], list[str]]:
    """Any of ``words``."""

    def offer(incomplete: str) -> list[str]:
        return _begun(words, incomplete)

    return offer


def objectives(incomplete: str) -> list[str]:
    """Objectives of a plan."""
    from halda import OBJECTIVES

    return _begun(OBJECTIVES, incomplete)


def fleets(incomplete: str) -> list[str]:
    """The built-in fleets."""
    from primad.profiler.fleets import fleet_names

    return _begun(fleet_names(), incomplete)


def shapes(incomplete: str) -> list[str]:
    """The built-in models; matching ones also with each quantisation."""
    from primad.gguf.shapes import SUFFIXES, shape_names

    names = shape_names()
    quantised = [f"{name}-{suffix}" for name in names if incomplete.startswith(name) for suffix in SUFFIXES]
    return _begun((*names, *quantised), incomplete)


def device_names(context: typer.Context, incomplete: str) -> list[str]:
    """The devices of the fleet on the command line; else this device and those that it trusts."""
    return _begun(_devices(context), incomplete)


def device_limits(context: typer.Context, incomplete: str) -> list[str]:
    """``device_names`` as the start of a limit: NAME=."""
    return _begun((f"{name}=" for name in _devices(context)), incomplete)


def trusted_names(context: typer.Context, incomplete: str) -> list[str]:
    """The devices that this one trusts."""
    return _begun(_trusted(_home(context)), incomplete)


def head_names(incomplete: str) -> list[str]:
    """The heads that run on this device."""
    from primad.network.local_heads import local_heads, names

    with contextlib.suppress(PrimadError):
        return _begun(names(local_heads(load_config({}).home)), incomplete)
    return []


def _begun(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _devices(context: typer.Context) -> list[str]:
    fleet = context.params.get("fleet")
    with contextlib.suppress(PrimadError):
        if fleet:
            from primad.profiler.fleets import read_fleet

            return [device.device for device in read_fleet(fleet).devices]
        return [load_config({"home": _home(context)}).name, *_trusted(_home(context))]
    return []


def _home(context: typer.Context) -> Path | None:
    home = context.params.get("home")
    return None if home is None else Path(home)


def _trusted(home: Path | None) -> list[str]:
    from primad.trust.identity import load_identity
    from primad.trust.trust import FILE_NAME, TrustStore

    with contextlib.suppress(PrimadError):
        folder = load_config({"home": home}).home
        if (folder / FILE_NAME).is_file():  # else there is no key either, and looking makes none
            return [each.device for each in TrustStore(folder, load_identity(folder)).entries()]
    return []
