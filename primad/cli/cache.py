"""``primad cache``: what layers this device keeps on disk, whether they are whole, and which of them may go."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from primad.cli.options import Home
from primad.cli.output import err, out, print_json
from primad.errors import ConfigError
from primad.settings.config import Config, load_config, usage_folder
from primad.settings.quantities import parse_bytes, show_bytes

if TYPE_CHECKING:
    from primad.engine.streaming.expert_usage import StoredFile
    from primad.layers.cache import LayerCache
    from primad.layers.eviction import CachedLayer

DAY_S = 86_400.0


cache_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", help="The layers that this device keeps on disk."
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON: bytes, and Unix times.")]


@cache_app.command("list")
def list_layers(home: Home = None, json: Json = False) -> None:
    """List the layers on disk, least recently used first.

    Examples:

        primad cache list

        primad cache list --json
    """
    config, cache = _open(home)
    layers, partial_bytes = cache.layers(), cache.partial_bytes()
    total = sum(layer.size_bytes for layer in layers)
    limit = config.limits.disk_bytes
    if json:
        rows = [
            {"digest": one.digest, "size_bytes": one.size_bytes, "used_s": one.used_s, "in_use": one.held}
            for one in layers
        ]
        print_json(
            {
                "folder": str(config.layers),
                "limit_bytes": limit,
                "total_bytes": total,
                "partial_bytes": partial_bytes,
                "layers": rows,
            }
        )
        return
    if layers:
        out.print(_table(layers))
    most = "" if limit is None else f" of at most {_size(limit)}"
    out.print(f"{_count(layers)}, {_size(total)}{most}, in {config.layers}")
    if partial_bytes:
        out.print(f"{_size(partial_bytes)} besides of layers that are not complete yet")


def _table(layers: list[CachedLayer]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("layer")
    table.add_column("size", justify="right")
    table.add_column("last used")
    table.add_column("")
    for layer in layers:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(layer.used_s))
        table.add_row(layer.digest[:16], _size(layer.size_bytes), used, "in use" if layer.held else "")
    return table


@cache_app.command()
def verify(
    home: Home = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Remove what is damaged; it is fetched again when needed.")
    ] = False,
    json: Json = False,
) -> None:
    """Hash every layer on disk; exit code 1 when one is damaged.

    Examples:

        primad cache verify

        primad cache verify --fix
    """
    _, cache = _open(home)
    layers = cache.layers()
    damaged: list[Path] = []
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("hashing", total=max(1, sum(layer.size_bytes for layer in layers)))
        for layer in layers:
            damaged += cache.damaged(layer.digest, fix=fix)
            bar.advance(task, layer.size_bytes)
    if json:
        print_json(
            {"layers": len(layers), "damaged": [str(path) for path in damaged], "removed": fix and bool(damaged)}
        )
    else:
        for path in damaged:
            out.print(f"{path}: is damaged" + (", removed" if fix else ""))
        healthy = f"{_count(layers)} hashed, "
        out.print(healthy + (f"{len(damaged)} damaged" if damaged else "all whole"))
        if damaged and not fix:
            out.print("'primad cache verify --fix' removes what is damaged")
    if damaged:
        raise typer.Exit(1)


@cache_app.command()
def prune(
    home: Home = None,
    to: Annotated[
        str | None, typer.Option(help="Keep at most so many bytes, as in 20GB.", metavar="SIZE", show_default=False)
    ] = None,
    older: Annotated[
        float | None,
        typer.Option(help="Remove what was not used for so many days.", metavar="DAYS", min=0, show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all layers.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    json: Json = False,
) -> None:
    """Remove layers from disk, least recently used first; never those that a running primad uses.

    With --older and --all also what was counted of the use of experts, which is small and bounded anyway.

    Examples:

        primad cache prune --to 20GB

        primad cache prune --older 30 --dry-run

        primad cache prune --all
    """
    if to is None and older is None and not everything:
        raise ConfigError("primad cache prune: nothing says what may go; give --to SIZE, --older DAYS or --all")
    from primad.engine.streaming import expert_usage

    size = None if to is None else parse_bytes(to, "--to")
    config, cache = _open(home)
    layers = cache.layers()
    idle = sum(size_bytes for _, size_bytes in cache.idle_partial())
    excess = _excess(layers, cache.partial_bytes(), size)
    gained = idle if everything or excess > 0 else 0
    chosen = _chosen(layers, excess - gained, older, everything=everything)
    counts = _counts(usage_folder(config.home), older, everything=everything)
    if not dry_run:
        if gained:
            gained = cache.drop_partial()
        cache.remove(chosen)
        expert_usage.remove(counts)
    freed = gained + sum(layer.size_bytes for layer in chosen)
    held = [layer for layer in layers if layer.held]
    if json:
        print_json(
            {
                "removed": [layer.digest for layer in chosen],
                "removed_counts": len(counts),
                "freed_bytes": freed,
                "dry_run": dry_run,
                "in_use": len(held),
            }
        )
        return
    out.print(f"{'would remove' if dry_run else 'removed'} {_count(chosen)}, {_size(freed)}")
    if counts:
        out.print(
            f"{'would remove' if dry_run else 'removed'} what was counted of the experts of {_layers(len(counts))}"
        )
    if held:
        out.print(f"{_count(held)} in use stay{'s' if len(held) == 1 else ''}")


def _counts(folder: Path, older_days: float | None, *, everything: bool) -> list[StoredFile]:
    from primad.engine.streaming.expert_usage import excess, stored

    if everything:
        return excess(stored(folder), time.time(), most_files=0)
    return [] if older_days is None else excess(stored(folder), time.time(), most_age_s=older_days * DAY_S)


def _excess(layers: list[CachedLayer], partial_bytes: int, size: int | None) -> int:
    return 0 if size is None else sum(layer.size_bytes for layer in layers) + partial_bytes - size


def _chosen(
    layers: list[CachedLayer], excess_bytes: int, older_days: float | None, *, everything: bool
) -> list[CachedLayer]:
    from primad.layers.eviction import oldest_first

    if everything:
        return [layer for layer in layers if not layer.held]
    chosen = oldest_first(layers, excess_bytes)
    if older_days is not None:
        before_s = time.time() - older_days * DAY_S
        chosen += [layer for layer in layers if layer.used_s < before_s and not layer.held and layer not in chosen]
    return chosen


def _open(home: Path | None) -> tuple[Config, LayerCache]:
    from primad.layers.cache import LayerCache

    config = load_config({"home": home})
    return config, LayerCache(config.layers, config.limits.disk_bytes, owner=False)


def _count(layers: list[CachedLayer]) -> str:
    return _layers(len(layers))


def _layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"


def _size(count: float) -> str:
    return show_bytes(count) if count else "0 B"
