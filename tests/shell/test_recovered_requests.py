"""Requests of llama.cpp resume in another ring from kept KV cells, with the same bits."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from halda.assignment import in_memory
from primad.engine.protocol import GREEDY, WindowSource
from primad.gguf.architectures.layers import layer_count
from primad.gguf.header import read_header
from primad.gguf.windows import vocabulary_size
from primad.kv.keys import to_go_on_from
from primad.ring.head import Notify
from primad.ring.keeping import prompt_blocks
from primad.ring.loading import open_head
from primad.ring.messages import Drained, Generate, HeadPart, KvKept, Open, PromptProgress, Sampled
from tests.shell.test_cut_exact import OPTIONS, synth

PROMPT = [(7 * place) % 90 + 3 for place in range(40)]
SAMPLED = msgspec.structs.replace(GREEDY, temperature=1.5, seed=3, presence_penalty=0.5, penalty_tokens=8)
TOKENS = 24
WIDE = {"width": 256, "head_width": 64}
"""The heads' width is a multiple of a Q8_0 block."""


class SingleDevice:
    """The head's part of a ring process with the whole model, and the events that it reported."""

    def __init__(self, path, cells, options, *, streams=False, states=0) -> None:
        header = read_header(path)
        assignment = in_memory(0, layer_count(header), output="cpu")
        if streams:
            size = sum(tensor.bytes for name, tensor in header.tensors.items() if name.startswith("blk."))
            assignment = replace(assignment, layer_bytes=size, resident_bytes=size // 2)
        source = WindowSource(window=0, metadata=str(path), layers=(), assignment=assignment, extra_buffers=False)
        opening = Open(
            ring=1,
            epoch=1,
            windows=[source],
            route=1,
            width=256,
            host="127.0.0.1",
            head=HeadPart(
                model=str(path),
                vocabulary=vocabulary_size(header),
                ends=(2,),
                depth=1,
                at_once=2,
                chunk_rows=16,
                min_rows=16,
                keep_rows=5,
                states=states,
                state_rows=5 if states else None,
            ),
            step_timeout_s=60,
            options=options,
            read_ahead_bytes=0,
            usage=None,
            cells=str(cells),
        )
        self.head, self._streams = open_head(opening, lambda _: None, lambda _: None)
        self.events = []

    def run(self, *generate, until=lambda events: False) -> None:
        """Run until it is idle or ``until`` holds."""
        for each in generate:
            self.head.submit(each)
        while not until(self.events) and (outcome := self.head.turn()) is not None:
            assert isinstance(outcome, Notify)
            self.events += outcome.events

    def reported(self, request):
        """The request's tokens and log-probabilities."""
        return [
            (each.token, each.logprob) for each in self.events if isinstance(each, Sampled) and each.request == request
        ]

    def saved(self, request):
        reported = (each for each in self.events if isinstance(each, KvKept) and each.request == request)
        return [block for each in reported for block in each.blocks]

    def close(self) -> None:
        self._streams.end()
        self.head.kv_writer.close()
        self.head._tail.release()


@pytest.fixture
def device(tmp_path):
    opened = []
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="llama", **WIDE)

    def make(options, **how) -> SingleDevice:
        opened.append(SingleDevice(path, tmp_path / "cells", options, **how))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def generate(request=1, *, sampled=(), **options) -> Generate:
    common = {"prompt": PROMPT, "max_tokens": TOKENS, "sampling": SAMPLED, "logprobs": 0, "root": "model and owner"}
    return Generate(request=request, sampled=list(sampled), **{**common, **options})


