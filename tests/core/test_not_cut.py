"""A model that cannot be cut is served by one device, unless others were requested."""

from types import SimpleNamespace

import pytest

from primad.errors import ModelError
from primad.gguf.architectures.cuts import cuttable
from primad.gguf.architectures.table import ADVICE
from primad.gguf.header import read_header
from primad.gguf.profile import model_profile
from primad.head.model.checked import as_it_can_be, check_options
from primad.head.model.options import ServeOptions
from primad.planning.run_config import RunConfig
from tests.fakes.gguf import toy_arrays, write_gguf
from tools import synth

CONFIG = SimpleNamespace(devices=())


class Reported(list):
    """A reporter that records lines."""

    report_line = list.append


def options(*, wait=None, single_device=False, **run):
    return ServeOptions(
        wait=wait,
        wait_timeout_s=None,
        step_timeout_s=5.0,
        http_port=0,
        single_device=single_device,
        run=RunConfig(extra_buffers="off", context_tokens=64, chunk_rows=16, **run),
    )


@pytest.fixture
def unknown(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="llama", values={"llama.attention.key_length_swa": synth.scalar_value(4, 8)})
    return read_header(path)


def test_the_head_serves_it_alone_and_reports_the_reason(unknown):
    reported = Reported()
    found = as_it_can_be(options(wait=0), CONFIG, unknown, reported)
    assert found == options(wait=0, single_device=True)
    assert len(reported) == 1
    assert "key 'llama.attention.key_length_swa' cannot be cut into windows exactly" in reported[0]
    assert reported[0].endswith("; only this device serves it")


@pytest.mark.parametrize(
    "asked", [{"wait": 1}, {"windows": (2, 2)}, {"use_all": True}], ids=["wait", "windows", "use all"]
)
def test_where_other_devices_were_asked_for_nothing_changes(asked, unknown):
    reported = Reported()
    assert as_it_can_be(options(**asked), CONFIG, unknown, reported) == options(**asked)
    assert reported == []


def test_it_is_refused_by_name_where_other_devices_were_asked_for(unknown):
    asked = options(wait=1, use_all=True)
    with pytest.raises(ModelError, match=ADVICE):
        check_options(asked, CONFIG, unknown, model_profile(unknown))


def test_a_named_device_counts_as_asked_for(unknown):
    config = SimpleNamespace(devices=(("192.0.2.1", 7770),))
    assert not as_it_can_be(options(), config, unknown, Reported()).single_device


def test_a_model_that_is_cut_is_not_served_alone(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path)
    reported = Reported()
    assert as_it_can_be(options(), CONFIG, read_header(path), reported) == options()
    assert reported == []


def test_a_file_that_is_no_complete_model_is_judged_where_it_is_read(tmp_path):
    header = read_header(write_gguf(tmp_path / "toy.gguf", toy_arrays()))
    with pytest.raises(ModelError):
        cuttable(header)
    assert as_it_can_be(options(), CONFIG, header, Reported()) == options()
