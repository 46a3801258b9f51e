"""Whether a model's own prediction layer drafts, and its costs in a plan."""

import pytest

from primad.engine.protocol import PREDICTOR_CELLS
from primad.errors import ConfigError
from primad.gguf.digests import LayerDigests
from primad.gguf.header import read_header
from primad.gguf.layers import LayerCut
from primad.gguf.profile import model_profile
from primad.gguf.windows import ModelCutter
from primad.planning.check_run import check_speculate
from primad.planning.predicting import drafts_line, predicts, with_predicting
from primad.planning.run_config import RunConfig
from tools import synth


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    synth.write_model(path, architecture="glm4moe")
    return read_header(path)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "other.gguf"
    synth.write_model(path)
    return read_header(path)


def test_it_drafts_unless_something_else_was_asked_for(header, other):
    assert [predicts(RunConfig(speculate=mode), header) for mode in ("auto", "mtp", "lookup", "draft", "off")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert not predicts(RunConfig(), other)
    assert [predicts(RunConfig(speculate=mode), header, free_bytes=100_000) for mode in ("auto", "mtp")] == [
        False,
        True,
    ]
    assert not predicts(RunConfig(), header, "--draft names another model")


def test_a_group_and_drafts_of_the_model_exclude_each_other_with_a_line(header, other):
    assert "drafts with --parallel pipeline" in drafts_line(RunConfig(parallel="tensor"), header, drafts=False)
    assert "devices share no layers" in drafts_line(RunConfig(parallel="auto"), header, drafts=True)
    lookup = RunConfig(parallel="tensor", speculate="lookup")
    for run, model in ((RunConfig(), header), (lookup, header), (RunConfig(parallel="tensor"), other)):
        assert drafts_line(run, model, drafts=False) == ""


def test_it_is_refused_by_name_where_there_is_none_or_it_cannot(header, other):
    with pytest.raises(ConfigError, match=r"--speculate mtp: other\.gguf has no layer"):
        predicts(RunConfig(speculate="mtp"), other)
    with pytest.raises(ConfigError, match="--speculate mtp: adapters"):
        predicts(RunConfig(speculate="mtp"), header, "adapters change the model")
    with pytest.raises(ConfigError, match="contradicts --speculate mtp"):
        check_speculate(RunConfig(speculate="mtp"), model_profile(header), header.path)


def test_a_plan_counts_its_weights_and_cells_with_the_output_matrix(header):
    before = model_profile(header)
    after = with_predicting(before, header)
    weights = sum(tensor.bytes for name, tensor in header.tensors.items() if name.startswith("blk.7."))
    more = sum(after.output_bytes_by_type.values()) - sum(before.output_bytes_by_type.values())
    assert more == weights + min(PREDICTOR_CELLS, before.context_tokens) * before.layers[-1].kv_bytes_per_token
    assert after.layers == before.layers


def test_its_layer_file_goes_to_the_tail_alone_with_the_real_embedding(header):
    plain, cutter = ModelCutter(header), ModelCutter(header, predicts=True)
    assert [plain.spec(0, 0, 3).files, plain.spec(1, 3, 5).files] == [
        cutter.spec(0, 0, 3).files,
        cutter.spec(1, 3, 5).files,
    ]
    tail = cutter.spec(2, 5, 7)
    names = [{each.name for each in ref.tensors} for ref in tail.layers]
    assert len(names) == 4
    assert "blk.*.nextn.eh_proj.weight" in names[2]
    assert {"token_embd.weight", "output.weight"} <= names[3]
    assert cutter.source(tail.layers[2].digest) is not None


def test_its_digest_is_known_the_next_time_and_differs_from_that_of_the_plain_output(header, tmp_path, monkeypatch):
    digests = LayerDigests(header, tmp_path / "digests.json")
    cutters = [ModelCutter(header, digests, predicts=predicts) for predicts in (True, False)]
    expected = [cutter.spec(2, 5, 7) for cutter in cutters]
    digests.save()
    later = LayerDigests(header, tmp_path / "digests.json")
    monkeypatch.setattr(LayerCut, "chunks", None)
    assert [ModelCutter(header, later, predicts=predicts).spec(2, 5, 7) for predicts in (True, False)] == expected
    assert expected[0] != expected[1]
