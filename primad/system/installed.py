"""How primad was installed on this device, and the command with which its owner changes the version."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final, Literal

Installer = Literal["uv", "pipx", "deb", "checkout", "pip"]

DEB_PREFIX: Final = Path("/usr/lib/primad")
"""The folder of the Debian package's Python packages (``packaging/deb/build``)."""
_VERSION: Final = re.compile(r"[0-9][0-9A-Za-z.+]{0,39}")


def installer(prefix: Path = Path(sys.prefix)) -> Installer:
    """How the running primad was installed, by the marks in ``prefix``, the environment's folder."""
    if prefix == DEB_PREFIX:
        return "deb"
    if (prefix / "uv-receipt.toml").is_file():
        return "uv"
    if (prefix / "pipx_metadata.json").is_file():
        return "pipx"
    try:
        origin = distribution("primad").read_text("direct_url.json") or ""
    except PackageNotFoundError:
        return "checkout"
    return "checkout" if '"editable": true' in origin or '"editable":true' in origin else "pip"


def upgrade(version: str, how: Installer) -> str:
    """The command that installs ``version``, a text from the network, if ``how`` installed primad."""
    if not _VERSION.fullmatch(version):
        version = "VERSION"
    wheel = f"primad-{version}-py3-none-any.whl"
    match how:
        case "uv":
            return f"uv tool install --force {wheel}"
        case "pipx":
            return f"pipx install --force {wheel}"
        case "deb":
            return f"sudo apt install ./primad_{version}-*.deb"
        case "checkout":
            return f"git checkout v{version} && ./tools/setup"
        case "pip":
            return f"{Path(sys.executable)} -m pip install {wheel}"
