"""Write what the code knows into the documents: requests, ``/status``, metrics, architectures, messages.

Each table lies between two marks of its page; what stands around them is written by hand. ``tools/docs --check`` writes
nothing and fails where a page is not current, as a test asks for it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from pydantic import ValidationError  # noqa: E402

from primad.api import status  # noqa: E402
from primad.api.metrics import Metrics  # noqa: E402
from primad.api.openai.schema import ChatRequest, CompletionRequest, SamplingRequest  # noqa: E402
from primad.gguf.architectures import SUPPORTED, Recurrent, Sliding  # noqa: E402
from primad.gguf.published import published_models, published_profile  # noqa: E402
from primad.network import layer_messages, messages  # noqa: E402
from primad.ring import messages as ring_messages  # noqa: E402
from primad.settings.quantities import show_bytes  # noqa: E402
from primad.trust import pairing  # noqa: E402

_UNBOUNDED = 2**31 - 1
_FIRST_CONTEXT = 8192
_METRIC = re.compile(r"^# HELP (\S+) (.*)\n# TYPE \S+ (\S+)$", re.MULTILINE)


def pages() -> dict[Path, dict[str, str]]:
    """What belongs into which page, by the name of the place."""
    http = {"requests": _requests(), "status": _status(), "metrics": _metrics()}
    return {
        ROOT / "docs" / "http.md": http,
        ROOT / "docs" / "models.md": {"": _architectures()},
        ROOT / "docs" / "first-models.md": {"": _published()},
        ROOT / "docs" / "protocol.md": _protocol(),
    }


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """The page with its tables written anew."""
    for name, table in tables.items():
        place = f": {name}" if name else ""
        begin, end = f"<!-- written by tools/docs{place} -->\n", f"<!-- end of what tools/docs writes{place} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        assert found, f"the page lacks {begin!r}"
        assert closed, f"the page lacks {end!r}"
        page = f"{before}{begin}\n{table}\n{end}{after}"
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


# ---- requests -------------------------------------------------------------------------------------------------------


def _requests() -> str:
    shared = [name for name in SamplingRequest.model_fields if name in ChatRequest.model_fields]
    parts = [
        "### Both\n\n" + _fields(SamplingRequest, shared),
        "### `/v1/chat/completions`\n\n" + _fields(ChatRequest, _own(ChatRequest)),
        "### `/v1/completions`\n\n" + _fields(CompletionRequest, _own(CompletionRequest)),
    ]
    return "\n".join(parts)


def _own(model: type[SamplingRequest]) -> list[str]:
    return [name for name in model.model_fields if name not in SamplingRequest.model_fields]


def _fields(model: type[SamplingRequest], names: list[str]) -> str:
    schema = model.model_json_schema()
    lines = ["| field | value |", "|---|---|"]
    for name in sorted(names, key=lambda name: (name not in schema.get("required", ()), names.index(name))):
        field = model.model_fields[name]
        properties = schema["properties"]
        shown = properties.get(name) or properties[field.validation_alias.choices[0]]  # type: ignore[union-attr]
        value = _refusal(model, name) or _value(shown, schema.get("$defs", {}))
        required = " (required)" if name in schema.get("required", ()) else ""
        lines.append(f"| `{name}`{required} | {value} |")
    return "\n".join(lines) + "\n"


def _refusal(model: type[SamplingRequest], name: str) -> str | None:
    """Why a field that is known is not served; None for one that is."""
    field = model.model_fields[name]
    if field.annotation is not Any:
        return None
    try:
        model.__pydantic_validator__.validate_assignment(model.model_construct(), name, object())
    except ValidationError as exc:
        reasons = [error["msg"] for error in exc.errors() if error["loc"][:1] == (name,)]
        return reasons[0] if reasons else None
    return None


def _value(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        return _object(defs[schema["$ref"].rsplit("/", 1)[-1]], defs)
    if "anyOf" in schema:
        kinds = [kind for kind in schema["anyOf"] if kind.get("type") != "null"]
        return ", or ".join(_value(kind, defs) for kind in kinds)
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in values)
    match schema.get("type"):
        case "array":
            return f"list{_count(schema)} of: {_value(schema['items'], defs)}"
        case "object":
            inner = schema.get("additionalProperties")
            return f"object with values: {_value(inner, defs)}" if isinstance(inner, dict) else "object"
        case "boolean":
            return "`true` or `false`"
        case "string" if "maxLength" in schema:
            return f"string of {schema.get('minLength', 0)} to {schema['maxLength']} characters"
        case "integer" | "number" as kind:
            return f"{kind}{_bounds(schema)}"
        case kind:
            return str(kind or "anything")


def _object(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    served = {name: value for name, value in schema["properties"].items() if value.keys() & {"anyOf", "type", "$ref"}}
    return "object: " + "; ".join(f"`{name}` {_value(value, defs)}" for name, value in served.items())


def _count(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minItems"), schema.get("maxItems")
    if most is not None:
        return f" of {least or 0} to {most}"
    return " of at least 1" if least else ""


def _bounds(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum", schema.get("exclusiveMaximum"))
    above = schema.get("exclusiveMinimum")
    if most is not None and most < _UNBOUNDED:
        return f" above {above:g}, at most {most:g}" if above is not None else f" from {least:g} to {most:g}"
    return f", at least {least:g}" if least is not None and least > -_UNBOUNDED else ""


# ---- status and metrics ---------------------------------------------------------------------------------------------


def _status() -> str:
    """Every object of ``StatusBody``, the outermost first."""
    parts = []
    for kind in _structs(status.StatusBody):
        lines = [f"### {kind.__name__}", "", _told(kind), "", "| field | value |", "|---|---|"]
        lines += [f"| `{field.name}` | {_kind(field.type)} |" for field in msgspec.inspect.type_info(kind).fields]  # type: ignore[attr-defined]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _told(kind: type[msgspec.Struct]) -> str:
    """A docstring as one line of a page."""
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


def _kind(kind: msgspec.inspect.Type) -> str:
    match kind:
        case msgspec.inspect.StructType(cls=cls):
            return cls.__name__
        case msgspec.inspect.UnionType(types=types):
            return " or ".join(_kind(one) for one in types)
        case msgspec.inspect.ListType(item_type=item):
            return f"list of {_kind(item)}"
        case msgspec.inspect.TupleType(item_types=items):
            return "[" + ", ".join(_kind(item) for item in items) + "]"
    plain = {"IntType": "integer", "FloatType": "number", "StrType": "string", "BoolType": "true or false"}
    return plain.get(type(kind).__name__, "null")


def _metrics() -> str:
    """What ``/metrics`` says of a ring of one device."""
    device = status.DeviceStatus(
        name="desk",
        role="head",
        windows=[],
        layers=0,
        gpu_layers=0,
        daemon_rss_bytes=0,
        ring=status.RingFigures(
            steps=0,
            rows=0,
            compute_s=0.0,
            hops=0,
            hop_median_s=None,
            hop_p99_s=None,
            rss_bytes=0,
            private_bytes=0,
            refused_messages=0,
        ),
        memory=status.MemoryFigures(),
        predicted=status.PlannedFigures(),
    )
    kv = status.KvStatus(copies=[], **dict.fromkeys(status.KvStatus.__struct_fields__[1:], 1))
    embedding = status.EmbeddingStatus(
        model="", alive=True, rss_bytes=0, starts=1, requests=0, errors=0, tokens=0, waiting=0, compute_s=0.0
    )
    body = status.StatusBody(
        serving=True, detail="", model="model", epoch=1, rounds=1, devices=[device], embedding=embedding, kv=kv
    )
    lines = ["| metric | kind | |", "|---|---|---|"]
    for name, told, kind in _METRIC.findall(Metrics().render(body).decode()):
        if not name.endswith("_created"):
            lines.append(f"| `{name}` | {kind} | {told} |")
    return "\n".join(lines) + "\n"


def _architectures() -> str:
    """By where windows may begin."""
    places: dict[str, list[str]] = {}
    for entry in SUPPORTED.values():
        place = (
            "at any layer" if entry.cut_multiple == 1 else f"at every layer that is a multiple of {entry.cut_multiple}"
        )
        if entry.sliding in (Sliding.NEEDED, Sliding.NEEDED_IF_ANY):
            place = "where each has a layer with a sliding window: mostly at every second layer"
        elif entry.recurrent in (Recurrent.INTERVAL, Recurrent.HEADS):
            place = "where each has a layer with attention and one with a state: mostly at every fourth layer"
        elif entry.skips_attention:
            place = "where each has a layer with attention, its first one heads: at nearly any layer"
        elif entry.needs_indexer:
            place = "where each has a layer of sparse attention: behind the dense ones"
        elif entry.name == "glm-dsa":
            place = "where a layer chooses what attention sees: any of GLM 5; of GLM 5.2 every fourth from the third on"
        elif entry.step:
            place += f" and of `{entry.step}`" if entry.cut_multiple > 1 else f" that is a multiple of `{entry.step}`"
        places.setdefault(place, []).append(entry.name)
    rows = [f"| {place} | {', '.join(f'`{name}`' for name in sorted(names))} |" for place, names in places.items()]
    return "\n".join(["| windows begin | architectures |", "|---|---|", *rows]) + "\n"


# ---- messages -------------------------------------------------------------------------------------------------------


def _protocol() -> dict[str, str]:
    versions = {
        "control and layers": (messages.PROTOCOL, messages.OLDEST),
        "ring": (ring_messages.PROTOCOL, ring_messages.PROTOCOL),
        "pairing": (pairing.PROTOCOL, pairing.PROTOCOL),
    }
    lines = ["| conversation | speaks | down to |", "|---|---|---|"]
    lines += [f"| {name} | {protocol} | {oldest} |" for name, (protocol, oldest) in versions.items()]
    to_inviter, to_joiner = pairing.Start | pairing.Prove, pairing.Answer | pairing.Accept | pairing.Refuse
    return {
        "versions": "\n".join(lines) + "\n",
        "pairing": _heard(("The joiner says:", to_inviter), ("The inviter says:", to_joiner)),
        "control": _heard(("The head says:", messages.HeadMessage), ("The worker says:", messages.WorkerMessage)),
        "layers": _heard(("Requests:", layer_messages.TransferRequest), ("Replies:", layer_messages.TransferReply)),
        "ring": _heard(("The header:", ring_messages.Step), ("Its KV operations:", ring_messages.KvOp)),
        "commands": _heard(("", ring_messages.RingCommand)),
        "events": _heard(("", ring_messages.RingEvent)),
    }


def _heard(*groups: tuple[str, Any]) -> str:
    """Tables of the messages of each union, and of the structs that lie in them."""
    parts, told = [], set()
    for title, union in groups:
        kinds = list(dict.fromkeys(_inner(msgspec.inspect.type_info(union))))
        told |= set(kinds)
        inside = [one for one in dict.fromkeys(one for kind in kinds for one in _structs(kind)) if one not in told]
        told |= set(inside)
        parts += [title] * bool(title) + [_messages(kinds)]
        parts += ["In them:", _messages(inside)] if inside else []
    return "\n\n".join(parts) + "\n"


def _messages(kinds: list[type[msgspec.Struct]]) -> str:
    lines = ["| message | fields | |", "|---|---|---|"]
    for kind in kinds:
        info: Any = msgspec.inspect.type_info(kind)
        name = kind.__name__ + (f" `{info.tag}`" if info.tag is not None else "")
        fields = ", ".join(f"`{field.encode_name}`" for field in info.fields) or "none"
        lines.append(f"| {name} | {fields} | {_told(kind)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Write the pages, or with ``--check`` say which are not current; the exit code."""
    stale = 0
    for path, tables in pages().items():
        page = path.read_text(encoding="utf-8")
        current = with_tables(page, tables)
        if page != current:
            stale += 1
            if arguments == ["--check"]:
                print(f"{path.relative_to(ROOT)}: not current; run tools/docs")
            else:
                path.write_text(current, encoding="utf-8")
                print(f"{path.relative_to(ROOT)}: written")
    return 1 if stale and arguments == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
