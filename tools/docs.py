"""Write facts from the code into the documents: architectures, models, messages, the fields of ``primad plan --json``.

Each table lies between two marks of its page; the text around them is written by hand. ``tools/docs --check`` writes
nothing and fails if a page is outdated; a test runs it. ``profiles/devices`` are also written, from data sheets.
``tools/docs paper`` solves for the paper's fleet instead, and writes the tables of ``profiles/PAPER.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from primad.gguf.architecture import Recurrent, Sliding  # noqa: E402
from primad.gguf.architectures.table import SUPPORTED  # noqa: E402
from primad.gguf.published import published_models, published_profile  # noqa: E402
from primad.gguf.whole_attention import WITHOUT_NETWORKS, why_not_by_heads  # noqa: E402
from primad.network import layer_messages, messages, relay_messages  # noqa: E402
from primad.planning import schema  # noqa: E402
from primad.profiler.fleets import read_fleet  # noqa: E402
from primad.profiler.store import encode_profile  # noqa: E402
from primad.ring import messages as ring_messages  # noqa: E402
from primad.settings.quantities import show_bytes  # noqa: E402
from primad.trust import pairing  # noqa: E402
from tools.lab import matrix, paper  # noqa: E402
from tools.lab.data_sheets import SHEETS, profiles, read_sheets  # noqa: E402
from tools.lab.pages import between  # noqa: E402

_FIRST_CONTEXT = 8192
_MEASURED = "2026-11-28"
"""Date on which the rule of the data sheets was set."""


def pages() -> dict[Path, dict[str, str]]:
    """The tables of each page, by the name of their place."""
    return {
        ROOT / "docs" / "reference" / "architectures.md": {"": _architectures()},
        ROOT / "docs" / "first-models.md": {"": _published()},
        ROOT / "docs" / "protocol.md": {"versions": _versions()},
        ROOT / "docs" / "reference" / "messages.md": _all_messages(),
        ROOT / "docs" / "reference" / "faults.md": {"": matrix.meanings()},
        ROOT / "docs" / "reference" / "plan-json.md": {"": _messages(list(_structs(schema.Explanation))) + "\n"},
    }


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with its tables replaced."""
    for name, table in tables.items():
        place = f": {name}" if name else ""
        begin, end = f"<!-- written by tools/docs{place} -->\n", f"<!-- end of what tools/docs writes{place} -->"
        page = between(page, begin, end, f"\n{table}\n")
    return page


# ---- models that can be fetched -------------------------------------------------------------------------------------


def _published() -> str:
    lines = ["| model | `--model` | file | memory |", "|---|---|---|---|"]
    for model in published_models():
        cells = _FIRST_CONTEXT * sum(layer.kv_bytes_per_token for layer in published_profile(model).layers)
        lines.append(
            f"| {model.title} | `{model.hub}` | {show_bytes(model.file_bytes)} | {show_bytes(model.file_bytes + cells)} |"
        )
    return "\n".join(lines) + "\n"


# ---- structs --------------------------------------------------------------------------------------------------------


def _reported(kind: type[msgspec.Struct]) -> str:
    """Return a docstring as one line of a page."""
    return " ".join((kind.__doc__ or "").split()).replace("``", "`").replace("|", "\\|")


def _structs(kind: type[msgspec.Struct], seen: dict[str, None] | None = None) -> Iterator[type[msgspec.Struct]]:
    seen = {} if seen is None else seen
    if kind.__name__ in seen:
        return
    seen[kind.__name__] = None
    yield kind
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        for inner in _inner(field.type):
            yield from _structs(inner, seen)


def _inner(kind: msgspec.inspect.Type) -> Iterator[type[msgspec.Struct]]:
    match kind:
        case msgspec.inspect.StructType(cls=cls):
            yield cls
        case msgspec.inspect.UnionType(types=types):
            for one in types:
                yield from _inner(one)
        case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item):
            yield from _inner(item)


# ---- architectures --------------------------------------------------------------------------------------------------


def _architectures() -> str:
    """Tables of architectures, by where windows may begin, and by what devices can share."""
    places: dict[str, list[str]] = {}
    for entry in SUPPORTED.values():
        place = (
            "at any layer" if entry.cut_multiple == 1 else f"at every layer that is a multiple of {entry.cut_multiple}"
        )
        if entry.sliding in (Sliding.NEEDED, Sliding.NEEDED_IF_ANY):
            place = "where each has a layer with a sliding window: mostly at every second layer"
        elif entry.recurrent in (Recurrent.INTERVAL, Recurrent.HEADS):
            place = "at any layer; the last window has one with attention and one with a state"
        elif entry.skips_attention:
            place = "where each has a layer with attention, its first one heads: at nearly any layer"
        elif entry.needs_indexer:
            place = "where each has a layer of sparse attention: after the dense ones"
        elif entry.name == "glm-dsa":
            place = "where a layer chooses what attention sees: any of GLM 5; of GLM 5.2 every fourth from the third on"
        elif entry.step:
            place += f" and of `{entry.step}`" if entry.cut_multiple > 1 else f" that is a multiple of `{entry.step}`"
        places.setdefault(place, []).append(entry.name)
    shares: dict[str, list[str]] = {"networks; each device has all of the attention": [], "nothing": []}
    for entry in SUPPORTED.values():
        if entry.name in WITHOUT_NETWORKS:
            shares["nothing"].append(entry.name)
        elif why_not_by_heads(entry.name, keeps_states=entry.recurrent is not Recurrent.NEVER):
            shares["networks; each device has all of the attention"].append(entry.name)
    return f"{_listed('windows begin', places)}\n{_listed('devices share (others: heads too)', shares)}"


