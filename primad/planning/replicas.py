"""Which device replicates the KV cache of another one while completions grow. Decides only.

When a device dies, another one takes over its layers and gets their KV cache from the replica. So the replica is
another device, on another machine if there is one, over a link that carries the KV cache in addition to hidden states;
among those, the one with most room. The head's own KV cache needs no copy: when the head dies, its requests are lost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from halda import CacheType, DeviceProfile, LayerProfile, ModelProfile, Plan
from halda.cost import kv_bytes_per_token

LINK_SHARE: Final = 0.2
"""Copies take no more of a link."""
STATES_WITHOUT_NAMES: Final = frozenset({"plamo2"})
STATE_TOKENS: Final = (128, 512, 2048)
"""A state is kept after this many tokens of a completion, the most that are recomputed: the fewest that links can
carry. A state has some MB for each layer, as much as the KV cache of some hundred tokens."""
MORE_STATES: Final = (32, 64)
"""Fewer, where disks do not wear by them and a replica has one before three others are kept."""
MAX_WRITTEN: Final = 8e6
"""Bytes of states in a second that a device writes for that."""
STATES_PER_S: Final = 3
"""Maximum number of states kept per second for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A device that may keep cells or has some: ``host`` is its machine, as in its profile, ``room_bytes`` its free disk.

    A token has ``token_bytes`` of cells in its layers.
    """

    device: str
    host: str
    room_bytes: int
    token_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The KV cache of ``device`` is replicated by ``replica`` at ``bytes_per_s``; None: it is not, and ``why``."""

    device: str
    replica: str | None
    token_bytes: int
    bytes_per_s: float
    why: str = ""


def holders(profiles: Mapping[str, DeviceProfile], bytes_of: Mapping[str, int]) -> list[Holder]:
    """The devices of a plan by their ``profiles``; ``bytes_of`` each is what ``token_bytes`` says."""
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
    """For each device of ``plan`` the bytes of a token in its layers: of KV cache, and its share of a state."""
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
    """After how many tokens of a completion a state is kept: the fewest with which some link of each worker can carry
    it."""
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
    """For each device of ``plan`` the KV cache bytes of a token in its layers, or its share of them."""
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
    """For each device of ``plan`` the bytes of one state of its layers, or its share of them."""
    return {
        name: math.ceil(
            plan.heads_of(name)
            * sum(layers[layer].state_bytes for _, window in plan.windows_of(name) for layer in window.layers)
        )
        for name in plan.devices
    }


def why_not_kept(model: ModelProfile) -> str:
    """Why the windows of ``model`` give out no KV cells, which the engine finds when it loads them; empty where they do."""
    if model.cell_bytes:
        return "a second cache chooses the cells that its attention sees"
    if model.architecture in STATES_WITHOUT_NAMES:
        return "llama.cpp's graph does not show where its states are"
    if not model.is_recurrent and not all(layer.kv_bytes_per_token for layer in model.layers[: model.last_cut + 1]):
        return "some layers of the model have none"
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
    """The replica of each of ``devices`` except the ``head``, at ``tokens_per_s``.

    ``links`` are bytes/s by (source, target); an unknown one carries nothing. With ``always`` the KV cache is copied
    however slow a link is; ``why_not`` says why none is.
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
            lacks = "no link of it carries them beside the hidden states" if others else "there is no other device"
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
