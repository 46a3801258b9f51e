"""Home folders of earlier versions: this version keeps their decisions, trust and contents.

Measured or learnt figures may change their meaning and then count as missing. Keys, trust and the owner's decisions may
not.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from primad.api.http.key_file import KeyFile
from primad.api.http.keys import digest_of
from primad.daemon.owner import BY_HAND as PAUSED
from primad.daemon.owner import OwnerPause
from primad.engine.streaming.expert_usage import UsageFolder
from primad.gguf.layers import LayerRef, LayerTensor
from primad.head.model.learning import read_corrections
from primad.kv import keys
from primad.kv.store import KvStore
from primad.layers.cache import LayerCache
from primad.profiler.store import load_profile
from primad.settings.config import load_config, usage_folder
from primad.trust.identity import load_identity
from primad.trust.local_trust import LocalTrust
from primad.trust.trust import PAIRED, TrustStore
from tests.fakes.kv_cache import cells_of

KEPT = Path(__file__).parent.parent / "kept"
OWN = ")O/a2P)<JnK{oG@7XB^<R3h[#Ptp#M^VrU{SZ[xN"
DESK = "2UkUKsZG=7kW}3)}qu$XmYnXv0tLFgBWGZ/?D{7M"
LAMP = "}%4^](e.:nMx^/ezza+pT:I(-/hg4Tw$JWLTtyX("
LAYER = LayerRef(
    digest="5c3d14d509f94d7bc00917b6fef47cbe4aa7fb89d3a14e4f81b853b6e6ba901e",
    size_bytes=224,
    tensors=(
        LayerTensor("blk.*.attn_norm.weight", 0, (9,), 0, 36),
        LayerTensor("blk.*.attn_q.weight", 0, (8, 5), 64, 160),
    ),
)
BLOCK = keys.block("root", None, [1, 2, 3], [3])


@pytest.fixture(params=["home-0.1"])
def home(request, tmp_path) -> Path:
    """A copy of the home folder that the version left."""
    folder = tmp_path / "home"
    shutil.copytree(KEPT / request.param, folder)
    for name in ("identity.json", "trust.json", "api-keys"):
        (folder / name).chmod(0o600)
    return folder


def test_the_device_keeps_its_identity_and_its_trusted_devices(home, tmp_path):
    identity = load_identity(home)
    assert identity.public == OWN
    trust = TrustStore(home, identity, LocalTrust(tmp_path / "nobody"))
    assert [(each.device, each.key, each.how) for each in trust.entries()] == [("desk", DESK, PAIRED)]
    assert trust.is_head(DESK), "the head for which it worked"
    assert trust.revoked() == {LAMP}


def test_the_owners_settings_are_kept(home):
    config = load_config({"home": home}, {})
    assert (config.name, config.cluster, config.nice, config.keep_loaded_s) == ("attic", "kept", 10, 600.0)
    assert config.limits.ram == 8 * 10**9
    assert OwnerPause(home, pause_on_battery=False, changed=lambda _: None).paused == PAUSED
    (key,) = KeyFile(home / "api-keys").keys()
    assert (key.name, key.requests_per_min) == ("laptop", 20)
    assert key.digest == digest_of("a key of sixteen or more")


def test_layers_and_kv_blocks_need_not_be_fetched_again(home):
    cache = LayerCache(home / "cache" / "layers")
    assert cache.has(LAYER)
    assert cache.origins.get("hf:owner/repo layer 0") == LAYER.digest
    assert KvStore(home / "kv").read(BLOCK.key, 0, 2) == cells_of(BLOCK, (0, 1), 8)


def test_measured_and_learnt_figures_are_kept(home):
    profile = load_profile(home / "saved-profile.json").device
    assert (profile.device, profile.ram_read_bytes_per_s) == ("desk", 30000000000.0)
    learnt = read_corrections(home)
    assert learnt.devices["desk"].compute == 1.25
    assert learnt.links["desk", "mini"] == 0.8
    usage = UsageFolder(usage_folder(home)).load("0123456789abcdef0123456789abcdef", 4)
    assert (usage.rows, usage.used) == (4.0, 2)
