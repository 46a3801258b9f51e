"""Laws of the source that neither ruff nor import-linter checks; ``tools/check`` runs it. It prints each violation.

The product defines no public type name twice and imports no tools; tools import no tests; tests import no tools but the
lab, research and the model maker; nothing imports ``packaging/``, whose scripts only import each other; the product
prints in one place only and logs from there. No name contains a word for which the field has another one, and no text
contains a private phrase.

    tools/laws.py [ROOT]
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

PRODUCT: Final = ("primad", "solver/halda")
PRINTS: Final = ("primad/cli/output.py", "primad/system/terminal.py")
PRINTING: Final = {
    *(
        "print",
        "typer.echo",
        "typer.secho",
        "click.echo",
        "click.secho",
        "rich.print",
        "Console",
        "rich.console.Console",
    ),
    *("sys.stdout.write", "sys.stderr.write", "sys.stdout.writelines", "sys.stderr.writelines"),
    *("logging.basicConfig", "logging.StreamHandler", "logging.Formatter", "traceback.print_exc"),
}
"""Calls by which a text would reach a terminal or a log unescaped. Bytes between processes (``stdout.buffer``) do not
count."""
_MAY_PRINT: Final = re.compile("|".join(rf"\b{re.escape(name)}\(" for name in PRINTING))
OLD_WORDS: Final = {
    **dict.fromkeys(("guess", "guesses", "guessed", "guesser", "guessing"), "draft"),
    **dict.fromkeys(("participation", "participations"), "stage"),
    **dict.fromkeys(("promise", "promises", "promised"), "forecast"),
    **dict.fromkeys(("keeper", "keepers"), "replica"),
    **dict.fromkeys(("station", "stations"), "node"),
    **dict.fromkeys(("helped", "helps"), "prefill offload"),
    **dict.fromkeys(("lap", "laps"), "ring pass"),
    **dict.fromkeys(("apart",), "experts on CPU"),
    **dict.fromkeys(("desk",), "admin API"),
    **dict.fromkeys(("lending", "loan", "loans"), "device limit"),
    **dict.fromkeys(("shelf",), "KV writer"),
    **dict.fromkeys(("giver", "givers"), "source"),
    **dict.fromkeys(("borders",), "cut points"),
    **dict.fromkeys(("blame", "blamed"), "fault attribution"),
    **dict.fromkeys(("foresee", "foreseen"), "precompute"),
    **dict.fromkeys(("knock", "knocked"), "probe"),
    **dict.fromkeys(("brace", "void", "bridge", "bridges"), "prepare, discarded, padding"),
    **dict.fromkeys(("told", "untold"), "reported"),
    **dict.fromkeys(("said", "says"), "a noun: output, message, line"),
    "least": "min",
    "most": "max",
}
"""Words that a name may not contain, and the field's words for them."""
_GENERATED: Final = dict.fromkeys(
    ("answer", "answers", "answered", "answering"), "request, completion, response; reply"
)
_CELLS: Final = {"cells": "KV blocks, KV cache"}
ROOM_WORDS: Final = {
    "primad/api/": _GENERATED | _CELLS,
    "primad/head/": _GENERATED | _CELLS | dict.fromkeys(("row", "rows"), "token, tokens"),
    **dict.fromkeys(("primad/cli/", "primad/daemon/", "primad/settings/", "primad/worker/"), _CELLS),
    "primad/ring/": _GENERATED,
}
"""The same in rooms about generation, or about KV blocks and not their content."""
OLD_PROSE: Final = {
    r"\bgo(?:es|ing)? on with\b": "continue, resume",
    r"\bwhat of\b": "the part of",
    r"\bof its own accord\b": "by itself",
    r"\bkept twice\b": "replicated",
    r"\banswers at once\b": "concurrent requests",
    r"\bfirst token of an answer\b": "TTFT",
    r"\btaken in when\b": "added when",
    r"\bbeside (?:the|a|an|it|its|their|others|that|those|each|what|one|his|her|which)\b": "next to, besides, alongside",
    r"\bso many (?:of|rows|tokens|times|steps|layers|threads|devices|seconds)\b": "a number by its name",
    r"\b(?:foretold|foretells?)\b": "forecast",
    r"\bhangs? on\b": "depends on",
    r"\b(?:tried|computed|written|read|formed|measured|begun) anew\b": "again",
    r"\"\"\"(?:Of|What of|Who|Whose|Whom)\b": "the subject first",
}
"""Phrases that the product's text, its tests and the documents may not have, and what to say instead."""
KEPT_NAMES: Final = frozenset(
    {"at_least", "at_most", "_at_least", "_at_most", "AT_LEAST", "most_likely", "c_void_p", "_BRIDGE", "answers_open"}
)
"""Names that contain one of the words in plain English, or belong to a library, or to a field that others read."""
TESTS_HAVE: Final = ("desk", "lap")
SENTENCES_HAVE: Final = (*TESTS_HAVE, "least", "most")
"""Words that tests may have: devices called desk and lap, and superlatives in the sentences that name tests."""
FOR_TESTS: Final = ("tools.lab", "tools.research", "tools.synth", "tools.synthetic")


