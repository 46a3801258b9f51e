"""A head on loopback with scripted devices: rings come and go, streams continue."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import zmq.asyncio

from halda import DevicePrediction, Prediction
from primad.api.page.admin_api import DeviceLimit, OtherCluster, ShownCode
from primad.daemon import memory_watch as memory_watch
from primad.daemon.layer_files import Workspace
from primad.daemon.node import Node
from primad.errors import ClusterError, ConfigError, PlanError, PrimadError, RingError, UnreadableError, WeightsError
from primad.gguf.header import Header
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.head.daemon import HeadDaemon
from primad.head.members import core_loop as core_loop_module
from primad.head.members import devices as devices_module
from primad.head.members.core import StageError
from primad.head.members.link_book import LinkBook
from primad.head.model.options import ServeOptions
from primad.head.model.service import service_of
from primad.head.rings import planner as planner_module
from primad.head.rings import rings as rings_module
from primad.head.rings.backend import RingBackend
from primad.head.rings.planner import Planner
from primad.head.rings.rings import ATTENTION_CHANGES
from primad.kv.store import KvStore
from primad.layers.cache import LayerCache
from primad.membership.transitions import GREET_S
from primad.membership.types import DeviceRefused, Effect, Event, State
from primad.network.discovery import MulticastError
from primad.network.messages import Dismiss, Introduce, Leaving, MemoryLow, MemoryRecovered, Revoked
from primad.planning.corrections import MIN_TOKENS
from primad.planning.forecast import Forecast
from primad.planning.request import PlanRequest
from primad.planning.run_config import ParallelMode, RunConfig
from primad.ring.messages import DecodeStatus, Finished, Generate, Sampled, Status
from primad.settings.config import load_config, open_home
from primad.settings.timings import HeadTimings, MembershipTimings, NetworkTimings, Timings
from primad.system.memory import Memory
from primad.trust.identity import new_identity
from primad.trust.local_trust import LocalTrust
from primad.trust.pairing import CodeOutcome, Who
from primad.trust.pairing_links import PairingServer
from primad.trust.trust import BY_HAND, PAIRED, TrustedDevice, TrustStore, trusted_now
from primad.trust.words import Code
from tests.fakes import manager
from tests.fakes.control import HEAD, FakeDevice, gated
from tests.fakes.planning import device as profile_of
from tests.fakes.profile import KnownProfile
from tests.fakes.ring import GREEDY
from tests.fakes.rings import FakeDiscovery, FakeRing, FakeRings, FakeSolver

PATIENCE_S = 180
TIMINGS = Timings(
    network=NetworkTimings(probe_timeout_s=PATIENCE_S, hello_timeout_s=PATIENCE_S),
    membership=MembershipTimings(settle_s=0.2, greeting_s=PATIENCE_S),
    head=HeadTimings(look_s=0.3, trust_look_every_s=0.05),
)
"""The head looks often, but waits long enough for a busy machine."""
QUICK = {"heartbeat_interval": 0.05, "suspect_after": 1.0, "gone_after": 4.0}
"""For tests in which a device falls silent; in all others none does, however long the machine pauses this process."""


class Stream:
    """The stream of one request, read as the API reads it."""

    def __init__(self, backend: RingBackend) -> None:
        self.tokens: list[int] = []
        self.end: Finished | None = None
        self._backend = backend
        self._news = asyncio.Condition()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        answer = self._backend.generate(
            Generate(request=0, prompt=[1, 2], sampled=[], max_tokens=50, sampling=GREEDY, logprobs=None)
        )
        async for event in answer:
            if isinstance(event, Sampled):
                self.tokens.append(event.token)
            else:
                self.end = event
            async with self._news:
                self._news.notify_all()

    async def has(self, *tokens: int) -> None:
        """Wait until exactly ``tokens`` have arrived."""
        async with self._news:
            await self._news.wait_for(lambda: len(self.tokens) >= len(tokens))
        assert self.tokens == list(tokens)

    async def ends(self) -> Finished:
        """Wait for the end; returns how the stream ended."""
        await self.task
        assert self.end is not None, "a stream ended without a word"
        return self.end


def decoded(compute_s: float, *, token_s: float | None = None) -> Status:
    """The status of a ring process whose latest tokens took ``compute_s`` each."""
    figures = DecodeStatus(tokens=MIN_TOKENS, token_s=token_s, compute_s=compute_s, stall_s=0.0, read_bytes=0.0)
    return Status(steps=9, rows=9, compute_s=1.0, hop_s=[], rss_bytes=1, private_bytes=1, refused=0, decode=figures)


def prediction(*, desk_s: float, nas_s: float) -> Prediction:
    """A prediction with these times per token on two devices and no time for hops."""
    zeros = dict.fromkeys((each.name for each in fields(DevicePrediction)), 0)
    devices = [
        DevicePrediction(**zeros | {"device": name, "compute_s": compute_s, "each_gpu": ()})
        for name, compute_s in (("desk", desk_s), ("nas", nas_s))
    ]
    token_s = desk_s + nas_s
    return Prediction(
        **dict.fromkeys((each.name for each in fields(Prediction)), 0.0)
        | {
            "tpot_s": token_s,
            "period_s": token_s,
            "chunk_rows": 16,
            "step_rows": 16,
            "devices": tuple(devices),
            "short": (),
        }
    )


def as_solved(asked: PlanRequest, solved: SimpleNamespace, flash: bool | None = None) -> SimpleNamespace:
    """Replaces ``complete``: the plan that was asked for, with ``flash`` if given, and nothing else."""
    work = solved.workload if flash is None else replace(solved.workload, flash=flash)
    return SimpleNamespace(
        plan=solved.solution.plan,
        question=asked.instance(work),
        prediction=solved.solution.prediction,
        objective_s=solved.solution.objective_s,
        batches=None,
        why_sequences="",
        why_context="",
        drafting=None,
        why_parallel="",
        draft_device=None,
        encoder_place=None,
    )


class Lab:
    """A running head and its surroundings."""

    def __init__(self, home: Path, context: zmq.asyncio.Context, header: Header) -> None:
        self.context, self.home, self.header = context, home, header
        self.solver, self.rings, self.discovery = FakeSolver(), FakeRings(), FakeDiscovery()
        self.backend = RingBackend(texts=NoTexts())
        self.more_options: dict[str, object] = {}
        self.parallel: ParallelMode = "pipeline"
        self.free_bytes = profile_of("desk").ram_available_bytes
        self.profile = KnownProfile(lambda _: replace(profile_of("desk"), ram_available_bytes=self.free_bytes))
        self.printed: list[str] = []
        self.trust = TrustStore(home, HEAD, LocalTrust(home / "local"))
        self.running: asyncio.Task[None] | None = None
        self.daemon: HeadDaemon | None = None
        self._lines = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def device(self, name: str, *, trusted: bool = True, seen: bool = True, **changes: object) -> FakeDevice:
        """A running worker named ``name``."""
        made = FakeDevice(self.context, name, **changes)
        if trusted:
            self.trust.add(trusted_now(name, made.key, BY_HAND))
        if seen:
            self.discovery.sees(made)
        return made

    def start(
        self, *, wait: int | None = None, use_all: bool = False, timings: Timings = TIMINGS, **flags: object
    ) -> None:
        """Run the head with a model."""
        self._make(wait, use_all, timings, flags)
        assert self.daemon is not None
        service = service_of(self.daemon.node, self.header, model_profile(self.header), self.daemon._options)
        self.serving = self.daemon.only(service, self.backend)
        self.running = asyncio.create_task(self.daemon.run())

    def start_without_model(self, flags: Mapping[str, object] = MappingProxyType({})) -> None:
        """Run the head without a model; tests begin and end them."""
        self._make(None, False, TIMINGS, flags)
        assert self.daemon is not None
        self.running = asyncio.create_task(self.daemon.run())

    def _make(self, wait: int | None, use_all: bool, timings: Timings, flags: Mapping[str, object]) -> None:
        own = {"home": self.home, "name": "desk", "cluster": "test", "host": "127.0.0.1"}
        patient = {"suspect_after": PATIENCE_S, "gone_after": 2 * PATIENCE_S}
        config = load_config(own | patient | dict(flags), {})
        open_home(config)
        options = ServeOptions(
            wait=wait,
            wait_timeout_s=1.0,
            step_timeout_s=5.0,
            http_port=8080,
            single_device=False,
            run=RunConfig(
                extra_buffers="off",
                context_tokens=64,
                chunk_rows=16,
                use_all=use_all,
                parallel=self.parallel,
                sequences=1,
                speculate="off",
            ),
            **self.more_options,
        )
        place = Workspace(
            cache=LayerCache(config.layers),
            kv=KvStore(self.home / "cells"),
            run=config.run,
            usage=self.home / "v",
            build="a build",
        )
        node = Node(config=config, workspace=place, identity=HEAD, trust=self.trust, timings=timings)
        self.daemon = HeadDaemon(node, options, profile=self.profile, reporter=self)

    async def serves(self, *workers: str, after: int = 0) -> FakeRing:
        """Wait until the ring of exactly ``workers`` serves, with an epoch after ``after``."""
        ring = await self.rings.find(lambda each: each.formed and each.epoch > after and each.workers == set(workers))
        await self.emits(f"ring {ring.epoch}: ")
        assert (await self.backend.status())["epoch"] == ring.epoch
        return ring

    async def stream(self, ring: FakeRing) -> tuple[Stream, int]:
        """A new stream on ``ring``, and the number of its request."""
        before = len(ring.generates)
        stream = Stream(self.backend)
        await self.rings.find(lambda each: each is ring and len(each.generates) > before)
        return stream, ring.generates[-1].request

    async def emits(self, start: str) -> str:
        """Wait for the first line to the owner that begins with ``start``."""
        async with self._lines:
            await self._lines.wait_for(lambda: any(line.startswith(start) for line in self.printed))
        return next(line for line in self.printed if line.startswith(start))

    # methods of a reporter

    def report_line(self, line: str) -> None:
        self.printed.append(line)
        task = asyncio.create_task(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def progress(self, device: str, phase: str, done: int, total: int) -> None:
        assert phase == "links"

    def wait(self, words: str) -> None:
        """Nothing is displayed."""

    def resolve(self) -> None:
        """No display needs an update."""

    async def _notify(self) -> None:
        async with self._lines:
            self._lines.notify_all()


class NoTexts:
    """Stands in for the text process where no test uses it."""

    async def pieces(self) -> object:
        return object()


@pytest.fixture(scope="module")
def header(smollm2) -> Header:
    return open_model(smollm2)


@pytest.fixture
def lab(monkeypatch, tmp_path, header) -> Callable[[], AbstractAsyncContextManager[Lab]]:
    @asynccontextmanager
    async def make() -> AsyncIterator[Lab]:
        async with gated(patience_s=PATIENCE_S) as context:
            made = Lab(tmp_path, context, header)
            monkeypatch.setattr(planner_module, "solve_in_process", made.solver)
            monkeypatch.setattr(planner_module, "complete", as_solved)
            monkeypatch.setattr(rings_module, "HeadRing", made.rings)
            monkeypatch.setattr(devices_module, "Discovery", made.discovery)
            try:
                yield made
            finally:
                if made.running is not None:
                    made.running.cancel()
                    await asyncio.wait([made.running])
                made.backend.fail("the test is over")
        assert all(ring.closed for ring in made.rings.all.values()), "a ring was left behind"

    return make


# ---- the first ring -------------------------------------------------------------------------------------------------


async def test_a_head_without_mdns_reports_it_and_serves(lab, monkeypatch):
    async def fail(*_: object, **__: object) -> str:
        raise MulticastError("mDNS did not start")

    async with lab() as here:
        monkeypatch.setattr(FakeDiscovery, "announce", fail)
        here.start()
        await here.serves()
        assert "mDNS did not start" in here.printed


@pytest.mark.parametrize("larger", [None, 2048])
async def test_prompts_are_computed_in_the_chunks_that_the_plan_reckons_with(lab, larger):
    async with lab() as here:
        if larger is not None:
            here.solver.prediction = SimpleNamespace(
                chunk_rows=larger, step_rows=larger, prefill_chunk_s=1.0, devices=(), tpot_s=0.5, ttft_s=3.0
            )
        here.start()
        ring = await here.serves()
        assert ring.inputs.service.step_tokens(ring.inputs.forecast) == (larger or 16)


@pytest.mark.skipif(sys.platform == "win32", reason="systemd is Linux's")
async def test_a_service_manager_is_notified_that_a_head_is_ready_alive_and_stopping(lab, monkeypatch):
    with manager.listening() as ear:
        monkeypatch.setenv("NOTIFY_SOCKET", ear.getsockname())
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        async with lab() as here:
            here.start()
            assert (await asyncio.to_thread(manager.hear, ear, "READY=1")).startswith("READY=1\nSTATUS=")
            await here.serves()
            status = await asyncio.to_thread(manager.hear, ear, "STATUS=serving")
            assert status == "STATUS=serving with 1 device\nWATCHDOG=1"
        assert manager.hear(ear, "STOPPING=1")


async def test_the_devices_in_sight_serve_together(lab):
    async with lab() as here:
        here.device("nas")
        here.device("lap")
        here.start()
        ring = await here.serves("lap", "nas")
        assert here.solver.asked == [("desk", "lap", "nas")]
        assert set(ring.inputs.devices.holders) == {"lap", "nas"}
        stream, request = await here.stream(ring)
        ring.draw(request, 10, 11)
        ring.finish(request)
        assert (await stream.ends()).reason == "stop"
        assert stream.tokens == [10, 11]
        status = await here.backend.status()
        assert [(each["device"], each["phase"]) for each in status["cluster"]] == [
            ("lap", "serving"),
            ("nas", "serving"),
        ]


async def test_a_plan_that_a_request_proves_wrong_is_reported_and_corrects_the_next(lab, caplog, monkeypatch):
    async def value(_: Planner, forecast: Forecast) -> float:
        return 10.0

    monkeypatch.setattr(Planner, "value", value)
    async with lab() as here:
        here.device("nas")
        here.solver.prediction = prediction(desk_s=0.02, nas_s=0.03)
        here.start()
        ring = await here.serves("nas")
        await here.serving.planner.foreseeing
        as_measured = here.solver.step_s
        ring.emits = {"desk": decoded(0.02, token_s=0.08), "nas": decoded(0.06)}
        steps = 5  # enough for the times to count
        for _ in range(steps):
            stream, request = await here.stream(ring)
            ring.finish(request, MIN_TOKENS)
            await stream.ends()
            await here.serving.rings._learner
        assert ring.measured.wrong.device == "nas"
        assert "the worst term is computing on nas: 60.0 ms, not 30.0 ms" in caplog.text
        assert await here.emits("nas: figures are corrected; looking for a better plan")
        await here.solver.wait(lambda: here.solver.asked == [("desk", "nas")] * 2)
        assert here.solver.step_s["desk"] == as_measured["desk"]
        assert here.solver.step_s["nas"] == pytest.approx(1.9375 * as_measured["nas"])


async def test_a_head_that_was_measured_better_looks_for_a_better_plan(lab):
    async with lab() as here:
        here.device("nas")
        here.start()
        await here.serves("nas")
        here.profile.refined.set()
        assert await here.emits("desk: figures are corrected; looking for a better plan")
        await here.solver.wait(lambda: here.solver.asked == [("desk", "nas")] * 2)


async def test_short_and_disturbed_requests_correct_nothing(lab, monkeypatch):
    async def value(_: Planner, forecast: Forecast) -> float:
        return 10.0 / len(forecast.plan.devices)

    monkeypatch.setattr(Planner, "value", value)
    async with lab() as here:
        here.device("nas")
        here.solver.prediction = prediction(desk_s=0.02, nas_s=0.03)
        here.start()
        ring = await here.serves("nas")
        await here.serving.planner.foreseeing
        ring.emits = {"desk": decoded(0.02, token_s=0.08), "nas": decoded(0.06)}
        stream, request = await here.stream(ring)
        ring.finish(request, MIN_TOKENS - 1)
        await stream.ends()
        assert here.serving.rings._learner is None
        here.rings.holds_back = True
        here.solver.value = lambda count: 10.0 / count
        here.device("lap")
        shadow = await here.rings.find(lambda each: each is not ring)
        stream, request = await here.stream(ring)
        ring.finish(request, MIN_TOKENS)
        await stream.ends()
        await here.serving.rings._learner
        assert ring.measured is None
        shadow.may_form.set()


async def test_a_head_without_devices_in_sight_serves_alone(lab):
    async with lab() as here:
        here.start()
        await here.serves()
        assert here.backend.health().detail == "serving with 1 device"


async def test_devices_are_introduced_to_each_other(lab):
    async with lab() as here:
        nas, lap = here.device("nas"), here.device("lap")
        here.start()
        await here.serves("nas", "lap")
        known = {each.key for each in (await nas.hear(Introduce)).devices}
        assert lap.key in known
        assert nas.key not in known


async def test_named_devices_are_greeted_if_none_is_in_sight(lab):
    async with lab() as here:
        nas = here.device("nas", seen=False)
        here.start(devices=(f"127.0.0.1:{nas.port}",))
        await here.serves("nas")


def impatient() -> Timings:
    """Timings with which a device that does not identify itself is soon asked again."""
    return replace(
        TIMINGS,
        network=replace(TIMINGS.network, probe_timeout_s=0.2),
        head=replace(TIMINGS.head, named_again_s=0.05),
    )


async def test_a_named_device_that_is_not_paired_yet_is_waited_for(lab):
    async with lab() as here:
        nas = here.device("nas", seen=False, trusted=False)
        here.start(devices=(f"127.0.0.1:{nas.port}",), timings=impatient())
        await here.emits("waiting for 1 of 1 devices: start 'primad join' on the others")
        (line,) = [each for each in here.printed if each.startswith("--device")]
        assert line.startswith(f"--device 127.0.0.1:{nas.port}: no device is paired yet; retrying")
        assert "'primad pair' here shows a code" in line
        here.trust.add(trusted_now("nas", nas.key, BY_HAND))
        await here.serves("nas")


async def test_a_named_device_that_does_not_reply_is_awaited_unless_wait_is_0(lab):
    async with lab() as here:
        nas = here.device("nas", seen=False)
        await nas.leave()
        here.start(devices=(f"127.0.0.1:{nas.port}",), timings=impatient(), wait=0)
        await here.serves()
        assert any(line.startswith(f"--device 127.0.0.1:{nas.port}: no response") for line in here.printed)


async def test_a_named_device_with_an_unknown_host_name_is_reported(lab):
    async with lab() as here:
        here.start(devices=("no.such.host.invalid:7770",), timings=impatient(), wait=0)
        await here.serves()
        (line,) = [each for each in here.printed if each.startswith("--device")]
        assert line.startswith("--device no.such.host.invalid:7770: ")
        assert line.endswith("; retrying. Check that name, or give its IP address")


async def test_without_a_plan_in_the_first_place_the_program_ends_with_the_line(lab):
    async with lab() as here:
        here.solver.minimum = 3
        here.device("nas")
        here.start()
        with pytest.raises(ExceptionGroup) as failed:
            await here.running
        (error,) = failed.value.exceptions
        assert isinstance(error, ClusterError)
        assert str(error) == "2 devices are short of 1 GB"


async def test_too_few_devices_are_counted_in_the_line_that_ends_the_program(lab):
    async with lab() as here:
        here.device("nas")
        busy = here.device("lap")
        busy.refuses = "lap works for the head tower"
        here.start(wait=2)
        with pytest.raises(ExceptionGroup) as failed:
            await here.running
        (error,) = failed.value.exceptions
        assert str(error).startswith("--wait 2: found 1 of 2 devices in 1 s (lap: lap works for the head tower)")


# ---- trust ----------------------------------------------------------------------------------------------------------


async def test_an_unpaired_device_is_named_once_and_not_contacted(lab):
    async with lab() as here:
        stranger = here.device("stranger", trusted=False)
        here.start()
        await here.serves()
        for _ in range(3):
            here.discovery.sees(stranger, addresses=("127.0.0.1", "127.0.0.2"))
            here.discovery.sees(stranger)
        assert [line for line in here.printed if "stranger" in line] == [
            "stranger was discovered, but is not paired; 'primad pair' here shows a code for 'primad join --code' there"
        ]
        assert stranger.knocks == 0


async def test_a_stranger_with_the_name_of_a_device_that_serves_changes_nothing(lab):
    async with lab() as here:
        here.device("nas")
        here.start()
        ring = await here.serves("nas")
        impostor = FakeDevice(here.context, "nas", identity=new_identity())
        here.discovery.sees(impostor)
        assert "an untrusted device announces itself as nas" in await here.emits("an untrusted device")
        assert impostor.knocks == 0
        assert not ring.closed


async def test_a_device_that_is_paired_while_serving_joins(lab):
    async with lab() as here:
        here.solver.value = lambda count: 10.0 / count
        nas = here.device("nas", trusted=False)
        here.start()
        await here.serves()
        here.trust.add(trusted_now("nas", nas.key, BY_HAND))
        await here.serves("nas")


async def test_a_device_whose_trust_is_revoked_while_it_serves_is_dropped(lab):
    async with lab() as here:
        nas, _ = here.device("nas"), here.device("lap")
        here.start()
        first = await here.serves("nas", "lap")
        stream, request = await here.stream(first)
        first.draw(request, 10)
        here.trust.revoke("nas")
        second = await here.serves("lap", after=first.epoch)
        assert "it is no longer trusted" in await here.emits("nas is gone")
        second.draw(request, 11)
        await stream.has(10, 11)
        assert first.closed
        await nas.hear(Revoked)
        assert len(nas.hellos) == 1, "it is not greeted any more"


async def test_a_revoked_device_is_notified_on_each_return_and_used_again_once_paired(lab):
    async with lab() as here:
        here.solver.value = lambda count: 10.0 / count
        nas, lap = here.device("nas"), here.device("lap")
        here.trust.revoke("nas")
        here.start()
        first = await here.serves("lap")
        await nas.hear(Revoked)
        here.discovery.sees(nas, revision=7)
        await nas.hear(Revoked)
        here.trust.add(trusted_now("nas", nas.key, PAIRED))
        await here.serves("nas", "lap", after=first.epoch)
        message = await lap.hear(Introduce)
        while nas.key not in {each.key for each in message.devices}:
            assert message.revoked == [nas.key]
            message = await lap.hear(Introduce)
        assert message.revoked == [], "for all workers of this head"


async def test_a_device_renamed_by_its_owner_has_the_new_name_everywhere(lab):
    async with lab() as here:
        here.solver.value = lambda count: 10.0 / count
        nas = here.device("nas")
        here.start()
        first = await here.serves("nas")
        here.trust.add(trusted_now("attic", nas.key, BY_HAND))
        assert "it is now named attic here" in await here.emits("nas is gone")
        await here.serves("attic", after=first.epoch)
        assert [each.device for each in (await here.daemon.admin_api.devices()).devices] == ["attic"]


# ---- lost devices ---------------------------------------------------------------------------------------------------


async def test_a_dead_device_is_left_out_and_the_stream_continues(lab):
    async with lab() as here:
        nas, _ = here.device("nas"), here.device("lap")
        here.start()
        first = await here.serves("nas", "lap")
        stream, request = await here.stream(first)
        first.draw(request, 10, 11)
        await nas.leave()
        second = await here.serves("lap", after=first.epoch)
        assert [each.sampled for each in second.generates] == [[10, 11]]
        first.draw(request, 66)
        second.draw(request, 12)
        second.finish(request)
        assert (await stream.ends()).reason == "stop"
        assert stream.tokens == [10, 11, 12]
        assert first.closed
        assert "nas is gone: its primad ended" in here.printed


async def test_the_loss_of_each_device_was_planned_for_before(lab):
    async with lab() as here:
        nas, _ = here.device("nas"), here.device("lap")
        here.start()
        first = await here.serves("nas", "lap")
        await here.solver.wait(lambda: len(here.solver.precomputed) == 2)
        assert here.solver.precomputed == [("desk", "nas"), ("desk", "lap")]
        foreseeing = here.serving.planner.foreseeing
        if foreseeing is not None:
            await asyncio.wait([foreseeing])
        await nas.leave()
        await here.serves("lap", after=first.epoch)
        assert here.solver.asked == [("desk", "lap", "nas")], "the answer was there"


async def test_a_silent_device_causes_a_shadow_ring_that_serves_once_it_is_gone(lab):
    async with lab() as here:
        nas, _ = here.device("nas"), here.device("lap")
        here.start(**QUICK)
        first = await here.serves("nas", "lap")
        stream, request = await here.stream(first)
        nas.silent = True
        # a machine that pauses this process for a second seems to silence both at first
        shadow = await here.rings.find(lambda each: each is not first and each.workers == {"lap"} and each.formed)
        assert not first.closed
        first.draw(request, 10)
        await stream.has(10)
        assert await here.serves("lap", after=first.epoch) is shadow
        assert [each.sampled for each in shadow.generates] == [[10]]
        assert "no message for" in await here.emits("nas is gone")
        stream.task.cancel()


async def test_a_silent_device_that_replies_again_keeps_its_ring(lab):
    async with lab() as here:
        nas, _ = here.device("nas"), here.device("lap")
        here.start(**(QUICK | {"gone_after": 20}))
        first = await here.serves("nas", "lap")
        stream, request = await here.stream(first)
        nas.silent = True
        shadow = await here.rings.find(lambda each: each.epoch > first.epoch and each.formed)
        nas.silent = False
        await here.emits("nas responds again")
        await here.rings.find(lambda each: each is shadow and each.closed)
        first.draw(request, 10)
        first.finish(request)
        assert (await stream.ends()).reason == "stop"
        assert shadow.reported == []
        assert not first.closed


async def test_without_a_plan_for_the_rest_streams_end_with_an_error_and_a_device_that_returns_cures_it(lab):
    async with lab() as here:
        here.solver.minimum = 2
        nas = here.device("nas")
        here.start()
        first = await here.serves("nas")
        stream, request = await here.stream(first)
        first.draw(request, 10)
        here.discovery.misses(nas)
        await nas.leave()
        end = await stream.ends()
        assert (end.reason, end.error) == ("error", "1 devices are short of 1 GB")
        assert stream.tokens == [10]
        assert not here.backend.health().serving
        with pytest.raises(RingError, match="the model cannot be served now"):
            await Stream(here.backend).task
        again = FakeDevice(here.context, "nas", identity=nas.identity)
        here.discovery.sees(again)
        second = await here.serves("nas", after=first.epoch)
        following, number = await here.stream(second)
        second.finish(number)
        assert (await following.ends()).reason == "stop"


async def test_a_broken_ring_is_formed_again_without_the_device_at_fault(lab):
    async with lab() as here:
        here.device("nas")
        here.device("lap")
        here.start()
        first = await here.serves("nas", "lap")
        stream, request = await here.stream(first)
        first.draw(request, 10)
        first.breaks("nas", "nas: the ring process was ended by SIGABRT")
        second = await here.serves("lap", after=first.epoch)
        second.draw(request, 11)
        await stream.has(10, 11)
        assert "nas: the ring process was ended by SIGABRT; forming the ring again" in here.printed
        stream.task.cancel()


@pytest.mark.parametrize(("forms_again", "read"), [(True, "weights"), (False, "weights"), (False, "layers")], ids=str)
async def test_an_unreadable_model_file_is_reported_and_tried_again_later(lab, forms_again, read):
    """A ring that breaks over it, while serving or while being formed, is not formed again at once."""
    async with lab() as here:
        path = str(here.header.path)
        unreadable: PrimadError = UnreadableError(path, "Input/output error")
        if read == "weights":
            unreadable = WeightsError(f"{path}: weights cannot be read: Input/output error", path)
        retry = replace(TIMINGS.membership, retry_s=0.5)
        here.start(timings=replace(TIMINGS, membership=retry, head=replace(TIMINGS.head, model_again_s=3.0)))
        first = await here.serves()
        stream, request = await here.stream(first)
        first.draw(request, 10)
        if forms_again:
            first.breaks(None, unreadable)
        else:
            here.rings.errors = [unreadable]
            first.breaks(None, "the ring process was ended by SIGKILL")
        await here.emits("nothing can be served: ")
        await stream.task
        assert stream.end is not None
        assert stream.end.error == f"{unreadable}; check the disk, or serve another copy of the model"
        assert not here.backend.health().serving
        await here.serves(after=first.epoch)


async def test_a_device_whose_disk_is_full_is_left_out_of_the_first_ring(lab):
    async with lab() as here:
        here.device("nas")
        here.device("lap")
        here.rings.errors = [StageError("nas: the disk is full", "nas", "disk")]
        here.start()
        second = await here.serves("lap")
        assert second.epoch == 2
        assert here.rings.all[1].closed
        assert "nas: the disk is full; forming the ring again" in here.printed


# ---- devices that join or leave -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "joins"), [(9.5, False), (5.0, True)], ids=["5 % better", "50 % better"])
async def test_a_device_that_joins_takes_part_when_that_gains_enough(lab, value, joins):
    async with lab() as here:
        here.solver.value = lambda count: 10.0 if count == 2 else value
        here.device("nas")
        here.start()
        first = await here.serves("nas")
        stream, request = await here.stream(first)
        first.draw(request, 10)
        here.device("lap")
        await here.solver.wait(lambda: ("desk", "lap", "nas") in here.solver.asked)
        if not joins:
            await asyncio.sleep(0.1)
            assert set(here.rings.all) == {first.epoch}
            assert here.solver.asked.count(("desk", "lap", "nas")) == 1, "it is not queried repeatedly"
            first.finish(request)
        else:
            second = await here.serves("nas", "lap", after=first.epoch)
            assert first.drained, "its last steps end first"
            assert [each.sampled for each in second.generates] == [[10]]
            await here.rings.find(lambda each: each is first and each.closed)
            second.finish(request)
        assert (await stream.ends()).reason == "stop"


async def test_with_parallel_tensor_a_new_device_has_a_share_even_if_that_gains_nothing(lab):
    async with lab() as here:
        here.solver.value = lambda count: float(10 + count)
        here.parallel = "tensor"
        here.device("nas")
        here.start()
        first = await here.serves("nas")
        here.device("lap")
        await here.serves("nas", "lap", after=first.epoch)


@pytest.mark.parametrize("may_keep", [True, False])
async def test_requests_started_while_a_ring_with_other_attention_forms_keep_their_attention(
    lab, monkeypatch, may_keep
):
    """The ring was planned without requests; the next one is planned to keep the request's attention if possible."""

    def attends(asked: PlanRequest, solved: SimpleNamespace) -> SimpleNamespace:
        keeps = asked.keeps_attention and may_keep
        return as_solved(asked, solved, solved.workload.flash if keeps else len(solved.solution.plan.devices) == 2)

    async with lab() as here:
        monkeypatch.setattr(planner_module, "complete", attends)
        here.solver.value = lambda count: 10.0 / count
        here.device("nas")
        here.start()
        first = await here.serves("nas")
        here.rings.holds_back = True
        here.device("lap")
        shadow = await here.rings.find(lambda each: each.epoch > first.epoch)
        assert (first.inputs.forecast.flash, shadow.inputs.forecast.flash) == (True, False)
        stream, request = await here.stream(first)
        first.draw(request, 10)
        await stream.has(10)
        here.rings.holds_back = False
        shadow.may_form.set()
        third = await here.serves("nas", "lap", after=shadow.epoch)
        assert third.inputs.forecast.flash == may_keep
        assert not shadow.generates
        assert [each.sampled for each in third.generates] == [[10]]
        assert bool([line for line in here.printed if line == ATTENTION_CHANGES]) != may_keep
        await here.rings.find(lambda each: each is first and each.closed)
        third.finish(request)
        assert (await stream.ends()).reason == "stop"


