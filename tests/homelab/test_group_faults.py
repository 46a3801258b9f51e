"""Devices of tensor-parallel groups fail: responses continue in a ring without them, and no token changes.

All cells of one manual plan run on one cluster of a head and three workers, one more than the plan uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.homelab.cluster import Cluster
from tests.homelab.faults import FAULTS, Fault
from tests.homelab.phases import REACH
from tests.homelab.rig import LONG, SHORT, STORY, Rig, fleet
from tests.homelab.stream import Stream
from tools.lab import Homelab, missing
from tools.lab.group_matrix import CELLS, CONTINUES, WINDOWS, GroupCell, is_chosen
from tools.synth import FEW_TOKENS, write_model

NAMES = {
    "kill -9": "killed",
    "SIGSTOP": "stopped",
    "ring process aborts": "ring aborted",
    "ring process stops": "ring stopped",
    "power lost": "power lost",
    "link cut": "cable cut",
    "half-open TCP": "half-open",
    "paused by its owner": "paused",
    "disk full": "disk full",
}
"""Names of faults in ``faults.py``, by their names in the matrix."""
SHARED = ("--parallel", "tensor", "--context", 4096, "--speculate", "lookup", "--batching", "fast", "--sequences", 2)
DEVICES = 3
"""Devices of a manual plan."""
READY = ("ready", "serving")
DRAFTED = {"logit_bias": {"28": 50.0, "29": 50.0}, "speculate": True}
"""Two likely tokens, so that the text repeats itself and drafts are accepted."""
DRAFTED_TOKENS = 100
DRAFTED_PROMPT = "Tell me a story of a ship."

Note = Callable[[str, object], None]


def parameters() -> list[object]:
    marks = {cell: [pytest.mark.slow] + ([] if is_chosen(cell) else [pytest.mark.matrix]) for cell in CELLS}
    return [pytest.param(cell, id=cell.id, marks=marks[cell]) for cell in CELLS]


def write_shared_model(path: Path, vocabulary: Path) -> Path:
    """Write a model that three devices can share, slow enough for a fault to hit a running request."""
    shape = {"layers": 12, "width": 256, "heads": 8, "heads_kv": 4, "head_width": 32, "feed_forward": 768}
    write_model(path, vocabulary=f"from:{vocabulary}", tokens=FEW_TOKENS, quantisation="f32", **shape)
    return path


class GroupRig(Rig):
    """A cluster with a manual plan that has a group."""

    def whole(self) -> None:
        """Wait until the devices of the plan serve, and all others are ready."""
        self.serves_with(DEVICES)
        self.wait_until(lambda: self.phases() <= {*READY}, "all are here")

    def phases(self) -> set[str]:
        return {str(each["phase"]) for each in self.cluster.status()["cluster"]}

    def computing(self) -> list[str]:
        """Return the computing devices, in the order of the plan."""
        return [str(each["name"]) for each in self.cluster.status()["devices"]]

    def strike(self, cell: GroupCell, other: str, name: str) -> None:
        """Inject the fault on ``name``; ``other`` is a device of its group."""
        match cell.fault:
            case "cut off from the head":
                self.lab.isolate(self.cluster.head.name, name)
            case "cut off from the other rank":
                self.lab.isolate(other, name)
            case _:
                FAULTS[NAMES[cell.fault]].do(self.cluster, name)

    def heal(self, cell: GroupCell, name: str) -> None:
        """Undo the fault, as the device's owner would."""
        fault = FAULTS.get(NAMES.get(cell.fault, ""), Fault(do=lambda *_: None))
        self.lab.heal()
        if fault.undo is not None:
            fault.undo(self.cluster, name)
        if not self.lab.device(name).pids():
            self.cluster.start_worker(name)

    def drafted(self) -> Stream:
        """Start a request with draft tokens."""
        return self.cluster.stream(DRAFTED_PROMPT, DRAFTED_TOKENS, **DRAFTED)

    def ranks(self, place: str) -> list[str]:
        """Return two devices of the group; the second one is to fail."""
        _, one, other = self.computing()
        return {"group of all": [one, other], "first of a group": [other, one], "other of a group": [one, other]}[place]


class Bench:
    """The rig of these tests, by plan: built on first use, and rebuilt after a failed cell."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._stack = ExitStack()
        self._rig: GroupRig | None = None
        self._windows = ""

    def rig(self, windows: str) -> GroupRig:
        if self._rig is None or self._windows != windows:
            self.tear_down()
            lab = self._stack.enter_context(Homelab(fleet()))
            serve = (*SHARED, "--windows", windows)
            self._rig = GroupRig(self._stack.enter_context(Cluster(lab, self._model, serve=serve)))
            self._windows = windows
            self._rig.cluster.start()
        else:
            self._rig.restart_head()  # a new head has no record of faults
        return self._rig

    def tear_down(self) -> None:
        self._rig = None
        self._stack.close()


@pytest.fixture(scope="module")
def bench(smollm2: Path, is_matrix: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    del is_matrix  # requested because it decides how processes start
    if (reason := missing()) is not None:
        pytest.skip(reason)
    path = write_shared_model(tmp_path_factory.mktemp("shared") / "shared.gguf", smollm2)
    made = Bench(path)
    yield made
    made.tear_down()
    path.unlink()


@pytest.mark.parametrize("cell", parameters())
def test_a_device_of_a_group_fails(cell: GroupCell, bench: Bench, record_property: Note) -> None:
    try:
        record_property("seconds", run_cell(cell, bench.rig(WINDOWS[cell.place])))
    except BaseException:
        bench.tear_down()
        raise


def run_cell(cell: GroupCell, rig: GroupRig) -> float:
    """Run one cell; return the time from the fault to the next token."""
    rig.whole()
    rig.undisturbed(SHORT)
    undisturbed = rig.drafted()
    undisturbed.wait_end()
    (other, name), before = rig.ranks(cell.place), {*rig.computing()}
    stream = REACH[cell.phase](rig, name)
    also = rig.drafted()
    at = rig.cluster.now()
    rig.strike(cell, other, name)
    rig.go_on()
    assert stream is not None
    rig.check(stream, {"prefill": LONG, "decode": STORY}[cell.phase])
    seconds = stream.recovered_s(at) if cell.phase == "decode" else stream.times[0] - at
    assert seconds is not None, "the answer was over before the fault"
    also.wait_end()
    assert (also.error, also.finish_reason, also.text) == (None, "length", undisturbed.text), rig.cluster.logs()
    if cell.printed:
        rig.wait_printed("h", cell.printed.format(device=name))
    assert (before == {*rig.computing()}) == (cell.fault in CONTINUES), rig.cluster.logs()
    rig.heal(cell, name)
    rig.whole()
    rig.check(rig.ask())
    rig.check_clean()
    return seconds
