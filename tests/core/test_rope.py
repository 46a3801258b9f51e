"""``--rope-*`` and ``--yarn-*``: the parameters, the allowed context, and where windows may begin."""

from dataclasses import replace

import msgspec
import pytest

from primad.cli.options import RopeOptions, rope_of
from primad.engine.rope import Rope
from primad.errors import ConfigError
from primad.gguf.header import read_header
from primad.gguf.profile import model_profile
from primad.planning.adapters import with_rope
from primad.planning.default_context import first_context
from tools import synth


@pytest.fixture
def header(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="gpt-oss", layers=8)
    return read_header(path)


def test_nothing_asked_for_changes_nothing(header):
    profile = model_profile(header)
    assert rope_of(RopeOptions()) == Rope()
    assert with_rope(profile, header, Rope()) is profile


def test_options_become_llama_cpps_parameters():
    asked = RopeOptions(
        rope_scaling="yarn", rope_scale=4.0, rope_freq_base=5e5, yarn_orig_ctx=2048, yarn_beta_fast=16.0
    )
    assert rope_of(asked) == Rope(
        scaling="yarn", freq_scale=0.25, freq_base=5e5, yarn_orig_ctx=2048, yarn_beta_fast=16.0
    )


@pytest.mark.parametrize(
    ("asked", "printed"),
    [
        (RopeOptions(rope_scale=2.0, rope_freq_scale=0.5), "leave one of them out"),
        (RopeOptions(rope_scale=0.0), "--rope-scale 0: give a number of more than 0"),
        (RopeOptions(rope_freq_base=float("nan")), "--rope-freq-base nan"),
        (RopeOptions(rope_freq_scale=float("inf")), "--rope-freq-scale inf"),
        (RopeOptions(yarn_attn_factor=-2.0), "--yarn-attn-factor -2: give a number of at least 0"),
        (RopeOptions(rope_scaling="cubic"), "--rope-scaling"),
    ],
    ids=["both", "zero", "nan", "infinite", "negative", "kind"],
)
def test_a_nonsensical_value_is_refused_by_its_flag(asked, printed):
    with pytest.raises(ConfigError, match=printed):
        rope_of(asked)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (Rope(freq_scale=0.25), 400),
        (Rope(scaling="yarn", freq_scale=0.1, yarn_orig_ctx=60), 600),
        (Rope(scaling="none", freq_scale=0.25), 100),
        (Rope(scaling="yarn"), 100),
        (Rope(freq_scale=2.0), 100),
        (Rope(freq_base=1e6), 0),
    ],
    ids=["stretched", "from the original", "not scaled", "kind alone", "shrunk", "another base"],
)
def test_a_stretched_context_may_be_as_long_as_it_was_stretched(rope, longest):
    assert rope.reach(100, 100) == longest


def test_a_context_beyond_training_is_allowed_where_it_is_stretched(header):
    profile = replace(model_profile(header), context_tokens=1000)
    with pytest.raises(ConfigError, match="--rope-scale"):
        first_context(2000, profile)
    stretched = Rope(freq_scale=0.5, yarn_orig_ctx=1000)
    assert first_context(2000, with_rope(profile, header, stretched)) == 2000
    assert first_context(99_999, with_rope(profile, header, Rope(freq_base=1e6))) == 99_999


def test_where_a_window_has_to_slide_it_begins_where_one_does(header):
    profile = model_profile(header)
    assert profile.cut_multiple == 1
    assert with_rope(profile, header, Rope(freq_base=1e6)).cut_multiple == 2


@pytest.mark.parametrize("name", ["freq_base", "freq_scale", "yarn_ext_factor", "yarn_orig_ctx"])
def test_a_number_that_is_none_is_refused_on_the_wire(name):
    for number in (float("nan"), float("inf"), -5.0):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode({name: number}), type=Rope)
