"""The file of API keys: a line per key with its name, the hash of the key, and limits, readable by its owner alone.

    laptop 5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8 requests=60 tokens=100000
    phone 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b manages

Empty lines, and those that start with ``#``, are ignored. ``primad key`` writes it, and a server notices immediately.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from primad.api.http.keys import ApiKey
from primad.errors import ConfigError, printable
from primad.system.files import alone_with, read_private, write_private

logger = logging.getLogger(__name__)

MAX_KEYS: Final = 1024
MAX_LIMIT: Final = 10**9
KEY_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,61}")
_MANAGES: Final = "manages"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_LIMIT: Final = re.compile(r"(requests|tokens)=([1-9][0-9]{0,9})")
_HEADING: Final = "# API keys of primad, hashed: 'primad key' writes this file"

_Stamp = tuple[int, int, int] | None


def parse_keys(text: str, file: Path) -> tuple[ApiKey, ...]:
    """Parse the keys in ``text``. Raises ``ConfigError`` that names ``file`` and the invalid line."""
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            key = _key(words, f"{file}, line {number}")
            if key.name in keys:
                raise ConfigError(f"{file}, line {number}: a second key is named {key.name}; give each its own name")
            keys[key.name] = key
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{file}: has {len(keys)} keys; a server accepts at most {MAX_KEYS}")
    return tuple(keys.values())


def _key(words: list[str], where: str) -> ApiKey:
    if len(words) < 2 or not KEY_NAME.fullmatch(words[0]) or not _DIGEST.fullmatch(words[1]):
        raise ConfigError(f"{where}: not a key (a name, 64 digits, limits); write it with 'primad key add'")
    limits: dict[str, int] = {}
    rights, given = {_MANAGES} & set(words[2:]), [word for word in words[2:] if word != _MANAGES]
    for word in given:
        found = _LIMIT.fullmatch(word)
        if found is None or found[1] in limits or int(found[2]) > MAX_LIMIT:
            raise ConfigError(
                f"{where}: {printable(word, 60)!r} is not a limit; write requests=60 or tokens=100000, or {_MANAGES}"
            )
        limits[found[1]] = int(found[2])
    return ApiKey(
        name=words[0],
        digest=words[1],
        requests_per_min=limits.get("requests"),
        tokens_per_min=limits.get("tokens"),
        manages=bool(rights),
    )


def written_keys(keys: Iterable[ApiKey]) -> str:
    """Return ``keys`` in the format of their file."""
    return "\n".join([_HEADING, *map(_line, keys), ""])


def _line(key: ApiKey) -> str:
    limits = {"requests": key.requests_per_min, "tokens": key.tokens_per_min}
    words = [f"{what}={maximum}" for what, maximum in limits.items() if maximum is not None]
    return " ".join([key.name, key.digest, *words, *([_MANAGES] if key.manages else [])])


def read_keys(file: Path) -> tuple[ApiKey, ...] | None:
    """Return the keys in ``file``, None if it does not exist. Raises ``ConfigError``."""
    data = read_private(file)
    if data is None:
        return None
    try:
        return parse_keys(data.decode(), file)
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file}: not text; write it with 'primad key add'") from exc


def add_key(file: Path, key: ApiKey) -> None:
    """Write ``key`` into ``file``. Raises ``ConfigError`` if its name is taken."""
    with alone_with(file):
        keys = read_keys(file) or ()
        if any(each.name == key.name for each in keys):
            raise ConfigError(f"{file}: already has a key {key.name}; remove it first, or choose another name")
        if len(keys) >= MAX_KEYS:
            raise ConfigError(f"{file}: has {MAX_KEYS} keys, and a server accepts no more; remove one")
        write_private(file, written_keys([*keys, key]).encode())


def remove_key(file: Path, name: str) -> None:
    """Remove the key ``name`` from ``file``. Raises ``ConfigError`` if there is none."""
    with alone_with(file):
        keys = read_keys(file) or ()
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            known = ", ".join(key.name for key in keys) or "none"
            raise ConfigError(f"{file}: has no key {printable(name, 70)}; there are: {known}")
        write_private(file, written_keys(left).encode())


class KeyFile:
    """The current keys of ``file``, which is read again when it was replaced.

    If the file is damaged while the server runs, the keys stay as they were and a line is logged. Raises
    ``ConfigError`` at the start if there are no keys.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._stamp = file, _stamp(file)
        keys = read_keys(file)
        if not keys:
            missing = "there is no such file" if keys is None else "has no key"
            raise ConfigError(f"--api-key-file {file}: {missing}; write one with 'primad key add NAME --file {file}'")
        self._keys = keys

    def keys(self) -> tuple[ApiKey, ...]:
        """The valid keys."""
        stamp = _stamp(self._file)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._keys = read_keys(self._file) or ()
            except ConfigError as exc:
                logger.warning("the API keys stay unchanged: %s", exc)
        return self._keys


def _stamp(file: Path) -> _Stamp:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
