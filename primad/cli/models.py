"""``primad pull``, ``models`` and ``rm``: models by name from Hugging Face's hub, in this device's home folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from primad.cli.hub import fetched
from primad.cli.options import Home
from primad.cli.output import err, out, print_json
from primad.errors import ConfigError
from primad.settings.config import load_config, models_folder
from primad.settings.quantities import show_bytes

if TYPE_CHECKING:
    from primad.gguf.hub import HubName

ModelName = Annotated[
    str, typer.Argument(help="hf:owner/repo, or hf:owner/repo:Q4_K_M.", metavar="NAME", show_default=False)
]


def pull(name: ModelName, home: Home = None) -> None:
    """Download a model by name, as 'serve --model hf:owner/repo' does.

    An interrupted download resumes. HF_TOKEN is sent if it is set.

    Examples:

        primad pull hf:Qwen/Qwen3-8B-GGUF:Q4_K_M
    """
    model = fetched(_named(name), load_config({"home": home}))
    out.print(f"{model.name}: {show_bytes(model.size_bytes)} in {model.files[0]}")


def models(home: Home = None, json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the downloaded models."""
    from primad.gguf.hub import kept_models

    found = kept_models(models_folder(load_config({"home": home}).home))
    if json:
        print_json(
            [
                {
                    "name": str(each.name),
                    "bytes": each.size_bytes,
                    "whole": each.whole,
                    "files": [*map(str, each.files)],
                }
                for each in found
            ]
        )
        return
    if not found:
        err.print("no models yet; primad pull hf:owner/repo downloads one")
        return
    table = Table("name", "size", "file", box=None, pad_edge=False)
    for each in found:
        file = str(each.files[0]) if each.whole else "only the header; its layers are on the devices"
        table.add_row(str(each.name), show_bytes(each.size_bytes), file)
    out.print(table)


def rm(name: ModelName, home: Home = None) -> None:
    """Remove a downloaded model; without a quantisation, all of its repository."""
    from primad.gguf.hub import remove

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
