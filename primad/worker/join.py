"""``primad join``: compose a worker and run it until it is stopped.

A worker without ``--api`` serves no HTTP, so it does not load those modules: half of its start-up time, and 30 MB of
memory.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from primad.daemon.measuring import OwnProfile
from primad.daemon.pairing_service import pair
from primad.daemon.reporter import Reporter
from primad.daemon.run import own_node, run
from primad.relay.place import ApiPlace
from primad.settings.config import Config
from primad.trust.trust import HEAD
from primad.worker.daemon import WorkerDaemon


def join(config: Config, reporter: Reporter, *, code: str | None, pair_at: str | None, api: ApiPlace | None) -> None:
    """Run a worker until it is stopped; first pair with ``code`` at the device that shows it, at ``pair_at`` if
    given. At ``api`` it takes requests for its head."""
    with own_node(config) as node:
        relayed = None
        if api is not None:
            from primad.relay.api import RelayedApi

            relayed = RelayedApi(node.identity, config.name, api, node.timings.api)
        if code is not None:
            bring = code

            async def bring_code() -> None:
                await pair(node, bring, pair_at, reporter.report_line, HEAD)

            run(bring_code())
        workers: list[WorkerDaemon] = []

        async def main() -> None:
            profile = OwnProfile(config, reporter)
            worker = WorkerDaemon(node, profile=profile, report_line=reporter.report_line, relay=relayed)
            workers.append(worker)
            async with AsyncExitStack() as stack:
                if relayed is not None:
                    await stack.enter_async_context(relayed.serving())
                await worker.run()

        run(main(), lambda: bool(workers) and workers[0].leave())
