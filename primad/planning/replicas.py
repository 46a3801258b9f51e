"""Choose which device replicates the KV cells of another one while responses grow. Decides only.

When a device dies, another one takes over its layers and gets their cells from the replica. So the replica is another
device, on another machine where there is one, over a link that can carry the cells in addition to the hidden states,
and among those the one with the most room. The head's own cells need no replica: when it dies, its requests are lost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from halda import CacheType, DeviceProfile, LayerProfile, ModelProfile, Plan
from halda.cost import kv_bytes_per_token

LINK_SHARE: Final = 0.2
"""Largest share of a link for replication."""
STATES_WITHOUT_NAMES: Final = frozenset({"plamo2"})
STATE_TOKENS: Final = (128, 512, 2048)
"""Candidate distances in tokens between saved states, the most that is recomputed; the shortest that links can carry is
used. A state has some MB for each layer, as much as the cells of some hundred tokens."""
MORE_STATES: Final = (32, 64)
"""Shorter distances, where disks do not wear from them and a replica has received one before three more are saved."""
MAX_WRITTEN: Final = 8e6
"""Bytes of states per second that a device may write for these."""
STATES_PER_S: Final = 3
"""Largest number of states per second for these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A device that has cells and may hold replicas: ``host`` is its machine, as in its profile.

    ``room_bytes`` is its free disk. A token has ``token_bytes`` of cells in its layers.
    """

    device: str
    host: str
    room_bytes: int
    token_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The cells of ``device`` are replicated on ``replica`` at ``bytes_per_s``; None: on no device, and ``why``."""

    device: str
    replica: str | None
    token_bytes: int
    bytes_per_s: float
    why: str = ""


def holders(profiles: Mapping[str, DeviceProfile], bytes_of: Mapping[str, int]) -> list[Holder]:
    """Return the devices of a plan by their ``profiles``; ``bytes_of`` has the ``token_bytes`` of each."""
    return [
        Holder(device=name, host=profile.host, room_bytes=profile.disk.free_bytes, token_bytes=bytes_of[name])
        for name, profile in profiles.items()
    ]


def token_bytes(
    plan: Plan,
    layers: Sequence[LayerProfile],
    kv_type: CacheType,
    links: Mapping[tuple[str, str], float],
    tokens_per_s: float,
) -> dict[str, int]:
    """Bytes of a token in the layers of each device of ``plan``: its cells, and its share of a state."""
    cells, states = cell_bytes(plan, layers, kv_type), state_bytes(plan, layers)
    rows = state_tokens(plan, layers, kv_type, links, tokens_per_s)
    return {name: cells[name] + states[name] // rows for name in plan.devices}


def state_tokens(
    plan: Plan,
    layers: Sequence[LayerProfile],
    kv_type: CacheType,
    links: Mapping[tuple[str, str], float],
    tokens_per_s: float,
) -> int:
    """Tokens between saved states: the fewest for which each worker has a link that carries them."""
    cells, states = cell_bytes(plan, layers, kv_type), state_bytes(plan, layers)

    def is_carried(name: str, rows: int) -> bool:
        rate = max((links.get((name, other), 0.0) for other in plan.devices if other != name), default=0.0)
        return (cells[name] + states[name] // rows) * tokens_per_s <= LINK_SHARE * rate

    def is_cheap(rows: int) -> bool:
        return tokens_per_s <= STATES_PER_S * rows and max(states.values()) * tokens_per_s <= MAX_WRITTEN * rows

    workers = [name for name in plan.devices if name != plan.head]
    found = [*filter(is_cheap, MORE_STATES), *STATE_TOKENS]
    return next((rows for rows in found if all(is_carried(name, rows) for name in workers)), STATE_TOKENS[0])


def cell_bytes(plan: Plan, layers: Sequence[LayerProfile], kv_type: CacheType) -> dict[str, int]:
    """Bytes of cells of a token in the layers of each device of ``plan``, or its share of them."""
    return {
        name: math.ceil(
            plan.heads_of(name)
            * sum(
                kv_bytes_per_token(layers[layer], kv_type)
                for _, window in plan.windows_of(name)
                for layer in window.layers
            )
        )
        for name in plan.devices
    }


def state_bytes(plan: Plan, layers: Sequence[LayerProfile]) -> dict[str, int]:
    """Bytes of one state of the layers of each device of ``plan``, or its share of them."""
    return {
        name: math.ceil(
            plan.heads_of(name)
            * sum(layers[layer].state_bytes for _, window in plan.windows_of(name) for layer in window.layers)
        )
        for name in plan.devices
    }


def why_not_kept(model: ModelProfile) -> str:
    """Say why windows of ``model`` cannot export KV cells, as the engine finds when it loads them; empty where they
    can."""
    if model.cell_bytes:
        return "a second cache chooses the cells that its attention sees"
    if model.architecture in STATES_WITHOUT_NAMES:
        return "llama.cpp's graph does not show where its states are"
    if not model.is_recurrent and not all(layer.kv_bytes_per_token for layer in model.layers[: model.last_cut + 1]):
        return "some layers of the model have no KV cells"
    return ""


def replicas(
    devices: Collection[Holder],
    head: str,
    links: Mapping[tuple[str, str], float],
    tokens_per_s: float,
    *,
    always: bool = False,
    why_not: str = "",
) -> list[Kept]:
    """Choose the replica for the cells of each of ``devices`` except the ``head``, at ``tokens_per_s``.

    ``links`` are bytes/s by (source, target); an unknown link carries nothing. With ``always`` cells are replicated
    however slow a link is; ``why_not`` says why none are.
    """
    load = {each.device: 0 for each in devices}
    found = []
    for each in sorted(devices, key=lambda one: (-one.token_bytes, one.device)):
        if each.device == head:
            continue
        bytes_per_s = each.token_bytes * tokens_per_s
        others = [other for other in devices if other.device != each.device]
        able = [
            other
            for other in others
            if not why_not and (always or bytes_per_s <= LINK_SHARE * links.get((each.device, other.device), 0.0))
        ]
        if not able:
            lacks = (
                "none of its links can carry them in addition to the hidden states"
                if others
                else "there is no other device"
            )
            why = why_not or lacks
            found.append(Kept(device=each.device, replica=None, token_bytes=each.token_bytes, bytes_per_s=0.0, why=why))
            continue
        replica = max(
            able,
            key=lambda one: (one.host != each.host, one.room_bytes / (1 + load[one.device]), one.device),
        )
        load[replica.device] += each.token_bytes
        found.append(
            Kept(device=each.device, replica=replica.device, token_bytes=each.token_bytes, bytes_per_s=bytes_per_s)
        )
    return sorted(found, key=lambda one: one.device)
