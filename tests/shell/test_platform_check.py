"""ty finds, for ``tools/check``, what macOS or Windows lack of the names that a module uses unguarded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TY = Path(sys.executable).with_name("ty")
IN_PLACE = "import os\nimport sys\n\nif sys.platform == 'linux':\n    print(os.sched_getaffinity(0))\n"


def check(platform: str, folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "module.py").write_text(text)
    words = [TY, "check", "--output-format", "concise", "--config-file", "tools/platforms.toml"]
    words += ["--python-platform", platform, folder / "module.py"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("platform", "text", "missing"),
    [
        ("darwin", "import os\nprint(os.sched_getaffinity(0))\n", "sched_getaffinity"),
        ("win32", "import os\nprint(os.sched_getaffinity(0))\n", "sched_getaffinity"),
        ("win32", "import fcntl\nfcntl.flock(1, 2)\n", "flock"),
        ("darwin", "from os import posix_fadvise\n", "posix_fadvise"),
        ("win32", "import socket\n\ndef f(a: socket.socket) -> None:\n    a.sendmsg([b''])\n", "sendmsg"),
    ],
)
def test_use_of_functions_that_a_platform_lacks_is_found(tmp_path, platform, text, missing):
    ended = check(platform, tmp_path, text)
    assert ended.returncode == 1
    assert missing in ended.stdout
    assert check("linux", tmp_path, text).returncode == 0


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_use_of_linux_functions_in_linux_only_code_is_allowed(tmp_path, platform):
    ended = check(platform, tmp_path, IN_PLACE)
    assert ended.returncode == 0, ended.stdout
