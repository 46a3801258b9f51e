"""Nodes with their own home, for tests of the daemon."""

from __future__ import annotations

from pathlib import Path

from primad.daemon.layer_files import Workspace
from primad.daemon.node import Node
from primad.kv.store import KvStore
from primad.layers.cache import LayerCache
from primad.settings.config import load_config, open_home
from primad.trust.identity import Identity, new_identity
from primad.trust.local_trust import LocalTrust
from primad.trust.trust import TrustStore


def node_of(home: Path, name: str, identity: Identity) -> Node:
    """The node of the device ``name`` in ``home``."""
    config = load_config({"home": home, "name": name, "host": "127.0.0.1"}, {})
    open_home(config)
    workspace = Workspace(
        cache=LayerCache(home / "layers"),
        kv=KvStore(home / "cells"),
        run=config.run,
        usage=home / "usage",
        build="b",
    )
    trust = TrustStore(home, identity, LocalTrust(home / "local"))
    return Node(config=config, workspace=workspace, identity=identity, trust=trust)


def worker_node(home: Path) -> Node:
    """The node of the device ``lap`` in ``home``."""
    return node_of(home, "lap", new_identity())