async def test_while_the_next_ring_loads_the_first_one_serves(lab):
    async with lab() as here:
        here.solver.value = lambda count: 10.0 / count
        here.device("nas")
        here.start()
        first = await here.serves("nas")
        here.rings.holds_back = True
        here.device("lap")
        shadow = await here.rings.find(lambda each: each.epoch > first.epoch)
        stream, request = await here.stream(first)
        first.draw(request, 10, 11)
        await stream.has(10, 11)
        assert not first.drained
        shadow.may_form.set()
        assert await here.serves("nas", "lap", after=first.epoch) is shadow
        assert [each.sampled for each in shadow.generates] == [[10, 11]]
        stream.task.cancel()


async def test_a_device_that_leaves_hands_over_first_and_is_dismissed_then(lab):
    async with lab() as here:
        nas, _ = here.device("nas"), here.device("lap")
        here.start()
        first = await here.serves("nas", "lap")
        stream, request = await here.stream(first)
        first.draw(request, 10)
        here.rings.holds_back = True
        await nas.notify(Leaving("its owner ended it"))
        second = await here.rings.find(lambda each: each.epoch > first.epoch)
        assert second.workers == {"lap"}
        assert not any(isinstance(message, Dismiss) for message in nas.heard._queue)
        first.draw(request, 11)
        second.may_form.set()
        assert await here.serves("lap", after=first.epoch) is second
        await nas.hear(Dismiss)
        assert first.drained
        assert [each.sampled for each in second.generates] == [[10, 11]]
        await nas.leave()
        await here.emits("nas left: ")
        second.finish(request)
        assert (await stream.ends()).reason == "stop"


