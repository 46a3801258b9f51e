"""The place of the image encoder: next to a plan's layers, on the device where an image takes clearly less time."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from primad.planning.encoder_place import EncoderPlace, encoder_place
from primad.planning.explain import explain
from primad.planning.question import PlannedEncoder, ask
from primad.planning.table import show
from tests.core.test_planned_drafts import ALONE, TWO, asked
from tests.fakes.planning import GB, device, model, wishes

ENCODER = PlannedEncoder(sees=True, hears=False, memory_bytes=GB, picture_flop=4e12, encoded_bytes=4 << 20)


def with_gpu(name, **how):
    made = device(name, **how)
    return replace(made, gpu=replace(made.gpu, id="CUDA0"))


def place(*devices, plan=ALONE, encoder=ENCODER, wish=None):
    return encoder_place(encoder, wish, plan, asked(*devices))


def where(*devices, **how):
    found = place(*devices, **how)
    return found.device, found.gpu


def test_without_an_encoder_there_is_no_place():
    assert place(device("a"), encoder=None) is None


def test_the_head_encodes_unless_another_device_is_a_tenth_faster_including_the_transfer():
    head = device("a")
    assert where(head) == ("a", "")
    assert where(head, device("b", rate=21e9)) == ("a", "")
    assert where(head, device("b", rate=40e9)) == ("b", "")
    slow = replace(ENCODER, encoded_bytes=2 * GB)
    assert where(head, device("b", rate=40e9), encoder=slow) == ("a", "")
    unknown = replace(ENCODER, picture_flop=0.0)
    assert place(head, device("b", rate=40e9), encoder=unknown) == EncoderPlace(device="a")


def test_a_gpu_that_has_room_besides_its_layers_encodes():
    assert where(with_gpu("a", vram=2 * GB)) == ("a", "CUDA0")
    assert where(with_gpu("a", vram=GB // 2)) == ("a", "")
    assert where(device("a"), with_gpu("b", vram=2 * GB)) == ("b", "CUDA0")
    assert where(device("a"), with_gpu("b", ram=GB // 4, vram=2 * GB)) == ("a", ""), "its process takes RAM too"
    assert where(device("a"), device("b", vram=2 * GB)) == ("a", ""), "of one without a name nothing can be asked"


def test_a_device_that_computes_layers_has_half_of_its_processor_and_the_memory_that_they_leave():
    assert where(device("a"), device("b", rate=38e9), plan=TWO) == ("a", "")
    assert where(device("a"), device("b", rate=60e9), plan=TWO) == ("b", "")
    assert where(device("a"), device("b", rate=60e9, ram=3 * GB), plan=TWO) == ("a", "")


def test_a_device_on_a_machine_with_others_is_taken_only_where_it_was_wished_for():
    devices = device("a", host="one"), device("b", host="one", rate=60e9)
    assert where(*devices) == ("a", "")
    assert where(*devices, wish="b") == ("b", "")


def test_a_wish_is_kept_where_there_is_room():
    assert where(device("a"), device("b", rate=5e9), wish="b") == ("b", "")
    assert where(device("a"), with_gpu("b", vram=2 * GB), wish="b") == ("b", "CUDA0")
    assert where(device("a"), with_gpu("b", vram=2 * GB), wish="a") == ("a", "")
    assert where(device("a"), device("b", ram=GB // 2), wish="b") == ("a", "")


def test_the_plan_shows_where_pictures_are_encoded_and_how_long_one_takes():
    question = ask(wishes(head="a"), [device("a"), with_gpu("b", vram=8 * GB)], [], model(layers=4))
    answer = explain(replace(question, encoder=ENCODER))
    assert (answer.model.encoder_device, answer.model.encoder_gpu) == ("b", "CUDA0")
    out = Console(file=io.StringIO(), width=200)
    show(answer, out)
    printed = out.file.getvalue()
    assert "an image takes about" in printed
    assert "on b (CUDA0)" in printed
