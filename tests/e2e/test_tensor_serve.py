"""A tensor-parallel group serves: all devices compute each request, which survives the loss of a device."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.cluster import HTTP, Head, Primad, all_joined, heading, ring_process, wait_until
from tests.e2e.reference import Plain
from tests.e2e.streams import STORY, Reported, ask
from tests.shell.test_tensor_groups import MAX_DIFFERENCE
from tools.synth import FEW_TOKENS, write_model

pytestmark = pytest.mark.slow

TOKENS = 100
LIKELY = 24
FEW_LIKELY = {"28": 50.0, "29": 50.0}
"""Two likely tokens, so that the text repeats itself and drafts are accepted."""
CHARACTERS = 100
"""Characters before the loss; later ones may differ, since other shares are summed in another order."""


@dataclass(frozen=True)
class Group:
    """A head, workers by name, and the undisturbed completion."""

    head: Head
    workers: dict[str, Primad]
    answer: Reported

    def devices(self) -> dict[str, str]:
        """Return the role of each computing device."""
        return {device["name"]: device["role"] for device in self.head.status().get("devices", ())}


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model that three devices can share."""
    path = tmp_path_factory.mktemp("shared") / "shared.gguf"
    write_model(
        path, layers=6, heads=4, heads_kv=4, vocabulary=f"from:{smollm2}", tokens=FEW_TOKENS, quantisation="f32"
    )
    yield path
    path.unlink()


@pytest.fixture(scope="module")
def group(model: Path, module_home) -> Iterator[Group]:
    cluster, homes = f"group-{secrets.token_hex(6)}", [module_home(name) for name in ("g1", "g2")]
    arguments = ("--wait", 2, "--parallel", "tensor", "--context", 512, "--speculate", "lookup", "--batching", "fast")
    with ExitStack() as stack:
        runs = stack.enter_context(all_joined(homes, cluster))
        head = stack.enter_context(heading(model, module_home("head"), cluster, *arguments, config=""))
        head.wait_serving()
        yield Group(head, dict(zip(("g1", "g2"), runs, strict=True)), ask(head, tokens=TOKENS))


def test_all_devices_compute_each_layer(group):
    devices = group.head.status()["devices"]
    assert [device["windows"] for device in devices] == [[[0, 6]]] * 3
    assert group.answer.finish == "length"
    assert ask(group.head, tokens=TOKENS).text == group.answer.text
    assert group.head.status()["kv"] is not None, "each rank keeps the cells of its share"


def test_drafts_of_a_group_change_no_token(group):
    drafted, plain = (
        ask(group.head, tokens=LIKELY, speculate=speculates, logit_bias=FEW_LIKELY) for speculates in (True, False)
    )
    assert drafted.text == plain.text
    wait_until(lambda: group.head.status()["drafts"]["accepted"], "drafts hold")


def test_tokens_are_as_likely_as_to_the_whole_model(group, model):
    plain = Plain(model)
    expected = plain.continue_(plain.tokenize(STORY), LIKELY)
    plain.release()
    asked = {"prompt": STORY, "max_tokens": LIKELY, "temperature": 0, "logprobs": 1}
    found = HTTP.post(f"{group.head.url}/v1/completions", json=asked).json()["choices"][0]["logprobs"]
    likely = [expected.logprob(step, token) for step, token in enumerate(expected.tokens)]
    assert found["token_logprobs"] == pytest.approx(likely, abs=MAX_DIFFERENCE * float(np.abs(expected.logits).max()))


def test_a_request_continues_after_the_loss_of_a_device(group):
    """It is taken in again seconds later, so the head's lines are checked, not what serves now. If its daemon is late to
    report the end of its process, another device of the group names it."""
    before = len(group.head.run.lines)
    reported = ask(group.head, lambda: ring_process(group.workers["g2"]).kill(), still=True, tokens=TOKENS)
    assert (reported.finish, reported.error) == ("length", None), group.head.run.output
    assert reported.text[:CHARACTERS] == group.answer.text[:CHARACTERS]
    group.head.run.wait_for(r"^g2: the ring process was ended by SIGKILL|\bg2 of this group ", start=before)
    group.head.run.wait_for("^g1: 50% of each of 6 layers", start=before)
    assert "Traceback" not in group.head.run.output
