"""Feed hostile files to the picture process for some seconds: each is accepted or refused, and none may end the process.

    .venv/bin/python tools/fuzz_pictures.py --seconds 600 --seed 7 [--sounds]

A file that ends the process, or exceeds its time limit, is written to ``--findings``, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.lab.fuzzed_pictures import fuzz, tiny_service
from tools.lab.hostile_media import GOOD, GOOD_SOUNDS, cases


async def _main(arguments: argparse.Namespace) -> int:
    until, own = time.monotonic() + arguments.seconds, psutil.Process()
    with tempfile.TemporaryDirectory() as folder:
        service = tiny_service(Path(folder), hears=arguments.sounds)
        before = own.memory_info().rss
        endless = cases(arguments.seed, GOOD_SOUNDS if arguments.sounds else GOOD)
        files = itertools.takewhile(lambda _: time.monotonic() < until, endless)
        found = await fuzz(service, files)
        await service.close()
    grown = own.memory_info().rss - before
    print(f"seed {arguments.seed}: {found.accepted.total()} accepted, {found.refused.total()} refused")
    for name, count in [*found.accepted.most_common(12), *found.refused.most_common(20)]:
        print(f"{count:8d}  {name}")
    print(f"this process grew by {grown >> 20} MB; the picture process held up to {found.child_bytes >> 20} MB")
    arguments.findings.mkdir(parents=True, exist_ok=True)
    for number, (done, data, error) in enumerate(found.findings):
        path = arguments.findings / f"{arguments.seed}-{number}"
        path.write_bytes(data)
        print(f"{path} ({done}): {error}")
    return 1 if found.findings else 0


def main() -> int:
    """Read the command line and fuzz."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sounds", action="store_true")
    parser.add_argument("--findings", type=Path, default=Path(tempfile.gettempdir()) / "primad-fuzz")
    return asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
