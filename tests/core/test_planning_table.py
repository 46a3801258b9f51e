"""The printed table of a plan."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from primad.errors import ConfigError
from primad.planning.explain import explain
from primad.planning.question import Wishes, ask
from primad.planning.table import check_plot, plot, show
from primad.planning.whatif import change
from tests.fakes.planning import GB, device, model, offloading, wishes


@pytest.fixture(scope="module")
def answer():
    devices = (device("desk", ram=3 * GB, vram=2 * GB), device("laptop", ram=2 * GB), device("watch", ram=GB // 10))
    asked = ask(Wishes(), devices, (), model())
    changes = ["ram:laptop=3GB"]
    return explain(change(asked, changes, lambda path: []), changes, asked)


def shown(answer, *, width=None):
    out = io.StringIO()
    show(answer, Console(file=out, width=width, force_terminal=width is not None, color_system=None))
    return out.getvalue()


def test_everything_that_was_asked_for_is_there(answer):
    text = shown(answer)
    for words in (
        "device",
        "windows",
        "GPU",
        "resident",
        "streamed",
        "RAM",
        "VRAM",
        "compute",
        "hops",
        "tokens/s",
        "TTFT",
        "for a prompt of 512 tokens",
        "bottleneck",
        "left out",
        "watch: cannot take part",
        "best single device",
        "What if ram:laptop=3GB",
        "before",
        "after",
        "RAM, laptop",
    ):
        assert words in text, words


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_nothing_is_cut_on_a_narrow_terminal(answer, width):
    text = shown(answer, width=width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_a_picture_is_written(answer, tmp_path):
    path = tmp_path / "plan.png"
    check_plot(path)
    plot(answer, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_refused_early(tmp_path):
    with pytest.raises(ConfigError, match=r"end the name in \.png, \.svg or \.pdf"):
        check_plot(tmp_path / "plan.jpeg2000")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_plot(tmp_path / "nowhere" / "plan.png")


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'primad\[plot\]'"):
        check_plot(tmp_path / "plan.png")


def test_bytes_read_from_disk_are_shown_where_layers_stream():
    slow = explain(ask(Wishes(), (device("desk", ram=2 * GB, disk=1e9),), (), model()))
    text = shown(slow)
    for words in ("ahead", "disk", "stall", "layers: ", "read per token", "by the slowest disk, of which it waits"):
        assert words in text, words
    fast = shown(explain(ask(wishes(sequences=1), (device("desk", ram=20 * GB),), (), model())))
    for words in ("ahead", "disk", "stall"):
        assert words not in fast, words
    minimum = explain(ask(Wishes(), (device("desk", ram=9 * GB // 8),), (), model()))
    (alone,) = minimum.devices
    assert f"{alone.streamed_layers} of 20 layers: " in shown(minimum)
    assert alone.streamed_layers >= 15
    assert "at a time" not in fast
    assert f"for a prompt of 512 tokens, {minimum.chunk_rows} at a time" in shown(minimum)
    assert minimum.chunk_rows < 512


def test_each_gpu_of_a_device_is_named_with_what_it_has():
    desk = device("desk", ram=12 * GB, vram=4 * GB)
    assert desk.gpu is not None
    two = desk.with_gpus([replace(desk.gpu, id=name) for name in ("CUDA0", "CUDA1")])
    found = explain(ask(Wishes(), (two,), (), model(context_tokens=1024)))
    text = " ".join(shown(found, width=200).split())
    gpus = found.devices[0].gpus
    assert [gpu.id for gpu in gpus] == ["CUDA0", "CUDA1"]
    assert sum(gpu.layers for gpu in gpus) == found.devices[0].gpu_layers == 20
    assert [*found.devices[0].windows[0].other_gpus] == [gpus[1].layers]
    for gpu in gpus:
        assert f"{gpu.layers} layers on GPU ({gpu.id})" in text
    assert found.devices[0].vram_bytes == sum(gpu.vram_bytes for gpu in gpus)
    assert found.devices[0].vram_limit_bytes == 8 * GB
    assert "on GPUs" in found.predicted.bottleneck
    assert "CUDA" not in shown(explain(ask(Wishes(), (desk,), (), model(context_tokens=1024))), width=200)


def test_devices_with_prefill_offload_are_shown():
    desk = device("desk", ram=12 * GB, vram=GB)
    answers = {
        offloads: explain(ask(Wishes(), (offloading(desk) if offloads else desk,), (), model()))
        for offloads in (True, False)
    }
    assert [answer.devices[0].prefill_offload for answer in answers.values()] == [True, False]
    assert "prompts through layers in RAM are computed by the GPU of desk" in shown(answers[True])
    assert "helped" not in shown(answers[False])
    assert answers[True].predicted.ttft_ms < answers[False].predicted.ttft_ms


def test_a_plan_shows_what_was_given_up_for_simplicity():
    desk, laptop = device("desk", ram=12 * GB), replace(device("laptop", ram=12 * GB, rate=21e9), wireless=True)
    found = explain(ask(wishes(sequences=1), (desk, laptop), (), model()))
    assert found.head == "desk"
    assert [each.what for each in found.given_up] == ["laptop as head, which is on Wi-Fi"]
    assert found.given_up[0].objective_ms == pytest.approx(found.proof.given_up_ms)
    assert "%), without laptop as head, which is on Wi-Fi" in shown(found)
    alone = explain(ask(wishes(sequences=1), (desk,), (), model()))
    assert not alone.given_up
    assert "given up" not in shown(alone)