async def test_a_leaving_device_is_dismissed_if_the_others_cannot_take_over(lab):
    async with lab() as here:
        here.solver.minimum = 2
        nas = here.device("nas")
        here.start()
        first = await here.serves("nas")
        await nas.notify(Leaving("its owner ended it"))
        await nas.hear(Dismiss)
        assert await here.emits("the other devices cannot take over")
        assert not first.closed, "it serves as long as it can"


async def test_a_device_without_a_part_may_leave_at_once(lab):
    async with lab() as here:
        here.solver.value = lambda count: 10.0
        here.device("nas")
        here.start()
        first = await here.serves("nas")
        lap = here.device("lap")
        await here.solver.wait(lambda: ("desk", "lap", "nas") in here.solver.asked)
        await lap.notify(Leaving("its owner ended it"))
        await lap.hear(Dismiss)
        assert not first.closed


async def report_memory_low(ring: FakeRing, device: FakeDevice) -> None:
    """Report that ``device`` has 123 bytes left for its stage in ``ring``."""
    ring.inputs.devices.workers[device.name].attend(
        SimpleNamespace(epoch=ring.epoch, compare=lambda number, state: None)
    )
    await device.notify(MemoryLow(epoch=ring.epoch, needed_bytes=1 << 30, ram_available_bytes=123))