def _listed(title: str, found: Mapping[str, list[str]]) -> str:
    rows = [f"| {place} | {', '.join(f'`{name}`' for name in sorted(names))} |" for place, names in found.items()]
    return "\n".join([f"| {title} | architectures |", "|---|---|", *rows]) + "\n"


# ---- messages -------------------------------------------------------------------------------------------------------


def _versions() -> str:
    versions = {
        "control, layers and relay": (messages.PROTOCOL, messages.OLDEST),
        "ring": (ring_messages.PROTOCOL, ring_messages.PROTOCOL),
        "pairing": (pairing.PROTOCOL, pairing.PROTOCOL),
    }
    lines = ["| conversation | speaks | down to |", "|---|---|---|"]
    lines += [f"| {name} | {protocol} | {oldest} |" for name, (protocol, oldest) in versions.items()]
    return "\n".join(lines) + "\n"


def _all_messages() -> dict[str, str]:
    to_inviter, to_joiner = pairing.Start | pairing.Prove, pairing.Answer | pairing.Accept | pairing.Refuse
    return {
        "pairing": _heard(("The joiner says:", to_inviter), ("The inviter says:", to_joiner)),
        "control": _heard(("The head says:", messages.HeadMessage), ("The worker says:", messages.WorkerMessage)),
        "layers": _heard(("Requests:", layer_messages.TransferRequest), ("Replies:", layer_messages.TransferReply)),
        "relay": _heard(
            ("The worker says:", relay_messages.RelayedMessage), ("The head says:", relay_messages.RelayReply)
        ),
        "ring": _heard(("The header:", ring_messages.Step), ("Its KV operations:", ring_messages.KvOp)),
        "commands": _heard(("", ring_messages.RingCommand)),
        "events": _heard(("", ring_messages.RingEvent)),
    }


def _heard(*groups: tuple[str, Any]) -> str:
    """Tables of the messages of each union, and of the structs inside them."""
    parts, reported = [], set()
    for title, union in groups:
        kinds = list(dict.fromkeys(_inner(msgspec.inspect.type_info(union))))
        reported |= set(kinds)
        inside = [one for one in dict.fromkeys(one for kind in kinds for one in _structs(kind)) if one not in reported]
        reported |= set(inside)
        parts += [title] * bool(title) + [_messages(kinds)]
        parts += ["In them:", _messages(inside)] if inside else []
    return "\n\n".join(parts) + "\n"


def _messages(kinds: list[type[msgspec.Struct]]) -> str:
    lines = ["| name | fields | |", "|---|---|---|"]
    for kind in kinds:
        info: Any = msgspec.inspect.type_info(kind)
        name = kind.__name__ + (f" `{info.tag}`" if info.tag is not None else "")
        fields = ", ".join(f"`{field.encode_name}`" for field in info.fields) or "none"
        lines.append(f"| {name} | {fields} | {_reported(kind)} |")
    return "\n".join(lines)


def files() -> dict[Path, bytes]:
    """The generated files, by path."""
    found = {path: with_tables(path.read_text(encoding="utf-8"), tables).encode() for path, tables in pages().items()}
    devices = profiles(read_sheets()).items()
    return found | {
        SHEETS.parent / "devices" / f"{name}.json": encode_profile(device, how, _MEASURED)
        for name, (device, how) in devices
    }


def paper_page() -> dict[Path, bytes]:
    """The paper's fleet under primad's plan, next to the published figures."""
    fleet = read_fleet(paper.FLEET)
    tables = paper.tables([paper.row(name, fleet) for name in paper.MODELS])
    return {paper.PAGE: with_tables(paper.PAGE.read_text(encoding="utf-8"), tables).encode()}


def main(arguments: list[str]) -> int:
    """Write the files, or with ``--check`` name the outdated ones; return the exit code."""
    stale = 0
    for path, content in (paper_page() if arguments == ["paper"] else files()).items():
        if not path.is_file() or path.read_bytes() != content:
            stale += 1
            if arguments == ["--check"]:
                print(f"{path.relative_to(ROOT)}: not current; run tools/docs")
            else:
                path.write_bytes(content)
                print(f"{path.relative_to(ROOT)}: written")
    return 1 if stale and arguments == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
