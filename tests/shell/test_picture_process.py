"""The picture process with a tiny encoder: good files, bad files, crashes."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
from contextlib import asynccontextmanager, nullcontext
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from primad.daemon.pictures import PictureService
from primad.engine.pictures.messages import EmbeddedRun, EncodedPicture, TokenRun
from primad.errors import EngineError, RequestError, RingError
from primad.ring.pictures import placed
from tests.shell.unanswered import ask_stopped
from tools.lab.mmproj import noise, png, write_encoder
from tools.synth import write_model

PATIENCE_S = 120


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    shape = write_model(folder / "model.gguf", architecture="gemma3")
    eye = write_encoder(folder / "encoder.gguf", "gemma3", shape.width)
    return folder / "encoder.gguf", folder / "model.gguf", eye, shape


@asynccontextmanager
async def pictures(files, **options):
    service = PictureService(files[0], files[1], threads=1, **options)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield service
    finally:
        await service.close()


async def test_a_picture_becomes_embeddings_of_the_models_width_between_tokens(files):
    _, _, eye, shape = files
    async with pictures(files) as service:
        assert service.pid is None, "started with the first picture"
        found, other = await service.encode(noise(1), "a"), await service.encode(noise(2), "b")
    before, rows, after = found.runs
    assert isinstance(before, TokenRun)
    assert isinstance(after, TokenRun)
    assert isinstance(rows, EmbeddedRun)
    assert (rows.rows, rows.looks_ahead) == (eye.rows, True)
    hidden = np.frombuffer(rows.content, "<f4").reshape(eye.rows, shape.width)
    assert np.isfinite(hidden).all()
    assert hidden.std() > 0
    assert found.positions == len(before.tokens) + eye.rows + len(after.tokens)
    assert other.digest != found.digest
    assert other.runs[1] != rows


async def test_a_webp_is_its_pixels_and_an_animated_one_its_first_frame(files):
    """It equals a PNG of these pixels, bit for bit; transparent pixels keep their colour."""
    pixels = [np.random.default_rng(seed).integers(0, 256, (40, 48, 3), np.uint8) for seed in (1, 2)]
    frames = [Image.fromarray(each) for each in pixels]
    still, moving, clear = BytesIO(), BytesIO(), BytesIO()
    frames[0].save(still, "WEBP", lossless=True)
    frames[0].save(moving, "WEBP", lossless=True, save_all=True, append_images=frames[1:])
    seen = frames[0].copy()
    seen.putalpha(0)
    seen.save(clear, "WEBP", lossless=True, exact=True)
    async with pictures(files) as service:
        expected = await service.encode(png(pixels[0]), "a")
        for file in (still, moving, clear):
            assert (await service.encode(file.getvalue(), "a")).runs == expected.runs
        assert (await service.encode(png(pixels[1]), "a")).runs != expected.runs
        with pytest.raises(RequestError, match="damaged"):
            await service.encode(still.getvalue()[:200], "a")
        assert service.starts == 1


async def test_a_picture_is_encoded_once_while_there_is_room_to_keep_it(files):
    _, _, eye, shape = files
    async with pictures(files, kept_bytes=eye.rows * shape.width * 4) as service:
        first = await service.encode(noise(1), "a")
        assert await service.encode(noise(1), "a") is first
        assert service.encoded == 1
        await service.encode(noise(2), "a")
        assert await service.encode(noise(1), "a") == first
        assert service.encoded == 3


async def test_token_limits_bound_the_embeddings_of_a_picture_which_have_their_own_ids(tmp_path):
    shape = write_model(tmp_path / "model.gguf", architecture="qwen2vl")
    write_encoder(tmp_path / "encoder.gguf", "qwen2vl_merger", shape.width)
    found = dict[tuple[int, int], EncodedPicture]()
    for limits in ((4, 6), (12, 16)):
        async with pictures((tmp_path / "encoder.gguf", tmp_path / "model.gguf"), image_tokens=limits) as service:
            found[limits] = await service.encode(noise(1), "a")
    rows = {
        limits: sum(run.rows for run in each.runs if isinstance(run, EmbeddedRun)) for limits, each in found.items()
    }
    assert all(minimum <= rows[minimum, maximum] <= maximum for minimum, maximum in found)
    small, large = found.values()
    assert small.digest == large.digest
    assert not set(placed(small, 0)[0]) & {each for each in placed(large, 0)[0] if each < 0}


async def test_limits_that_the_encoder_cannot_keep_are_named(tmp_path):
    shape = write_model(tmp_path / "model.gguf", architecture="qwen2vl")
    write_encoder(tmp_path / "encoder.gguf", "qwen2vl_merger", shape.width)
    async with pictures((tmp_path / "encoder.gguf", tmp_path / "model.gguf"), image_tokens=(0, 1)) as service:
        with pytest.raises(EngineError, match="--image-max-tokens 1"):
            await service.encode(noise(1), "a")


async def test_a_damaged_picture_is_the_requests_fault_and_ends_nothing(files):
    whole = noise(1)
    async with pictures(files) as service:
        await service.encode(whole, "a")
        pid = service.pid
        for data in (
            whole[:60],
            whole[:-40],
            whole[:33] + bytes(100),
            b"GIF89a" + struct.pack("<HH", 9, 9) + bytes(50),
        ):
            with pytest.raises(RequestError, match=r"images\[3\]"):
                await service.encode(data, "images[3]")
        with pytest.raises(RequestError, match="pixels"):
            await service.encode(whole[:16] + struct.pack(">II", 40_000, 40_000) + whole[24:], "a")
        await service.encode(noise(2), "a")
        assert service.pid == pid


async def test_a_crash_is_no_error_but_a_second_one_in_a_picture_is_and_the_next_picture_succeeds(files):
    crashing = False

    def began(pid):
        if crashing:
            os.kill(pid, signal.SIGKILL)

    async with pictures(files, began=began) as service:
        first = await service.encode(noise(1), "a")
        for number, crashing in ((2, False), (3, True)):
            task = await ask_stopped(service.pid, service.encode(noise(number), "a"))
            assert await service.encode(noise(1), "a") is first, "what is kept waits for no other picture"
            os.kill(service.pid, signal.SIGKILL)
            with pytest.raises(RingError, match="process for images") if crashing else nullcontext():
                await task
        assert await service.encode(noise(1), "a") is first, "what was kept is"
        crashing = False
        await service.encode(noise(3), "a")
        os.kill(service.pid, signal.SIGKILL)
        await service.encode(noise(4), "a")  # the service cannot know of the end yet
        assert service.starts == 5


@pytest.mark.parametrize("content", [None, b"", b"no GGUF", b"GGUF" + bytes(100)])
async def test_an_invalid_encoder_file_is_named(content, files, tmp_path):
    if content is not None:
        (tmp_path / "none.gguf").write_bytes(content)
    async with pictures((tmp_path / "none.gguf", files[1])) as service:
        with pytest.raises(EngineError, match=r"none\.gguf"):
            await service.encode(noise(1), "a")


async def test_an_encoder_of_another_model_is_named_to_clients_and_once_with_its_folder_to_the_owner(
    files, tmp_path, caplog
):
    write_encoder(tmp_path / "other.gguf", "gemma3", 32)
    async with pictures((tmp_path / "other.gguf", files[1])) as service:
        for _ in range(2):
            with pytest.raises(EngineError, match=r"load other\.gguf as the encoder of model\.gguf"):
                await service.encode(noise(1), "a")
        assert service.pid is None
    assert caplog.text.count(str(tmp_path / "other.gguf")) == 1


async def test_an_idle_process_ends_and_the_next_picture_starts_it_again(files):
    async with pictures(files, idle_s=0.0, kept_bytes=0) as service:
        first = await service.encode(noise(1), "a")
        for _ in range(20):  # turns of the event loop until it is told to end
            await asyncio.sleep(0)
        assert service.pid is None
        assert await service.encode(noise(1), "a") == first
        assert service.starts == 2


async def test_a_client_that_leaves_costs_the_others_no_process(files):
    async with pictures(files) as service:
        await service.encode(noise(1), "a")
        pid, leaving = service.pid, asyncio.create_task(service.encode(noise(2), "a"))
        for _ in range(3):  # turns of the event loop until it is asked
            await asyncio.sleep(0)
        leaving.cancel()
        await service.encode(noise(2), "b")
        assert leaving.cancelled()
        assert (service.pid, service.encoded) == (pid, 2)


async def test_a_service_that_has_ended_starts_nothing(files):
    async with pictures(files) as service:
        await service.close()
        with pytest.raises(RingError, match="unloaded"):
            await service.encode(noise(1), "a")
        assert service.pid is None
