"""Check the home folder: its kind of disk, speed and free space, and who may read the identity."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from primad.doctor.findings import Finding, finding, gib
from primad.layers.cache import LayerCache
from primad.layers.eviction import CachedLayer
from primad.profiler.records import read_home
from primad.settings.config import layer_folder
from primad.settings.quantities import show_count
from primad.system.files import reserve_bytes
from primad.system.memory import memory
from primad.trust.identity import FILE_NAME

_NETWORK: Final = ("nfs", "cifs", "smb", "sshfs", "fuse.sshfs", "9p", "afpfs", "webdav", "davfs", "ceph", "glusterfs")
_MEMORY: Final = ("tmpfs", "ramfs", "devtmpfs")
_SLOW_BYTES_PER_S: Final = 150e6
_LAYER_BYTES: Final = 132_000_000
"""A layer of an 8B model of about four bits: the unit in which room is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """``kind`` is the file system ("" when unknown), ``read_bytes_per_s`` what the profile measured (None: never).

    The disk has ``total_bytes``, of which ``free_bytes`` are free; ``layers`` are here already. This device may use
    ``memory_bytes``.
    """

    home: str
    writable: bool
    kind: str
    free_bytes: int
    total_bytes: int
    layers: tuple[CachedLayer, ...]
    memory_bytes: int
    read_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """The mode of ``identity.json``, and whether another user owns it."""

    path: str
    mode: int
    foreign: bool


def gather_disk(home: Path) -> DiskFacts:
    """Read the disk under ``home``, which need not exist yet."""
    folder = home
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    record = read_home(home)
    usage = shutil.disk_usage(folder)
    return DiskFacts(
        home=str(home),
        writable=folder.is_dir() and os.access(folder, os.W_OK | os.X_OK),
        kind=_kind(folder.resolve()),
        free_bytes=usage.free,
        total_bytes=usage.total,
        layers=tuple(LayerCache(layer_folder(home), owner=False).layers()),
        memory_bytes=memory().total_bytes,
        read_bytes_per_s=None if record is None else record.disk.prefetch_bytes_per_s,
    )


def judge_disk(facts: DiskFacts) -> list[Finding]:
    """Judge the disk: it must hold layers, and read those that do not fit into memory fast.

    How much is enough depends on this device: what its memory holds, and which layers it has already.
    """
    found = []
    if not facts.writable:
        found.append(finding("disk", "error", f"{facts.home} cannot be written", "primad doctor --home FOLDER"))
    found.append(_judge_room(facts))
    if facts.kind.lower().startswith(_NETWORK):
        text = f"{facts.home} is on a network file system ({facts.kind}): layers are read through the network"
        found.append(finding("disk", "warning", text, "primad join --home FOLDER    (on a disk of this machine)"))
    elif facts.kind in _MEMORY:
        text = (
            f"{facts.home} is in RAM ({facts.kind}): layers there take memory from the model, and a restart loses them"
        )
        found.append(finding("disk", "warning", text, "primad join --home FOLDER    (on a disk)"))
    return found + _judge_speed(facts.read_bytes_per_s)


def _judge_room(facts: DiskFacts) -> Finding:
    reserve = reserve_bytes(facts.total_bytes)
    room = max(0, facts.free_bytes - reserve)
    here = sum(layer.size_bytes for layer in facts.layers)
    held = sum(layer.size_bytes for layer in facts.layers if layer.held)
    text = f"{gib(facts.free_bytes)} are free under {facts.home}"
    if here:
        text += f" in addition to {show_count(len(facts.layers), 'layer')} ({gib(here)}) stored here"
    spare = room + here - held
    if spare < _LAYER_BYTES:
        why = f"as large as those of an 8B model fits, as {gib(min(reserve, facts.free_bytes))} stay free"
        if here:
            return finding("disk", "note", f"{text}; no further layer {why}")
        elsewhere = "primad join --home FOLDER    (on a disk with room)"
        return finding("disk", "error", f"{text}: no layer {why}", elsewhere)
    more = "more layers" if here else "layers"
    text += f"; {spare // _LAYER_BYTES} {more} as large as those of an 8B model fit"
    if room + here < facts.memory_bytes:
        less = f"{text}: less than this device's memory of {gib(facts.memory_bytes)} could hold"
        return finding("disk", "note", less)
    return finding("disk", "ok", text)


def _judge_speed(rate: float | None) -> list[Finding]:
    if rate is None:
        return [finding("disk", "note", "the disk was never measured", "primad profile")]
    speed = f"layers are read at {rate / 1e6:.0f} MB/s"
    if rate < _SLOW_BYTES_PER_S:
        text = f"{speed}: slow for layers that do not fit into memory; use another disk, if there is one"
        return [finding("disk", "note", text, "primad profile --remeasure --home FOLDER")]
    return [finding("disk", "ok", speed)]


def gather_identity(home: Path) -> FileFacts | None:
    """Return the identity file's facts; None if there is none. Windows has no useful mode: access lists guard user
    folders."""
    path = home / FILE_NAME
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if sys.platform == "win32":
        return FileFacts(path=str(path), mode=0o600, foreign=False)
    else:
        return FileFacts(path=str(path), mode=stat.S_IMODE(found.st_mode), foreign=found.st_uid != os.geteuid())


def judge_identity(facts: FileFacts | None) -> list[Finding]:
    """Judge who may read the secret key. Any program that has it can pose as this device."""
    if facts is None:
        return [finding("identity", "ok", "this device has no identity yet; it is made at first use")]
    if facts.foreign:
        text = f"{facts.path} belongs to another user"
        return [finding("identity", "error", text, f"sudo chown $USER '{facts.path}'")]
    if facts.mode & 0o077:
        text = f"{facts.path} can be read by others (mode {facts.mode:04o}): any reader can pose as this device"
        return [finding("identity", "error", text, f"chmod 600 '{facts.path}'")]
    return [finding("identity", "ok", f"{facts.path} is readable by this user only")]


def _kind(folder: Path) -> str:
    """Return the type of the file system that holds ``folder``, from the deepest mount point above it."""
    best, kind = -1, ""
    for partition in psutil.disk_partitions(all=True):
        mount = Path(partition.mountpoint)
        if (folder == mount or mount in folder.parents) and len(mount.parts) >= best:
            best, kind = len(mount.parts), partition.fstype
    return kind
