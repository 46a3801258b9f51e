"""What every test may ask for: the test models, a cluster name of its own, home folders."""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from tests import figures
from tests.fakes.profile import seed
from tests.forks import forking

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait leave their core to the tests beside
os.environ["COLUMNS"] = "200"  # the commands' consoles ask for it when they are first imported
MODELS = Path(__file__).parent.parent / ".models"
collect_ignore = [  # tools/test-gpu and tools/test-page run them
    name for name in ("gpu", "page") if not os.environ.get(f"PRIMAD_TEST_{name.upper()}")
]

# The time of an example is that of the clock: a process that waits for a core or a disk would take too long. Each run
# has the same examples, so that what fails fails again; ``--hypothesis-profile explore`` looks for others, and ``full``,
# which ``tools/test --full`` chooses, at more of them.
settings.register_profile("explore", deadline=None)
settings.register_profile("full", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("primad", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("primad")

LONGEST = (
    "homelab/test_short_of_memory.py",
    "e2e/test_recovery.py",
    "homelab/test_group_faults.py",
    "e2e/test_less_memory.py",
    "e2e/test_ctrl_c.py",
    "shell/test_http_schemas.py",
    "e2e/test_disk_faults.py",
    "e2e/test_exactness.py",
    "shell/test_profiler.py",
    "e2e/test_kept_cells.py",
    "shell/test_cut_exact.py",
    "shell/test_state_exact.py",
    "homelab/test_faults.py",
    "e2e/test_attacks.py",
    "e2e/test_serve.py",
    "homelab/test_trust_and_places.py",
    "e2e/test_sampling.py",
    "e2e/test_drafted_requests.py",
    "e2e/test_picture_rings.py",
    "shell/test_discovery.py",
    "shell/test_head_daemon.py",
    "solver/test_solve.py",
    "homelab/test_group_joins.py",
    "e2e/test_first_start.py",
    "shell/test_kv_exact.py",
    "e2e/test_many_models.py",
    "shell/test_check_command.py",
    "homelab/test_cluster.py",
    "homelab/test_homelab.py",
    "shell/test_document_commands.py",
    "shell/test_http_hostile.py",
    "shell/test_fit_command.py",
    "shell/test_shipped_templates.py",
    "e2e/test_restart.py",
    "e2e/test_bad_input.py",
    "e2e/test_pairing_daemons.py",
    "core/test_ring.py",
    "e2e/test_new_models.py",
    "core/test_planning_explain.py",
    "shell/test_plan_command.py",
    "shell/test_streams_exact.py",
    "core/test_draft_costs.py",
    "solver/test_by_expert.py",
    "e2e/test_replay_in_processes.py",
    "e2e/test_kept_prompts.py",
    "e2e/test_several_at_once.py",
    "solver/test_simulate.py",
)
"""Files that take half a minute to some minutes, the longest first."""

MakeHome = Callable[[str], Path]
"""Makes a home folder by name; it is measured already."""


def _model(name: str) -> Path:
    path = MODELS / name
    if not path.is_file():
        pytest.fail(f"{path}: the test model is missing; run tools/setup --tests", pytrace=False)
    return path


def pytest_configure() -> None:
    """Whoever started the tests may ignore SIGINT, as a shell does for what it starts with ``&``; children would too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until all tests are collected


def pytest_collection_finish() -> None:
    """What was collected stays to the end: looking through it for garbage again and again takes a tenth of the time."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first, so that of two processes with whole files neither waits long for the other at the end."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in places), places
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: places.get(item.path, len(places) + (item.path not in slow)))


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither use nor touch the user's cache folder: the lock on measuring lies there, and this machine's figures.

    The machine counts as measured, with made-up figures: they are not what is tested, and take a minute.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        if find_spec("llama_cpp") is not None:  # figures are of one build of it; the core has none
            seed(tmp_path_factory.mktemp("seed"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Daemons stay on loopback, and trust nobody whom this user runs beside the tests, nor are they trusted there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIMAD_HOST", "127.0.0.1")
        patch.setenv("PRIMAD_LOCAL_TRUST", str(tmp_path_factory.mktemp("trust") / "local-devices"))
        yield


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Each async test runs in a loop of its own, which cancels the tasks that are left at its end."""
    return "asyncio"


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    """What starts a process of primad forks it, unless it says ``executing``."""
    with forking():
        yield


@pytest.fixture(autouse=True)
def _figures(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """What the test notes of its time goes into the report."""
    yield
    for promise, seconds in figures.taken():
        record_property(promise, seconds)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1: 30 layers."""
    return _model("smollm2-135m-q4_1.gguf")


@pytest.fixture(scope="session")
def quick_model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of SmolLM2's layers with its first tokens, a twentieth of its work and random weights, for tests of who
    computes what.

    Its greedy text wanders: a cell or a token that is lost changes all that follows.
    """
    return _write_quick(smollm2, tmp_path_factory.mktemp("quick"), 15)


@pytest.fixture(scope="session")
def deep_model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the quick model, with layers for faults to come in the midst of a prompt and a transfer."""
    return _write_quick(smollm2, tmp_path_factory.mktemp("deep"), 30)


def _write_quick(smollm2: Path, folder: Path, layers: int) -> Path:
    from gguf import GGUFValueType, LlamaFileType

    from primad.gguf.header import scalar_value
    from tools.synth import FEW_TOKENS, write_model  # not for tests of the core

    path = folder / f"quick-{layers}-layers.gguf"
    named = {"general.file_type": scalar_value(GGUFValueType.UINT32, LlamaFileType.MOSTLY_Q8_0)}
    shape = {"layers": layers, "quantisation": "q8_0", "tied": True}
    write_model(path, vocabulary=f"from:{smollm2}", tokens=FEW_TOKENS, values=named, **shape)
    return path


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M Q4_K_M: 18 layers, sliding windows."""
    return _model("gemma3-270m-q4_k_m.gguf")


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """The chat templates of real models that llama.cpp ships, by name."""
    found = {path.stem: path.read_text("utf-8") for path in (MODELS / "templates").glob("*.jinja")}
    if not found:
        pytest.fail(f"{MODELS / 'templates'}: no templates; run tools/setup --tests", pytrace=False)
    return found


@pytest.fixture
def cluster() -> str:
    """A cluster name that nobody else on this network uses."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture(scope="session")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ``profile.json`` with made-up figures, for homes."""
    return seed(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def module_home(tmp_path_factory: pytest.TempPathFactory, profiled: Path) -> Iterator[MakeHome]:
    """Makes homes that live as long as the module's tests."""
    root = tmp_path_factory.mktemp("homes")
    yield _homes(root, profiled)
    _remove(root)


@pytest.fixture
def new_home(tmp_path: Path, profiled: Path) -> Iterator[MakeHome]:
    """Makes homes that live as long as the test."""
    root = tmp_path / "homes"
    root.mkdir()
    yield _homes(root, profiled)
    _remove(root)


def _remove(root: Path) -> None:
    """Make room. A process that was killed may have others that end after it, and write there until they do."""
    shutil.rmtree(root, ignore_errors=True)


def _homes(root: Path, profile: Path) -> MakeHome:
    def make(name: str) -> Path:
        home = root / name
        home.mkdir()
        shutil.copy(profile, home)
        return home

    return make