@pytest.mark.parametrize("drains", [True, False])
@pytest.mark.parametrize(("kv_type", "flash", "sequences"), [("f16", True, 1), ("f16", False, 2), ("q8_0", True, 2)])
def test_a_request_resumes_from_its_kv_cells_bit_for_bit(device, kv_type, flash, sequences, drains):
    options = msgspec.structs.replace(OPTIONS, kv_type=kv_type, flash=flash, sequences=sequences, rows=16)
    undisturbed, first = device(options), device(options)
    requests = range(1, sequences + 1)
    undisturbed.run(*(generate(request, root="") for request in requests))
    whole = {request: undisturbed.reported(request) for request in requests}
    first.run(
        *(generate(request) for request in requests),
        until=lambda events: sum(isinstance(each, Sampled) for each in events) == 13 * sequences,
    )
    if drains:
        first.head.drain()
        first.run()
        assert Drained() in first.events
    first.head.kv_writer.flush()
    second = device(options)
    for request in requests:
        reported = first.reported(request)
        assert reported == whole[request][: len(reported)]
        rows = len(PROMPT) + len(reported) - 1 - first.saved(request)[-1].end
        assert rows == 0 if drains else rows < 8
        second.head.submit(
            generate(request, sampled=[token for token, _ in reported], blocks=first.saved(request)),
        )
    second.run()
    for request in requests:
        assert first.reported(request) + second.reported(request) == whole[request]


@pytest.mark.parametrize("saves_kv", [True, False])
@pytest.mark.parametrize("streams_first", [True, False])
def test_a_plan_that_streams_and_one_that_does_not_take_over_from_each_other_without_a_token_changed(
    device, streams_first, saves_kv
):
    options = msgspec.structs.replace(OPTIONS, flash=False, sequences=1, rows=16)
    undisturbed = device(options)
    undisturbed.run(generate(root=""))
    first = device(options, streams=streams_first)
    first.run(generate(), until=lambda events: sum(isinstance(each, Sampled) for each in events) == 9)
    first.head.kv_writer.flush()
    second = device(options, streams=not streams_first)
    blocks = first.saved(1) if saves_kv else []
    second.run(generate(sampled=[token for token, _ in first.reported(1)], blocks=blocks))
    assert first.reported(1) + second.reported(1) == undisturbed.reported(1)


def test_a_prompt_is_found_again_by_another_process(device):
    options = msgspec.structs.replace(OPTIONS, rows=16)
    first = device(options)
    first.run(generate())
    first.head.kv_writer.flush()
    second = device(options)
    found = prompt_blocks(second.head._scheduler._state.slots._chunking, PROMPT, "model and owner")
    second.run(generate(blocks=found))
    assert second.reported(1) == first.reported(1)
    assert [each.reused for each in second.events if isinstance(each, PromptProgress)] == [32]


FAMILIES = ["qwen35", "qwen35moe", "qwen3next", "nemotron_h", "granitehybrid", "lfm2", "falcon-h1"]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_model_with_states_resumes_from_one_and_finds_prompts_up_to_one(architecture, tmp_path):
    """Two concurrent requests with a common prefix; one resumes in another process, which also finds the prompt."""
    path, options = tmp_path / "model.gguf", msgspec.structs.replace(OPTIONS, rows=16, sequences=2)
    synth.write_model(path, architecture=architecture, **WIDE)
    longer, opened = [*PROMPT[:32], *PROMPT[:20]], []

    def device() -> SingleDevice:
        opened.append(SingleDevice(path, tmp_path / "cells", options, states=5))
        return opened[-1]

    undisturbed = device()
    for request in (generate(1, root=""), generate(2, root="", prompt=longer, reuses=False)):
        undisturbed.run(request)
    first = device()
    first.run(
        generate(1),
        generate(2, prompt=longer),
        until=lambda events: sum(isinstance(each, Sampled) for each in events) == 27,
    )
    assert [each.reused for each in first.events if isinstance(each, PromptProgress) and each.reused] == [32]
    first.head.kv_writer.flush()
    second = device()
    for request, prompt in ((1, PROMPT), (2, longer)):
        reported, saved = first.reported(request), to_go_on_from(first.saved(request))
        assert len(prompt) + len(reported) - 1 - saved[-1].end < 10
        second.head.submit(generate(request, prompt=prompt, sampled=[token for token, _ in reported], blocks=saved))
    second.run()
    for request in (1, 2):
        assert first.reported(request) + second.reported(request) == undisturbed.reported(request)
    third, prompt_blocks = device(), [each for each in first.saved(1) if each.end <= 32]
    third.run(generate(1, blocks=prompt_blocks))
    assert third.reported(1) == undisturbed.reported(1)
    assert [each.reused for each in third.events if isinstance(each, PromptProgress)] == [32]
    for each in opened:
        each.close()