async def test_a_device_short_of_memory_gets_a_new_plan_and_the_stream_continues(lab):
    """The new plan fits the memory that is left; the first ring serves until the second is ready."""
    async with lab() as here:
        nas, _ = here.device("nas"), here.device("lap")
        here.start()
        first = await here.serves("nas", "lap")
        stream, request = await here.stream(first)
        first.draw(request, 10)
        here.rings.holds_back = True
        here.solver.layers = {"nas": 3}
        await report_memory_low(first, nas)
        second = await here.rings.find(lambda each: each.epoch > first.epoch)
        assert here.solver.memory["nas"] == 123
        first.draw(request, 11)
        await stream.has(10, 11)
        assert not first.drained
        second.may_form.set()
        assert await here.serves("nas", "lap", after=first.epoch) is second
        assert first.drained
        assert [each.sampled for each in second.generates] == [[10, 11]]
        second.finish(request)
        assert (await stream.ends()).reason == "stop"


async def test_a_device_with_room_again_gets_a_new_plan_if_that_gains(lab):
    async with lab() as here:
        nas = here.device("nas")
        here.start()
        first = await here.serves("nas")
        here.solver.layers = {"nas": 3}
        await report_memory_low(first, nas)
        second = await here.serves("nas", after=first.epoch)
        assert here.solver.memory["nas"] == 123
        here.solver.layers = {"nas": 4}
        here.solver.value = lambda _: 5.0
        await nas.notify(MemoryRecovered(2 << 30))
        await here.emits("nas: there is memory again")
        third = await here.serves("nas", after=second.epoch)
        assert here.solver.memory["nas"] == 2 << 30
        assert not third.closed
        await here.rings.find(lambda each: each is second and each.closed)


