"""A model in less memory than its size: the same text, nothing read twice, no process killed or swapped out.

``tools/bench memory`` compares reads with the plan. A machine short of memory rightly makes the process give up
resident layers, and read up to the whole model per token.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from halda import ModelProfile, Solution, solve
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.planning.question import default_workload
from primad.ring.messages import Sampled, Status
from primad.system.memory import memory
from tests.fakes.neighbour import Neighbour
from tests.fakes.profile import PROFILE
from tools.lab import missing
from tools.lab.cgroups import here
from tools.lab.local_ring import LocalRing
from tools.lab.memory import Counters, LimitedGroup
from tools.synth import write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("started_by_a_shell"),  # memory that forks share is not counted in their group
]

LAYERS, MORE_LAYERS = 40, 64
ROWS = 32
CONTEXT = 1280
LONG = [(i * 37) % 300 + 10 for i in range(70)]
"""Two whole chunks and part of another."""
SHORT = LONG[:12]
LONG_TOKENS, SHORT_TOKENS = 2, 16
FEW_TOKENS = 8
"""Enough, as reads per token are steady while no other program takes memory."""
NEIGHBOUR_SHARE = 0.2
"""Maximum share of the limit that the other program takes."""
MAX_READ = 1.5
"""Maximum reads per token over the size of the model: all of it if memory pressure makes everything stream, and some
evicted pages. With half of the memory or less, over half of the model streams, so reading it twice exceeds this."""


@dataclass(frozen=True)
class Model:
    """A model, and its completions without a memory limit."""

    path: Path
    profile: ModelProfile
    size_bytes: int
    long: list[int]
    short: list[int]


@dataclass(frozen=True)
class Ran:
    """Completions in a group, their reads, and the group's counters at the end."""

    solution: Solution
    long: list[int]
    short: list[int]
    read_bytes_per_token: float
    counters: Counters
    status: Status


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model of many small layers: the read-ahead, output matrix and process fit where the model does not."""
    if (reason := unable()) is not None:
        pytest.skip(f"memory limits: {reason}")
    folder = tmp_path_factory.mktemp("model")
    path = folder / "deep.gguf"
    write_model(path, preset="deep-q4k", layers=request.param)
    profile = model_profile(open_model(path))
    long, short = asyncio.run(unlimited(path))
    yield Model(path, profile, path.stat().st_size, long, short)
    path.unlink()


def unable() -> str | None:
    """Return why memory cannot be limited here; None if it can."""
    if (reason := missing()) is not None:
        return reason
    return None if "memory" in here().folders else "requires the memory controller of cgroups"


async def unlimited(path: Path) -> tuple[list[int], list[int]]:
    async with LocalRing(path, None, context=CONTEXT, rows=ROWS, threads=1) as ring:
        long, _ = await ring.generate(LONG, LONG_TOKENS)
        short, _ = await ring.generate(SHORT, SHORT_TOKENS)
    return [event.token for event in long], [event.token for event in short]


def planned(model: Model, group: LimitedGroup) -> Solution:
    """Return the solver's plan for a device with the group's memory."""
    with tempfile.NamedTemporaryFile("w", suffix=".cgroup") as file:
        file.write(group.proc_cgroup())
        file.flush()
        found = memory(Path(file.name))
    device = replace(
        PROFILE,
        device="d0",
        host="d0",
        ram_total_bytes=found.total_bytes,
        ram_available_bytes=found.available_bytes,
        disk=replace(PROFILE.disk, prefetch_bytes_per_s=1e9),
        gpu=None,
    )
    return solve([device], [], model.profile, default_workload(CONTEXT, ROWS, "f16"))


async def limited(model: Model, group: LimitedGroup, solution: Solution, tokens: int = SHORT_TOKENS) -> Ran:
    ring = LocalRing(
        model.path,
        None,
        plan=solution.plan,
        groups={"d0": group},
        context=CONTEXT,
        rows=ROWS,
        step_timeout_s=300,
        threads=1,
    )
    reads: list[int] = []

    def heard(_: Sampled) -> None:
        reads.append(group.counters().read_bytes)

    async with ring:
        long, _ = await ring.generate(LONG, LONG_TOKENS)
        short, _ = await ring.generate(SHORT, tokens, heard=heard)
        status, counters = await ring.status("d0"), group.counters()
    return Ran(
        solution=solution,
        long=[event.token for event in long],
        short=[event.token for event in short],
        read_bytes_per_token=(reads[-1] - reads[0]) / (len(reads) - 1),
        counters=counters,
        status=status,
    )


def check(model: Model, ran: Ran) -> None:
    """Check the text, and that the plan streams, nothing was killed or swapped, and nothing read twice."""
    assert ran.long == model.long
    assert ran.short == model.short[: len(ran.short)]
    assert len(ran.short) in (FEW_TOKENS, SHORT_TOKENS), "choose a prompt whose answer does not end"
    assert ran.solution.plan.streaming_of("d0").streamed_bytes
    assert ran.status.memory is not None
    assert ran.counters.oom_kills == 0
    assert ran.counters.swap_bytes == 0
    assert ran.read_bytes_per_token <= MAX_READ * model.size_bytes


@pytest.mark.parametrize(
    ("model", "share"),
    [*(pytest.param(MORE_LAYERS, share, marks=pytest.mark.matrix) for share in (0.75, 0.5, 0.3)), (LAYERS, 0.5)],
    indirect=["model"],
)
async def test_limited_memory_gives_the_same_text_and_reads_nothing_twice(model: Model, share: float) -> None:
    limit = int(share * model.size_bytes)
    with LimitedGroup(limit) as group:
        solution = planned(model, group)
        ran = await limited(model, group, solution, FEW_TOKENS)
    check(model, ran)
    memory, streaming = ran.status.memory, solution.plan.streaming_of("d0")
    assert memory is not None
    assert memory.streamed_bytes > 0
    assert 0 < memory.read_ahead_bytes <= streaming.read_ahead_bytes


@pytest.mark.parametrize(("model", "share"), [(LAYERS, 0.7)], indirect=["model"])
async def test_a_program_that_takes_and_frees_memory_does_not_change_the_text(model: Model, share: float) -> None:
    limit = int(share * model.size_bytes)
    maximum = int(NEIGHBOUR_SHARE * limit)
    with LimitedGroup(limit) as group:
        solution = planned(model, group)
        with Neighbour(group, maximum) as other:
            ran = await limited(model, group, solution)
            assert other.end() >= 1
    check(model, ran)
