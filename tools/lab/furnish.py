"""Prepare a device before anything runs on it: disk, host name, names of the others, folders."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from tools.lab import disk
from tools.lab.fleet import DeviceSpec
from tools.lab.names import root

HOME_FOLDERS: Final = ("cache", "config", "data", "runtime", "state", "tmp")


def furnish(lab: str, spec: DeviceSpec, addresses: Mapping[str, str]) -> dict[str, Any]:
    """Write the files of a device. Return what its holder does with them (see ``inside.py``).

    ``addresses`` are those of the devices that have one, by name. Raises ``LabError`` if its disk cannot be made.
    """
    folder = root(lab) / spec.name
    home, own = folder / "home", folder / "own"
    for made in (home, own / "sys"):
        made.mkdir(parents=True)
    commands = [["mount", "--make-rprivate", "/"]]
    if spec.disk_bytes is not None:
        disk.make_image(folder / "disk.img", spec.disk_bytes)
        commands.append(["mount", "-o", "loop", str(folder / "disk.img"), str(home)])
    for path, text in _texts(lab, spec.name, addresses).items():
        (own / path.name).write_text(text + "\n", encoding="ascii")
        if path.is_file():
            commands.append(["mount", "--bind", str(own / path.name), str(path)])
    # sysfs shows the interfaces of the namespace in which it was mounted.
    commands += [
        ["mount", "-t", "sysfs", "sysfs", str(own / "sys")],
        ["mount", "--rbind", "/sys/fs/cgroup", str(own / "sys/fs/cgroup")],
        ["mount", "--move", str(own / "sys"), "/sys"],
    ]
    off = "0" if spec.ipv6 or not spec.ipv4 else "1"
    return {
        "namespaces": ["net", "uts", "mnt"],
        "hostname": spec.name,
        "sysctls": {f"net/ipv6/conf/{scope}/disable_ipv6": off for scope in ("all", "default")},
        "commands": commands,
        "folders": [str(home / name) for name in HOME_FOLDERS],
    }


def _texts(lab: str, name: str, addresses: Mapping[str, str]) -> dict[Path, str]:
    hosts = ["127.0.0.1 localhost", "::1 localhost", *(f"{ip} {other}" for other, ip in addresses.items())]
    return {
        Path("/etc/hosts"): "\n".join(hosts),
        Path("/etc/hostname"): name,
        Path("/etc/machine-id"): blake2b(f"{lab} {name}".encode(), digest_size=16).hexdigest(),
    }
