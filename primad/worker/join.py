"""``primad join``: compose a worker and run it until it is stopped.

A worker serves no HTTP, and so does not load what that takes: half of its start, and 30 MB of memory.
"""

from __future__ import annotations

from primad.daemon.pairing_service import pair
from primad.daemon.reporter import Reporter
from primad.daemon.run import home_place, own_home, profile_held, profile_now, run
from primad.network.sockets import raise_descriptor_limit
from primad.settings.config import Config
from primad.system.allocator import keep_little_freed
from primad.trust.identity import load_identity
from primad.trust.trust import TrustStore
from primad.worker.daemon import WorkerDaemon


def join(config: Config, reporter: Reporter, *, code: str | None, pair_at: str | None) -> None:
    """Run a worker until it is stopped; first bring ``code`` to the device that shows it, at ``pair_at`` if given."""
    with own_home(config):
        raise_descriptor_limit()
        keep_little_freed()
        identity = load_identity(config.home)
        trust = TrustStore(config.home, identity)
        if code is not None:
            bring = code

            async def bring_code() -> None:
                await pair(config, identity, trust, bring, pair_at, reporter.say)

            run(bring_code())
        place = home_place(config)
        profile_held(config, reporter)
        workers: list[WorkerDaemon] = []

        async def main() -> None:
            worker = WorkerDaemon(
                config=config,
                place=place,
                identity=identity,
                trust=trust,
                profile=lambda name: profile_now(config, name),
                say=reporter.say,
            )
            workers.append(worker)
            await worker.run()

        run(main(), lambda: bool(workers) and workers[0].leave())
