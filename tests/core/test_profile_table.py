"""What ``primad profile`` shows of a device."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from halda import DeviceProfile, OffloadSpeed
from primad.profiler.table import profile_table
from tests.fakes.profile import GPU, PROFILE

OFFLOADED = OffloadSpeed(type="Q4_K", few_bytes_per_s=5e9, prefill_flop_per_s=2.34e12)


def shown(profile: DeviceProfile) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(*profile_table(profile))
    return out.getvalue()


def test_the_speed_of_prefill_offload_is_shown_next_to_that_of_the_processor():
    text = shown(replace(PROFILE, gpu=replace(GPU, prefill_offload=(OFFLOADED,))))
    header, row = (next(line for line in text.splitlines() if word in line) for word in ("GPU helps", "Q4_K"))
    assert header.index("prefill") < header.index("GPU helps") < header.index("GPU decode")
    assert row.count("2.34 TFLOP/s") == 1
    without = shown(PROFILE)
    assert "GPU decode" in without
    assert "GPU helps" not in without


def test_a_disk_that_is_known_is_named():
    assert "1f2e3d4c, " in shown(replace(PROFILE, disk=replace(PROFILE.disk, disk_id="1f2e3d4c")))
