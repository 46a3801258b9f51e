"""``primad load``, ``unload`` and ``models`` with a running head that offers several models."""

from __future__ import annotations

import asyncio
import json

import pytest

from primad.api.answering.models import ModelState
from primad.api.http.access import Admission, Door
from primad.api.http.keys import ApiKey, digest_of
from primad.api.http.offered import find_offered
from primad.network.local_heads import announced_head
from primad.trust.local_trust import VARIABLE
from tests.fakes.backend import FakeBackend, replies
from tests.fakes.http import served_in_thread
from tests.fakes.model_stores import toy
from tests.fakes.models import FakeModels, backend_of, without_model

KEY = "k" * 20


class LoadingModels(FakeModels):
    """Loads each model a moment later, or finds that it cannot be loaded."""

    async def load(self, name: str) -> None:
        name = find_offered(name, self.offered()).id
        self.change(name, state=ModelState.LOADING, progress=0.25, expected_s=9.0)
        if name in self.failing:
            end = {"state": ModelState.FAILED, "detail": "no device has room", "progress": None}
        else:
            end = {"state": ModelState.LOADED, "progress": None, "expected_s": None}
        asyncio.get_running_loop().call_soon(lambda: self.change(name, **end))


@pytest.fixture(autouse=True)
def _isolated(monkeypatch, tmp_path):
    """Hide this user's heads, models and keys."""
    for name, place in {VARIABLE: "local", "PRIMAD_HOME": "home", "HOME": "user"}.items():
        monkeypatch.setenv(name, str(tmp_path / place))
    monkeypatch.delenv("PRIMAD_API_KEY", raising=False)


def three() -> LoadingModels:
    models = LoadingModels(backend_of("one"), backend_of("org/two:Q4_K_M"), backend_of("broken"))
    models.failing.add("broken")
    return models


def test_a_model_is_loaded_by_a_short_name_and_unloaded(command):
    models = three()
    with served_in_thread(without_model(), models=models) as url:
        assert command("load", "two", "--url", url) == (0, "org/two:Q4_K_M: loaded\n", "")
        assert list(models.loaded()) == ["org/two:Q4_K_M"]
        assert command("load", "two", "--url", url)[0] == 0, "again"
        assert command("unload", "two", "--url", url) == (0, "org/two:Q4_K_M: unloaded\n", "")
    assert models.loaded() == {}


def test_why_a_model_is_not_loaded_is_one_line(command):
    with served_in_thread(without_model(), models=three()) as url:
        assert command("load", "broken", "--url", url)[2].endswith("broken: cannot be loaded: no device has room\n")
        for verb in ("load", "unload"):
            code, out, err = command(verb, "three", "--url", url)
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert "there are: one, org/two:Q4_K_M, broken" in err
    with served_in_thread(FakeBackend(replies())) as url:
        assert "serves one model, " in command("load", "one", "--url", url)[2]
    assert "no response; is 'primad serve' running?" in command("unload", "one", "--url", url)[2]


def test_without_the_right_key_nothing_is_loaded(command):
    models = three()
    door = Door(keys=lambda: (ApiKey(name="laptop", digest=digest_of(KEY)),))
    with served_in_thread(without_model(), models=models, admission=Admission(door=door)) as url:
        assert "requires an API key" in command("load", "one", "--url", url)[2]
        assert command("load", "one", "--url", url, "--api-key", KEY)[0] == 0
    assert list(models.loaded()) == ["one"]


def test_models_shows_the_loaded_models_of_a_head(command, tmp_path):
    models = three()
    models.change("one", state=ModelState.LOADED)
    models.change("broken", state=ModelState.LOADING, progress=0.5, expected_s=3.0)
    with served_in_thread(without_model(), models=models) as url:
        listed = command("models", "--url", url)[1]
        assert [line.split()[0] for line in listed.splitlines()] == ["name", "one", "org/two:Q4_K_M", "broken"]
        assert "loading, 50 %, about 3 s left" in listed
        states = [each["status"]["value"] for each in json.loads(command("models", "--url", url, "--json")[1])]
        assert states == ["loaded", "unloaded", "loading"]


def test_models_of_this_device_have_the_state_that_its_head_reports(command, tmp_path):
    toy(tmp_path / "mine" / "one.gguf")
    words = ("models", "--models", tmp_path / "mine")
    assert "state" not in command(*words)[1]
    models = three()
    models.change("one", state=ModelState.LOADED)
    with served_in_thread(without_model(), models=models) as url:
        with announced_head(tmp_path / "home", "desk", url, 8080):
            assert "loaded" in command(*words)[1]
            listed = json.loads(command(*words, "--json")[1])
            assert [each["state"] for each in listed if each["name"] == "one"] == ["loaded"]
        assert [each["state"] for each in json.loads(command(*words, "--json")[1])] == [None]
    with announced_head(tmp_path / "home", "desk", url, 8080):
        code, out, err = command(*words)
        assert (code, "one" in out, "states are unknown" in err) == (0, True, True)
