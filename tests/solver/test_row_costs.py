"""C(b): the cost of b rows of a layer, between and beyond measured points."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halda import RATE_WIDTH, CacheCost, CpuProfile, LayerProfile, RowSpeed, TypeSpeed, WidthCost
from halda.cost import (
    PLAIN_READ,
    TILE_ROWS,
    attention_s,
    cached,
    layer_s,
    nearest_speed,
    output_s,
    read_bytes,
    seconds_per_byte,
    width_ratio,
)
from tests.fakes.planning import model
from tests.fakes.profile import GPU

RATES = st.floats(1e8, 1e11)
SPEED = TypeSpeed(
    type="Q4_K",
    decode_bytes_per_s=1e10,
    batch_bytes_per_s=2e9,
    prefill_flop_per_s=1e11,
    extra_buffers=False,
    decode_spread=0.0,
    prefill_spread=0.0,
)
CPU = CpuProfile(name="a cpu", cores=1, threads=1, batch_threads=1, step_s=0, layer_s=1e-5, speeds=(SPEED,))
LAYER = LayerProfile(bytes_by_type={"Q4_K": 9_000_000}, expert_bytes_by_type={}, kv_bytes_per_token=1024)


@given(
    rates=st.lists(RATES, min_size=5, max_size=5),
    flop=st.floats(1e9, 1e13),
    ratio=st.floats(0.5, 2.0),
    rows=st.lists(st.integers(1, 2048), min_size=2, max_size=2),
)
def test_more_rows_never_cost_less(rates, flop, ratio, rows):
    one, batch, *more = rates
    between = tuple(RowSpeed(rows=n, bytes_per_s=rate) for n, rate in zip((2, 4, 16), more, strict=True))
    speed = replace(SPEED, decode_bytes_per_s=one, batch_bytes_per_s=batch, prefill_flop_per_s=flop, rows=between)
    cpu = replace(CPU, speeds=(speed,), widths=(WidthCost(weights=10**7, ratio=ratio),))
    few, many = (layer_s(cpu, 1e10, LAYER, model(), n, 64, "f16") for n in sorted(rows))
    assert few <= many * (1 + 1e-9)


def test_the_cost_of_cached_tokens_is_proportional_to_the_query_width():
    plain, narrow = model(), replace(model(), query_width=model().width // 2)
    cpu = replace(CPU, attention_s=5e-10)

    def of_cached(asked, rows):
        return layer_s(cpu, 1e10, LAYER, asked, rows, 100, "f16") - layer_s(CPU, 1e10, LAYER, asked, rows, 100, "f16")

    assert of_cached(plain, 1) == pytest.approx(100 * plain.width * 5e-10)
    assert of_cached(plain, 4) == pytest.approx(4 * of_cached(plain, 1))
    assert of_cached(narrow, 1) == pytest.approx(of_cached(plain, 1) / 2)


@given(st.lists(st.floats(1e-13, 1e-9), min_size=3, max_size=3), st.lists(st.integers(1, 200), min_size=2, max_size=2))
def test_more_rows_of_a_chunk_never_attend_for_less(costs, rows):
    one, plain, several = costs
    cpu = replace(CPU, attention_s=one, plain_attention_s=plain, rows_attention_s=several)
    few, many = (attention_s(cpu, 1e10, LAYER, model(), n, 64, "f16", flash=False, chunk=True) for n in sorted(rows))
    assert few <= many * (1 + 1e-9)


def test_rows_of_a_chunk_attend_as_a_matrix_and_those_of_several_sequences_one_by_one():
    cpu = replace(CPU, attention_s=9e-10, plain_attention_s=4e-10, rows_attention_s=1e-10)

    def of_cached(rows, *, flash, chunk):
        none = replace(cpu, attention_s=0.0, plain_attention_s=0.0, rows_attention_s=1e-30)
        with_it, without = (
            attention_s(each, 1e10, LAYER, model(), rows, 100, "f16", flash=flash, chunk=chunk) for each in (cpu, none)
        )
        return (with_it - without) / (100 * model().width)

    assert of_cached(16, flash=False, chunk=True) == pytest.approx(16 * 1e-10)
    assert of_cached(2, flash=False, chunk=True) == pytest.approx(4e-10)
    assert of_cached(16, flash=False, chunk=False) == pytest.approx(16 * 4e-10)
    assert of_cached(16, flash=True, chunk=True) == pytest.approx(16 * 9e-10)
    assert of_cached(TILE_ROWS, flash=True, chunk=True) == pytest.approx(TILE_ROWS * 1e-10)


def test_without_flash_attention_a_gpu_reads_its_cache_slower_for_a_token():
    def of(rows, *, flash):
        return attention_s(GPU, 1e10, LAYER, model(), rows, 1000, "f16", flash=flash)

    assert of(1, flash=False) == pytest.approx(of(1, flash=True) / PLAIN_READ)
    assert of(512, flash=False) == of(512, flash=True)


def test_short_rows_of_the_output_matrix_cost_more_than_their_bytes():
    cpu = replace(CPU, row_s=1e-8)
    asked = replace(model(), width=RATE_WIDTH // 4)
    more = output_s(cpu, cpu, asked) - output_s(CPU, CPU, asked)
    assert more == pytest.approx(0.75e-8 * asked.vocabulary)
    assert output_s(cpu, cpu, replace(asked, width=4 * RATE_WIDTH)) == output_s(CPU, CPU, asked)


def test_measured_row_counts_have_their_measured_cost():
    between = (RowSpeed(rows=2, bytes_per_s=8e9), RowSpeed(rows=4, bytes_per_s=5e9), RowSpeed(rows=16, bytes_per_s=1e9))
    speed = replace(SPEED, rows=between)
    found = [1 / seconds_per_byte(speed, rows) for rows in (1, 2, 4, 8, 16)]
    assert found == pytest.approx([1e10, 8e9, 5e9, 2e9, 1e9])
    assert seconds_per_byte(speed, 3) == pytest.approx((1 / 8e9 + 1 / 5e9) / 2)


def test_layers_of_other_sizes_cost_what_lies_between_those_measured():
    widths = (WidthCost(weights=10**8, ratio=1.2), WidthCost(weights=10**6, ratio=1.0, many_ratio=1.4))
    one, many = zip(*(width_ratio(widths, n) for n in (10, 10**6, 10**7, 10**8, 10**12)), strict=True)
    assert one == pytest.approx([1, 1, 1.1, 1.2, 1.2])
    assert many == pytest.approx([1.4, 1.4, 1.2, 1, 1])
    assert width_ratio((), 10**7) == (1, 1)
    assert width_ratio(widths, 0) == (1, 1)


def test_small_models_are_quicker_as_far_as_caches_hold_them():
    cpu = replace(CPU, caches=(CacheCost(bytes=20_000_000, ratio=0.5), CacheCost(bytes=40_000_000, ratio=0.9)))

    def of_layers(count):
        asked = replace(model(), layers=(LAYER,) * count, output_bytes_by_type={})
        found = cached(cpu, asked)
        assert read_bytes(asked) == count * 9_000_000
        taken = (layer_s(each, 1e10, LAYER, asked, 1, 0, "f16") - CPU.layer_s for each in (found, CPU))
        few, many = (layer_s(each, 1e10, LAYER, asked, 512, 0, "f16") for each in (found, CPU))
        assert few == many
        return next(taken) / next(taken)

    assert [of_layers(count) for count in (1, 2, 3, 5)] == pytest.approx([0.5, 0.5, 0.64, 1])


def test_a_token_reads_only_the_experts_that_it_uses():
    layer = replace(LAYER, expert_bytes_by_type={"Q4_K": 8_000_000})
    asked = replace(model(), layers=(layer,), output_bytes_by_type={"Q6_K": 100}, experts=8, experts_used=2)
    assert read_bytes(asked) == 9_000_000 + 2_000_000 + 100


def test_a_type_that_was_not_measured_is_as_quick_as_the_nearest_of_its_family():
    speeds = [replace(SPEED, type=kind) for kind in ("Q4_K", "Q6_K", "Q8_0", "F16", "Q4_0", "Q5_K")]
    wanted = {"Q4_1": "Q4_0", "Q5_0": "Q4_0", "Q2_K": "Q4_K", "BF16": "F16", "Q6_K": "Q6_K", "IQ4_XS": "Q4_K"}
    assert {kind: nearest_speed(speeds, kind).type for kind in wanted} == wanted
    assert nearest_speed(speeds[:1], "Q8_0").type == "Q4_K"


def test_narrow_layers_cost_more_with_many_rows():
    narrow = replace(CPU, widths=(WidthCost(weights=10**6, ratio=1.0, many_ratio=1.5),))
    for rows in (8, 64, 512):
        of_weights = layer_s(CPU, 1e10, LAYER, model(), rows, 0, "f16") - CPU.layer_s
        assert layer_s(narrow, 1e10, LAYER, model(), rows, 0, "f16") - CPU.layer_s == pytest.approx(1.5 * of_weights)
    assert layer_s(narrow, 1e10, LAYER, model(), 1, 0, "f16") == layer_s(CPU, 1e10, LAYER, model(), 1, 0, "f16")