def type_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the public types that a module defines, with their lines: its classes, and assignments to such names."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                found = [name]
            case ast.Assign(targets=targets, value=value) if not _is_type_variable(value):
                found = [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind) if "TypeAlias" in ast.unparse(kind):
                found = [name]
            case _:
                found = []
        yield from ((name, node.lineno) for name in found if _is_type_name(name))


def _is_type_name(name: str) -> bool:
    """Whether ``name`` is ``CamelCase``: all capitals is a constant, a leading underscore is private."""
    return name[:1].isupper() and not name.isupper() and "_" not in name


def _is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in ("TypeVar", "ParamSpec")


def imports_of(files: Iterable[tuple[str, Path]], names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """Yield what ``files`` import, with their paths and the lines. Those without any of ``names`` are not looked through."""
    word = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
    for name, path in files:
        if word.search(source(path)):
            yield from ((name, module, line) for module, line in imported(path))


@cache
def source(path: Path) -> str:
    """The text of a file."""
    return path.read_text(encoding="utf-8")


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(source(path))


@cache
def imported(path: Path) -> list[tuple[str, int]]:
    """The modules that a file imports, with their lines; ``from tools import x`` counts as ``tools.x``."""
    found: list[tuple[str, int]] = []
    for node in _statements(parsed(path)):
        match node:
            case ast.Import(names=names):
                found += ((each.name, node.lineno) for each in names)
            case ast.ImportFrom(module="tools", names=names):
                found += ((f"tools.{each.name}", node.lineno) for each in names)
            case ast.ImportFrom(module=str(module), level=0):
                found.append((module, node.lineno))
    return found


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every statement in ``node``, including nested ones, but no expression."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, name, ())
        for each in inner if isinstance(inner, list) else ():
            yield each
            yield from _statements(each)


def files(root: Path, *folders: str) -> Iterator[tuple[str, Path]]:
    """Yield every source file under the folders, with its path from the root."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield str(path.relative_to(root)), path


def trees(root: Path, *folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the syntax tree of every source file under the folders, with its path from the root."""
    for name, path in files(root, *folders):
        yield name, parsed(path)


def names_defined_twice(root: Path) -> Iterator[str]:
    """Yield lines about type names that have more than one definition."""
    places = defaultdict(list)
    for path, tree in trees(root, *PRODUCT):
        for name, line in type_names(tree):
            places[name].append(f"{path}:{line}")
    for name, found in places.items():
        if len(found) > 1:
            yield f"{name} is defined more than once: {', '.join(found)}"


def wrong_imports(root: Path) -> Iterator[str]:
    """Yield lines about product code that imports tools, tools that import tests, and tests that import other tools
    than theirs."""
    for path, module, line in imports_of(files(root, *PRODUCT), ["tools"]):
        if module.partition(".")[0] == "tools":
            yield f"{path}:{line}: what runs imports {module}, which only a checkout has"
    for path, module, line in imports_of(files(root, "tools"), ["tests"]):
        if module.partition(".")[0] == "tests":
            yield f"{path}:{line}: a tool imports {module}"
    for path, module, line in imports_of(files(root, "tests"), ["tools"]):
        if module.partition(".")[0] == "tools" and not _is_for_tests(module):
            yield f"{path}:{line}: a test imports {module}; what both need belongs to tools/lab"


def imports_of_packaging(root: Path) -> Iterator[str]:
    """Yield lines about files that import a script of ``packaging/``, by its own name or through the folder's."""
    scripts = {path.stem for path in (root / "packaging").rglob("*.py")}
    for path, module, line in imports_of(files(root, *PRODUCT, "tools", "tests", "examples"), scripts):
        first, _, rest = module.partition(".")
        if first in scripts or (first == "packaging" and rest.partition(".")[0] in scripts):
            yield f"{path}:{line}: imports {module} of packaging/, which nothing imports"


def prints_elsewhere(root: Path) -> Iterator[str]:
    """Yield lines about calls that print, or start logging, outside the places that escape text."""
    for folder in PRODUCT:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if name in PRINTS or not _MAY_PRINT.search(source(path)):
                continue
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in PRINTING:
                    yield f"{name}:{node.lineno}: calls {called}; cli/output.py prints, system/terminal.py logs"


def old_words(root: Path) -> Iterator[str]:
    """Yield lines about names that contain a word for which the field has another one; ``docs/architecture.md`` has the
    words."""
    for path, tree in trees(root, *PRODUCT, "tests"):
        words = {**OLD_WORDS, **next((own for room, own in ROOM_WORDS.items() if path.startswith(room)), {})}
        for name, line in named(tree):
            plain = SENTENCES_HAVE if name.startswith("test_") else TESTS_HAVE if path.startswith("tests/") else ()
            for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name):
                if word.lower() in words and word.lower() not in plain and name not in KEPT_NAMES:
                    yield f"{path}:{line}: {name}: say {words[word.lower()]}, not {word.lower()}"
    for file in (each for folder in (*PRODUCT, "tests", "tools") for each in sorted((root / folder).rglob("*.py"))):
        for word in file.stem.split("_"):
            if word in OLD_WORDS:
                yield f"{file.relative_to(root)}: say {OLD_WORDS[word]}, not {word}"


def old_prose(root: Path) -> Iterator[str]:
    """Yield lines about private phrases in the product's source, in its tests and in documents."""
    pages = [*root.glob("*.md"), *root.glob("docs/*.md")]
    sources = [path for folder in (*PRODUCT, "tests") for path in sorted((root / folder).rglob("*.py"))]
    for path in (page for page in (*pages, *sources) if page.name != "CHANGELOG.md"):
        text = source(path)
        for phrase, better in OLD_PROSE.items():
            for found in re.finditer(phrase, text, re.IGNORECASE):
                number = text.count("\n", 0, found.start()) + 1
                yield f"{path.relative_to(root)}:{number}: say {better}, not {found[0]}"


def named(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the names that a file defines, with their lines: types, functions, parameters, variables, fields."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno


def _is_for_tests(module: str) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in FOR_TESTS)


def main() -> int:
    """Print the violations; return the exit code."""
    gc.disable()  # a syntax tree is large and has no cycles
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    broken = [
        *names_defined_twice(root),
        *wrong_imports(root),
        *imports_of_packaging(root),
        *prints_elsewhere(root),
        *old_words(root),
        *old_prose(root),
    ]
    for line in broken:
        print(line, file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
