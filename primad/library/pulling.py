"""Downloads models from the hub into a running head's own folder, and deletes them there: ``primad pull`` and ``rm``
for concurrent callers.

Callers that want the same model share one download, which stops when the last of them leaves; its data is kept, and the
next download resumes it. Models of other programs are only read, so they are never deleted.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from primad.errors import ConfigError, NotNowError, PrimadError, RequestError
from primad.gguf.hub import PREFIX, HubName, headers_in, hub_name
from primad.gguf.hub_download import DownloadStopped, StopDownload
from primad.gguf.hub_fetch import fetch, remove_files
from primad.gguf.hub_library import NoRepositoryError
from primad.library.library import Library, LibraryModel
from primad.library.pull_progress import PullProgress
from primad.system.files import reserve_bytes


class HubDownloads:
    """Downloads into ``folder``, which is part of what ``library`` reads. ``close`` stops all downloads."""

    def __init__(self, folder: Path, library: Callable[[], Library]) -> None:
        self._folder, self._library = folder, library
        self._running: dict[HubName, _Download] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def free_bytes(self) -> int | None:
        """Return the bytes that downloads may take; None if unknown."""
        there = next((each for each in (self._folder, *self._folder.parents) if each.exists()), None)
        try:
            usage = shutil.disk_usage(there or self._folder)
        except OSError:
            return None
        return max(0, usage.free - reserve_bytes(usage.total))

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """Download the model ``name`` of the hub, with or without the prefix ``hf:``; close the generator to leave.

        Raises ``RequestError``: 404 for an unknown repository, 503 for a hub that cannot be reached, 400 otherwise.
        """
        try:
            asked = hub_name(name if name.startswith(PREFIX) else PREFIX + name)
        except ConfigError as exc:
            raise _refusal(exc) from exc
        assert asked is not None
        running = self._running.get(asked)
        if running is None:
            running = self._running[asked] = _Download()
            task = asyncio.create_task(self._run(asked, running))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        news = asyncio.Event()
        running.listeners.append(news)
        try:
            while not running.is_done:
                await news.wait()
                news.clear()
                if running.progress is not None:
                    yield running.progress
            if running.error is not None:
                raise running.error
        finally:
            running.listeners.remove(news)
            if not running.listeners:
                running.stop.set()
                if self._running.get(asked) is running:
                    del self._running[asked]

    async def delete(self, model: LibraryModel) -> None:
        """Delete the downloaded files of ``model``, and its projector if no other model uses it.

        Raises ``RequestError`` for a model that another program or a folder of the owner keeps.
        """
        parts = _below(self._folder, model.files[0])
        if parts is None or not all(_below(self._folder, each) for each in model.files):
            where = " and ".join(each for each in model.sources if each != "folder") or str(model.files[0].parent)
            raise RequestError(
                f"{model.name} was not downloaded by primad: it is kept by {where}; delete it there", param="model"
            )
        library = await asyncio.to_thread(self._library)
        others = {each.projector for each in library.models if each.files != model.files}
        files = [*model.files]
        if model.projector is not None and model.projector not in others and _below(self._folder, model.projector):
            files.append(model.projector)
        name = HubName(*parts)
        for header in headers_in(name.place(self._folder)):
            if header.name.quantisation.lower() == model.quantisation.lower():
                files += header.files
        async with self._turn(name):
            try:
                await asyncio.to_thread(remove_files, name, self._folder, files)
            except PrimadError as exc:
                raise _refusal(exc) from exc

    async def close(self) -> None:
        """Stop all downloads, and wait until they have ended."""
        for running in self._running.values():
            running.stop.set()
        await asyncio.gather(*self._tasks)

    async def _run(self, name: HubName, running: _Download) -> None:
        loop = asyncio.get_running_loop()

        def advance(what: str, done: int, total: int) -> None:
            progress = PullProgress(file=what, done_bytes=done, total_bytes=total)
            loop.call_soon_threadsafe(running.report, progress)

        try:
            async with self._turn(name):
                await asyncio.to_thread(partial(fetch, name, self._folder, advance, running.stop))
        except DownloadStopped:
            running.error = RequestError(f"{name}: the download was stopped; another one resumes it", status=503)
        except PrimadError as exc:
            running.error = _refusal(exc)
        finally:
            running.is_done = True
            running.tell()
            if self._running.get(name) is running:
                del self._running[name]

    def _turn(self, name: HubName) -> asyncio.Lock:
        """Return the lock that permits one download or deletion at a time in a repository."""
        return self._turns.setdefault(name.repository, asyncio.Lock())


class _Download:
    """A running download: its stop flag, its latest progress, its error and its listeners."""

    def __init__(self) -> None:
        self.stop = StopDownload()
        self.listeners: list[asyncio.Event] = []
        self.progress: PullProgress | None = None
        self.error: RequestError | None = None
        self.is_done = False

    def report(self, progress: PullProgress) -> None:
        """Record progress and notify listeners."""
        self.progress = progress
        self.tell()

    def tell(self) -> None:
        """Notify all listeners."""
        for each in self.listeners:
            each.set()


def _below(folder: Path, file: Path) -> tuple[str, str] | None:
    """Return owner and repository of a downloaded ``file``; None if it is not in ``folder`` where downloads are."""
    parts = file.relative_to(folder).parts if file.is_relative_to(folder) else ()
    return (parts[0], parts[1]) if len(parts) > 2 and ".." not in parts else None


def _refusal(exc: PrimadError) -> RequestError:
    """Return ``exc`` as the error of a request."""
    match exc:
        case NoRepositoryError():
            return RequestError(str(exc), status=404, code="model_not_found", param="model")
        case NotNowError():
            return RequestError(str(exc), status=503)
        case _:
            return RequestError(str(exc), param="model")
