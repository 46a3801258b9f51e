"""``primad models`` lists the library; ``pull`` and ``rm`` manage models of Hugging Face's hub in this device's home."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Column, Table

from primad.cli.endpoint import HeadName, Key, Reached, Url, connected, reached
from primad.cli.hub import fetched
from primad.cli.library import ModelFolders, library_of, pinned_in
from primad.cli.offered import ANSWER_TIMEOUT_S, HeadModel, offered_models, states_here
from primad.cli.options import Home
from primad.cli.output import err, out, print_json
from primad.errors import ClusterError, ConfigError
from primad.settings.config import load_config, models_folder
from primad.settings.quantities import show_bytes

if TYPE_CHECKING:
    from primad.gguf.hub import HubName, KeptModel
    from primad.library.library import LibraryModel

_COLUMNS: Final = ("parameters", "quantisation", "size", "context", "from")
ModelName = Annotated[
    str, typer.Argument(help="hf:owner/repo, or hf:owner/repo:Q4_K_M.", metavar="NAME", show_default=False)
]


def pull(
    name: ModelName,
    home: Home = None,
    no_mmproj: Annotated[bool, typer.Option("--no-mmproj", help="Skip the image encoder (mmproj).")] = False,
) -> None:
    """Download a model by name, and the file for its images (mmproj), if the repository has one.

    An interrupted download resumes. HF_TOKEN is sent if it is set.

    Examples:

        primad pull hf:Qwen/Qwen3-8B-GGUF:Q4_K_M
    """
    from primad.head.model.encoder import AUTO, encoder_file, projector_beside

    model = fetched(_named(name), load_config({"home": home}), with_projector=not no_mmproj)
    out.print(f"{model.name}: {show_bytes(model.size_bytes)} in {model.files[0]}")
    found = None if no_mmproj else projector_beside(model.files[0], is_repository=True)
    if found is not None:
        err.print(encoder_file(AUTO, model.files[0], found)[1], markup=False, highlight=False)


def models(
    home: Home = None,
    folders: ModelFolders = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: Url = None,
    head: HeadName = None,
    api_key: Key = None,
) -> None:
    """List the models of this device by name, with their problems, and which a head that runs here has loaded.

    These are the models of --models, downloads, and those of Ollama, LM Studio, Hugging Face's cache and llama.cpp.
    With --url or --head: the models that this head offers.

    Examples:

        primad models

        primad models --models /srv/models --json

        primad models --head desk
    """
    from primad.gguf.hub import kept_models
    from primad.planning.question import senses

    if url is not None or head is not None:
        _show_offered(reached(url, head, api_key), json)
        return
    config = load_config({"home": home, "models": tuple(folders or ())})
    library = library_of(config)
    headers = [each for each in kept_models(models_folder(config.home)) if not each.whole]
    pinned, offered = pinned_in(library, config).values(), _offered_here(config.home)
    others = [each for each in offered if not any(each.id in model.names for model in library.models)]
    for wrong in library.problems:
        err.print(wrong.line, markup=False, highlight=False)
    if json:
        here = (_fields(each, each in pinned, offered) for each in library.models)
        print_json([*here, *map(_fields_of_offered, others), *map(_fields_of_header, headers)])
        return
    if not library.models and not headers and not others:
        err.print("no models yet; primad pull hf:owner/repo downloads one")
        return
    more = ["state"] if offered else []
    table = Table(Column("name", no_wrap=True), *_COLUMNS, *more, box=None, pad_edge=False)
    for each in library.models:
        context = "" if each.context_tokens is None else f"{each.context_tokens:,}"
        size = show_bytes(each.size_bytes) if each.size_bytes else ""
        state = _state(each, offered)
        can = "without its mmproj" if each.lacks_encoder else senses(each.sees, each.hears)
        where = ", ".join(each.sources) + (f"; {can}" if can else "")
        shown = [each.parameters, each.quantisation, size, context, where]
        table.add_row(each.name, *shown, *(["" if state is None else state.line] if offered else []))
    for other in others:
        table.add_row(other.id, "", "", *_sizes(other), "the head here", other.line)
    for header in headers:
        note = "only the header; its layers are on the devices"
        table.add_row(str(header.name), "", header.name.quantisation, "", "", note)
    out.print(table)
    for each in library.models:
        if each.problem:
            err.print(f"{each.name} cannot be used: {each.problem}", markup=False, highlight=False)


def _offered_here(home: Path) -> list[HeadModel]:
    """The models that the head of this home offers; none, with a line, where it does not respond."""
    try:
        return states_here(home)
    except ClusterError as exc:
        err.print(f"states are unknown: {exc}")
        return []


def _state(model: LibraryModel, offered: list[HeadModel]) -> HeadModel | None:
    return next((each for each in offered if each.id in model.names), None)


def _show_offered(there: Reached, json: bool) -> None:
    """The models of the head ``there``."""
    from primad.planning.question import senses

    with connected(there, ANSWER_TIMEOUT_S) as client:
        models = offered_models(client, there)
    if json:
        print_json(models)
        return
    table = Table(Column("name", no_wrap=True), "size", "context", "", "state", box=None, pad_edge=False)
    for each in models:
        table.add_row(each.id, *_sizes(each), senses(*each.takes), each.line)
    out.print(table)


def _sizes(model: HeadModel) -> tuple[str, str]:
    """Bytes and context, as far as the head reports them."""
    size, context = model.meta.get("size"), model.max_model_len
    return show_bytes(size) if isinstance(size, int) else "", "" if context is None else f"{context:,}"


def _fields(model: LibraryModel, pinned: bool, offered: list[HeadModel]) -> dict[str, object]:
    state = _state(model, offered)
    return {
        "name": model.name,
        "names": model.names,
        "bytes": model.size_bytes,
        "architecture": model.architecture,
        "parameters": model.parameters,
        "quantisation": model.quantisation,
        "context": model.context_tokens,
        "from": model.sources,
        "files": [*map(_shown, model.files)],
        "whole": True,
        "sees": model.sees,
        "hears": model.hears,
        "lacks_encoder": model.lacks_encoder,
        "projector": None if model.projector is None else _shown(model.projector),
        "pinned": pinned,
        "state": None if state is None else state.state,
        "problem": model.problem or None,
    }


def _fields_of_offered(model: HeadModel) -> dict[str, object]:
    sees, hears = model.takes
    return {
        "name": model.id,
        "bytes": model.meta.get("size"),
        "context": model.max_model_len,
        "sees": sees,
        "hears": hears,
        "state": model.state,
    }


def _shown(path: Path) -> str:
    """``path`` as text; a file's name may not be valid text."""
    return str(path).encode(errors="backslashreplace").decode()


def _fields_of_header(model: KeptModel) -> dict[str, object]:
    files = [*map(str, model.files)]
    return {"name": str(model.name), "bytes": model.size_bytes, "from": ("primad",), "files": files, "whole": False}


def rm(name: ModelName, home: Home = None) -> None:
    """Remove a downloaded model; without a quantisation, all of its repository."""
    from primad.gguf.hub_fetch import remove

    asked = _named(name)
    removed = remove(asked, models_folder(load_config({"home": home}).home))
    if not removed:
        raise ConfigError(f"{asked}: not downloaded; primad models lists those that are")
    for each in removed:
        out.print(f"{each.name}: removed, {show_bytes(each.size_bytes)}")


def _named(text: str) -> HubName:
    from primad.gguf.hub import hub_name

    name = hub_name(text)
    if name is None:
        raise ConfigError(f"{text}: not a model of the hub; give one such as hf:owner/repo or hf:owner/repo:Q4_K_M")
    return name
