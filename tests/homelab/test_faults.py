"""The fault matrix: every fault in every phase ends as ``matrix.py`` says; the time to the next token is recorded.

All cells except those of pairing run one after another on one cluster of a head and three workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.homelab.cluster import Cluster
from tests.homelab.faults import FAULTS
from tests.homelab.phases import REACH, HalfPaired, trusted_by
from tests.homelab.rig import LONG, LONG_PATIENCE_S, PATIENCE_S, SHORT, STORY, TALE, Rig, fleet
from tests.homelab.rot import forget_pages, overwrite, rot
from tests.homelab.running import MakeLab
from tests.homelab.stream import Stream
from tools.lab import DeviceSpec, Homelab, missing
from tools.lab.matrix import CELLS, Cell, Outcome, is_chosen

NAMES = {
    "kill -9": "killed",
    "SIGSTOP": "stopped",
    "ring process aborts": "ring aborted",
    "link cut": "cable cut",
    "half-open TCP": "half-open",
    "disk full": "disk full",
    "layer file corrupted": "layer corrupted",
    "slow device": "slow",
}
"""Names of faults in ``faults.py``, by their names in the matrix."""

LOADED = ("prefill", "decode", "long response", "idle")
"""Phases in which the device has its layers in memory."""

FULL_SPEED_CPUS = 2.0

pytestmark = pytest.mark.usefixtures("is_matrix")

Note = Callable[[str, object], None]


def parameters(*, pairing: bool) -> list[object]:
    cells = [cell for cell in CELLS if (cell.phase == "pairing") == pairing and cell.outcome is not Outcome.NONE]
    marks = {cell: [pytest.mark.slow] + ([] if is_chosen(cell) else [pytest.mark.matrix]) for cell in cells}
    return [pytest.param(cell, id=cell.id, marks=marks[cell]) for cell in cells]


class Bench:
    """The rig of these tests: built on first use, and rebuilt after a failed cell."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._stack = ExitStack()
        self._rig: Rig | None = None

    def rig(self) -> Rig:
        if self._rig is None:
            lab = self._stack.enter_context(Homelab(fleet()))
            self._rig = Rig(self._stack.enter_context(Cluster(lab, self._model)))
            self._rig.cluster.start()
            self._rig.undisturbed(SHORT)
        return self._rig

    def tear_down(self) -> None:
        self._rig = None
        self._stack.close()


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest, is_matrix: bool) -> Iterator[Bench]:
    """The whole matrix uses a real model for its times; the cells of the suite a quick one."""
    made = Bench(request.getfixturevalue("smollm2" if is_matrix else "deep_model"))
    yield made
    made.tear_down()


@pytest.mark.parametrize("cell", parameters(pairing=False))
def test_fault(cell: Cell, bench: Bench, request: pytest.FixtureRequest, record_property: Note) -> None:
    if (reason := missing()) is not None:
        pytest.skip(f"{request.node.name}: {reason}")
    try:
        record_property("seconds", run_cell(cell, bench.rig()))
    except BaseException:
        bench.tear_down()
        raise


def run_cell(cell: Cell, rig: Rig) -> float:
    """Run one cell; return the time from the fault to the next token."""
    name = rig.next_victim()
    under_way = REACH[cell.phase](rig, name)
    before = rig.whole_layers(name)
    at = rig.cluster.now()
    spoilt = strike(cell, rig, name)
    rig.go_on()
    if cell.phase == "transfer" and cell.fault != "SIGSTOP":
        rig.lab.device(name).thaw()
    stream = under_way if under_way is not None else rig.ask()
    prompt = {"prefill": LONG, "decode": STORY, "long response": TALE}.get(cell.phase, SHORT)
    rig.check(stream, prompt, LONG_PATIENCE_S if cell.fault == "slow device" else PATIENCE_S)
    seconds = first_after(stream, at, cell)
    if cell.printed:
        rig.wait_printed("h", cell.printed.format(device=name))
    heal(cell, rig, name, spoilt)
    rig.whole()
    rig.check(rig.ask())
    rig.check_clean()
    if cell.phase == "transfer":
        kept = {file: stamp for file, stamp in before.items() if rig.cache(name) / file not in spoilt}
        assert kept.items() <= rig.whole_layers(name).items(), "sent twice"
    return seconds


