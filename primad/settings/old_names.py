"""Old names in files, JSON and metrics, kept for one version: they are still read, and written in addition to the new
ones.

No document mentions them. They are removed in the version after the next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

KEYS: Final[Mapping[str, str]] = {
    "prefill_offload": "helped",
    "read_ahead_bytes": "ahead_bytes",
    "replica": "keeper",
    "replicated_bytes": "twice_bytes",
    "single_device": "alone",
    "tokens_per_pass": "tokens_a_lap",
}
"""The old key of each new one."""
METRICS: Final[Mapping[str, str]] = {
    "primad_device_read_ahead_bytes": "primad_device_ahead_bytes",
    "primad_draft_tokens_per_pass": "primad_draft_tokens_a_lap",
    "primad_kv_replicated_bytes": "primad_kv_twice_bytes",
}
"""The old name of each new one."""
NEW_KEYS: Final = {old: new for new, old in KEYS.items()}
"""The new key of each old one."""
_OLD_KEY: Final = re.compile(rb'"(%b)"(?=\s*:)' % "|".join(NEW_KEYS).encode())


def with_new_keys(data: bytes) -> bytes:
    """Return the JSON ``data`` with each old key replaced by the new one."""
    return _OLD_KEY.sub(lambda found: b'"%b"' % NEW_KEYS[found[1].decode()].encode(), data)


def with_old_keys(content: Any) -> Any:
    """Return plain data with each new key also under its old name."""
    if isinstance(content, list | tuple):
        return [with_old_keys(each) for each in content]
    if not isinstance(content, dict):
        return content
    found = {key: with_old_keys(value) for key, value in content.items()}
    return found | {old: found[new] for new, old in KEYS.items() if new in found}
