"""``primad cache``: list, verify and prune the layers that this device keeps on disk.

The KV cache of prompts is listed and pruned too, if there is a folder for it (``--kv-cache``).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from primad.cli.commands import CommandGroup
from primad.cli.options import Home
from primad.cli.output import err, out, print_json
from primad.errors import ConfigError
from primad.settings.config import Config, load_config, usage_folder
from primad.settings.quantities import parse_bytes, show_bytes, show_count

if TYPE_CHECKING:
    from primad.engine.streaming.expert_usage import StoredFile
    from primad.kv.store import StoredBlock
    from primad.layers.cache import LayerCache
    from primad.layers.eviction import CachedLayer

DAY_S = 86_400.0
IN_USE_S = 600.0
"""KV cache that was used this recently may still be in use."""


cache_app = CommandGroup(no_args_is_help=True, help="The layers that this device keeps on disk.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON, with bytes and Unix times.")]
KvFolder = Annotated[
    str | None,
    typer.Option(
        "--kv-cache",
        help="Also this folder with the KV cache of prompts [default: as configured].",
        metavar="DIR",
        show_default=False,
    ),
]


@cache_app.command("list")
def list_layers(home: Home = None, kv_cache: KvFolder = None, json: Json = False) -> None:
    """List the layers on disk, least recently used first, and the size of the KV cache.

    Examples:

        primad cache list

        primad cache list --json
    """
    config, cache = _open(home, kv_cache)
    stored = _kept_blocks(config)
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
                "kv": None
                if config.kv_cache is None
                else {
                    "folder": str(config.kv_cache),
                    "limit_bytes": config.kv_cache_limit_bytes,
                    "total_bytes": sum(block.size_bytes for block in stored),
                    "blocks": len(stored),
                    "oldest_used_s": stored[0].used_s if stored else None,
                },
            }
        )
        return
    if layers:
        out.print(_table(layers))
    maximum = "" if limit is None else f" of at most {_size(limit)}"
    out.print(f"{_count(layers)}, {_size(total)}{maximum}, in {config.layers}")
    if partial_bytes:
        out.print(f"{_size(partial_bytes)} of incomplete layers")
    if config.kv_cache is not None:
        oldest = f", used since {_when(stored[0].used_s)}" if stored else ""
        out.print(
            f"{_blocks(stored)} of KV cache, {_size(sum(block.size_bytes for block in stored))} of at most "
            f"{_size(config.kv_cache_limit_bytes)}{oldest}, in {config.kv_cache}"
        )


def _table(layers: list[CachedLayer]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("layer")
    table.add_column("size", justify="right")
    table.add_column("last used")
    table.add_column("")
    for layer in layers:
        table.add_row(layer.digest[:16], _size(layer.size_bytes), _when(layer.used_s), "in use" if layer.held else "")
    return table


def _when(used_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(used_s))


@cache_app.command()
def verify(
    home: Home = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Remove damaged layers; they are fetched again when needed.")
    ] = False,
    json: Json = False,
) -> None:
    """Hash every layer on disk; the exit code is 1 if one is damaged.

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
        str | None, typer.Option(help="Keep at most this size, such as 20GB.", metavar="SIZE", show_default=False)
    ] = None,
    older: Annotated[
        float | None,
        typer.Option(
            help="Remove layers and KV cache not used for this many days.", metavar="DAYS", min=0, show_default=False
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all layers and KV cache.")] = False,
    kv_cache: KvFolder = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    json: Json = False,
) -> None:
    """Remove layers from disk, least recently used first; except those that a running primad uses.

    --older and --all also remove the KV cache of prompts, except that of the last minutes, and usage counts of experts.

    Examples:

        primad cache prune --to 20GB

        primad cache prune --older 30 --dry-run

        primad cache prune --all
    """
    if to is None and older is None and not everything:
        raise ConfigError("primad cache prune: give --to SIZE, --older DAYS or --all")
    from primad.engine.streaming import expert_usage

    size = None if to is None else parse_bytes(to, "--to")
    config, cache = _open(home, kv_cache)
    stored = _old_blocks(_kept_blocks(config), older, everything=everything)
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
        _forget_blocks(config, stored)
    freed = gained + sum(layer.size_bytes for layer in chosen) + sum(block.size_bytes for block in stored)
    held = [layer for layer in layers if layer.held]
    if json:
        print_json(
            {
                "removed": [layer.digest for layer in chosen],
                "removed_counts": len(counts),
                "removed_blocks": len(stored),
                "freed_bytes": freed,
                "dry_run": dry_run,
                "in_use": len(held),
            }
        )
        return
    kept = f" and {_blocks(stored)} of KV cache" if stored else ""
    out.print(f"{'would remove' if dry_run else 'removed'} {_count(chosen)}{kept}, {_size(freed)}")
    if counts:
        counted = show_count(len(counts), "layer")
        out.print(f"{'would remove' if dry_run else 'removed'} usage counts of the experts of {counted}")
    if held:
        out.print(f"{_count(held)} in use stay{'s' if len(held) == 1 else ''}")


def _counts(folder: Path, older_days: float | None, *, everything: bool) -> list[StoredFile]:
    from primad.engine.streaming.expert_usage import excess, stored

    if everything:
        return excess(stored(folder), time.time(), max_files=0)
    return [] if older_days is None else excess(stored(folder), time.time(), max_age_s=older_days * DAY_S)


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


def _kept_blocks(config: Config) -> list[StoredBlock]:
    """The KV blocks in the cache, least recently used first."""
    from primad.kv.store import KvStore

    return [] if config.kv_cache is None else KvStore(config.kv_cache).list()


def _old_blocks(stored: list[StoredBlock], older_days: float | None, *, everything: bool) -> list[StoredBlock]:
    """The blocks that may be removed. A running primad may use those of the last minutes."""
    if not everything and older_days is None:
        return []
    before_s = time.time() - max(IN_USE_S, 0.0 if everything or older_days is None else older_days * DAY_S)
    return [block for block in stored if block.used_s < before_s]


def _forget_blocks(config: Config, stored: list[StoredBlock]) -> None:
    from primad.kv.store import KvStore

    if config.kv_cache is not None:
        KvStore(config.kv_cache).forget(block.key for block in stored)


def _blocks(stored: list[StoredBlock]) -> str:
    return show_count(len(stored), "block")


def _open(home: Path | None, kv_cache: str | None = None) -> tuple[Config, LayerCache]:
    from primad.layers.cache import LayerCache

    config = load_config({"home": home, "kv_cache": kv_cache})
    return config, LayerCache(config.layers, config.limits.disk_bytes, owner=False)


def _count(layers: list[CachedLayer]) -> str:
    return show_count(len(layers), "layer")


def _size(count: float) -> str:
    return show_bytes(count) if count else "0 B"