async def test_an_unreachable_device_is_measured_again_and_used_once_reachable(lab):
    soon = replace(
        TIMINGS,
        network=replace(TIMINGS.network, link_timeout_s=PATIENCE_S, link_again_s=0.01),
        membership=replace(TIMINGS.membership, settle_s=0.0, again_s=0.3),
    )
    async with lab() as here:
        nas = here.device("nas")
        nas.garbles = True
        here.start(timings=soon)
        here.solver.layers = {"nas": 3}
        first = await here.serves("nas")
        await here.emits("desk does not reach nas")
        here.solver.layers = {"nas": 4}
        here.solver.value = lambda _: 5.0
        nas.garbles = False
        await here.emits("desk reaches nas now")
        assert await here.serves("nas", after=first.epoch)


async def test_a_link_that_does_not_work_is_named_with_its_cause_and_no_plan_is_made_for_it(lab):
    async with lab() as here:
        here.solver.cut = True
        here.device("nas").garbles = True
        here.start(use_all=True)
        await here.serves()
        assert "(it replies too late at 127.0.0.1:" in await here.emits("desk does not reach nas")
        assert (await here.emits("nas is left out: desk does not reach nas (")).endswith("or use a cable")


async def test_a_head_with_room_again_replans_if_that_gains(lab, monkeypatch):
    """A head that was short of memory samples it until there is room again."""
    now = iter(range(0, 10**6, 30))
    monkeypatch.setattr(memory_watch, "time", SimpleNamespace(monotonic=lambda: next(now)))
    async with lab() as here:
        monkeypatch.setattr(memory_watch, "memory", lambda ours: Memory(16 << 30, here.free_bytes))
        here.device("nas")
        here.start(timings=replace(TIMINGS, memory_look_every_s=0.01))
        first = await here.serves("nas")
        here.solver.layers = {"nas": 3}
        before, here.free_bytes = here.free_bytes, 1 << 30
        first.inputs.listener.memory_low(1 << 30)
        second = await here.serves("nas", after=first.epoch)
        await asyncio.sleep(0.1)
        assert not any(line.startswith("desk: there is memory again") for line in here.printed)
        here.solver.value = lambda _: 5.0
        here.free_bytes = before
        await here.emits("desk: there is memory again")
        assert await here.serves("nas", after=second.epoch)


