"""Lists the licences of everything that primad needs to run, from the metadata of the installed packages.

    packaging/licences.py             writes docs/reference/licences.md
    packaging/licences.py --check     reports missing and superfluous entries there; writes nothing
    packaging/licences.py --copy DIR  copies the metadata of those packages there, for packaging/sbom to see no others

The list has names and licences, not versions: it changes when a dependency comes, goes or changes its licence, and not
with each release of one. Run it in the environment of tools/setup: ``.venv/bin/python packaging/licences.py``.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "reference" / "licences.md"
EXTRAS: Final = ("hub", "plot")
"""The extras users may choose; the packages of the extra ``dev`` do not reach users."""
STATED_ELSEWHERE: Final[dict[str, str]] = {}
"""Licences of packages whose metadata has none, taken from their licence files."""
_CLASSIFIER: Final = "License :: OSI Approved :: "
_ROW: Final = re.compile(r"^\| \[([\w.-]+)\]", re.MULTILINE)
"""The names in the table."""
_HEAD: Final = """# Licences

primad has the [MIT licence](../../LICENSE). It depends on these packages and copies none of their code; the `.deb` and the
container include them with their licence files. `packaging/licences.py` writes this page, `packaging/sbom` a CycloneDX
list with versions.

llama-cpp-python includes [llama.cpp](https://github.com/ggml-org/llama.cpp) with ggml (MIT). The web page includes two
libraries with their licence files: %s.

"""
VENDORED: Final = {
    "marked": "[marked](https://github.com/markedjs/marked) (MIT)",
    "purify": "[DOMPurify](https://github.com/cure53/DOMPurify) (Apache-2.0 OR MPL-2.0)",
}
"""Third-party scripts in ``primad/api/page/static/vendor``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An installed package. ``extra`` is the extra of primad that needs it; empty if primad always needs it."""

    name: str
    licence: str
    page: str
    extra: str


def packages() -> list[Package]:
    """Return all packages that primad needs here, sorted by name. Raises ``PackageNotFoundError`` if one is missing."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    found: dict[str, Package] = {}
    for extra in ("", *EXTRAS):
        wanted = project["optional-dependencies"][extra] if extra else project["dependencies"]
        for name in _closure(Requirement(each) for each in wanted):
            if name not in found:
                found[name] = _package(name, extra)
    return [found[name] for name in sorted(found)]


def _closure(wanted: Iterator[Requirement]) -> set[str]:
    """Return the names of the wanted packages and of all that they need on this system."""
    found: set[str] = set()
    waiting = [(each.name, frozenset(each.extras)) for each in wanted if each.marker is None or each.marker.evaluate()]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        found.add(canonicalize_name(name))
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                more = (needed.name, frozenset(needed.extras))
                if more not in seen:
                    seen.add(more)
                    waiting.append(more)
    return found


def _package(name: str, extra: str) -> Package:
    stated: Any = metadata.metadata(name)
    links = dict(line.split(", ", 1) for line in stated.get_all("Project-URL") or () if ", " in line)
    by_kind = {kind.lower(): url for kind, url in links.items()}
    kinds = ("homepage", "repository", "source", "source code", "code", "github", "documentation")
    page = stated.get("Home-page") or next((by_kind[kind] for kind in kinds if kind in by_kind), "")
    if not page:
        raise SystemExit(f"licences: error: {name} names no page; take one more of the kinds of links that it has")
    return Package(name=stated["Name"], licence=_licence(name, stated), page=page, extra=extra)


def _licence(name: str, stated: Any) -> str:
    """Return the licence's SPDX expression, or the text that the metadata has in place of one."""
    classified = [
        each.removeprefix(_CLASSIFIER) for each in stated.get_all("Classifier") or () if each.startswith(_CLASSIFIER)
    ]
    text = (stated.get("License") or "").strip()
    short = text if 0 < len(text) <= 60 and "\n" not in text else ""
    licence = stated.get("License-Expression") or STATED_ELSEWHERE.get(name) or short or ", ".join(classified)
    if not licence:
        raise SystemExit(
            f"licences: error: {name} names no licence; look into its licence file and put it into SAID_ELSEWHERE"
        )
    return licence


def table(found: list[Package]) -> str:
    """The page."""
    lines = ["| package | licence | for |", "|---|---|---|"]
    lines += [
        f"| [{each.name}]({each.page}) | {each.licence} | {each.extra and f'extra `{each.extra}`'} |" for each in found
    ]
    return _HEAD % " and ".join(VENDORED.values()) + "\n".join(lines) + "\n"


def stale(page: str, found: list[Package]) -> list[str]:
    """Return lines about packages that the page lacks, and about entries that nothing needs on any system."""
    listed = {canonicalize_name(name) for name in _ROW.findall(page)}
    here = {canonicalize_name(each.name) for each in found}
    elsewhere = {canonicalize_name(Requirement(text).name) for name in here for text in metadata.requires(name) or ()}
    carried = {path.stem for path in (ROOT / "primad").rglob("vendor/*.js")}
    return [f"{name} is missing" for name in sorted((here - listed) | (carried - VENDORED.keys()))] + [
        f"{name} is not needed any more" for name in sorted((listed - here - elsewhere) | (VENDORED.keys() - carried))
    ]


def copy_metadata(found: list[Package], folder: Path) -> None:
    """Copy the metadata of the packages and of primad to ``folder``, without their code."""
    for name in ("primad", *(each.name for each in found)):
        for file in metadata.distribution(name).files or ():
            if file.parts[0].endswith(".dist-info"):
                target = folder.joinpath(*file.parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(Path(str(file.locate())).read_bytes())


def main(arguments: list[str]) -> int:
    """Write the page, or report what is wrong with it; return the exit code."""
    found = packages()
    if arguments == ["--check"]:
        wrong = stale(PAGE.read_text(encoding="utf-8"), found)
        for line in wrong:
            print(f"docs/reference/licences.md: {line}; run .venv/bin/python packaging/licences.py")
        return 1 if wrong else 0
    if arguments[:1] == ["--copy"] and len(arguments) == 2:
        copy_metadata(found, Path(arguments[1]))
        return 0
    if arguments:
        print(f"licences: error: {arguments[0]}: not known; there are --check and --copy DIR", file=sys.stderr)
        return 2
    PAGE.write_text(table(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
