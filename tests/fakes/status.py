"""The status of a ring as plain data."""

from __future__ import annotations

from typing import Any

import msgspec

from primad.api.http.status import (
    ClusterMember,
    CopyStatus,
    DeviceStatus,
    DraftFigures,
    KvStatus,
    MemoryFigures,
    PlannedFigures,
    RingFigures,
    RingForecast,
)

FIGURES = RingFigures(
    steps=40,
    rows=50,
    compute_s=1.5,
    hops=3,
    hop_median_s=0.001,
    hop_p99_s=0.002,
    rss_bytes=5_000_000_000,
    private_bytes=400_000_000,
    refused_messages=1,
)
MEMORY = MemoryFigures(
    resident=23,
    streamed=3,
    streams_output=False,
    read_ahead_bytes=200_000_000,
    resident_bytes=2_300_000_000,
    streamed_bytes=300_000_000,
    read_bytes=12_000_000_000,
    stall_s=2.5,
    bytes_read_per_token=310_000_000,
    stall_ms_per_token=62.5,
    pressure="some",
)
PLANNED = PlannedFigures(
    resident=22,
    streamed=4,
    read_ahead_bytes=300_000_000,
    ram_bytes=2_900_000_000,
    bytes_read_per_token=400_000_000,
    stall_ms_per_token=20.0,
)


def device(
    name: str,
    *,
    role: str = "worker",
    ring: RingFigures | None = FIGURES,
    computes: bool = False,
    memory: MemoryFigures = MEMORY,
    predicted: PlannedFigures = PLANNED,
) -> DeviceStatus:
    """A device with 26 layers."""
    return DeviceStatus(
        name=name,
        role=role,
        windows=[(0, 26)],
        layers=26,
        gpu_layers=0,
        daemon_rss_bytes=90_000_000,
        ring=ring,
        computes=computes,
        memory=memory,
        predicted=predicted,
    )


def ring(
    *devices: DeviceStatus, epoch: int = 4, predicted: RingForecast | None = None, **others: str
) -> dict[str, Any]:
    """The ring of ``devices``; ``others`` are phases of devices known to the head."""
    return {
        "epoch": epoch,
        "rounds": 2,
        "predicted": msgspec.to_builtins(predicted),
        "devices": msgspec.to_builtins(devices),
        "links": [],
        "cluster": [
            msgspec.to_builtins(ClusterMember(device=name, phase=phase, reason="")) for name, phase in others.items()
        ],
    }


KV = KvStatus(
    copies=[
        CopyStatus(device="lap", replica="desk", why=""),
        CopyStatus(device="nas", replica=None, why="no link of it carries them"),
    ],
    replicated_bytes=46_000_000,
    lag_tokens=12,
    restores=3,
    restored_tokens=2000,
    restore_s=0.4,
    computed_again_tokens=31,
    found_tokens=512,
)
"""Two workers, one of which has a replica."""

DRAFTS = DraftFigures(drafted=200, accepted=150, skipped=30, tokens_per_pass=1.75, model_on="nas")
