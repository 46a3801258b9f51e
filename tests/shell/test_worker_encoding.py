"""A worker that encodes pictures for a head, and a head that encodes what the worker does not."""

from __future__ import annotations

import asyncio
import os
import signal
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from primad.daemon.layer_files import copy_layers
from primad.daemon.pictures import PictureService
from primad.engine.pictures.checks import check_encoded
from primad.engine.pictures.messages import EmbeddedRun, EncodedPicture, TokenRun
from primad.errors import ProtocolError, RequestError
from primad.gguf.model import open_model
from primad.gguf.whole_file import cut_file
from primad.head.rings.remote_encoder import EncoderInputs, RemoteEncoder
from primad.network import messages
from primad.network.messages import (
    EncodedChunk,
    EncodedWanted,
    LoadMmproj,
    MmprojState,
    PictureChunk,
    ReleaseMmproj,
    decode_from_head,
    decode_from_worker,
)
from primad.planning.encoder_place import EncoderPlace
from primad.system.wire import encode
from primad.worker.encoding import EncodingService
from tests.fakes.node import worker_node
from tests.shell.unanswered import ask_stopped
from tools.lab.mmproj import noise, write_encoder
from tools.synth import write_model

PATIENCE_S = 120


class Worker:
    """A worker's encoding service and the head's link to it; messages pass as bytes."""

    name = "lap"

    def __init__(self, home: Path) -> None:
        node = worker_node(home)
        self.place = node.workspace
        self.printed: list[str] = []
        self.service = EncodingService(
            node,
            context=cast("Any", None),
            number=count(1).__next__,
            notify=self.notify,
            report_line=self.printed.append,
        )
        self.listeners: dict[int, Any] = {}
        self.is_mute = False

    def encodes_for(self, rows: Any) -> None:
        self.listeners[rows.number] = rows

    def forget_encoding(self, rows: Any) -> None:
        self.listeners.pop(rows.number, None)

    async def notify(self, message: MmprojState | EncodedChunk) -> None:
        decoded = decode_from_worker(encode(message))
        assert decoded == message
        if message.number in self.listeners and not self.is_mute:
            self.listeners[message.number].hear(decoded)

    async def send(self, message: object) -> None:
        decoded = decode_from_head(encode(cast("Any", message)))
        match decoded:
            case LoadMmproj():
                await self.service.load(decoded, 1)
            case PictureChunk():
                await self.service.take(decoded)
            case EncodedWanted():
                await self.service.give(decoded)
            case ReleaseMmproj(number=number):
                await self.service.release(number)

    @property
    def pid(self) -> int:
        (current,) = self.service._loadings.values()
        assert current.child is not None
        assert current.child.pid is not None
        return current.child.pid


class Home:
    """A head whose plan places the encoder on ``lap``."""

    def __init__(self, tmp_path: Path) -> None:
        self.model, self.encoder = tmp_path / "model.gguf", tmp_path / "encoder.gguf"
        shape = write_model(self.model, architecture="qwen3vl")
        write_encoder(self.encoder, "qwen3vl_merger of deeper layers", shape.width)
        self.worker = Worker(tmp_path / "lap")
        self.is_here = True
        self.picture_s = 0.0
        self.printed: list[str] = []
        source = SimpleNamespace(header=open_model(self.model), profile=SimpleNamespace(width=shape.width))
        service = SimpleNamespace(
            model=source,
            encoder=SimpleNamespace(path=self.encoder, memory_bytes=1 << 20),
            options=SimpleNamespace(image_tokens=(0, 0)),
        )
        self.inputs = EncoderInputs(
            service=cast("Any", service),
            place=lambda: EncoderPlace(device="lap", picture_s=self.picture_s),
            find=lambda _: cast("Any", self.worker if self.is_here else None),
            sources=self._no_sources,
            own="desk",
            report_line=self.printed.append,
        )
        self.remote = RemoteEncoder(self.inputs)
        self.pictures = PictureService(self.encoder, self.model, threads=1, elsewhere=self.remote, kept_bytes=0)

    async def _no_sources(self, _: object) -> list[Any]:
        return []

    async def get_ready(self) -> None:
        """The worker has the file and was asked to load it."""
        cut = cut_file(self.encoder).hashed()
        await copy_layers(lambda _: cut, self.worker.place.cache, [cut.ref()], lambda _: None)
        await self.pictures.encode(noise(1), "a")
        await self.remote._tasks.wait()
        assert self.remote.device == "lap"

    async def __aenter__(self) -> Home:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pictures.close()
        await self.worker.service.end()


