"""Notes of the heads that run on this device, for their clients.

Each head writes its note twice: into its home folder (``run/head.json``), and into a folder that all daemons of this
user share, where it is found without knowing the home folder. A note is valid while its process lives.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from primad.errors import ClusterError, ConfigError
from primad.settings.config import NAME
from primad.system.files import is_ours, read_private, write_private
from primad.system.process_start import start_of, still_runs
from primad.trust.local_trust import default_folder

logger = logging.getLogger(__name__)

_MAX_NOTES: Final = 256


class LocalHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A head of this device: its name, endpoint and process; ``created`` and ``since_boot`` are when it started
    (``start_of``).

    ``key`` admits this user's commands if the endpoint needs one: no other user can read the note.
    """

    device: str
    url: str
    port: int
    pid: int
    created: float
    since_boot: float
    key: str = ""


def home_note(home: Path) -> Path:
    """The note of the head of ``home``."""
    return home / "run" / "head.json"


def shared_folder() -> Path:
    """The folder of the notes of all heads of this user on this device."""
    return default_folder() / "heads"


@contextlib.contextmanager
def announced_head(home: Path, device: str, url: str, port: int, key: str = "") -> Iterator[None]:
    """Keep a note of the head ``device`` inside this context. A failure is only logged."""
    pid = os.getpid()
    created, since_boot = start_of(pid)
    note = LocalHead(device=device, url=url, port=port, pid=pid, created=created, since_boot=since_boot, key=key)
    paths = (home_note(home), shared_folder() / f"{pid}.json")
    for path in paths:
        try:
            path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_private(path, msgspec.json.encode(note) + b"\n")
        except (OSError, ConfigError) as exc:
            logger.warning("commands cannot find this head: %s", exc)
    try:
        yield
    finally:
        for path in paths:
            if read_head(path) == note:
                with contextlib.suppress(OSError):
                    path.unlink()


def read_head(path: Path) -> LocalHead | None:
    """The head of the note at ``path``; None if it has ended, or the note is not ours."""
    try:
        if not is_ours(path):
            return None
        note = msgspec.json.decode(read_private(path) or b"", type=LocalHead)
    except (OSError, ConfigError, msgspec.MsgspecError):
        return None
    sound = NAME.fullmatch(note.device) and 0 < note.port < 65_536 and note.pid > 0
    return note if sound and still_runs(note.pid, note.created, note.since_boot) else None


def local_heads(home: Path) -> list[LocalHead]:
    """The heads that run on this device, by name and port: that of ``home``, and those of the shared folder."""
    folder = shared_folder()
    shared: list[Path] = []
    if is_ours(folder):
        shared = sorted(folder.glob("*.json"))[:_MAX_NOTES]
    notes = [note for path in (home_note(home), *shared) if (note := read_head(path)) is not None]
    return sorted({note.pid: note for note in notes}.values(), key=lambda note: (note.device, note.port))


def chosen_head(heads: Iterable[LocalHead], wanted: str | None) -> LocalHead | None:
    """Return the head of ``heads`` that ``wanted`` names (name, port or name:port); by default the only one, None for
    none.

    Raises ``ClusterError`` with the names to choose from.
    """
    heads = list(heads)
    if wanted is None and len(heads) <= 1:
        return heads[0] if heads else None
    fits = [head for head in heads if wanted is not None and is_called(head, wanted)]
    if len(fits) == 1:
        return fits[0]
    choice = ", ".join(f"--head {name}" for name in names(fits or heads))
    if wanted is None:
        raise ClusterError(f"{len(heads)} heads run on this device; choose one: {choice}")
    if not heads:
        raise ClusterError(f"--head {wanted}: no head runs on this device; start 'primad serve', or give its --url")
    problem = f"{len(fits)} heads have this name" if fits else "no head of this name runs on this device"
    raise ClusterError(f"--head {wanted}: {problem}; choose one: {choice}")


def is_called(head: LocalHead, wanted: str) -> bool:
    """Whether ``wanted`` means ``head``: by its name, its port, both, or the address of its endpoint."""
    at = head.url.removeprefix("http://")
    return wanted in (head.device, str(head.port), f"{head.device}:{head.port}", at)


def names(heads: Sequence[LocalHead]) -> list[str]:
    """Unique names for ``heads``: heads with the same name get their ports."""
    called = [head.device for head in heads]
    return [head.device if called.count(head.device) == 1 else f"{head.device}:{head.port}" for head in heads]