async def test_a_head_short_of_memory_replans(lab):
    async with lab() as here:
        here.device("nas")
        here.start()
        first = await here.serves("nas")
        here.solver.layers = {"nas": 3}
        first.inputs.listener.memory_low(1)
        await here.emits("desk: other programs need the memory")
        assert await here.serves("nas", after=first.epoch)
        assert first.drained


# ---- the admin API --------------------------------------------------------------------------------------------------


async def test_a_device_that_is_paused_has_no_layers_until_it_is_resumed(lab):
    async with lab() as here:
        here.device("nas")
        here.device("lap")
        here.start()
        first = await here.serves("lap", "nas")
        await here.daemon.admin_api.limit_device(DeviceLimit(device="nas", is_paused=True))
        await here.emits("nas: the owner lowered its limit")
        second = await here.serves("lap", after=first.epoch)
        assert first.drained
        status = await here.backend.status()
        (nas,) = [each for each in status["cluster"] if each["device"] == "nas"]
        assert (nas["phase"], nas["reason"]) == ("ready", "paused by the owner of this head")
        here.solver.value = lambda count: 10.0 / count
        await here.daemon.admin_api.limit_device(DeviceLimit(device="nas"))
        assert await here.serves("lap", "nas", after=second.epoch)


async def test_plans_respect_the_memory_limit_of_a_device(lab):
    async with lab() as here:
        here.device("nas")
        here.start()
        first = await here.serves("nas")
        here.solver.layers = {"nas": 3}
        await here.daemon.admin_api.limit_device(DeviceLimit(device="nas", ram_bytes=1 << 30))
        await here.serves("nas", after=first.epoch)
        assert here.solver.memory["nas"] == 1 << 30
        (nas,) = (await here.daemon.admin_api.devices()).devices
        assert (nas.device, nas.trusted, nas.in_sight, nas.ram_bytes) == ("nas", "yes", True, 1 << 30)


