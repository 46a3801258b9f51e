"""Devices are found in data sheets by common names, and forecasts for them are compared with published figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from primad.errors import ConfigError
from primad.profiler.store import load_profile
from primad.settings.profiles import check_profile
from tools.lab.data_sheets import SHEETS, Sheets, profiles, read_sheets
from tools.lab.named_devices import named_device
from tools.lab.published import FIGURES, Figure, Prompt, link_speed, read_figures, row

NAMES = {
    "RTX 4070 Laptop 8GB": ("AMD Ryzen 7 7700", "NVIDIA GeForce RTX 4070 Laptop", 32, 8),
    "RTX 4070 Ti Super": ("AMD Ryzen 7 7700", "NVIDIA GeForce RTX 4070 Ti Super", 32, 16),
    "Apple M2 Ultra 76-core 192GB": ("Apple M2 Ultra", "Apple M2 Ultra", 192, 144),
    "Ryzen 7 8840U, Radeon 780M": ("AMD Ryzen 7 8840U", "AMD Radeon 780M", 32, 16),
    "Ryzen AI 9 HX 370 DDR5-5600, CPU": ("AMD Ryzen AI 9 HX 370", None, 32, 0),
    "Core i7-14700K 64GB DDR5-5600": ("Intel Core i7-14700", None, 64, 0),
    "EPYC 7532 8 channels DDR4-3200": ("AMD EPYC with 8 channels of DDR4-3200", None, 256, 0),
    "Raspberry Pi CM5 16GB": ("BCM2712 (Cortex-A76)", None, 16, 0),
}


@pytest.fixture(scope="module")
def sheets() -> Sheets:
    return read_sheets()


@pytest.mark.parametrize("name", NAMES)
def test_the_sheet_with_the_most_words_of_a_name_is_its_device(name: str, sheets: Sheets) -> None:
    found, (processor, gpu, ram, vram) = named_device(name, sheets, "desk"), NAMES[name]
    assert (found.device, found.cpu.name, found.ram_total_bytes >> 30) == ("desk", processor, ram)
    assert (found.gpu.name if found.gpu else None) == gpu
    assert (found.gpu.vram_total_bytes >> 30 if found.gpu else 0) == vram


def test_cores_of_an_apple_gpu_count(sheets: Sheets) -> None:
    few, many = (named_device(f"Apple M3 Max {cores}-core 64GB", sheets, "mac").gpu for cores in (30, 40))
    assert few is not None
    assert many is not None
    assert few.speeds[0].prefill_flop_per_s < many.speeds[0].prefill_flop_per_s
    assert few.vram_read_bytes_per_s < many.vram_read_bytes_per_s


def test_a_name_that_no_sheet_has_is_one_clear_error(sheets: Sheets) -> None:
    with pytest.raises(ConfigError, match="'Cray-1': neither a data sheet"):
        named_device("Cray-1", sheets, "desk")


def test_a_link_has_the_middle_of_the_named_range() -> None:
    wifi = link_speed("Wi-Fi 320-610 Mbit/s, 3-7 ms")
    assert (wifi.bytes_per_s, wifi.round_trip_s) == (pytest.approx(465e6 / 8), pytest.approx(0.005))
    assert link_speed("2.5 to 5 Gbit/s Ethernet").bytes_per_s == pytest.approx(3.75e9 / 8)


def test_forecasts_attend_as_llama_bench_did() -> None:
    found = {figure.id: figure.flash for figure in read_figures(FIGURES)}
    assert [found[each] for each in ("m2ultra-8b-long", "strix-gptoss120-d32k", "m4-3b-ollama")] == [False, True, True]


def test_every_figure_names_devices_and_a_model_that_are_known(sheets: Sheets) -> None:
    for figure in read_figures(FIGURES):
        assert figure.source
        for name in figure.devices:
            named_device(name, sheets, "device")


def _figure(*devices: str) -> Figure:
    prompt = Prompt(prefill_tokens=512, depth=0, generated=128)
    return Figure(
        id="one",
        devices=list(devices),
        link=None,
        model="Llama 3 8B",
        quant="Q4_K_M",
        prefill_tok_s=4000,
        decode_tok_s=100,
        prompt=prompt,
        source="here",
        engine="llama.cpp",
        kind="cuda",
        shape="llama3-8b-like",
    )


def test_a_ratio_is_the_planned_over_the_published_figure(sheets: Sheets) -> None:
    found = row(_figure("RTX 3090 24GB"), sheets)
    assert found.is_single
    assert found.decode_planned_tok_s is not None
    assert found.prefill_planned_tok_s is not None
    assert found.decode_ratio == pytest.approx(found.decode_planned_tok_s / 100, abs=1e-3)
    assert found.prefill_ratio == pytest.approx(found.prefill_planned_tok_s / 4000, abs=1e-3)


def test_two_gpus_of_a_pc_are_forecast_near_their_published_speed() -> None:
    """As in ``profiles/published.json``: a 70B model that neither GPU holds."""
    sheets = read_sheets()
    found = {figure.id: row(figure, sheets) for figure in read_figures(FIGURES) if figure.kind == "multi-gpu-one-box"}
    assert len(found) == 3
    for each in found.values():
        assert not each.is_single
        assert each.decode_ratio is not None
        assert each.prefill_ratio is not None
        assert 0.8 < each.decode_ratio < 1.2
        assert 0.8 < each.prefill_ratio < 1.2


def test_the_devices_that_come_with_primad_are_what_the_rule_gives(sheets: Sheets) -> None:
    for name, (device, how) in profiles(sheets).items():
        check_profile(device)
        stored = load_profile(SHEETS.parent / "devices" / f"{name}.json")
        assert (stored.device, stored.how) == (device, how), "run tools/docs"


def test_a_device_without_a_forecast_is_shown_with_the_reason(sheets: Sheets) -> None:
    found = row(_figure("Cray-1"), sheets)
    assert (found.decode_ratio, found.prefill_ratio) == (None, None)
    assert "Cray-1" in found.note


def test_a_file_without_figures_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_figures(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="has no figures"):
        read_figures(path)
