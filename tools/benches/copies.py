"""``copies``: the cost of replicating the KV cache of a request while it grows.

Two rings of a head and two workers, real daemons with the same windows, one with replicas and one without, are loaded
before the first run and take turns. Besides tokens/s: how many tokens have not been replicated yet.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from tools.lab.figures import Compared
from tools.lab.harness import Bench, Run, in_thread, threads_flag
from tools.lab.http_servers import HttpServer
from tools.lab.local_ring import even_windows
from tools.lab.plain_llama import PROMPT

DEVICES: Final = 3
PROMPT_TOKENS: Final = 40
TOKENS: Final = 256
RINGS: Final[Mapping[str, tuple[str, ...]]] = {"without": ("--kv-backup", "off"), "with": ("--kv-backup", "16")}
AT_LEAST: Final = 0.98


async def measure(run: Run, model: Path) -> None:
    """Measure both rings in turn."""
    windows = even_windows(len(model_profile(open_model(model)).layers), DEVICES) or ()
    serving = ["--extra-buffers", "off", "--context", "1024", "--sequences", "1", "--rounds", "1"]
    serving += ["--windows", ",".join(map(str, windows))]
    every = ("--threads", str(run.options.threads))

    def ask(head: HttpServer, _: int) -> tuple[float, int]:
        times = head.stream(PROMPT[:PROMPT_TOKENS], TOKENS, ignore_eos=True)
        kept = head.status()["kv"]  # None without replication
        behind = 0 if kept is None else kept["lag_tokens"]
        time.sleep(1)  # so that the latest blocks are replicated and forgotten before the other ring's turn
        return (len(times) - 1) / (times[-1] - times[0]), behind

    heads = {ring: run.head(model, DEVICES, *serving, *options, every=every) for ring, options in RINGS.items()}
    turns = await run.alternate({ring: in_thread(partial(ask, head)) for ring, head in heads.items()})
    without, copied = ([rate for rate, _ in its] for its in turns.values())
    note = f"at most {max(behind for _, behind in turns['with'])} tokens behind after a response"
    run.add(
        Compared(
            model=model.stem,
            case="copies",
            devices=DEVICES,
            what="tokens/s with the KV cache replicated, of without",
            found=copied,
            beside=without,
            at_least=AT_LEAST,
            note=note,
        )
    )


BENCH: Final = Bench(
    help="the cost of replicating the KV cache of requests",
    measure=measure,
    rounds=9,
    quick={"rounds": 3},
    flags=(threads_flag(1),),
)
