"""``primad key``: API keys for a server that listens beyond this device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from primad.cli.commands import CommandGroup
from primad.cli.options import Home
from primad.cli.output import err, out
from primad.errors import ConfigError, printable
from primad.settings.config import load_config

key_app = CommandGroup(help="API keys: add, list and remove them.", no_args_is_help=True)

File = Annotated[
    Path | None,
    typer.Option("--file", help="The file of the keys [default: api-keys in the home folder].", show_default=False),
]
KeyName = Annotated[str, typer.Argument(help="A name for the key, such as its owner.")]


@key_app.command("add")
def add(
    name: KeyName,
    file: File = None,
    home: Home = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests per minute.", min=1, max=10**9, show_default=False)
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens per minute, of prompts and responses.", min=1, max=10**9, show_default=False),
    ] = None,
    manages: Annotated[bool, typer.Option("--manages", help="It may download and delete models.")] = False,
) -> None:
    """Make a key and print it. It is stored hashed and cannot be shown again. A running server accepts it immediately.

    Examples:

        primad key add laptop

        primad key add guest --requests 20 --tokens 20000

        primad key add phone --manages
    """
    from primad.api.http.key_file import KEY_NAME, add_key
    from primad.api.http.keys import ApiKey, digest_of, new_key

    if not KEY_NAME.fullmatch(name):
        raise ConfigError(
            f"{printable(name, 70)!r} is not a valid name of a key; use up to 62 letters, digits, '.', '_' and '-'"
        )
    path, key = _file(file, home), new_key()
    rights = ApiKey(name=name, digest=digest_of(key), requests_per_min=requests, tokens_per_min=tokens, manages=manages)
    add_key(path, rights)
    out.print(key)
    err.print(f"the key {name}; give it to its client now. It works with: primad serve --api-key-file {path}")


@key_app.command("list")
def show(file: File = None, home: Home = None) -> None:
    """List the keys by name, with their limits and rights.

    Examples:

        primad key list
    """
    from primad.api.http.key_file import read_keys

    path = _file(file, home)
    keys = read_keys(path)
    if not keys:
        out.print(f"no keys in {path}; make one with 'primad key add NAME'")
    for key in keys or ():
        limits = ((key.requests_per_min, "requests"), (key.tokens_per_min, "tokens"))
        limits_text = ", ".join(f"{maximum} {what} per minute" for maximum, what in limits if maximum is not None)
        out.print(f"{key.name}: {limits_text or 'no limits'}{'; manages models' if key.manages else ''}")


@key_app.command("remove")
def remove(name: KeyName, file: File = None, home: Home = None) -> None:
    """Remove a key. A running server refuses it immediately.

    Examples:

        primad key remove guest
    """
    from primad.api.http.key_file import remove_key

    path = _file(file, home)
    remove_key(path, name)
    out.print(f"removed key {name}")


def _file(file: Path | None, home: Path | None) -> Path:
    return load_config({"home": home}).home / "api-keys" if file is None else file
