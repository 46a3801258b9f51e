"""A model on a hub: each device downloads its own layers, no disk has all of it, and the text is that of the file."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from primad.gguf.header import read_header
from primad.settings.config import layer_folder, models_folder
from tests.e2e.cluster import Head, heading, joined, serving, wait_until
from tests.e2e.streams import ask
from tests.fakes.hub import own_hub
from tools import synth

pytestmark = pytest.mark.slow

REPO = "acme/Tiny-GGUF"
FILE = "Tiny-Q8_0.gguf"
TOKENS = 32
NOWHERE = "http://127.0.0.1:9"
"""A hub that cannot be reached."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / FILE
    synth.write_model(path, layers=12, width=256, feed_forward=1024)
    return path


@pytest.fixture
def hub(model, monkeypatch):
    with own_hub(monkeypatch, {REPO: {FILE: model.read_bytes()}}) as fake:
        yield fake


def held_bytes(home: Path) -> int:
    """Return the disk space of a device's layers and models."""
    folders = (layer_folder(home), models_folder(home))
    return sum(path.stat().st_blocks * 512 for folder in folders for path in folder.rglob("*") if path.is_file())


def layer_bytes(model: Path) -> int:
    """The size of a layer, which is that of every other one."""
    return sum(each.bytes for name, each in read_header(model).tensors.items() if name.startswith("blk.0."))


def text_of(head: Head) -> str:
    return ask(head, tokens=TOKENS, middle=TOKENS // 2).text


def computing(head: Head) -> set[str]:
    return {device["name"] for device in head.status().get("devices", ())}


def test_every_device_fetches_its_own_layers_and_the_lost_ones_are_fetched_again(model, hub, new_home):
    """One worker cannot reach the hub: it gets its layers through the head, which keeps none of them."""
    size = model.stat().st_size
    with serving(model, new_home("alone"), "alone", "--alone") as head:
        expected = text_of(head)
    homes = {name: new_home(name) for name in ("head", "w1", "w2")}
    with ExitStack() as stack:
        w1 = stack.enter_context(joined(homes["w1"], "ranges"))
        w2 = stack.enter_context(joined(homes["w2"], "ranges", HF_ENDPOINT=NOWHERE))
        arguments = ("--wait", 2, "--use-all")
        head = stack.enter_context(heading(f"hf:{REPO}", homes["head"], "ranges", *arguments, config=""))
        head.wait_serving()
        assert text_of(head) == expected
        held = {name: held_bytes(home) for name, home in homes.items()}
        assert sum(held.values()) < 1.1 * size, "nobody holds what another one does"
        assert max(held.values()) < size - layer_bytes(model), "two others have at least a layer each"
        assert hub.given_bytes < 1.1 * size, "nor was anything fetched twice"
        hub_has = hub.given_bytes
        w1.kill()
        wait_until(lambda: computing(head) == {"head", "w2"}, "the head and the other worker serve")
        assert text_of(head) == expected
        assert hub_has < hub.given_bytes, "what was lost comes from the hub again"
        w2.kill()
        wait_until(lambda: computing(head) == {"head"}, "the head serves all of it")
        assert text_of(head) == expected
        assert any(models_folder(homes["head"]).rglob("compared")), "all of it is here, and as the hub says"
        asked = len(hub.asked)
        assert head.run.stop() == 0
        again = stack.enter_context(heading(f"hf:{REPO}", homes["head"], "ranges", config=""))
        again.wait_serving()
        assert text_of(again) == expected
        assert len(hub.asked) == asked, "what is here is used without asking"