def first_after(stream: Stream, at: float, cell: Cell) -> float:
    """Return the time to the next token: after the longest gap, if tokens were already under way."""
    if cell.phase not in ("decode", "long response"):
        return stream.times[0] - at
    seconds = stream.recovered_s(at)
    assert seconds is not None, "the answer was over before the fault"
    return seconds


def strike(cell: Cell, rig: Rig, name: str) -> list[Path]:
    """Inject the fault; return the damaged layer files."""
    if cell.fault != "layer file corrupted":
        FAULTS[NAMES[cell.fault]].do(rig.cluster, name)
        return []
    device = rig.lab.device(name)
    if cell.phase in LOADED:
        files = rig.in_use(name)
        for file in files:
            rot(device, file)
    else:
        files = [rig.cache(name) / file for file in rig.whole_layers(name)]
        for file in files:
            overwrite(file)
    assert files, f"{name} holds no layer"
    return files


def heal(cell: Cell, rig: Rig, name: str, spoilt: list[Path]) -> None:
    """Undo the fault, as the device's owner would."""
    device, fault = rig.lab.device(name), FAULTS[NAMES[cell.fault]]
    if fault.undo is not None:
        fault.undo(rig.cluster, name)
    device.slow(FULL_SPEED_CPUS)
    (device.outside / "primad" / "config.toml").unlink(missing_ok=True)
    if cell.phase == "transfer":
        rig.cluster.seed(name, 1.0)
    if spoilt and cell.phase in LOADED:
        device.kill()
        for file in spoilt:
            forget_pages(file)
        assert rig.damaged(name, spoilt), "the disk did not rot"
    if not device.pids():
        rig.cluster.start_worker(name)
    if cell.outcome is Outcome.ERROR:
        assert not list((rig.cache(name) / "partial").iterdir()), "something half-written stays"
        rig.restart_head()


@pytest.mark.parametrize("cell", parameters(pairing=True))
def test_pairing(cell: Cell, make_lab: MakeLab, smollm2: Path, record_property: Note) -> None:
    lab = make_lab(DeviceSpec(name="h"), DeviceSpec(name="c", disk_bytes=400 << 20))
    device = lab.device("c")
    with Cluster(lab, smollm2, trusting=False) as cluster:
        cluster.prepare()
        cluster.start_head("--wait", 0, "--use-all")
        cluster.wait_serving()
        rig = Rig(cluster)
        rig.undisturbed(SHORT)
        half = HalfPaired(cluster, "c")
        at = cluster.now()
        FAULTS[NAMES[cell.fault]].do(cluster, "c")
        half.resume()
        stream = rig.ask()
        rig.check(stream)
        record_property("seconds", stream.times[0] - at)
        if cell.fault == "SIGSTOP":
            device.thaw()
        if cell.printed:
            half.joining.wait_for(cell.printed)
        if cell.outcome is not Outcome.CONTINUES and "paired with" not in half.joining.output:
            assert "h" not in trusted_by(device)
        if cell.fault in ("kill -9", "link cut", "half-open TCP"):
            assert "c" not in trusted_by(cluster.head)
        if (undo := FAULTS[NAMES[cell.fault]].undo) is not None and cell.fault != "SIGSTOP":
            undo(cluster, "c")
        device.slow(FULL_SPEED_CPUS)
        if "paired with" not in half.joining.output:
            cluster.pair("c")
        rig.serves_with(2)
        rig.check(rig.ask())
        rig.check_clean()
        assert (trusted_by(device), trusted_by(cluster.head)) == ({"h"}, {"c"})