@pytest.fixture
def parts(monkeypatch):
    """Pictures and embeddings are sent in many parts."""
    for module in ("primad.head.rings.remote_encoder", "primad.worker.encoding"):
        monkeypatch.setattr(f"{module}.PICTURE_CHUNK_BYTES", 1 << 11)


async def test_a_worker_with_the_encoder_and_a_weightless_model_computes_the_heads_embeddings_exactly(tmp_path, parts):
    async with asyncio.timeout(PATIENCE_S), Home(tmp_path) as home:
        await home.get_ready()
        assert (home.pictures.encoded, home.pictures.encoded_elsewhere) == (1, 0), (
            "the head, until the worker has the file"
        )
        here = await home.pictures._child.encode(noise(2, 96, 64))
        there = await home.pictures.encode(noise(2, 96, 64), "b")
        assert here == there
        assert home.pictures.status() == {"device": "lap", "alive": True, "encoded": 2, "encoded_elsewhere": 1}
        with pytest.raises(RequestError, match=r"images\[3\]"):
            await home.pictures.encode(noise(2)[:-40], "images[3]")
        await home.pictures._end_idle()
        assert not home.worker.service._loadings
        assert not list(home.worker.place.run.glob("window-*"))


async def test_a_worker_encodes_for_several_models_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("primad.worker.encoding.MAX_ENCODERS", 2)
    async with asyncio.timeout(PATIENCE_S), Home(tmp_path) as home:
        await home.get_ready()
        others = [RemoteEncoder(home.inputs) for _ in range(2)]
        for other in others:
            assert await other.encode(noise(2)) is None
            await other._tasks.wait()
        assert [home.remote.device, *(each.device for each in others)] == ["lap", "lap", None]
        assert "it encodes for other models" in home.printed[-1]
        assert await others[0].encode(noise(2)) == await home.remote.encode(noise(2))
        await others[0].end()
        assert await home.remote.encode(noise(2)) is not None
        await home.worker.service.stop("memory is short on this device")
        assert home.remote.device is None


async def test_the_head_encodes_a_picture_that_a_worker_cannot_finish(tmp_path):
    async with asyncio.timeout(PATIENCE_S), Home(tmp_path) as home:
        for fault in ("killed", "lost", "stopped"):
            home.remote._failed = None
            await home.get_ready()
            before = home.pictures.encoded_elsewhere
            expected = await home.pictures.encode(noise(2), "a")
            session = home.remote._session
            assert home.pictures.encoded_elsewhere == before + 1
            task = await ask_stopped(home.worker.pid, home.pictures.encode(noise(2), "a"))
            assert session._picture == 2
            match fault:
                case "killed":
                    os.kill(home.worker.pid, signal.SIGKILL)
                case "lost":
                    session.lost("its primad ended")
                case "stopped":
                    await home.worker.service.stop("memory is short on this device")
            assert await task == expected
            assert home.printed[-1].startswith("lap does not encode images: ")
            assert await home.pictures.encode(noise(2), "a") == expected
            assert home.pictures.encoded_elsewhere == before + 1, "it is not tried again at once"
            assert home.remote.device is None


async def test_a_picture_in_progress_delays_no_end_and_another_plan_leaves_nothing_on_the_worker(tmp_path):
    async with asyncio.timeout(PATIENCE_S), Home(tmp_path) as home:
        await home.get_ready()
        await home.remote.follow_plan()
        assert home.remote.device == "lap"
        expected = await home.pictures.encode(noise(2), "a")
        task = await ask_stopped(home.worker.pid, home.pictures.encode(noise(2), "a"))
        home.is_here = False
        await home.remote.follow_plan()
        assert not home.worker.service._loadings
        assert await task == expected, "by the head"
        assert home.printed == ["lap encodes images"]


async def test_a_worker_without_the_file_or_a_reply_costs_no_picture(tmp_path, monkeypatch):
    monkeypatch.setattr("primad.head.rings.remote_encoder.REPLY_S", 0.0)
    async with asyncio.timeout(PATIENCE_S), Home(tmp_path) as home:
        for is_mute in (False, True):
            home.worker.is_mute, home.remote._failed = is_mute, None
            await home.pictures.encode(noise(1), "a")
            await home.remote._tasks.wait()
            assert home.remote.device is None
        assert "did not reply" in home.printed[-1]
        assert home.pictures.encoded == 2


