"""Several devices on one Linux machine, each with its own network, memory, CPU and disk: a home cluster to break.

Every device is a network namespace on a bridge that is in a namespace too; this machine's network is not touched.
``tools/lab/fleet.py`` explains fleet files. Commands that name no lab use the only one that exists.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from primad.errors import PrimadError  # noqa: E402
from tools.lab import Homelab, LabError, load_fleet, record  # noqa: E402
from tools.lab.cgroups import here  # noqa: E402
from tools.lab.removal import remove  # noqa: E402
from tools.lab.requirements import require  # noqa: E402

EXAMPLES = """examples:
  tools/homelab up tools/homelab-fleets/three.toml
  tools/homelab exec desk primad join
  tools/homelab partition 'desk,mini | laptop'      tools/homelab heal
  tools/homelab isolate mini laptop                 (they still reach all others; heal ends it)
  tools/homelab cut laptop                          tools/homelab plug laptop
  tools/homelab half-open laptop                    (plug or heal ends it)
  tools/homelab power-off mini                      (everything dies, no connection is closed)
  tools/homelab power-on mini                       (it is there again; start its programs with exec)
  tools/homelab kill mini --ring                    tools/homelab freeze mini
  tools/homelab slow mini 0.2                       tools/homelab fill-disk mini
  tools/homelab status                              tools/homelab down"""

out = Console(highlight=False)


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell that starts this in the background has it ignored
    try:
        require()
        options.action(options)
    except PrimadError as exc:
        print(f"homelab: error: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("homelab: stopped", file=sys.stderr)
        return 130
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/homelab",
        description="A home cluster on this machine (Linux, root).",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lab", metavar="ID", help="which lab (default: the only one)")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, action: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(action=action)
        return added

    def on_device(name: str, act: Callable[[Homelab, str], object], text: str) -> None:
        command(name, lambda given: _each(given, act), text).add_argument("devices", nargs="+", metavar="DEVICE")

    command("up", _up, "build a lab and leave it up").add_argument("fleet", type=Path, metavar="FLEET.toml")
    run = command("exec", _exec, "run a command on a device")
    run.add_argument("device")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    parted = command("partition", _partition, "drop everything between groups of devices: 'a,b | c'")
    parted.add_argument("groups", nargs="+", metavar="GROUP")
    isolated = command(
        "isolate", lambda given: _lab(given).isolate(*given.devices), "drop everything between these devices alone"
    )
    isolated.add_argument("devices", nargs="+", metavar="DEVICE")
    command("heal", lambda given: _lab(given).heal(), "undo partitions, isolation and half-open links")
    on_device("cut", lambda lab, name: lab.cut(name), "pull the cable")
    on_device("plug", lambda lab, name: lab.plug(name), "put the cable back, or end half-open")
    on_device("half-open", lambda lab, name: lab.half_open(name), "lose every frame silently")
    on_device(
        "power-off", lambda lab, name: lab.power_off(name), "everything dies with no word to anyone, as without power"
    )
    on_device(
        "power-on", lambda lab, name: lab.power_on(name), "undo power-off: the device is there, nothing runs on it"
    )
    killed = command("kill", _kill, "kill -9 everything on a device, or part of it")
    killed.add_argument("device")
    which = killed.add_mutually_exclusive_group()
    which.add_argument(
        "--ring", dest="which", action="store_const", const="ring", default="all", help="ring processes only"
    )
    which.add_argument("--daemon", dest="which", action="store_const", const="daemon", help="daemons only")
    on_device("freeze", lambda lab, name: lab.device(name).freeze(), "SIGSTOP everything on a device")
    on_device("thaw", lambda lab, name: lab.device(name).thaw(), "SIGCONT everything on a device")
    slowed = command(
        "slow", lambda given: _lab(given).device(given.device).slow(given.cpus), "change a device's CPU time"
    )
    slowed.add_argument("device")
    slowed.add_argument("cpus", type=float)
    on_device("fill-disk", lambda lab, name: lab.device(name).fill_disk(), "leave nothing free on a device's disk")
    on_device("free-disk", lambda lab, name: lab.device(name).free_disk(), "undo fill-disk")
    command("status", _status, "every lab and its devices")
    ended = command("down", _down, "take labs down, remains of crashed ones too; again is no error")
    ended.add_argument("labs", nargs="*", metavar="ID", help="default: every lab that no running program owns")
    return parser.parse_args()


def _lab(options: argparse.Namespace) -> Homelab:
    if options.lab is not None:
        return Homelab.open(options.lab)
    labs = record.labs(here())
    if len(labs) != 1:
        raise LabError(f"{len(labs)} labs are there{': ' if labs else ''}{', '.join(labs)}; " + _which_lab(labs))
    return Homelab.open(labs[0])


def _which_lab(labs: list[str]) -> str:
    return "say which with --lab ID" if labs else "build one with homelab up FLEET.toml"


def _up(options: argparse.Namespace) -> None:
    lab = Homelab(load_fleet(options.fleet))
    lab.up(stay=True)
    out.print(f"lab {lab.id}: {', '.join(f'{device.name} {device.ip}' for device in lab.devices)}")


def _exec(options: argparse.Namespace) -> None:
    device = _lab(options).device(options.device)
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        raise LabError("exec: no command; as in: homelab exec desk primad join")
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    command = device.command(words)
    os.execve(command[0], command, device.environment({"PATH": paths}))


def _partition(options: argparse.Namespace) -> None:
    text = " ".join(options.groups)
    sides = text.split("|") if "|" in text else text.split()
    _lab(options).partition(*([name.strip() for name in side.split(",") if name.strip()] for side in sides))


def _kill(options: argparse.Namespace) -> None:
    killed = _lab(options).device(options.device).kill(options.which)
    out.print(f"{options.device}: killed {len(killed)}")


def _each(options: argparse.Namespace, act: Callable[[Homelab, str], object]) -> None:
    lab = _lab(options)
    for device in [lab.device(name) for name in options.devices]:  # a wrong name is reported before anything happens
        act(lab, device.name)


def _status(_: argparse.Namespace) -> None:
    labs = record.labs(here())
    if not labs:
        out.print("no lab")
    for name in labs:
        try:
            statuses = Homelab.open(name).status()
        except (LabError, OSError) as exc:  # never finished, or being taken down
            out.print(str(exc))
            continue
        table = Table(title=f"lab {name}", title_justify="left")
        for column in ("device", "address", "link", "memory", "processes"):
            table.add_column(column)
        for status in statuses:
            memory = "" if status.memory_bytes is None else f"{status.memory_bytes / 1e6:.0f} MB"
            running = ", ".join(f"{what} {pid}" for pid, what in status.processes.items())
            table.add_row(
                status.name, status.ip, status.link, memory, f"frozen: {running}" if status.frozen else running
            )
        out.print(table)


def _down(options: argparse.Namespace) -> None:
    hierarchies = here()
    labs = record.labs(hierarchies)
    chosen = options.labs or (
        [options.lab] if options.lab else [lab for lab in labs if record.owner_lives(lab) is not True]
    )
    for lab in chosen:
        if lab not in labs:
            raise LabError(f"lab {lab}: not there; {', '.join(labs) or 'there is none'}")
        remove(lab, hierarchies)
        out.print(f"lab {lab}: gone")


if __name__ == "__main__":
    sys.exit(main())
