"""What ``/status`` and the owner are told about a ring: plain data and lines."""

from __future__ import annotations

import statistics
from typing import Any

from halda import LinkProfile, Plan, Prediction
from primad.ring.messages import Status


def plan_lines(plan: Plan) -> list[str]:
    """Who computes what, a line a device, and who is left out."""
    lines = []
    for name in plan.devices:
        windows = ", ".join(
            f"{window.first}-{window.last - 1}" if len(window.layers) > 1 else str(window.first)
            for _, window in plan.windows_of(name)
        )
        lines.append(f"{name}: {plan.layers_of(name)} layers ({windows})")
    lines += [f"{left.device} is left out: {left.reason}" for left in plan.left_out]
    return lines


def device_status(plan: Plan, name: str, status: Status | None, daemon_rss_bytes: int) -> dict[str, Any]:
    """What the device ``name`` computes, did and holds; ``status`` is None when its ring process did not answer."""
    return {
        "name": name,
        "role": "head" if name == plan.head else "worker",
        "windows": [[window.first, window.last] for _, window in plan.windows_of(name)],
        "layers": plan.layers_of(name),
        "daemon_rss_bytes": daemon_rss_bytes,
        "ring": None if status is None else _figures(status),
    }


def promises(prediction: Prediction) -> dict[str, float]:
    """What a plan promises."""
    return {
        "tokens_per_s": prediction.tokens_per_s,
        "tpot_ms": prediction.tpot_s * 1e3,
        "ttft_ms": prediction.ttft_s * 1e3,
    }


def link_status(link: LinkProfile) -> dict[str, Any]:
    """One direction of a link."""
    return {
        "source": link.source,
        "target": link.target,
        "round_trip_ms": link.round_trip_s * 1e3,
        "mbit_per_s": link.bytes_per_s * 8 / 1e6,
    }


def _figures(status: Status) -> dict[str, Any]:
    hops = sorted(status.hop_s)
    return {
        "steps": status.steps,
        "rows": status.rows,
        "compute_s": status.compute_s,
        "hops": len(hops),
        "hop_median_s": statistics.median(hops) if hops else None,
        "hop_p99_s": hops[min(len(hops) - 1, len(hops) * 99 // 100)] if hops else None,
        "rss_bytes": status.rss_bytes,
        "private_bytes": status.private_bytes,
        "refused_messages": status.refused,
    }
