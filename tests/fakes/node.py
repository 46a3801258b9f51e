"""A worker's node with a home of its own, for tests of what a worker does with it."""

from __future__ import annotations

from pathlib import Path

from primad.daemon.layer_files import Workspace
from primad.daemon.node import Node
from primad.kv.store import KvStore
from primad.layers.cache import LayerCache
from primad.settings.config import load_config, open_home
from primad.trust.identity import new_identity
from primad.trust.local_trust import LocalTrust
from primad.trust.trust import TrustStore


def worker_node(home: Path) -> Node:
    """The node of the device ``lap`` in ``home``."""
    config = load_config({"home": home, "name": "lap", "host": "127.0.0.1"}, {})
    open_home(config)
    workspace = Workspace(
        cache=LayerCache(home / "layers"),
        kv=KvStore(home / "cells"),
        run=config.run,
        usage=home / "usage",
        build="b",
    )
    identity = new_identity()
    trust = TrustStore(home, identity, LocalTrust(home / "local"))
    return Node(config=config, workspace=workspace, identity=identity, trust=trust)