async def test_the_wait_for_a_hanging_encoder_follows_the_measured_time_of_its_pictures(tmp_path, monkeypatch):
    async with asyncio.timeout(PATIENCE_S / 2), Home(tmp_path) as home:
        home.picture_s = 1e-6
        await home.get_ready()
        expected = await home.pictures.encode(noise(2), "a")
        assert home.pictures.encoded_elsewhere == 1
        monkeypatch.setattr("primad.head.rings.remote_encoder.REPLY_S", 0.1)
        os.kill(home.worker.pid, signal.SIGSTOP)
        assert await home.pictures.encode(noise(2), "a") == expected
        assert "it did not reply within 0.1" in home.printed[-1]


async def test_a_gpu_that_llama_cpp_does_not_see_leaves_the_processor(tmp_path):
    async with asyncio.timeout(PATIENCE_S), Home(tmp_path) as home:
        home.pictures._elsewhere = cast(
            "Any", SimpleNamespace(own_gpu="CUDA7", device=None, encode=_none, end=_nothing)
        )
        found = await home.pictures.encode(noise(1), "a")
        assert "CUDA" not in found.encoder
        assert home.pictures._child.load.gpu == ""


async def _none(_: bytes) -> None:
    return None


async def _nothing() -> None:
    pass


def test_parts_beyond_the_end_and_encoders_in_pieces_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100))
    ref = cut_file(tmp_path / "file").hashed().ref()
    assert (ref.size_bytes, ref.tensors[0].size_bytes) == (128, 100)
    load = LoadMmproj(number=1, file=ref, metadata=b"m", hole_bytes=0, gpu="", memory_bytes=0, sources=[])
    assert decode_from_head(encode(load)) == load
    two = replace(ref, tensors=(ref.tensors[0], replace(ref.tensors[0], name="other", offset=128)), size_bytes=256)
    with pytest.raises(ProtocolError, match="several pieces"):
        decode_from_head(encode(replace(load, file=two)))
    with pytest.raises(ProtocolError, match="beyond the end"):
        decode_from_head(encode(PictureChunk(number=1, picture=1, size=3, offset=2, data=b"ab")))
    with pytest.raises(ProtocolError, match="beyond the end"):
        decode_from_worker(encode(EncodedChunk(number=1, picture=1, size=3, offset=2, data=b"ab")))
    for size in (0, messages.MAX_PICTURE_BYTES + 1):
        with pytest.raises(ProtocolError, match="not a control message"):
            decode_from_head(encode(PictureChunk(number=1, picture=1, size=size, offset=0, data=b"a")))


RUN = EmbeddedRun(4, False, bytes(4 * 4 * 8), "grid", 2)
GOOD = EncodedPicture(digest="d", encoder="e", runs=(TokenRun((1,)), RUN))


@pytest.mark.parametrize(
    "runs",
    [
        (),
        (TokenRun((9,)), RUN),
        (TokenRun((-1,)), RUN),
        (TokenRun((1,)),),
        (replace(RUN, rows=0),),
        (replace(RUN, rows=3),),
        (replace(RUN, rows=8),),
        (replace(RUN, columns=3),),
        (replace(RUN, columns=0),),
        (replace(RUN, layout="line"),),
        (replace(RUN, content=bytes(4 * 4 * 8 * 5)),),
        (replace(RUN, content=b"\xff" * len(RUN.content)),),
        (RUN, replace(RUN, content=2 * RUN.content)),
    ],
)
def test_embeddings_that_do_not_fit_the_model_are_refused(runs):
    check_encoded(GOOD, "d", width=8, vocabulary=9)
    check_encoded(replace(GOOD, runs=(replace(RUN, content=2 * RUN.content),)), "d", width=8, vocabulary=9)
    with pytest.raises(ProtocolError):
        check_encoded(replace(GOOD, runs=runs), "d", width=8, vocabulary=9)


def test_another_picture_is_refused():
    with pytest.raises(ProtocolError, match="not the requested image"):
        check_encoded(GOOD, "other", width=8, vocabulary=9)
