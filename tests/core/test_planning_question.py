"""Options become one question for the solver, or one clear error line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from primad.errors import ConfigError
from primad.planning.check_run import check_run
from primad.planning.question import SAME_MACHINE, Wishes, ask, check
from primad.planning.run_config import DEFAULT_RUN, RunConfig
from tests.fakes.planning import GB, device, link, model, wishes

DESK, LAPTOP = device("desk", vram=8 * GB), device("laptop")


def asked(devices=(DESK, LAPTOP), known=(), **changes):
    return ask(wishes(**changes), devices, known, model())


def test_options_that_are_left_open_have_defaults():
    question = asked()
    assert (question.head, question.run) == (None, DEFAULT_RUN)
    work = question.workload
    assert (work.context_tokens, work.prompt_tokens, work.answer_tokens, work.sequences) == (4096, 512, 256, 1)


def test_a_small_context_shortens_the_typical_request():
    work = asked(context_tokens=16).workload
    assert (work.prompt_tokens, work.answer_tokens) == (8, 8)


def test_every_pair_has_a_link_and_known_ones_count():
    known = link("desk", "laptop", bytes_per_s=5e6)
    both = {(one.source, one.target): one for one in asked(known=(known,)).all_links}
    assert both["desk", "laptop"] is known
    assert both["laptop", "desk"].bytes_per_s == 100e6


def test_links_of_the_owner_win():
    known = link("desk", "laptop", bytes_per_s=5e6)
    question = ask(
        Wishes(links=("1Gbit/s,1ms", "laptop:desk=300Mbit/s,4ms")),
        (DESK, LAPTOP, device("pi")),
        (known,),
        model(),
    )
    both = {(one.source, one.target): one for one in question.all_links}
    assert both["desk", "laptop"].bytes_per_s == both["laptop", "desk"].bytes_per_s == 37.5e6
    assert (both["desk", "pi"].bytes_per_s, both["desk", "pi"].round_trip_s) == (125e6, 0.001)


def test_a_link_may_say_how_late_one_message_of_twenty_is():
    question = ask(
        Wishes(links=("1Gbit/s,1ms", "laptop:desk=300Mbit/s,4ms,10ms")), (DESK, LAPTOP, device("pi")), (), model()
    )
    both = {(one.source, one.target): one.late_s for one in question.all_links}
    assert (both["desk", "laptop"], both["laptop", "desk"], both["desk", "pi"]) == (0.01, 0.01, 0)


def test_processes_of_one_machine_are_near():
    question = asked(devices=(device("a", host="h"), device("b", host="h")))
    assert {one.bytes_per_s for one in question.all_links} == {SAME_MACHINE.bytes_per_s}


def test_limits_are_those_of_the_devices():
    question = asked(max_ram=("desk=4GB",), max_vram=("desk=2GB",), max_disk=("laptop=1GB",))
    assert question.limits["desk"].ram_bytes == 4 * GB
    assert question.limits["desk"].vram_bytes == 2 * GB
    assert question.limits["laptop"].disk_bytes == GB
    assert question.limits["laptop"].ram_bytes is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": "pi"}, "--head: no device is called 'pi'; there are desk, laptop"),
        ({"context_tokens": 9000}, "--context 9000: toy was trained for 8192 tokens"),
        ({"prompt_tokens": 5000}, "--prompt 5000: leaves no room"),
        (
            {"prompt_tokens": 4000, "answer_tokens": 200},
            "--prompt 4000 and --answer 200 take more than the context of 4096",
        ),
        ({"links": ("fast",)}, "--link: 'fast' is not a rate"),
        ({"links": ("desk:pi=1Gbit/s",)}, "--link: no device is called 'pi'"),
        ({"links": ("1Gbit/s,1ms,late",)}, "--link: 'late' is not a time"),
        ({"links": ("desk=1Gbit/s",)}, "--link desk=1Gbit/s: give two devices"),
        ({"links": ("desk:desk=1Gbit/s",)}, "give two devices"),
        ({"max_ram": ("4GB",)}, "--max-ram 4GB: give a device and a size, as in --max-ram desk=16GiB"),
        ({"max_vram": ("pi=4GB",)}, "--max-vram: no device is called 'pi'"),
        ({"max_disk": ("desk=much",)}, "--max-disk desk: 'much' is not a size"),
    ],
)
def test_a_bad_wish_is_refused_by_its_flag(changes, message):
    with pytest.raises(ConfigError) as caught:
        asked(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_devices_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two devices are called desk"):
        asked(devices=(DESK, device("desk")))


def test_no_device_is_refused():
    with pytest.raises(ConfigError, match="no device to plan for"):
        asked(devices=())


def test_wishes_are_judged_before_devices_are_looked_for():
    with pytest.raises(ConfigError, match="--link"):
        check(Wishes(links=("x",)))


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
def test_the_kv_cache_is_of_the_type_that_was_asked_for(kv_type):
    assert asked(kv_type=kv_type).workload.kv_type == kv_type


def test_a_kv_cache_that_the_model_cannot_have_is_refused():
    narrow = replace(model(), kv_head_width=80)
    with pytest.raises(
        ConfigError, match=r"^--kv-type q8_0: needs heads of a multiple of 32 values; those of toy have 80; choose f16$"
    ):
        check_run(RunConfig(kv_type="q8_0"), narrow)
    check_run(DEFAULT_RUN, narrow)
    with pytest.raises(ConfigError, match=r"^--kv-type q4_0: needs flash attention"):
        check_run(RunConfig(kv_type="q4_0"), replace(model(), architecture="grok"))
