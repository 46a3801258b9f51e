"""Writes what a system package of primad has besides the program: the manual page, shell completions, the service.

    packaging/system_files.py FOLDER     writes them under FOLDER, as they are placed under /usr

The same sources give the same bytes.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Final

import man

from primad.cli.service.service import NAME, DaemonService
from primad.cli.service.systemd import ENVIRONMENT_FILE, GPU_GROUPS, SYSTEM_HOME, SYSTEM_USER, unit, unit_name

COMPLETIONS: Final = {
    "bash": "share/bash-completion/completions/primad",
    "zsh": "share/zsh/vendor-completions/_primad",
    "fish": "share/fish/vendor_completions.d/primad.fish",
}


def completion(shell: str) -> str:
    """Return the script that completes ``primad`` in a shell: it asks the program itself, so it is never outdated."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'primad'; from primad.cli.main import main; main()"],
        env=os.environ | {"_PRIMAD_COMPLETE": f"source_{shell}", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    # zsh loads the file at the first Tab, and that Tab should complete too.
    return done.stdout.strip() + ('\n\n_primad_completion "$@"\n' if shell == "zsh" else "\n")


def service() -> str:
    """Return the unit of a device that joins as a worker; ``primad service install`` replaces it."""
    return unit(
        DaemonService(
            role="join",
            program=("/usr/bin/primad",),
            arguments=(),
            home=PurePosixPath(SYSTEM_HOME),
            user=SYSTEM_USER,
            groups=GPU_GROUPS,
            environment_file=PurePosixPath(ENVIRONMENT_FILE),
            options_variable="PRIMAD_OPTIONS",
        )
    )


def files() -> dict[str, bytes]:
    """Return the files to write, by their path under the prefix."""
    made = {
        "share/man/man1/primad.1.gz": gzip.compress(man.page().encode(), mtime=0),
        f"lib/systemd/system/{unit_name(NAME)}": service().encode(),
    }
    return made | {place: completion(shell).encode() for shell, place in COMPLETIONS.items()}


def main() -> int:
    """Write the files; return the exit code."""
    if len(sys.argv) != 2:
        print("system_files: error: needs the folder to write to", file=sys.stderr)
        return 2
    for place, data in files().items():
        path = Path(sys.argv[1], place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
