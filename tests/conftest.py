"""Fixtures for all tests: the test models, unique cluster names, home folders."""

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

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads yield their core to parallel tests
os.environ["COLUMNS"] = "200"  # read when the commands' consoles are first imported
MODELS = Path(__file__).parent.parent / ".models"
collect_ignore = [  # tools/test-gpu and tools/test-page run them
    name for name in ("gpu", "page") if not os.environ.get(f"PRIMAD_TEST_{name.upper()}")
]

# Deadlines are in wall time, which a process that waits for a core or a disk would exceed. Every run has the same
# examples, so failures are reproducible; ``--hypothesis-profile explore`` tries new ones, and ``full``, which
# ``tools/test --full`` selects, more of them.
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
    "e2e/test_kv_replication.py",
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
    "e2e/test_cached_prompts.py",
    "e2e/test_concurrent_requests.py",
    "solver/test_simulate.py",
)
"""Files that take from half a minute to several minutes, longest first."""

MakeHome = Callable[[str], Path]
"""Makes a home folder by name; the device counts as measured."""


def _model(name: str) -> Path:
    path = MODELS / name
    if not path.is_file():
        pytest.fail(f"{path}: the test model is missing; run tools/setup --tests", pytrace=False)
    return path


def pytest_configure() -> None:
    """Restore SIGINT: a shell ignores it for background jobs (``&``), and children would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until all tests are collected


def pytest_collection_finish() -> None:
    """Collected tests stay to the end; scanning them in every garbage collection takes a tenth of the time."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow files first, so that processes, which run whole files, finish at about the same time."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in places), places
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: places.get(item.path, len(places) + (item.path not in slow)))


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep away from the user's cache folder, which has the measuring lock and this machine's figures.

    The machine counts as measured, with made-up figures: measuring takes a minute and is not under test.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        if find_spec("llama_cpp") is not None:  # figures belong to one build of it; core tests run without it
            seed(tmp_path_factory.mktemp("seed"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Daemons stay on loopback; they and the user's other daemons do not trust each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIMAD_HOST", "127.0.0.1")
        patch.setenv("PRIMAD_LOCAL_TRUST", str(tmp_path_factory.mktemp("trust") / "local-devices"))
        yield


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Each async test runs in its own event loop, which cancels remaining tasks at the end."""
    return "asyncio"


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    """Processes of primad are forked, except inside ``executing``."""
    with forking():
        yield


@pytest.fixture(autouse=True)
def _figures(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Add the times that the test records to the report."""
    yield
    for limit, seconds in figures.take():
        record_property(limit, seconds)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1: 30 layers."""
    return _model("smollm2-135m-q4_1.gguf")


@pytest.fixture(scope="session")
def quick_model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of SmolLM2's layers and its first tokens, with random weights: a twentieth of its computation.

    For tests of which device computes what. Its greedy text wanders: one lost token or KV cell changes the rest.
    """
    return _write_quick(smollm2, tmp_path_factory.mktemp("quick"), 15)


@pytest.fixture(scope="session")
def deep_model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick model with more layers, so that a fault can hit in the middle of a prompt or a transfer."""
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
    """A unique cluster name."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture(scope="session")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ``profile.json`` with made-up figures, for home folders."""
    return seed(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def module_home(tmp_path_factory: pytest.TempPathFactory, profiled: Path) -> Iterator[MakeHome]:
    """Makes home folders that last as long as the module's tests."""
    root = tmp_path_factory.mktemp("homes")
    yield _homes(root, profiled)
    _remove(root)


@pytest.fixture
def new_home(tmp_path: Path, profiled: Path) -> Iterator[MakeHome]:
    """Makes home folders that last as long as the test."""
    root = tmp_path / "homes"
    root.mkdir()
    yield _homes(root, profiled)
    _remove(root)


def _remove(root: Path) -> None:
    """Free the space. Children of a killed process may outlive it for a moment and still write there."""
    shutil.rmtree(root, ignore_errors=True)


def _homes(root: Path, profile: Path) -> MakeHome:
    def make(name: str) -> Path:
        home = root / name
        home.mkdir()
        shutil.copy(profile, home)
        return home

    return make
