"""Layers downloaded from a hub on loopback: the header alone, interrupted ranges, changed files, other hubs."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
import zmq.asyncio

from primad.certify.first import certified
from primad.cli.hub import served_model
from primad.daemon.bring import bring_layers
from primad.errors import ClusterError, DiskError, ModelError
from primad.gguf import hub_ranges
from primad.gguf.architectures.table import NotCutError
from primad.gguf.digests import LayerDigests
from primad.gguf.hub import HubName, header_of, kept_models
from primad.gguf.hub_fetch import remove
from primad.gguf.hub_ranges import HubError, HubRanges, own_hubs
from primad.gguf.layers import chunk_count, cut_layer
from primad.gguf.model import open_model
from primad.gguf.origins import RemoteFile
from primad.gguf.ranged import RangedModel
from primad.gguf.ranged_cutter import RangedCutter
from primad.gguf.windows import ModelCutter
from primad.head.members.core import StageError
from primad.head.rings.loads import learn_downloaded
from primad.layers.cache import LayerCache
from primad.layers.download import download_layers
from primad.layers.server import LayerServer
from primad.layers.source_link import Transfers
from primad.layers.sources import HubRoutes, WantedLayer
from primad.layers.whole import compare, is_compared
from primad.network.gate import Gate
from primad.network.messages import DownloadedLayer
from primad.settings.config import load_config
from primad.settings.timings import LayerTimings
from primad.trust.identity import new_identity
from tests.fakes.hub import PATIENCE_S, FakeHub, own_hub, serving
from tests.fakes.layers import here, missing
from tools import synth

REPO, FILE = "acme/Tiny-GGUF", "Tiny-Q8_0.gguf"
NAME = HubName("acme", "Tiny-GGUF")
TIMINGS = LayerTimings(hub_connect_timeout_s=PATIENCE_S, hub_silence_timeout_s=PATIENCE_S, hub_again_s=0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / FILE
    synth.write_model(path, architecture="llama")
    return path


@pytest.fixture
def hub(path, monkeypatch):
    with own_hub(monkeypatch, {REPO: {FILE: path.read_bytes()}}) as fake:
        yield fake


@pytest.fixture
def cutter(hub, tmp_path):
    model = header_of(NAME, tmp_path / "models")
    digests = LayerDigests(model.header, tmp_path / "digests.json")
    return RangedCutter(model.header, digests, files=model.files, parts=model.parts, hubs=own_hubs())


def wanted(cutter: RangedCutter, *layers: int) -> list[WantedLayer]:
    """``layers`` as windows of a new plan name them."""
    refs = [cutter.ref(layer) for layer in layers]
    origins = {origin.layer: origin for origin in cutter.origins_of([refs])}
    return [WantedLayer(ref, origins[ref.digest]) for ref in refs]


async def download(cutter: RangedCutter, cache: LayerCache, layers: list[WantedLayer]) -> dict[str, tuple[str, bytes]]:
    """Download ``layers``; returns the digest and tree of each, by the name of its origin."""
    found: dict[str, tuple[str, bytes]] = {}
    transfers = Transfers(context=None, identity=None, timings=TIMINGS)
    hub_routes = HubRoutes(files=cutter.files, token=None, head=None, transfers=transfers)
    async with asyncio.timeout(PATIENCE_S):
        await download_layers(
            hub_routes, layers, cache, lambda _: None, lambda name, *rest: found.update({name: tuple(rest)})
        )
    return found


def test_a_header_fetched_alone_equals_that_of_the_file_and_is_fetched_once(hub, path, tmp_path):
    model, file = header_of(NAME, tmp_path), open_model(path)
    assert model.header.values == file.values
    where = {name: (each.type, each.shape, each.bytes) for name, each in file.tensors.items()}
    assert {name: (each.type, each.shape, each.bytes) for name, each in model.header.tensors.items()} == where
    asked = len(hub.asked)
    assert header_of(NAME, tmp_path) == model
    assert len(hub.asked) == asked
    assert [(str(each.name), each.whole) for each in kept_models(tmp_path)] == [(f"hf:{REPO}:Q8_0", False)]
    assert [str(each.name) for each in remove(NAME, tmp_path)] == [f"hf:{REPO}:Q8_0"]
    assert not NAME.place(tmp_path).exists()


def test_a_hub_without_ranges_or_with_a_different_file_supplies_no_header(hub, tmp_path):
    hub.ranges = False
    with pytest.raises(HubError, match="gives no byte ranges"):
        header_of(NAME, tmp_path)
    hub.ranges = True
    hub.stated[FILE] = "0" * 64
    with pytest.raises(HubError, match="has another file"):
        header_of(NAME, tmp_path)
    assert not kept_models(tmp_path)


async def test_downloaded_layers_equal_those_cut_out_of_the_file(hub, path, cutter, tmp_path):
    hub.cut[FILE] = 100
    hub.statuses += [503, 429, 500]
    found = await download(cutter, LayerCache(tmp_path / "cache"), wanted(cutter, 0, 1, 5))
    file = open_model(path)
    assert {digest for digest, _ in found.values()} == {cut_layer(file, layer).ref().digest for layer in (0, 1, 5)}
    assert not hub.cut
    assert not hub.statuses


async def test_an_unknown_architecture_is_certified_by_its_header_and_fetched_by_layer(monkeypatch, tmp_path):
    path = tmp_path / FILE
    synth.write_model(path, architecture="bloom", width=256)
    config = load_config({"home": tmp_path / "home"}, {})
    with own_hub(monkeypatch, {REPO: {FILE: path.read_bytes()}}) as hub:
        found = served_model(Path(str(NAME)), config, whole=False, several=False)
        assert isinstance(found, RangedModel)
        assert hub.given_bytes < 0.5 * path.stat().st_size
        asked = len(hub.asked)
        assert served_model(Path(str(NAME)), config, whole=False, several=False) == found
        assert len(hub.asked) == asked, "nor is it tried again"
        header, why = certified(found.header, config.home, pytest.fail)
        assert not why
        digests = LayerDigests(header, tmp_path / "digests.json")
        cutter = RangedCutter(header, digests, files=found.files, parts=found.parts, hubs=own_hubs())
        for name, (_, tree) in (
            await download(cutter, LayerCache(tmp_path / "cache"), wanted(cutter, *range(9)))
        ).items():
            cutter.learn(name, tree)
        file = ModelCutter(replace(open_model(path), derived=header.derived))
        for first, last in ((0, 3), (3, 8)):
            assert cutter.spec(0, first, last) == file.spec(0, first, last)


def test_an_uncertified_architecture_is_fetched_whole_for_one_device_with_the_reason(monkeypatch, tmp_path, capsys):
    path, config = tmp_path / FILE, load_config({"home": tmp_path / "home"}, {})
    synth.write_model(path, architecture="dream", width=256)
    with own_hub(monkeypatch, {REPO: {FILE: path.read_bytes()}}) as hub:
        with pytest.raises(NotCutError, match="depend on later ones"):
            served_model(Path(str(NAME)), config, whole=False, several=True)
        assert hub.given_bytes < 0.5 * path.stat().st_size
        found = served_model(Path(str(NAME)), config, whole=False, several=False)
    assert found.read_bytes() == path.read_bytes()
    printed = " ".join(capsys.readouterr().err.split())
    assert "depend on later ones" in printed
    assert "the whole file is fetched" in printed


async def test_a_model_with_all_layers_is_compared_with_the_hash_that_the_hub_states(hub, cutter, tmp_path):
    cache, done = LayerCache(tmp_path / "cache"), []
    first, *others = cutter.layers_of_all

    async def have(*layers):
        for name, (_, tree) in (await download(cutter, cache, wanted(cutter, *layers))).items():
            cutter.learn(name, tree)

    await have(*others)
    assert not compare(cutter, cache, lambda *reported: done.append(reported))
    assert not done, "not all of it is here"
    await have(first)
    path = cache.path(cutter.ref(first).digest)
    right = path.read_bytes()
    path.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    with pytest.raises(ModelError, match="not the file that the hub states"):
        compare(cutter, cache, lambda *reported: done.append(reported))
    assert not cache.layers()
    await have(first, *others)
    assert not is_compared(cutter)
    assert compare(cutter, cache, lambda *reported: done.append(reported))
    size = cutter.files[0].size_bytes
    assert done[-1] == (size, size)
    assert is_compared(cutter)


async def test_a_downloaded_layer_is_not_downloaded_again_and_then_known_by_its_digest(hub, cutter, tmp_path):
    cache = LayerCache(tmp_path / "cache")
    (layer,) = wanted(cutter, 2)
    assert not layer.is_hashed
    found = await download(cutter, cache, [layer])
    digest, tree = found[layer.origin.name]
    assert cutter.learn(layer.origin.name, tree) is None
    (layer,) = wanted(cutter, 2)
    assert layer.is_hashed
    assert layer.ref.digest == digest
    assert cache.has(layer.ref)


async def test_a_layer_with_another_digest_than_before_is_refused_and_not_saved(cutter, tmp_path):
    cache = LayerCache(tmp_path / "cache")
    (layer,) = wanted(cutter, 3)
    cutter.learn(layer.origin.name, bytes(32 * chunk_count(layer.ref.size_bytes)))
    with pytest.raises(ClusterError, match="another device fetched other bytes"):
        await download(cutter, cache, wanted(cutter, 3))
    assert not cache.layers()
    assert not cache.partial_bytes()


def test_a_worker_that_reports_other_bytes_of_a_layer_ends_the_ring_by_name(cutter):
    (layer,) = wanted(cutter, 4)
    size = 32 * chunk_count(layer.ref.size_bytes)

    def printed(name: str, tree: bytes) -> None:
        learn_downloaded(cutter, {"lap": SimpleNamespace(downloaded=[DownloadedLayer(name, tree)])})

    printed(layer.origin.name, bytes(size))
    printed(layer.origin.name, bytes(size))
    for name, tree, replies in (
        (layer.origin.name, b"\1" * size, "other bytes for layer"),
        (layer.origin.name, bytes(size + 1), "has no layer of the origin"),
        ("0" * 64, bytes(size), "has no layer of the origin"),
    ):
        with pytest.raises(StageError, match=rf"^lap: .*{replies}"):
            printed(name, tree)


async def bring(
    cutter: RangedCutter, cache: LayerCache, layers: list[WantedLayer], *neighbours: LayerCache
) -> dict[str, tuple[str, bytes]]:
    """Bring ``layers`` to a worker whose hub files are elsewhere; ``neighbours`` may have some. Returns the same as
    ``download``.
    """
    identity, found = new_identity(), dict[str, tuple[str, bytes]]()

    async def once(context: zmq.asyncio.Context, stack: AsyncExitStack) -> None:
        sources = []
        for device, find in [("head", cutter.source), *(("lap", each.reader) for each in neighbours)]:
            own = new_identity()
            server = LayerServer(context, "127.0.0.1", own, find)
            stack.callback(asyncio.create_task(server.run()).cancel)
            sources.append(here(device, own.public, server.port))
        files = [RemoteFile(f"https://{file.sha256}.test/", file.size_bytes, file.sha256) for file in cutter.files]
        transfers = Transfers(context=context, identity=identity, timings=TIMINGS)
        hub_routes = HubRoutes(files=files, token=None, head=sources[0], transfers=transfers)
        refs, origins = [layer.ref for layer in layers], [layer.origin for layer in layers]
        named = lambda name, *rest: found.update({name: tuple(rest)})  # noqa: E731
        await bring_layers(cache, hub_routes, sources, origins, refs, lambda _: None, named)

    context = zmq.asyncio.Context()
    try:
        async with asyncio.timeout(PATIENCE_S), Gate(context, lambda _: True), AsyncExitStack() as stack:
            await once(context, stack)
    finally:
        context.destroy(linger=0)
    return found


async def test_without_a_hub_neighbours_send_downloaded_layers_and_the_head_relays_the_others(
    hub, cutter, path, tmp_path
):
    neighbour, cache, file = LayerCache(tmp_path / "neighbour"), LayerCache(tmp_path / "own"), open_model(path)
    for name, (_, tree) in (await download(cutter, neighbour, wanted(cutter, 1))).items():
        cutter.learn(name, tree)
    asked = len(hub.asked)
    assert not await bring(cutter, cache, wanted(cutter, 1), neighbour)
    assert len(hub.asked) == asked
    found = await bring(cutter, cache, wanted(cutter, 0, 1))
    assert len(hub.asked) > asked
    assert [digest for digest, _ in found.values()] == [cut_layer(file, 0).ref().digest]
    assert not missing(cache, [cut_layer(file, layer).ref() for layer in (0, 1)])


async def test_a_layer_that_nobody_sends_is_an_error_with_all_sources(hub, cutter, tmp_path):
    hub.repositories[REPO].clear()
    with pytest.raises(
        ClusterError, match=r"^layers cannot be fetched: the hub: .* owner .*; head: cannot pass it on: "
    ):
        await bring(cutter, LayerCache(tmp_path / "cache"), wanted(cutter, 0))


async def test_a_file_that_changed_during_the_download_is_refused(hub, cutter, tmp_path):
    hub.repositories[REPO][FILE] = hub.repositories[REPO][FILE][:-1] + b"?"
    with pytest.raises(ClusterError, match=r"the hub: .* has another file there by now"):
        await download(cutter, LayerCache(tmp_path / "cache"), wanted(cutter, 0))


def test_a_range_that_is_too_slow_is_given_up(hub, cutter, monkeypatch):
    monkeypatch.setattr(hub_ranges, "MAX_RANGE_S", -1.0)
    with pytest.raises(HubError, match="it takes too long") as caught:
        HubRanges(own_hubs()).read(cutter.files[0], 0, 4)
    assert caught.value.again


async def test_a_disk_without_room_is_an_error_before_the_download(hub, cutter, tmp_path):
    asked = len(hub.asked)
    with pytest.raises(DiskError, match="do not fit"):
        await download(cutter, LayerCache(tmp_path / "cache", 1000), wanted(cutter, 0))
    assert len(hub.asked) == asked


def test_the_token_is_not_sent_to_a_redirect_target(hub, cutter, path):
    with serving(FakeHub(hub.repositories)) as other:
        hub.elsewhere = other.endpoint
        reader = HubRanges(own_hubs(), "secret", connect_timeout_s=PATIENCE_S, silence_timeout_s=PATIENCE_S)
        data = path.read_bytes()
        assert reader.read(cutter.files[0], 10, 90) == data[10:100]
        assert reader.read(cutter.files[0], 0, 4) == data[:4]
        assert hub.tokens[-1] == "Bearer secret"
        assert other.tokens == ["", ""]
        reader.close()


def resolve_to(monkeypatch, address: str) -> None:
    """Resolve every name to ``address``."""
    monkeypatch.setattr(hub_ranges.socket, "getaddrinfo", lambda host, port, type: [(0, 0, 0, "", (address, port))])


@pytest.mark.parametrize(
    ("hub_url", "there", "address", "replies"),
    [
        ("http://hub.test", "http://hub.test/f", "93.184.215.14", "without encryption"),
        ("https://hub.test", "https://cdn.test/f", "10.0.0.1", "cdn.test, which is not public"),
        ("https://hub.test", "https://cdn.test/f", "127.0.0.1", "which is not public"),
        ("https://hub.test", "https://cdn.test/f", "169.254.169.254", "which is not public"),
        ("https://hub.test", "https://cdn.test/f", "fd00::1", "which is not public"),
        ("https://hub.test", "https://cdn.test/f", "64:ff9b::c0a8:101", "which is not public"),
        ("https://hub.test", "https://cdn.test/f", "2002:c0a8:101::1", "which is not public"),
    ],
)
def test_no_connection_goes_to_private_addresses_or_without_encryption(monkeypatch, hub_url, there, address, replies):
    resolve_to(monkeypatch, address)
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("a connection was made"))
    file = RemoteFile(f"{hub_url}/f", 10, "0" * 64)
    reader = HubRanges({hub_url})
    reader._moved[file.url] = there
    with pytest.raises(HubError, match=replies) as caught:
        reader.read(file, 0, 1)
    assert not caught.value.again


def test_a_redirect_to_an_unencrypted_url_is_refused(monkeypatch):
    file = RemoteFile("https://hub.test/f", 10, "0" * 64)
    with pytest.raises(HubError, match="not encrypted"):
        HubRanges({"https://hub.test"})._judge(file, "http://cdn.test/f")


def test_only_hubs_of_the_owner_are_contacted(hub):
    with pytest.raises(HubError, match="no hub of this device's owner"):
        HubRanges(own_hubs()).read(RemoteFile("https://elsewhere.test/f", 10, "0" * 64), 0, 1)
    assert not hub.asked
