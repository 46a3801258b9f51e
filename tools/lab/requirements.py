"""Requirements of this machine for building a lab."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Final

from tools.lab.names import LabError

_TOOLS: Final = {"ip": "iproute2", "tc": "iproute2", "bridge": "iproute2", "nsenter": "util-linux", "mount": "mount"}


def missing() -> str | None:
    """Return in one line why no lab can be built here; None if one can."""
    if not sys.platform.startswith("linux"):
        return "requires Linux (network namespaces and cgroups)"
    if os.geteuid() != 0:
        return "requires root (network namespaces and cgroups); run it with sudo"
    lacking = [tool for tool in _TOOLS if tool_path(tool) is None]
    if lacking:
        packages = " ".join(sorted({_TOOLS[tool] for tool in lacking}))
        return f"requires {', '.join(lacking)}; install it (apt install {packages})"
    return None


def require() -> None:
    """Raise ``LabError`` if no lab can be built."""
    if (reason := missing()) is not None:
        raise LabError(reason)


def tool_path(tool: str) -> str | None:
    """Return the path of a command, also from the administrator's folders, which are not on every PATH."""
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin")
