"""``primad cache`` as its user sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from primad.cli.cache import cache_app
from primad.errors import ConfigError
from primad.gguf.header import read_header
from primad.gguf.layers import LayerCut, LayerRef, cut_layer
from primad.kv import keys
from primad.kv.cells import LayerCells
from primad.kv.store import KvStore
from primad.layers.cache import LayerCache
from tests.fakes.gguf import toy_arrays, write_gguf
from tests.fakes.layers import put

DAY_S = 86_400


@pytest.fixture
def layers(tmp_path) -> list[LayerCut]:
    model = read_header(write_gguf(tmp_path / "toy.gguf", toy_arrays()))
    return [cut_layer(model, layer).hashed() for layer in range(3)]


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "home"


@pytest.fixture
def filled(home, layers) -> tuple[LayerCache, list[LayerRef]]:
    """A cache whose three layers were last used 30, 20 and 10 days ago."""
    cache = LayerCache(home / "cache" / "layers")
    refs = []
    for number, layer in enumerate(layers):
        ref = put(cache, layer)
        used_s = time.time() - (30 - 10 * number) * DAY_S
        os.utime(cache.path(ref.digest).with_suffix(".tree"), (used_s, used_s))
        refs.append(ref)
    return cache, refs


def run(home: Path, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cache_app, [arguments[0], "--home", str(home), *arguments[1:]])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


@contextmanager
def holding(home: Path, ref: LayerRef) -> Iterator[None]:
    """Another process uses the layer during the block."""
    holder = (
        "import sys; from pathlib import Path; from primad.layers.cache import LayerCache\n"
        "LayerCache(Path(sys.argv[1])).lease('ring', [sys.argv[2]])\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, str(home / "cache" / "layers"), ref.digest]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            yield
        finally:
            process.kill()


def left(cache: LayerCache) -> set[str]:
    return {layer.digest for layer in cache.layers()}


@pytest.mark.parametrize("command", [("list",), ("verify",), ("prune", "--all")], ids=" ".join)
def test_a_home_without_layers_is_no_error_and_stays_as_it_is(home, command):
    assert "0 layers" in run(home, *command)
    assert not home.exists()


def test_list_shows_cached_layers_and_which_are_in_use(home, filled):
    _, refs = filled
    with holding(home, refs[1]):
        lines = run(home, "list").splitlines()
    assert lines[0].split() == ["layer", "size", "last", "used"]
    for line, ref in zip(lines[1:4], [refs[0], refs[2], refs[1]], strict=True):
        assert line.startswith(f"{ref.digest[:16]}  16.6 kB")
    assert ["in use" in line for line in lines[1:4]] == [False, False, True]
    assert lines[4].startswith("3 layers, 49.9 kB, in ")


def test_list_as_json(home, filled):
    _, refs = filled
    reported = json.loads(run(home, "list", "--json"))
    assert [layer["digest"] for layer in reported["layers"]] == [ref.digest for ref in refs]
    assert reported["total_bytes"] == sum(layer["size_bytes"] for layer in reported["layers"])
    assert (reported["partial_bytes"], reported["limit_bytes"]) == (0, None)
    assert set(reported["layers"][0]) == {"digest", "size_bytes", "used_s", "in_use"}


def test_list_shows_the_limit_and_incomplete_layers(home, filled, layers):
    cache, _ = filled
    (home / "config.toml").write_text('max_disk = "5GB"\n')
    cache.remove(cache.layers()[:1])
    with cache.part(layers[0].ref()) as part:
        part.begin(layers[0].tree())
    text = run(home, "list")
    assert "of at most 5.00 GB" in text
    assert "of incomplete layers" in text


def test_verify_finds_no_damage_in_an_intact_cache(home, filled):
    assert run(home, "verify") == "3 layers hashed, all whole\n"


def test_verify_finds_a_damaged_layer_and_removes_it_only_when_asked(home, filled):
    cache, refs = filled
    path = cache.path(refs[1].digest)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    text = run(home, "verify", code=1)
    assert f"{path}: is damaged\n" in text
    assert path.exists()
    assert json.loads(run(home, "verify", "--json", code=1))["damaged"] == [str(path)]
    assert f"{path}: is damaged, removed\n" in run(home, "verify", "--fix", code=1)
    assert left(cache) == {refs[0].digest, refs[2].digest}
    run(home, "verify")


def test_verify_finds_a_damaged_copy_and_leaves_the_layer(home, filled):
    cache, refs = filled
    copy = cache.place(refs[0], number=1, split=2, copy=1)
    copy.write_bytes(copy.read_bytes()[:-1])
    assert str(copy) in run(home, "verify", "--fix", code=1)
    assert not copy.exists()
    assert cache.has(refs[0])


def test_prune_to_a_size(home, filled):
    cache, refs = filled
    assert run(home, "prune", "--to", "40kB") == "removed 1 layer, 16.6 kB\n"
    assert left(cache) == {refs[1].digest, refs[2].digest}
    assert run(home, "prune", "--to", "1GB") == "removed 0 layers, 0 B\n"


def test_prune_by_age(home, filled):
    cache, refs = filled
    run(home, "prune", "--older", "15")
    assert left(cache) == {refs[2].digest}


def test_prune_all_removes_layers_and_incomplete_ones(home, filled, layers):
    cache, _ = filled
    cache.remove(cache.layers()[:1])
    with cache.part(layers[0].ref()) as part:
        part.begin(layers[0].tree())
    would = json.loads(run(home, "prune", "--all", "--dry-run", "--json"))
    assert (len(would["removed"]), would["dry_run"]) == (2, True)
    assert len(left(cache)) == 2
    run(home, "prune", "--all")
    assert left(cache) == set()
    assert list((home / "cache" / "layers" / "partial").iterdir()) == []


def test_a_running_daemon_loses_nothing(home, filled):
    cache, refs = filled
    with holding(home, refs[0]):
        assert run(home, "prune", "--all").endswith("1 layer in use stays\n")
    assert left(cache) == {refs[0].digest}
    run(home, "prune", "--all")
    assert left(cache) == set()


@pytest.mark.parametrize(("arguments", "named"), [((), "--to SIZE"), (("--to", "much"), "--to: 'much'")])
def test_prune_names_the_missing_or_wrong_option(home, arguments, named):
    with pytest.raises(ConfigError, match=named):
        run(home, "prune", *arguments)


def test_the_commands_have_examples():
    assert isinstance(cache_app, typer.Typer)
    for command in ("list", "verify", "prune"):
        assert "Examples" in CliRunner().invoke(cache_app, [command, "--help"]).stdout


def test_expert_usage_is_pruned_with_all_or_by_age(home, filled):
    folder = home / "expert-usage"
    folder.mkdir()
    for days in (40, 10):
        path = folder / f"{days}.json"
        path.write_text("{}")
        os.utime(path, (time.time() - days * DAY_S,) * 2)
    assert "experts" not in run(home, "prune", "--to", "1GB")
    printed = run(home, "prune", "--older", "35", "--dry-run")
    assert printed == "would remove 0 layers, 0 B\nwould remove usage counts of the experts of 1 layer\n"
    assert len(list(folder.iterdir())) == 2
    assert json.loads(run(home, "prune", "--older", "35", "--json"))["removed_counts"] == 1
    assert [path.name for path in folder.iterdir()] == ["10.json"]
    run(home, "prune", "--all")
    assert list(folder.iterdir()) == []


# ---- KV cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def kv_folder(tmp_path) -> Path:
    """A folder with two KV blocks, last used 20 days ago and now."""
    folder = tmp_path / "cells"
    store = KvStore(folder)
    blocks = [keys.block("root", None, [token], [1]) for token in (1, 2)]
    for block in blocks:
        layer = LayerCells(layer=0, start=0, end=1, key_type=1, value_type=1, keys=b"k" * 500, values=b"v" * 500)
        store.put(block, [layer])
    used_s = time.time() - 20 * DAY_S
    os.utime(folder / blocks[0].key, (used_s, used_s))
    return folder


def test_list_shows_the_number_and_the_age_of_kv_blocks(home, kv_folder):
    since = time.strftime("%Y-%m-%d", time.localtime(time.time() - 20 * DAY_S))
    line = run(home, "list", "--kv-cache", str(kv_folder)).splitlines()[-1]
    assert line.startswith("2 blocks of KV cache, 2.")
    assert f"used since {since}" in line
    reported = json.loads(run(home, "list", "--kv-cache", str(kv_folder), "--json"))["kv"]
    assert (reported["blocks"], reported["folder"], reported["limit_bytes"]) == (2, str(kv_folder), 4_000_000_000)
    assert "KV cells" not in run(home, "list")
    assert json.loads(run(home, "list", "--json"))["kv"] is None


@pytest.mark.parametrize("words", [("--older", "10"), ("--all",)], ids=" ".join)
def test_prune_removes_kv_blocks_except_those_that_may_be_in_use(home, kv_folder, words):
    arguments = ("prune", *words, "--kv-cache", str(kv_folder))
    assert "would remove 0 layers and 1 block of KV cache" in run(home, *arguments, "--dry-run")
    assert len(KvStore(kv_folder).list()) == 2
    assert "removed 0 layers and 1 block of KV cache" in run(home, *arguments)
    assert len(KvStore(kv_folder).list()) == 1


def test_prune_to_a_size_is_about_layers(home, kv_folder):
    run(home, "prune", "--to", "1GB", "--kv-cache", str(kv_folder))
    assert len(KvStore(kv_folder).list()) == 2