@pytest.mark.parametrize("device", ["desk", "nobody"])
async def test_limits_apply_only_to_other_trusted_devices(lab, device):
    async with lab() as here:
        here.start()
        await here.serves()
        with pytest.raises(ClusterError, match="not another device"):
            await here.daemon.admin_api.limit_device(DeviceLimit(device=device, is_paused=True))


async def test_a_what_if_forecast_changes_nothing(lab):
    async with lab() as here:
        here.solver.prediction = prediction(desk_s=0.1, nas_s=0.1)
        here.device("nas")
        here.start()
        ring = await here.serves("nas")
        asked = OtherCluster(without=["nas"], profiles=["mini-pc-n100-16gb", "mini-pc-n100-16gb"])
        found = await here.daemon.admin_api.what_if(asked)
        assert [each.device for each in found.devices] == ["desk", "mini-pc-n100-16gb", "mini-pc-n100-16gb-2"]
        assert (found.tokens_per_s, found.now_tokens_per_s) == (5.0, 5.0)
        here.solver.minimum = 2
        with pytest.raises(PlanError, match="there is no such plan: 1 devices are short"):
            await here.daemon.admin_api.what_if(OtherCluster(without=["nas"]))
        with pytest.raises(ClusterError, match="desk: not a device to leave out; there are: nas"):
            await here.daemon.admin_api.what_if(OtherCluster(without=["desk"]))
        with pytest.raises(ClusterError, match="not a built-in profile"):
            await here.daemon.admin_api.what_if(OtherCluster(profiles=["../devices/mini-pc-n100-16gb"]))
        assert (await here.backend.status())["epoch"] == ring.epoch


async def test_the_admin_api_accepts_the_code_that_a_device_shows_and_both_trust_each_other(lab):
    async with lab() as here:
        nas = here.device("nas", trusted=False)
        here.solver.value = lambda count: 10.0 / count
        here.start()
        single_device = await here.serves()
        identity, paired = Who(device="nas", key=nas.key, cluster="test", version="0.1"), list[TrustedDevice]()
        server = PairingServer("127.0.0.1", Code(7, "lamp", "river"), identity, paired.append)
        showing, at = asyncio.create_task(server.run()), f"127.0.0.1:{server.port}"
        with pytest.raises(ClusterError, match="wrong code"):
            await here.daemon.admin_api.bring_code(ShownCode(code="7-lamp-stone", at=at))
        with pytest.raises(ConfigError, match="not a device address"):
            await here.daemon.admin_api.bring_code(ShownCode(code="7-lamp-river", at="no where"))
        assert (await here.daemon.admin_api.bring_code(ShownCode(code="7 lamp river", at=at))).device == "nas"
        assert await showing is CodeOutcome.USED
        assert [each.device for each in paired] == ["desk"]
        await here.serves("nas", after=single_device.epoch)


