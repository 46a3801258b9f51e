"""Daemons of one user on one machine trust each other by files in a folder that only this user can write to.

Each keeps its public key there while it runs. So does a command that queries other daemons, such as ``primad plan``; it
may have a daemon's key, so each process has its own file. Any program that can write such a file can also read our
secret key, so trusting it adds no risk. The folder is ``primad/local-devices`` in the user's state folder, or the value
of the environment variable ``PRIMAD_LOCAL_TRUST`` (for tests, and for several machines that share one home folder).
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
import platformdirs

from primad.errors import ConfigError
from primad.settings.config import NAME
from primad.system.files import is_ours, read_private, write_private
from primad.system.process_start import start_of, still_runs
from primad.trust.identity import is_key, key_hex

logger = logging.getLogger(__name__)

VARIABLE: Final = "PRIMAD_LOCAL_TRUST"
BELIEVED_S: Final = 1.0
"""A key that was found is not looked up again for this time."""
_MAX_FILES: Final = 256


class _Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file's content. ``created`` and ``since_boot`` are the process's start, from ``start_of``."""

    device: str
    key: str
    pid: int
    created: float
    since_boot: float


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the keys of this user's daemons."""
    chosen = environ.get(VARIABLE)
    return (
        Path(chosen).absolute()
        if chosen
        else Path(platformdirs.user_state_dir("primad", appauthor=False), "local-devices")
    )


class LocalTrust:
    """The keys in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._believed: dict[str, float] = {}

    def knows(self, key: str) -> bool:
        """Whether a running daemon of this user on this machine has ``key``."""
        now = time.monotonic()
        if now - self._believed.get(key, -BELIEVED_S) < BELIEVED_S:
            return True
        self._believed.pop(key, None)
        if not is_ours(self.folder) or all(
            self._read(path) is None for path in self.folder.glob(f"{key_hex(key)}*.json")
        ):
            return False
        self._believed[key] = now
        return True

    def devices(self) -> list[tuple[str, str]]:
        """Return the running daemons' names and keys, by name; files of dead processes are removed."""
        if not is_ours(self.folder):
            return []
        notes = (self._read(path) for path in sorted(self.folder.glob("*.json"))[:_MAX_FILES])
        return sorted({(note.device, note.key) for note in notes if note is not None})

    @contextlib.contextmanager
    def announce(self, device: str, key: str) -> Iterator[None]:
        """Keep ``key`` in the folder inside this context. A failure is only logged."""
        pid = os.getpid()
        path, (created, since_boot) = self.folder / f"{key_hex(key)}-{pid}.json", start_of(pid)
        note = _Note(device=device, key=key, pid=pid, created=created, since_boot=since_boot)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_ours(self.folder):
                raise ConfigError(f"{self.folder}: others could write to it; make it yours alone (chmod 700)")
            self.devices()
            write_private(path, msgspec.json.encode(note) + b"\n")
        except (OSError, ConfigError) as exc:
            logger.warning("other daemons of this user have to be paired with: %s", exc)
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()

    def _read(self, path: Path) -> _Note | None:
        """Return the note of a running daemon at ``path``; remove that of a dead one."""
        try:
            if not stat.S_ISREG(path.lstat().st_mode) or not is_ours(path):
                return None
            note = msgspec.json.decode(read_private(path) or b"", type=_Note)
        except (OSError, ConfigError, msgspec.MsgspecError):
            return None
        if not is_key(note.key) or not path.name.startswith(key_hex(note.key)) or not NAME.fullmatch(note.device):
            return None
        if still_runs(note.pid, note.created, note.since_boot):
            return note
        with contextlib.suppress(OSError):
            path.unlink()
        return None
