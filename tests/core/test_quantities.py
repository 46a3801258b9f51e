"""Sizes, rates, times and shares in human notation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.errors import ConfigError
from primad.settings.quantities import (
    Share,
    bytes_of,
    parse_amount,
    parse_bytes,
    parse_duration,
    parse_gain,
    parse_list,
    parse_rate,
    parse_whole,
    parse_yes_no,
)

SCALES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@given(st.integers(0, 100_000), st.sampled_from(sorted(SCALES)), st.sampled_from(["", " "]))
def test_a_size_is_its_number_times_its_unit(number, unit, gap):
    assert parse_bytes(f"{number}{gap}{unit}", "--x") == number * SCALES[unit]
    assert parse_amount(f" {number}{gap}{unit} ", "--x") == number * SCALES[unit]


@given(st.integers(1, 100_000), st.sampled_from(sorted(SCALES)), st.sampled_from(["", "/s"]))
def test_a_rate_in_bits_is_an_eighth(number, unit, per):
    assert parse_rate(f"{number}{unit}{per}", "--x") == number * SCALES[unit]
    assert parse_rate(f"{number}{unit[:-1]}bit{per}", "--x") == number * SCALES[unit] / 8


@given(st.integers(1, 100), st.integers(0, 1 << 50))
def test_a_share_is_of_all_there_is(percent, total):
    share = parse_amount(f"{percent}%", "--x")
    assert share == Share(percent / 100)
    assert 0 <= bytes_of(share, total) <= total


def test_a_number_is_bytes_or_seconds():
    assert parse_bytes(4096, "x") == parse_amount(4096, "x") == bytes_of(4096, 1) == 4096
    assert parse_duration(2, "x", maximum=10) == parse_duration("2", "x", maximum=10) == 2.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("150us", 0.00015), ("2s", 2.0), ("10min", 600.0), ("2h", 7200.0), ("1d", 86_400)],
)
def test_a_time_is_read(text, seconds):
    assert parse_duration(text, "--x", maximum=1e6) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value", ["", "16", "GiB", "-1GiB", "16gib", "1e3GB", "nanGB", "9" * 16 + "GB", True, None, -1, 1.5]
)
def test_a_bad_size_is_refused(value):
    with pytest.raises(ConfigError, match=r"^--x: .* is not a size; give one such as 16GiB"):
        parse_bytes(value, "--x")


ANYTHING = st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.booleans(), st.lists(st.text()), st.binary())


@given(ANYTHING)
def test_nothing_breaks_a_parser(value):
    parsers = (parse_bytes, parse_amount, parse_rate, parse_gain, parse_yes_no, parse_list)
    for parse in (*parsers, lambda v, s: parse_whole(v, s, maximum=9), lambda v, s: parse_duration(v, s, maximum=9)):
        try:
            parse(value, "--x")
        except ConfigError as exc:
            text = str(exc)
            assert text.startswith("--x: ")
            assert "\n" not in text


@pytest.mark.parametrize("value", [10**5000, "9" * 5000, -(10**5000)], ids=["most", "text", "least"])
def test_absurd_numbers_are_refused_in_a_short_line(value):
    for parse in (parse_bytes, parse_rate, parse_gain, lambda v, s: parse_duration(v, s, maximum=9)):
        with pytest.raises(ConfigError) as caught:
            parse(value, "--x")
        assert len(str(caught.value)) < 250