async def test_the_admin_api_shows_a_code_approves_and_revokes(lab):
    async with lab() as here:
        here.device("nas", trusted=False)
        here.solver.value = lambda count: 10.0 / count
        here.start()
        single_device = await here.serves()
        desk = here.daemon.admin_api
        assert (await desk.devices()).code is None
        code = await desk.open_code()
        body = await desk.devices()
        assert body.code is not None
        assert body.code.code == code.code
        assert [(each.device, each.trusted) for each in body.devices] == [("nas", "no")]
        await desk.trust("nas", body.devices[0].key)
        both = await here.serves("nas", after=single_device.epoch)
        await desk.revoke(body.devices[0].key)
        assert [each.trusted for each in (await desk.devices()).devices] == ["revoked"]
        await here.serves(after=both.epoch)
        kinds = [each["kind"] for each in (await here.backend.status())["events"]]
        assert kinds[0] == "ring"
        assert {"joined", "gone"} <= set(kinds)


async def test_a_plan_with_the_same_windows_is_no_relief(lab):
    async with lab() as here:
        nas = here.device("nas")
        here.start()
        first = await here.serves("nas")
        await report_memory_low(first, nas)
        await here.emits("no other plan asks less of nas: the best one has the same windows")
        assert not first.closed
        await here.solver.wait(
            lambda: here.solver.precomputed.count(("desk",)) == 2
        )  # with the memory that is left now


async def test_a_head_that_ends_closes_its_ring(lab):
    async with lab() as here:
        here.device("nas")
        here.start()
        ring = await here.serves("nas")
        here.running.cancel()
        await asyncio.wait([here.running])
        assert here.running.cancelled()
        assert ring.closed


async def test_a_head_that_ends_sends_goodbye_while_its_ring_ends(lab):
    async with lab() as here:
        here.device("nas")
        ends = asyncio.Event()
        here.discovery.close = ends.wait
        here.start()
        ring = await here.serves("nas")
        close = ring.close

        async def close_at_last() -> None:
            ends.set()
            await close()

        ring.close = close_at_last
        here.running.cancel()
        await asyncio.wait([here.running])


async def test_a_head_that_ends_while_closing_a_broken_ring_still_closes_it(lab):
    async with lab() as here:
        here.device("nas")
        here.start()
        ring = await here.serves("nas")
        started, may_end = asyncio.Event(), asyncio.Event()

        async def close() -> None:
            started.set()
            await may_end.wait()
            ring.closed = True

        ring.close = close
        ring.breaks(None, "the head's ring process was ended by SIGKILL")
        await started.wait()
        here.running.cancel()
        await asyncio.sleep(0.05)
        may_end.set()
        await asyncio.wait([here.running])
        assert ring.closed


# ---- internal errors ------------------------------------------------------------------------------------------------


def fails_once(monkeypatch, holder: object, name: str) -> None:
    """Make the first call of a coroutine function fail unexpectedly."""
    real = getattr(holder, name)

    async def first(*_: object, **__: object) -> None:
        monkeypatch.setattr(holder, name, real)
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(holder, name, first)


async def test_an_internal_error_in_planning_is_reported(lab):
    async with lab() as here:
        here.device("nas")
        here.solver.value = lambda count: 1 / 0
        here.start()
        with pytest.raises(ExceptionGroup) as caught:
            await here.running
        assert caught.group_contains(ClusterError, match="internal error of the head: ZeroDivisionError")


async def test_a_ring_is_formed_again_after_an_internal_error(lab):
    async with lab() as here:
        here.device("nas")
        here.start()
        ring = await here.serves("nas")
        here.rings.errors = [RuntimeError("dictionary changed size during iteration")]
        ring.breaks(None, "the head's ring process was ended by SIGKILL")
        await here.emits("internal error of the head: RuntimeError: dictionary changed size")
        await here.serves("nas", after=ring.epoch)


async def test_a_head_looks_for_devices_while_measured_and_plans_afterwards(lab):
    async with lab() as here:
        here.profile.measured.clear()
        device = here.device("nas")
        here.start(use_all=True)
        await here.discovery.announced.wait()
        assert not device.hellos
        here.profile.measured.set()
        await here.serves("nas")


async def test_a_device_is_greeted_once_its_measurement_is_done(lab):
    async with lab() as here:
        device = here.device("nas", seen=False)
        here.discovery.sees(device, is_measuring=True)
        here.start(use_all=True)
        await here.serves()
        await here.emits("nas is being measured")
        assert not device.knocks
        here.discovery.sees(device)
        await here.serves("nas")


async def test_a_deadline_that_passes_while_the_core_decides_is_not_missed(lab, monkeypatch):
    """The machine may pause between two reads of the clock."""
    decide = core_loop_module.step

    def slowly(state: State, event: Event, now: float) -> tuple[State, list[Effect]]:
        decided = decide(state, event, now)
        if isinstance(event, DeviceRefused):
            time.sleep(2 * GREET_S)
        return decided

    async with lab() as here:
        monkeypatch.setattr(core_loop_module, "step", slowly)
        fails_once(monkeypatch, devices_module, "probe")
        here.device("nas")
        here.start(use_all=True)
        await here.serves("nas")


@pytest.mark.parametrize("work", ["probe", "measure"])
async def test_a_device_is_greeted_and_measured_again_after_an_internal_error(lab, monkeypatch, work):
    async with lab() as here:
        fails_once(monkeypatch, devices_module if work == "probe" else LinkBook, work)
        here.device("nas")
        here.start(use_all=True)
        await here.serves("nas")


async def test_an_internal_error_before_a_ring_is_made_is_reported(lab, monkeypatch):
    async with lab() as here:
        fails_once(monkeypatch, planner_module.OwnDevice, "begin")
        here.start()
        with pytest.raises(ExceptionGroup) as caught:
            await here.running
        assert "dictionary changed size" in str(caught.value.exceptions[0])
