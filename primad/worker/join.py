"""``primad join``: compose a worker and run it until it is stopped.

A worker serves no HTTP, so it does not load those modules: half of its start-up time, and 30 MB of memory.
"""

from __future__ import annotations

from primad.daemon.measuring import OwnProfile
from primad.daemon.pairing_service import pair
from primad.daemon.reporter import Reporter
from primad.daemon.run import own_node, run
from primad.settings.config import Config
from primad.trust.trust import HEAD
from primad.worker.daemon import WorkerDaemon


def join(config: Config, reporter: Reporter, *, code: str | None, pair_at: str | None) -> None:
    """Run a worker until it is stopped; first pair with ``code`` at the device that shows it, at ``pair_at`` if
    given."""
    with own_node(config) as node:
        if code is not None:
            bring = code

            async def bring_code() -> None:
                await pair(node, bring, pair_at, reporter.report_line, HEAD)

            run(bring_code())
        workers: list[WorkerDaemon] = []

        async def main() -> None:
            worker = WorkerDaemon(node, profile=OwnProfile(config, reporter), report_line=reporter.report_line)
            workers.append(worker)
            await worker.run()

        run(main(), lambda: bool(workers) and workers[0].leave())
