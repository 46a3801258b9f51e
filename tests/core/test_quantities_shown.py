"""Quantities as typed for a plan and as shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.errors import ConfigError
from primad.settings.quantities import (
    parse_bytes,
    parse_rate,
    parse_seconds,
    show_bytes,
    show_expiry,
    show_ms,
    show_rate,
    show_speed,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GiB", 16 << 30), ("1.5GB", 1_500_000_000), ("800MB", 800_000_000), ("64 kB", 64_000), ("7B", 7), ("0B", 0)],
)
def test_a_size_is_read(text, size):
    assert parse_bytes(text, "--x") == size


@pytest.mark.parametrize(
    "text", ["", "16", "GiB", "-1GiB", "16gib", "1e3GB", "nanGB", "infGB", "16GiB!", "999999999TiB"]
)
def test_a_bad_size_is_refused_by_its_flag(text):
    with pytest.raises(ConfigError, match=r"--x: .* is not a size; give one such as 16GiB"):
        parse_bytes(text, "--x")


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1Gbit/s", 125e6), ("1Gbit", 125e6), ("300Mbit/s", 37.5e6), ("2.5GB/s", 2.5e9), ("1MiB/s", 1 << 20)],
)
def test_a_rate_is_read(text, rate):
    assert parse_rate(text, "--x") == rate


@pytest.mark.parametrize("text", ["", "1Gb", "0MB/s", "-1MB/s", "1Gbps", "1GB/min"])
def test_a_bad_rate_is_refused(text):
    with pytest.raises(ConfigError, match=r"--x: .* is not a rate"):
        parse_rate(text, "--x")


@pytest.mark.parametrize(("text", "seconds"), [("2ms", 0.002), ("150us", 0.00015), ("0.5s", 0.5), ("0ms", 0.0)])
def test_a_time_is_read(text, seconds):
    assert parse_seconds(text, "--x") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "2", "2 minutes", "-2ms", "61s"])
def test_a_bad_time_is_refused(text):
    with pytest.raises(ConfigError, match=r"--x: .* is not a time"):
        parse_seconds(text, "--x")


@given(st.text(max_size=12))
def test_no_text_breaks_a_parser(text):
    for parse in (parse_bytes, parse_rate, parse_seconds):
        try:
            assert parse(text, "--x") >= 0
        except ConfigError:
            continue


def test_shown_quantities_are_short():
    assert [show_bytes(n) for n in (0, 999, 1e3, 12_345_678, 999.9e6, 40e9, -1.5e9)] == [
        "-",
        "999 B",
        "1.00 kB",
        "12.3 MB",
        "1.00 GB",
        "40.0 GB",
        "-1.50 GB",
    ]
    assert show_rate(720e6) == "720 MB/s"
    assert [show_ms(ms) for ms in (0, 0.12, 1.5, 12.34, 250, 1054, 200e3, 11.3 * 3.6e6)] == [
        "-",
        "0.12 ms",
        "1.50 ms",
        "12.3 ms",
        "250 ms",
        "1.05 s",
        "3.33 min",
        "11.3 h",
    ]
    assert [show_speed(x) for x in (136.5, 0.5, 0.0076)] == ["136 tokens/s", "0.50 tokens/s", "0.0076 tokens/s"]


@pytest.mark.parametrize(
    ("left_s", "left"), [(-3, "0 s"), (41.6, "42 s"), (60, "1 min"), (61, "2 min"), (7200, "120 min")]
)
def test_the_expiry_of_a_model_is_worded_in_one_way(left_s, left):
    assert show_expiry(left_s) == f"unloads in {left} if idle"
