"""The devices that a command plans for: from files, from a built-in fleet, or those in sight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from primad.cli.completion import device_limits, device_names, fleets
from primad.cli.options import DeviceOptions, NamedDevices, OnInterface
from primad.cli.output import err
from primad.settings.config import load_config

if TYPE_CHECKING:
    from halda import DeviceProfile, LinkProfile


ProfileFiles = Annotated[
    list[Path] | None,
    typer.Argument(help="More profile files, as from --devices *.json.", metavar="[FILE]...", show_default=False),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The devices to plan for, and their limits."""

    PANEL: ClassVar[str] = "Devices"

    devices: Annotated[
        list[Path] | None,
        typer.Option(help="A profile file or a folder of them; repeatable.", show_default=False),
    ] = None
    fleet: Annotated[
        str | None, typer.Option(help="A built-in fleet, or a fleet's file.", show_default=False, autocompletion=fleets)
    ] = None
    head: Annotated[
        str | None,
        typer.Option(
            help="The head [default: the best one; this device for live ones].",
            show_default=False,
            autocompletion=device_names,
        ),
    ] = None
    link: Annotated[
        list[str] | None,
        typer.Option(
            help="Unmeasured links [default: 100MB/s,2ms]: rate and round trip; a third "
            "figure is the p95 of the extra delay of messages. A:B=300Mbit/s,4ms is between two devices; repeatable.",
            show_default=False,
        ),
    ] = None
    max_ram: Annotated[
        list[str] | None,
        typer.Option(help="RAM limit: NAME=16GiB; repeatable.", show_default=False, autocompletion=device_limits),
    ] = None
    max_vram: Annotated[
        list[str] | None,
        typer.Option(help="VRAM limit: NAME=8GiB; repeatable.", show_default=False, autocompletion=device_limits),
    ] = None
    max_disk: Annotated[
        list[str] | None,
        typer.Option(
            help="Disk limit for layers: NAME=50GB; repeatable.", show_default=False, autocompletion=device_limits
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions(DeviceOptions):
    """How to find live devices, if no others are named."""

    PANEL: ClassVar[str] = "Live devices"

    device: NamedDevices = None
    interface: OnInterface = None
    seconds: Annotated[float, typer.Option(help="How long to look for live devices.", min=0, max=600)] = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevices:
    """Devices and known links; for live devices also this device and its home folder."""

    devices: Sequence[DeviceProfile]
    links: Sequence[LinkProfile]
    own: str | None = None
    home: Path | None = None


def found_devices(fleet: FleetOptions, files: list[Path] | None, live: LiveOptions) -> FoundDevices:
    """Return the devices of profile files and of a fleet; by default this one and those in sight.

    Raises ``ConfigError``.
    """
    paths = [*(fleet.devices or ()), *(files or ())]
    if paths or fleet.fleet is not None:
        from primad.planning.sources import read_devices

        devices, links = read_devices(paths, fleet.fleet)
        return FoundDevices(devices=devices, links=links)
    from primad.cli.progress import RichReporter
    from primad.head.members.survey import survey

    own_flags = {
        "home": live.home,
        "name": live.name,
        "cluster": live.cluster,
        "interface": live.interface,
        "devices": tuple(live.device or ()),
    }
    config = load_config(own_flags)
    reporter = RichReporter(err)
    with reporter.waiting("looking for devices"):
        found = survey(config, live.seconds, reporter)
    return FoundDevices(devices=found.devices, links=found.links, own=found.devices[0].device, home=config.home)


def wishes_of(fleet: FleetOptions) -> dict[str, Any]:
    """The part of ``Wishes`` about devices."""
    return {
        "head": fleet.head,
        "links": tuple(fleet.link or ()),
        "max_ram": tuple(fleet.max_ram or ()),
        "max_vram": tuple(fleet.max_vram or ()),
        "max_disk": tuple(fleet.max_disk or ()),
    }
