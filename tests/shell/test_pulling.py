"""Downloads and deletions in a running head, from a hub on loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from primad.errors import RequestError
from primad.gguf import hub_download
from primad.library.headers import HeaderCache
from primad.library.library import Library, read_library
from primad.library.places import ModelPlace
from primad.library.pull_progress import PullProgress
from primad.library.pulling import HubDownloads
from primad.system import files
from tests.fakes.hub import PATIENCE_S, own_hub
from tests.fakes.model_stores import toy

REPO = "acme/Tiny-GGUF"
LARGE = b"GGUF" + bytes(range(256)) * (3 << 12)
RANGE = hub_download.MIN_RANGE_BYTES


@pytest.fixture
def hub(monkeypatch):
    small = {"Tiny-Q8_0.gguf": LARGE, "Tiny-Q2_K.gguf": b"<html>", "Tiny-F16.gguf": b"GGUF f16"}
    with own_hub(monkeypatch, {REPO: small, "acme/Empty": {"README.md": b""}}) as fake:
        yield fake


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "models"


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await work()

    return asyncio.run(bounded())


async def whole(downloads: HubDownloads, name: str) -> list[PullProgress]:
    return [each async for each in downloads.pull(name)]


def refused(folder, name: str) -> tuple[int, str]:
    with pytest.raises(RequestError) as caught:
        run(lambda: whole(HubDownloads(folder, empty), name))
    return caught.value.status, str(caught.value)


def library_of(*places: ModelPlace) -> Library:
    return read_library(places, HeaderCache(places[0].folder.parent / "library.json"))


def empty() -> Library:
    return Library((), ())


def own(folder) -> ModelPlace:
    return ModelPlace(source="primad", layout="repositories", folder=folder)


@pytest.mark.parametrize("name", [f"hf:{REPO}:Q8_0", f"{REPO}:q8_0", REPO])
def test_a_download_reports_its_progress_until_the_model_is_complete(hub, folder, name):
    progress = run(lambda: whole(HubDownloads(folder, empty), name))
    assert progress[-1] == PullProgress(file="Tiny-Q8_0.gguf", done_bytes=len(LARGE), total_bytes=len(LARGE))
    assert [each.done_bytes for each in progress] == sorted(each.done_bytes for each in progress)
    assert (folder / REPO / "Tiny-Q8_0.gguf").read_bytes() == LARGE
    asked = len(hub.asked)
    assert run(lambda: whole(HubDownloads(folder, empty), name)) == [], "what is there is not fetched again"
    assert len(hub.asked) == asked + 1


def test_callers_share_a_download_that_ends_with_the_last_of_them_and_is_resumed(hub, folder):
    hub.gates["Tiny-Q8_0.gguf"] = gate = threading.Event()

    async def main() -> None:
        downloads = HubDownloads(folder, empty)
        first, second, third = (asyncio.create_task(whole(downloads, REPO)) for _ in range(3))
        await asyncio.to_thread(hub.waits.get, timeout=PATIENCE_S)
        first.cancel()
        gate.set()
        assert (await second)[-1].done_bytes == (await third)[-1].done_bytes == len(LARGE)
        assert hub.given_bytes == len(LARGE)
        (folder / REPO / "Tiny-Q8_0.gguf").unlink()
        hub.after["Tiny-Q8_0.gguf"] = RANGE
        async with aclosing(downloads.pull(REPO)) as last:
            async for progress in last:
                if progress.done_bytes == RANGE:
                    break
        await downloads.close()
        assert not (folder / REPO / "Tiny-Q8_0.gguf").exists()
        hub.after.clear()
        hub.asked.clear()
        await whole(downloads, REPO)
        starts = {int(part[len("bytes=") :].partition("-")[0]) for _, path, part in hub.asked if "resolve" in path}
        assert min(starts) == RANGE, "what came is not fetched again"

    run(main)


def test_a_client_that_arrives_while_a_download_stops_gets_the_next(hub, folder):
    hub.gates["Tiny-Q8_0.gguf"] = gate = threading.Event()

    async def main() -> None:
        downloads = HubDownloads(folder, empty)
        first = asyncio.create_task(whole(downloads, REPO))
        await asyncio.to_thread(hub.waits.get, timeout=PATIENCE_S)
        first.cancel()
        await asyncio.wait([first])
        next_download = asyncio.create_task(whole(downloads, REPO))
        gate.set()
        assert (await next_download)[-1].done_bytes == len(LARGE)

    run(main)


def test_each_refusal_has_a_status_and_a_reason(hub, folder, monkeypatch):
    assert refused(folder, "acme/Nosuch") == (404, "hf:acme/Nosuch: the hub has no such repository, or not for everybody;"
                                              " look at the name, or set HF_TOKEN")  # fmt: skip
    for name, status, reason in (
        ("llama3.2:1b", 400, "is not a model of the hub; give one as in hf:owner/repo"),
        ("acme/Empty", 400, "the repository has no GGUF file"),
        (f"{REPO}:Q3_K", 400, "the repository has"),
        (f"{REPO}:Q2_K", 400, "is not a GGUF file"),
    ):
        assert refused(folder, name)[0] == status
        assert reason in refused(folder, name)[1]
    with monkeypatch.context() as patched:
        patched.setattr(files, "reserve_bytes", lambda _: 1 << 62)
        status, reason = refused(folder, REPO)
        assert (status, "bytes of disk are free" in reason) == (400, True)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    status, reason = refused(folder, REPO)
    assert (status, "the hub cannot be reached" in reason) == (503, True)


def test_the_room_for_downloads_excludes_the_disk_reserve(folder, monkeypatch):
    usage = type("Usage", (), {"total": 100 << 30, "free": 40 << 30})
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage)
    assert HubDownloads(folder, empty).free_bytes() == (40 << 30) - files.reserve_bytes(100 << 30)
    usage.free = 1
    assert HubDownloads(folder, empty).free_bytes() == 0


def delete(folder, library: Library, name: str) -> None:
    model = library.find(name)
    assert model is not None
    run(lambda: HubDownloads(folder, lambda: library).delete(model))


def test_deleting_removes_all_parts_of_a_model_except_shared_files(folder):
    place = folder / REPO
    parts = [toy(place / f"Tiny-Q8_0-0000{number}-of-00002.gguf", str(number)) for number in (1, 2)]
    other = toy(place / "Tiny-Q4_0.gguf", "other")
    projector = toy(place / "mmproj-Tiny-F16.gguf", "images", general__type="mmproj")
    delete(folder, library_of(own(folder)), "Tiny-Q8_0")
    assert not any(part.exists() for part in parts)
    assert other.exists()
    assert projector.exists(), "the other model has it too"
    delete(folder, library_of(own(folder)), "Tiny-Q4_0")
    assert not place.exists()


def test_models_of_other_programs_and_folders_are_not_deleted(folder, tmp_path):
    studio = toy(tmp_path / "studio" / "org" / "repo" / "x-Q4_0.gguf", "studio")
    loose = toy(tmp_path / "mine" / "loose.gguf", "mine")
    by_hand = toy(folder / "hand.gguf", "by hand")
    places = (
        ModelPlace(source="folder", layout="folder", folder=tmp_path / "mine", named=True),
        own(folder),
        ModelPlace(source="LM Studio", layout="repositories", folder=tmp_path / "studio"),
    )
    library = library_of(*places)
    for name, program in (("x-Q4_0", "LM Studio"), ("loose", str(tmp_path / "mine")), ("hand", "primad")):
        with pytest.raises(RequestError, match="was not downloaded by primad") as caught:
            delete(folder, library, name)
        assert caught.value.status == 400
        assert program in str(caught.value)
    assert all(each.exists() for each in (studio, loose, by_hand))
