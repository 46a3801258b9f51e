"""``tools/constraints.txt`` pins version and hashes of all packages in ``pyproject.toml`` and their dependencies."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"# for (?P<groups>[a-z ]+)\n(?P<name>[a-z0-9-]+)==(?P<version>[^ ]+)(?: ; [^\\\n]+)?"
    r"(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n"
)
TEXT = (ROOT / "tools" / "constraints.txt").read_text()
LOCKED = {match["name"]: match for match in BLOCK.finditer(TEXT)}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
ASKED = {"base": PROJECT["project"]["dependencies"], **EXTRAS, "build": PROJECT["build-system"]["requires"]}


def test_every_package_has_a_version_hashes_and_a_use():
    head, *blocks = re.split(r"^(?=# for )", TEXT, flags=re.MULTILINE)
    assert all(line.startswith("#") for line in head.splitlines())
    for block in blocks:
        assert BLOCK.fullmatch(block), f"tools/lock did not write this: {block[:200]}"


@pytest.mark.parametrize("group", ASKED)
def test_every_requirement_is_locked(group: str):
    """Installed dependencies for this system are included."""
    waiting, seen = [Requirement(each) for each in ASKED[group]], set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        assert name in LOCKED, f"{wanted} of group {group} is not locked; run tools/lock"
        assert LOCKED[name]["version"] in wanted.specifier, f"{wanted}: run tools/lock"
        assert {group, "llama"} & set(LOCKED[name]["groups"].split()), (
            f"{wanted} is not of group {group}; run tools/lock"
        )
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # llama.cpp is missing where only core tests run
            continue
        for each in map(Requirement, lines):
            extras = wanted.extras or {""}
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(each)
