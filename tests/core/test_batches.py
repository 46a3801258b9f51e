"""Which requests' next tokens a ring batches, and the gain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from halda import CHUNKS, DeviceProfile, RowSpeed, TypeRows, evaluate, instance, residency, solve
from halda.instance import Instance
from halda.load import under_load
from primad.planning.batching import (
    SHORT_S,
    SPLIT_CELLS,
    BatchingMode,
    batches_of,
    efficient_rows,
    exact_rows,
    min_rows,
    piece_rows,
    pieces_of,
    rows_of_chunks,
)
from primad.planning.explain import explain
from primad.planning.fitting import fitted
from primad.planning.question import ask, default_workload
from primad.planning.table import render
from primad.ring.grouping import Batching
from primad.settings.quantities import show_speed
from tests.fakes.planning import GB, device, model, speed, wishes
from tests.solver.test_simulate import ring

PLAN = ring(("a", 9), ("b", 10), ("a", 1))
ALONE = ring(("a", 20))


def exactly(rows: int, profile: DeviceProfile, *, batch: float = 0.5, threads: int = 4) -> DeviceProfile:
    """``profile`` with steps of up to ``rows`` exact rows; 8 rows have ``batch`` times the byte rate of one."""
    (speed,) = profile.cpu.speeds
    speed = replace(speed, batch_bytes_per_s=batch * speed.decode_bytes_per_s)
    exact = (TypeRows(type=speed.type, rows=rows, piece_rows=8),)
    return replace(profile, cpu=replace(profile.cpu, speeds=(speed,), exact_rows=exact, threads=threads))


def question(*devices: DeviceProfile, flash: bool = False, **changes) -> Instance:
    work = replace(default_workload(4096, 512, "f16"), flash=flash, **changes)
    return instance(devices, [], model(), work, {})


def test_a_step_of_several_rows_is_worth_it_as_far_as_it_costs_less_than_single_ones():
    cheap, dear = (question(exactly(8, device("a"), batch=batch)) for batch in (0.5, 1 / 8))
    one = evaluate(ALONE, cheap).tpot_s
    assert under_load(ALONE, cheap, sequences=8, max_rows=1).tokens_per_s == pytest.approx(1 / one)
    assert under_load(ALONE, cheap, sequences=8).tokens_per_s > 3 / one
    assert under_load(ALONE, dear, sequences=8).tokens_per_s == pytest.approx(1 / one, rel=0.1)


def test_a_ring_of_two_machines_writes_twice_as_much_with_two_steps_in_it():
    asked = question(exactly(8, device("a", rate=1e9)), exactly(8, device("b", rate=1e9)))
    alone, both = (under_load(PLAN, asked, sequences=n, max_rows=1) for n in (1, 2))
    assert both.tokens_per_s == pytest.approx(2 * alone.tokens_per_s, rel=0.06)
    assert (both.rows, both.machines, both.steps) == (1, 2, 2)
    many = under_load(PLAN, asked, sequences=8)
    assert (many.rows, many.machines, many.steps) == (4, 2, 2)
    assert many.tbt_s == pytest.approx(8 / many.tokens_per_s)


def test_where_layers_stream_every_step_reads_them_all():
    asked = question(exactly(8, device("a", ram=3 * GB, disk=2e8)))
    plan = residency(ALONE, asked)
    assert plan.streaming
    alone, together, one_by_one = (
        under_load(plan, asked, sequences=n, max_rows=maximum) for n, maximum in ((1, 4), (4, 4), (4, 1))
    )
    assert together.tokens_per_s > 3.5 * alone.tokens_per_s
    assert one_by_one.tokens_per_s == pytest.approx(alone.tokens_per_s)


def test_a_prompt_that_comes_while_others_write_waits_for_them_at_every_chunk():
    asked = question(exactly(8, device("a")))
    idle, busy = (under_load(ALONE, asked, sequences=n) for n in (1, 4))
    assert idle.ttft_s == evaluate(ALONE, asked).ttft_s
    assert busy.ttft_s > idle.ttft_s


def test_exact_batches_are_used_if_they_keep_nine_tenths_of_the_best_speed():
    found = batches_of("auto", PLAN, question(exactly(7, device("a")), exactly(7, device("b"))), 8)
    assert (found.batching, found.is_exact) == (Batching(rows=7, steps=2), True)
    asked = question(exactly(1, device("a")), exactly(7, device("b")))
    assert batches_of("auto", PLAN, asked, 8).batching == Batching(rows=8, steps=2)
    assert not batches_of("auto", PLAN, asked, 8).is_exact
    exact = batches_of("exact", PLAN, asked, 8)
    assert (exact.batching, exact.is_exact) == (Batching(rows=1, steps=2), True)
    assert not batches_of("fast", PLAN, question(exactly(7, device("a")), exactly(7, device("b"))), 8).is_exact


def test_noise_alone_makes_no_batch_inexact():
    def is_exact(spread: float, *, other: float = 0.0) -> bool:
        devices = [exactly(1, device("a"), batch=0.7), exactly(1, device("b"), batch=0.7)]
        for i, each in enumerate((spread, other)):
            (speed,) = devices[i].cpu.speeds
            rare = replace(speed, type="Q2_K", decode_spread=9.0)  # a type that the model does not use
            speeds = (replace(speed, decode_spread=each), rare)
            devices[i] = replace(devices[i], cpu=replace(devices[i].cpu, speeds=speeds))
        return batches_of("auto", PLAN, question(*devices), 8).is_exact

    asked = question(exactly(1, device("a"), batch=0.7), exactly(1, device("b"), batch=0.7))
    fast, exact = (under_load(PLAN, asked, sequences=8, max_rows=rows).tokens_per_s for rows in (8, 1))
    enough = 0.9 * fast / exact - 1
    assert enough > 0.1
    assert not is_exact(0.0)
    assert not is_exact(0.99 * enough)
    assert is_exact(1.01 * enough)
    assert is_exact(0.0, other=1.01 * enough), "the device that was measured worst counts"


def test_one_sequence_is_exact_whatever_is_asked_for():
    asked = question(exactly(1, device("a")), exactly(1, device("b")))
    for mode in ("exact", "auto", "fast"):
        found = batches_of(mode, PLAN, asked, 1)
        assert (found.batching.rows, found.is_exact) == (1, True)


def test_flash_attention_on_several_threads_is_exact_before_many_cells_alone():
    devices = exactly(7, device("a")), exactly(7, device("b"))
    assert batches_of("exact", PLAN, question(*devices, flash=True), 8).batching.cells == SPLIT_CELLS
    assert not batches_of("auto", PLAN, question(*devices, flash=True), 8).is_exact
    assert batches_of("auto", PLAN, question(*devices, flash=True, kv_type="q8_0"), 8).is_exact
    single = [exactly(7, device(name), threads=1) for name in "ab"]
    assert batches_of("auto", PLAN, question(*single, flash=True), 8).batching.cells is None


def test_gaps_are_filled_where_a_step_reads_all_that_streams():
    asked = question(exactly(7, device("a", ram=3 * GB)))
    found = batches_of("auto", residency(ALONE, asked), asked, 4)
    assert found.batching == Batching(rows=4, pads=True)
    flash = replace(asked, workload=replace(asked.workload, flash=True))
    assert batches_of("exact", residency(ALONE, flash), flash, 4).batching == Batching(rows=4, cells=SPLIT_CELLS)


def test_completions_of_another_ring_are_recomputed_in_the_largest_steps_known_to_be_exact():
    def replays(mode: BatchingMode, sequences: int, *devices: DeviceProfile, **changes) -> tuple[int, int | None]:
        batching = batches_of(mode, PLAN, question(*devices, **changes), sequences).batching
        return batching.replays, batching.cells

    known = [replaying(7, exactly(8, device(name))) for name in "ab"]
    single = [replaying(7, exactly(8, device(name), threads=1)) for name in "ab"]
    assert replays("exact", 4, *known, flash=True) == (7, SPLIT_CELLS)
    assert replays("exact", 4, *single, flash=True) == (7, None)
    assert replays("exact", 4, *known, flash=True, kv_type="q8_0") == (7, None)
    assert replays("fast", 1, *known, flash=True) == (7, SPLIT_CELLS), "one alone is exact in any case"
    assert replays("exact", 4, *known) == (1, None)
    assert replays("exact", 4, known[0], exactly(8, device("b")), flash=True) == (1, SPLIT_CELLS)
    assert replays("fast", 8, *known, flash=True) == (1, None), "for rows after many cells it is not known"
    assert replays("fast", 8, *single, flash=True) == (7, None)


def replaying(rows: int, profile: DeviceProfile) -> DeviceProfile:
    """``profile`` with steps of up to ``rows`` exact rows of one sequence."""
    (exact,) = profile.cpu.exact_rows
    return replace(profile, cpu=replace(profile.cpu, exact_rows=(replace(exact, replay_rows=rows),)))


def test_a_plan_for_several_sequences_is_what_is_served():
    devices = exactly(8, device("a")), exactly(8, device("b"))
    asked_for = wishes(links=("1Gbit/s,1ms",), sequences=8, context_tokens=4096, time_limit_s=600)
    asked = ask(asked_for, devices, (), model())
    answer = explain(asked)
    solution = solve(
        devices, asked.all_links, asked.model, asked.workload, chunks=CHUNKS, time_limit_s=asked.time_limit_s
    )
    question = instance(devices, asked.all_links, asked.model, asked.workload, {}, solution.plan.head)
    served = fitted(solution, question, run=asked.run, widens=False)
    load = served.batches.load
    assert answer.load is not None
    assert (answer.load.sequences, answer.load.rows, answer.load.is_exact) == (8, load.rows, served.batches.is_exact)
    assert answer.load.tokens_per_s == pytest.approx(load.tokens_per_s)
    assert (answer.load.tbt_ms, answer.load.ttft_ms) == pytest.approx((1e3 * load.tbt_s, 1e3 * load.ttft_s))
    assert explain(ask(replace(asked_for, run=replace(asked_for.run, sequences=1)), devices, (), model())).load is None
    console = Console(width=200)
    with console.capture() as shown:
        console.print(render(answer, 200))
    assert f"8 requests: {show_speed(load.tokens_per_s)}, " in shown.get()


def test_rows_that_were_not_compared_are_computed_one_by_one():
    plan, devices = ALONE, [exactly(7, device("a"))]
    assert exact_rows(plan, devices, model()) == 7
    assert exact_rows(plan, devices, replace(model(), experts=8, experts_used=2)) == 1
    assert exact_rows(plan, devices, replace(model(), output_bytes_by_type={"Q6_K": GB})) == 1
    with_adapter = [replace(layer, adapter_reads={"F32": 1 << 10}) for layer in model().layers]
    assert exact_rows(plan, devices, replace(model(), layers=tuple(with_adapter))) == 1
    gpu = replace(plan, output_on_gpu=True)
    assert exact_rows(gpu, devices, model()) == 1
    norms = replace(model().layers[0], bytes_by_type={"Q4_K": GB // 4, "F32": 32_000})
    assert exact_rows(plan, devices, replace(model(), layers=(norms,) * 20)) == 7
    wide = replace(norms, bytes_by_type={"F32": GB})
    assert exact_rows(plan, devices, replace(model(), layers=(wide,) * 20)) == 1


def test_states_are_computed_together_as_far_as_the_device_computes_such_ones_exactly():
    layer = replace(model().layers[0], state_bytes=1000)
    hybrid = replace(model(), layers=(layer,) * 20, architecture="qwen35")
    (known,) = [exactly(7, device("a"))]
    assert exact_rows(ALONE, [known], hybrid) == 1, "it is not known of states"
    rows = (TypeRows(type="delta", rows=4, piece_rows=16, replay_rows=3), TypeRows(type="scan", rows=2))
    compared = replace(known, cpu=replace(known.cpu, exact_states=rows))
    assert exact_rows(ALONE, [compared], hybrid) == 4
    assert piece_rows(ALONE, [compared], hybrid) == 16
    assert exact_rows(ALONE, [compared], replace(hybrid, architecture="nemotron_h")) == 2
    assert exact_rows(ALONE, [compared], replace(hybrid, architecture="jamba")) == 1, "of a kind that is not compared"
    assert exact_rows(ALONE, [known, compared], hybrid) == 1
    assert exact_rows(ALONE, [compared], replace(hybrid, experts=8, experts_used=2)) == 1


def test_no_row_of_nobody_is_computed_in_a_state():
    asked = question(exactly(8, device("a", ram=3 * GB, disk=0.3e9)))
    layer = replace(asked.model.layers[0], state_bytes=1000)
    hybrid = replace(asked, model=replace(asked.model, layers=(layer,) * 20, architecture="qwen35"))
    for each, pads in ((asked, True), (hybrid, False)):
        assert batches_of("fast", residency(ALONE, each), each, 4).batching.pads == pads


def test_chunks_are_small_where_several_answers_were_asked_for():
    asked = question(exactly(8, device("a")), exactly(8, device("b")))
    assert rows_of_chunks(PLAN, asked, 1, asked=False) == 512
    assert rows_of_chunks(PLAN, asked, 4, asked=False) == 256
    few, many = (rows_of_chunks(PLAN, asked, sequences, asked=True) for sequences in (2, 64))
    assert 16 <= few < many <= 128
    longest = max(each.prefill_s for each in evaluate(PLAN, asked.with_rows(many)).devices)
    assert longest <= under_load(PLAN, asked, sequences=64).tbt_s
    assert rows_of_chunks(PLAN, asked.with_rows(8), 4, asked=True) == 8
    assert (min_rows(PLAN, 256), min_rows(PLAN, 16)) == (64, 16)


def test_a_step_has_room_for_a_picture_whose_rows_attend_to_each_other_even_where_chunks_are_small():
    run = wishes(context_tokens=4096, sequences=2, whole_rows=280)
    whole_rows = ask(run, [device("a")], (), model()).workload.whole_rows
    asked = question(exactly(8, device("a")), exactly(8, device("b")), whole_rows=whole_rows)
    rows = rows_of_chunks(PLAN, asked, 2, asked=True)
    found = evaluate(PLAN, asked.with_rows(rows))
    assert (found.chunk_rows < 256, found.step_rows) == (True, 280)


def test_pieces_of_a_chunk_take_no_longer_than_the_tokens_of_all_others():
    asked = question(exactly(8, device("a")), exactly(8, device("b")))
    found = pieces_of(PLAN, asked, 65)
    assert found is not None
    assert found.multiple == 8
    assert len(found.rows) == 64
    assert list(found.rows) == sorted(found.rows)
    assert found.rows[0] < found.rows[-1] <= 512
    took_s = max(each.prefill_s for each in evaluate(PLAN, asked.with_rows(found.rows[-1])).devices)
    assert took_s <= under_load(PLAN, asked, sequences=64).tbt_s
    short_s, long_s = (
        max(each.prefill_s for each in evaluate(PLAN, asked.with_rows(rows)).devices)
        for rows in (found.short, 2 * found.short)
    )
    assert short_s <= SHORT_S < long_s
    assert batches_of("auto", PLAN, asked, 65).pieces == found
    assert found.twice is not None, "attention to what is before a piece takes time"
    slow = [replace(each, cpu=replace(each.cpu, plain_attention_s=1e-8)) for each in asked.devices]
    slower = pieces_of(PLAN, question(*slow), 65)
    assert slower is not None
    assert slower.twice is not None
    assert slower.twice < found.twice


def test_a_piece_has_as_many_rows_as_are_computed_about_as_fast_as_any():
    assert efficient_rows({8: 4.0, 16: 4.0, 32: 4.4, 64: 8.0, 128: 16.0}) == 32
    assert efficient_rows({8: 1.0, 16: 2.0, 32: 4.0}) == 8
    steep = replace(speed(20e9), rows=tuple(RowSpeed(rows=rows, bytes_per_s=1e9) for rows in (16, 128)))
    devices = [exactly(8, device(name)) for name in "ab"]
    devices = [replace(each, cpu=replace(each.cpu, speeds=(steep,))) for each in devices]
    asked = question(*devices)
    found = pieces_of(PLAN, asked, 4)
    assert found is not None
    assert found.rows[0] >= 128, "16 rows take as long"
    assert rows_of_chunks(PLAN, question(*devices, flash=True), 4, asked=True) >= 128


def test_chunks_are_cut_only_where_that_is_known_to_be_exact_and_reads_nothing_twice():
    devices = exactly(8, device("a")), exactly(8, device("b"))
    asked = question(*devices)
    alone, several = pieces_of(PLAN, asked, 1), pieces_of(PLAN, asked, 4)
    assert alone is not None, "nobody else waits, but pieces are found again"
    assert several is not None
    assert alone.multiple == several.multiple
    assert pieces_of(PLAN, question(*devices, flash=True), 4) is None
    assert pieces_of(PLAN, asked.with_rows(8), 4) is None
    unknown = replace(devices[0].cpu, exact_rows=())
    assert pieces_of(PLAN, question(replace(devices[0], cpu=unknown), devices[1]), 4) is None
    assert piece_rows(PLAN, devices, replace(model(), experts=8, experts_used=2)) == 0
    streams = question(exactly(7, device("a", ram=3 * GB)))
    assert pieces_of(residency(ALONE, streams), streams, 4) is None
    (rows,) = devices[0].cpu.exact_rows
    finer = replace(devices[0].cpu, exact_rows=(replace(rows, piece_rows=3),))
    assert piece_rows(PLAN, (replace(devices[0], cpu=finer), devices[1]), model()) == 24


def test_chunks_that_each_read_all_that_streams_stay_large():
    asked = question(exactly(7, device("a", ram=3 * GB)))
    plan = residency(ALONE, asked)
    assert rows_of_chunks(plan, asked, 4, asked=True) == 512
    assert min_rows(plan, 512) == 256


def test_rows_of_states_that_were_not_compared_are_exact_one_by_one_alone_as_of_other_models():
    asked = question(exactly(8, device("a", rate=1e9)), exactly(8, device("b", rate=1e9)))
    states = tuple(replace(layer, kv_bytes_per_token=0, state_bytes=1 << 20) for layer in asked.model.layers)
    asked = replace(asked, model=replace(asked.model, layers=states))
    assert set(asked.kv_bytes) == {1 << 20}
    for mode, rows in (("exact", 1), ("fast", 4)):
        batches = batches_of(mode, PLAN, asked, sequences=4)
        assert (batches.batching.rows, batches.batching.replays, batches.pieces) == (rows, 1, None)
        assert batches.is_exact == (mode == "exact")
