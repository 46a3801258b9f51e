"""A head with several models: each has its rings, and all share the devices."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from primad.errors import ClusterError, ModelError
from primad.gguf.profile import model_profile
from primad.head.model.service import service_of
from primad.head.offer.opening import ModelOpening
from primad.head.rings.backend import RingBackend
from primad.membership.types import LoadStage
from primad.network.messages import Release
from tests.shell.test_head_daemon import QUICK, Lab, NoTexts, header, lab, prediction

__all__ = ["header", "lab"]


class Model:
    """A further model served in a lab."""

    def __init__(self, here: Lab, name: str) -> None:
        assert here.daemon is not None
        self.backend = RingBackend(texts=NoTexts())
        options = replace(here.daemon._options, name=name, is_only=False)
        service = service_of(here.daemon.node, here.header, model_profile(here.header), options)
        self.serving = here.daemon.begin(service, self.backend)
        self.running = asyncio.create_task(here.daemon.serve(self.serving))

    async def end(self, here: Lab) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])
        await here.daemon.end(self.serving)


async def test_two_models_are_served_side_by_side_on_the_same_devices(lab):
    async with lab() as here:
        nas = here.device("nas")
        here.start_without_model()
        one = Model(here, "one")
        first = await here.rings.find(lambda each: each.formed and each.workers == {"nas"})
        await one.serving.rings.serves.wait()
        assert here.solver.shared == frozenset(), "a model alone is planned as ever"
        two = Model(here, "two")
        second = await here.rings.find(lambda each: each.formed and each is not first)
        await two.serving.rings.serves.wait()
        assert second.workers == {"nas"}
        assert first.epoch != second.epoch
        assert here.solver.shared == {"desk", "nas"}
        assert two.serving.planner.shares(second.inputs.forecast) == ["desk", "nas"]
        assert not first.closed
        assert nas.knocks == 1, "a device is greeted once"
        resident_bytes = sum(each.resident_bytes for each in first.inputs.forecast.assignments["nas"].windows)
        assert here.solver.memory["nas"] == nas._profile.ram_available_bytes - resident_bytes
        await one.end(here)
        assert first.unloaded
        assert await nas.hear(Release) == Release(epoch=first.epoch, unload=True)
        assert not second.closed
        assert here.daemon.pool.taken({"two"}) == {}
        await two.end(here)


async def test_how_long_a_model_loads_is_forecast_until_it_is_served(lab):
    async with lab() as here:
        here.device("nas")
        here.rings.holds_back = True
        here.start_without_model()
        model = Model(here, "one")
        rings = model.serving.rings
        ring = await here.rings.find(lambda each: each.workers == {"nas"})
        expected_s = rings.expected_s
        assert expected_s is not None
        ring.inputs.listener.progressed(ring.epoch, "nas", LoadStage.FETCH, 0, 10**12)
        assert rings.moves
        assert rings.expected_s > expected_s
        ring.may_form.set()
        await rings.serves.wait()
        await model.end(here)


async def test_the_forecast_of_a_model_is_planned_in_the_background_and_loads_nothing(lab):
    async with lab() as here:
        here.device("nas")
        here.solver.prediction = prediction(desk_s=0.02, nas_s=0.03)
        here.start_without_model()
        one = Model(here, "one")
        ring = await here.rings.find(lambda each: each.formed and each.workers == {"nas"})
        await one.serving.rings.serves.wait()
        opening = ModelOpening(
            here.daemon,
            SimpleNamespace(),
            check=lambda _: SimpleNamespace(service=lambda _: one.serving.service),
            embedder=None,
            max_wait_s=None,
        )
        found = await opening.forecast(SimpleNamespace(name="two", embeds=False), ["one"], [])
        assert (found.devices, found.goes) == (("desk", "nas"), ())
        assert found.tokens_per_s == pytest.approx(1 / here.solver.prediction.tpot_s)
        assert ("desk", "nas") in here.solver.precomputed
        assert list(here.rings.all.values()) == [ring]
        await one.end(here)


async def test_a_device_that_is_lost_is_lost_for_all_models(lab):
    async with lab() as here:
        nas = here.device("nas")
        here.start_without_model(QUICK)
        models = [Model(here, "one"), Model(here, "two")]
        for each in models:
            await each.serving.rings.serves.wait()
        rings = list(here.rings.all.values())
        assert [each.workers for each in rings] == [{"nas"}, {"nas"}]
        await nas.leave()
        await here.rings.find(lambda _: sum(each.formed and not each.workers for each in here.rings.all.values()) == 2)
        for each in models:
            await each.end(here)


async def test_a_model_that_no_device_can_serve_any_more_is_unloaded(lab):
    async with lab() as here:
        nas = here.device("nas")
        here.start_without_model(QUICK)
        model = Model(here, "one")
        gave_up = asyncio.Event()
        model.serving.rings.gave_up = gave_up.set
        await model.serving.rings.serves.wait()
        here.solver.minimum = 2
        await nas.leave()
        await gave_up.wait()
        assert "short of" in model.backend.health().detail
        await here.emits("one cannot be served any more: ")
        await model.end(here)


async def test_a_model_whose_file_changed_is_loaded_again_by_a_request(lab):
    async with lab() as here:
        here.start_without_model(QUICK)
        model = Model(here, "one")
        source = model.serving.service.model
        source._stamps = dict.fromkeys(source._stamps, "another")
        with pytest.raises(ModelError, match="or the next request loads the new one"):
            source.check()
        await model.end(here)


async def test_a_model_without_a_plan_fails_and_the_head_continues(lab):
    async with lab() as here:
        here.solver.minimum = 2
        here.start_without_model()
        model = Model(here, "one")
        with pytest.raises(ClusterError, match="short of 1 GB"):
            await model.running
        await model.end(here)
        assert not here.running.done()
        here.device("nas")
        model = Model(here, "one")
        await here.rings.find(lambda each: each.formed and each.workers == {"nas"})
        await model.end(here)
