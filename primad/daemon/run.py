"""What head and worker share at their start and end: the home folder, the profile, and an end within two seconds of
Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from halda import DeviceProfile
from primad.daemon.layer_files import Workspace
from primad.daemon.measuring import OwnProfile, measuring
from primad.daemon.node import Node
from primad.daemon.reporter import Reporter
from primad.engine.build import build_id
from primad.errors import NotNowError, PrimadError, Stopped
from primad.kv.store import KvStore
from primad.layers.cache import LayerCache
from primad.network import admin, local_heads
from primad.network.sockets import raise_descriptor_limit
from primad.profiler.device import check_chosen_gpu, is_profiled, profile_device
from primad.profiler.effort import QUICK, Effort
from primad.settings.config import Config, open_home, open_kv_cache, usage_folder
from primad.settings.quantities import show_bytes
from primad.system.allocator import keep_little_freed, keep_what_is_loaded
from primad.system.files import locked
from primad.trust.identity import load_identity
from primad.trust.trust import TrustStore

logger = logging.getLogger(__name__)


def run(main: Coroutine[Any, Any, None], ask_to_end: Callable[[], bool] | None = None) -> None:
    """Run a daemon to its end. Raises its ``PrimadError``; a signal ends it in order and raises ``Stopped``.

    At a signal ``ask_to_end`` is tried first: it gives the daemon time to hand its work over. It returns False if it
    was called before, so that a second signal ends the daemon immediately.
    """
    keep_what_is_loaded()
    loop_factory = asyncio.SelectorEventLoop if sys.platform == "win32" else None  # ZeroMQ needs a selector loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            runner.run(_until_signalled(main, ask_to_end))
        except KeyboardInterrupt as exc:
            raise Stopped from exc


async def _until_signalled(main: Coroutine[Any, Any, None], ask_to_end: Callable[[], bool] | None) -> None:
    task = asyncio.create_task(main)
    loop = asyncio.get_running_loop()
    signalled = False

    def stop() -> None:
        nonlocal signalled
        signalled = True
        if ask_to_end is None or not ask_to_end():
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C arrives as KeyboardInterrupt
            loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if signalled:
            raise Stopped from None
        raise
    except BaseExceptionGroup as failures:
        raise _primad_error(failures) from failures
    if signalled:
        raise Stopped


def _primad_error(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    ours, others = failures.split(PrimadError)
    if others is not None or ours is None:
        return failures
    first: BaseException = ours
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first


class HomeTakenError(NotNowError):
    """Another daemon runs with this home folder."""


@contextlib.contextmanager
def own_home(config: Config) -> Iterator[None]:
    """Lock the home folder, which belongs to one daemon at a time."""
    open_home(config)
    path = config.home / "daemon.lock"
    taken = HomeTakenError(
        f"--home {config.home}: another primad runs with this folder; stop it or give this one its own --home"
    )
    with locked(path, path, taken):
        yield


@contextlib.contextmanager
def own_node(config: Config) -> Iterator[Node]:
    """Yield this device for one daemon, which has the home folder to itself."""
    with own_home(config):
        open_kv_cache(config)
        check_chosen_gpu(config.home, config.threads, config.limits.gpu)
        raise_descriptor_limit()
        keep_little_freed()
        identity = load_identity(config.home)
        trust = TrustStore(config.home, identity)
        try:
            yield Node(config=config, workspace=home_place(config), identity=identity, trust=trust)
        finally:
            _forget_blocks(config)


def home_place(config: Config) -> Workspace:
    """Return the workspace in the home folder, after removing what a killed daemon left there."""
    for path in config.run.glob("window-*.gguf"):
        path.unlink(missing_ok=True)
    for path in config.run.glob("ring-*.log"):
        path.unlink(missing_ok=True)
    for path in (admin.note_path(config.home), local_heads.home_note(config.home)):
        path.unlink(missing_ok=True)
    _forget_blocks(config)
    kv = KvStore(config.kv_folder, None if config.kv_cache is None else config.kv_cache_limit_bytes)
    if lacking := kv.lacking():
        limit = show_bytes(config.kv_cache_limit_bytes)
        logger.warning(
            "--kv-cache %s: not all of %s fit there: %s; prompts for which there is no room are computed again; make room, "
            "or give a smaller --kv-cache-limit",
            *(config.kv_cache, limit, lacking),
        )
    return Workspace(
        cache=LayerCache(config.layers, config.limits.disk_bytes),
        kv=kv,
        run=config.run,
        usage=usage_folder(config.home),
        build=build_id(),
    )


def _forget_blocks(config: Config) -> None:
    """Remove KV cache, which must not outlive its daemon, unless it is in the owner's cache."""
    if config.kv_cache is None:
        shutil.rmtree(config.kv_folder, ignore_errors=True)  # blocks that cannot be removed are never used


def profile(config: Config, reporter: Reporter, *, again: bool = False, effort: Effort = QUICK) -> DeviceProfile:
    """Return the profile of this device, measured with a progress bar unless that was done before (``again``: in any
    case).

    While a daemon runs here, quick figures are sufficient: the daemon measures more when the machine is idle.
    """
    open_home(config)
    own = OwnProfile(config, reporter)
    if not again and is_profiled(config.home, config.threads, effort):
        return own.now(config.name)
    try:
        with own_home(config), measuring(config, reporter, effort) as advance:
            return profile_device(
                config.name, config.home, config.threads, advance, again=again, limits=config.limits, effort=effort
            )
    except HomeTakenError:
        if again or not own.is_known:
            raise
        return own.now(config.name)
