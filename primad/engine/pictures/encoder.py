"""Encodes pictures and sound with a model's encoder file (mmproj), by llama.cpp's libmtmd."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from primad.engine.binding import llama, why
from primad.engine.devices import find_gpu
from primad.engine.pictures.checks import MAX_PARTS
from primad.engine.pictures.grids import RowLayout, turn_of_row
from primad.engine.pictures.headers import check_media, check_picture, is_webp
from primad.engine.pictures.messages import MAX_CONTENT_BYTES, EmbeddedRun, EncodedPicture, TokenRun
from primad.engine.pictures.sounds import check_samples, is_sound
from primad.errors import EngineError
from primad.system.allocator import without_top, zeroed

with without_top("llama_cpp"):
    from llama_cpp import mtmd_cpp as mtmd

_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 4096


def known_by(path: Path) -> str:
    """Return an identifier of the encoder file ``path``: a hash of its header and samples, as it may have gigabytes."""
    found, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        found.update(file.read(1 << 20))
        for sample in range(_SAMPLES):
            file.seek(size * sample // _SAMPLES)
            found.update(file.read(_SAMPLE_BYTES))
    return f"{found.hexdigest()[:32]}-{size}"


def why_not(eye: Any, loaded: Any) -> str:
    """Return why the encoder ``eye`` of the model ``loaded`` cannot be served; empty if it can."""
    if not mtmd.mtmd_support_vision(eye) and not mtmd.mtmd_support_audio(eye):
        return "it accepts neither images nor audio"
    parts = llama.llama_model_n_embd_inp(loaded) // llama.llama_model_n_embd(loaded)
    if parts > MAX_PARTS:
        return f"{parts - 1} layers of its model take parts of an image; at most {MAX_PARTS - 1} are supported"
    return ""


def _layout(image: Any, rows: int) -> tuple[RowLayout, int]:
    """Return the layout of the ``rows`` of ``image``, and its columns.

    Raises ``EngineError`` for other positions: a file does not state its layout before there is a picture.
    """
    columns, begin = int(mtmd.mtmd_image_tokens_get_nx(image)), 5
    at = [mtmd.mtmd_image_tokens_get_decoder_pos(image, begin, row) for row in range(rows)]
    found = [(each.t, each.y, each.x, each.z) for each in at]
    layouts: tuple[tuple[RowLayout, int], ...] = (("line", 0), ("grid", columns), ("framed", columns + 1))
    for layout, width in layouts:
        if found == [turn_of_row(row, rows, layout, width, begin=begin) for row in range(rows)]:
            return layout, width
    raise EngineError("this model's images have RoPE positions of an unknown layout, which is not supported")


def _of_pixels(stack: ExitStack, data: bytes) -> Any:
    """Return the WebP file ``data`` as a bitmap of libmtmd, like those it decodes itself."""
    from primad.engine.pictures.webp import decoded  # most processes never need it

    size = check_picture(data)
    pixels = decoded(data, size)
    bitmap = mtmd.mtmd_bitmap_init(size.width, size.height, (ctypes.c_uint8 * len(pixels)).from_buffer_copy(pixels))
    if not bitmap:
        raise EngineError("llama.cpp has no memory for an image")
    stack.callback(mtmd.mtmd_bitmap_free, bitmap)
    return bitmap


class PictureEncoder:
    """Encodes pictures for ``model``, of which only metadata and tokens are loaded.

    Pictures become ``min_tokens`` to ``max_tokens`` tokens where their size is not fixed; 0: the encoder's default. One
    that would exceed ``MAX_CONTENT_BYTES`` is scaled down first, where possible. A ``gpu``, by llama.cpp's name,
    computes other last bits than a CPU, so it is part of the encoder's identifier. Raises ``EngineError`` if llama.cpp
    cannot load the two together, or primad does not support the model's rows yet.
    """

    def __init__(
        self, path: str, model: str, *, threads: int, min_tokens: int = 0, max_tokens: int = 0, gpu: str = ""
    ) -> None:
        self._stack, self._opened = ExitStack(), ExitStack()
        self._path, self._threads, self._min_tokens = path, threads, min_tokens
        self._names = f"{Path(path).name} as the encoder of {Path(model).name}"  # clients must not see folders
        try:
            self._known_by = known_by(Path(path)) + (f"-{min_tokens}-{max_tokens}" if min_tokens or max_tokens else "")
        except OSError as exc:
            raise EngineError(f"{self._names} cannot be read: {exc.strerror}") from exc
        self._known_by += f"-{gpu}" if gpu else ""
        self._gpu = gpu
        self._makes_smaller = False
        try:
            with zeroed():  # some graphs (Pixtral's) multiply uninitialised memory by 0, which may be NaN
                self._load(model)
                self._open(max_tokens)
        except BaseException:
            self.release()
            raise

    def _load(self, model: str) -> None:
        params = llama.llama_model_default_params()
        params.n_gpu_layers, params.no_alloc, params.load_mode = 0, True, llama.LLAMA_LOAD_MODE_NONE
        loaded = llama.llama_model_load_from_file(model.encode(), params)
        if not loaded:
            raise EngineError(f"llama.cpp cannot read {Path(model).name}: {why('it does not say why')}")
        self._stack.callback(llama.llama_model_free, loaded)
        self._loaded = loaded
        self.width = int(llama.llama_model_n_embd_inp(loaded))

    def _open(self, max_tokens: int) -> None:
        self._opened.close()
        options = mtmd.mtmd_context_params_default()
        options.print_timings = options.warmup = False
        options.use_gpu, options.device = bool(self._gpu), find_gpu(self._gpu) if self._gpu else None
        options.n_threads = self._threads
        options.image_min_tokens, options.image_max_tokens = self._min_tokens or -1, max_tokens or -1
        self._eye: Any = mtmd.mtmd_init_from_file(self._path.encode(), self._loaded, options)
        if not self._eye:
            limits = {"--image-min-tokens": self._min_tokens, "--image-max-tokens": max_tokens}
            stated = "".join(f", with {name} {limit}" for name, limit in limits.items() if limit)
            raise EngineError(f"llama.cpp cannot load {self._names}{stated}")
        self._opened.callback(mtmd.mtmd_free, self._eye)
        self._takes = {False: mtmd.mtmd_support_vision(self._eye), True: mtmd.mtmd_support_audio(self._eye)}
        if reason := why_not(self._eye, self._loaded):
            raise EngineError(f"{self._names} cannot be served: {reason}")
        self._has_parts = bool(mtmd.mtmd_decode_use_mrope(self._eye))

    def encode(self, data: bytes) -> EncodedPicture:
        """Encode the file ``data``. Raises ``ValueError`` if it is no picture or sound, or too large."""
        check_media(data)
        if not self._takes[is_sound(data)]:
            raise ValueError(f"this model's encoder accepts no {'audio' if is_sound(data) else 'images'}")
        with zeroed(), ExitStack() as stack:
            bitmap = self._bitmap(stack, data)
            chunks = self._chunks(stack, bitmap)
            if self._bytes_of(chunks) > MAX_CONTENT_BYTES and not self._makes_smaller:
                self._makes_smaller = True  # pictures within the limit keep their size
                self._open(max(1, MAX_CONTENT_BYTES // (4 * self.width)))
                chunks = self._chunks(stack, bitmap)
            if self._bytes_of(chunks) > MAX_CONTENT_BYTES:
                raise ValueError(f"the image becomes more than {MAX_CONTENT_BYTES >> 20} MB of rows for the model")
            runs = tuple(self._runs(chunks))
            return EncodedPicture(digest=hashlib.sha256(data).hexdigest(), encoder=self._known_by, runs=runs)

    def _bitmap(self, stack: ExitStack, data: bytes) -> Any:
        if is_webp(data):
            return _of_pixels(stack, data)
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        options = mtmd.mtmd_helper_init_opt_default()
        options.video_params.ffmpeg_bin_dir = os.devnull.encode()  # ffmpeg must not see what stb_image cannot decode
        found = mtmd.mtmd_helper_bitmap_init_from_buf_wrapper(self._eye, buffer, len(data), False, options)
        if found.bitmap:
            stack.callback(mtmd.mtmd_bitmap_free, found.bitmap)
        if found.video_ctx:
            stack.callback(mtmd.mtmd_helper_video_free, found.video_ctx)
        if not found.bitmap or found.video_ctx:
            raise ValueError("the image or audio cannot be decoded: its file is damaged")
        if is_sound(data):
            size = mtmd.mtmd_bitmap_get_n_bytes(found.bitmap)
            samples = ctypes.string_at(mtmd.mtmd_bitmap_get_data(found.bitmap), size) if size else b""
            check_samples(samples, mtmd.mtmd_get_audio_sample_rate(self._eye))
        return found.bitmap

    def _chunks(self, stack: ExitStack, bitmap: Any) -> Any:
        chunks = mtmd.mtmd_input_chunks_init()
        stack.callback(mtmd.mtmd_input_chunks_free, chunks)
        part = mtmd.mtmd_input_part(None, bitmap)
        parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
        if mtmd.mtmd_tokenize_from_parts(self._eye, chunks, parts, 1, False):
            raise ValueError("the model's encoder does not accept an image of this shape, or audio of this length")
        return chunks

    def _bytes_of(self, chunks: Any) -> int:
        """Return the bytes of all embedded rows of ``chunks``."""
        found = [mtmd.mtmd_input_chunks_get(chunks, i) for i in range(mtmd.mtmd_input_chunks_size(chunks))]
        embedded = [each for each in found if mtmd.mtmd_input_chunk_get_type(each) != mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT]
        return 4 * self.width * sum(int(mtmd.mtmd_input_chunk_get_n_tokens(each)) for each in embedded)

    def _runs(self, chunks: Any) -> Iterator[TokenRun | EmbeddedRun]:
        for i in range(mtmd.mtmd_input_chunks_size(chunks)):
            chunk = mtmd.mtmd_input_chunks_get(chunks, i)
            rows = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
            kind = mtmd.mtmd_input_chunk_get_type(chunk)
            if kind == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                count = ctypes.c_size_t(0)
                pointer = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
                tokens = tuple(pointer[: count.value])
                if min(tokens, default=0) < 0:
                    raise EngineError("the model lacks tokens that its encoder puts around an image")
                yield TokenRun(tokens)
                continue
            content = self._content(chunk, rows * self.width * 4)
            looks_ahead = bool(mtmd.mtmd_decode_use_non_causal(self._eye, chunk))
            layout: tuple[RowLayout, int] = ("line", 0) if self._has_parts else ("", 0)
            if self._has_parts and kind == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE:
                layout = _layout(mtmd.mtmd_input_chunk_get_tokens_image(chunk), rows)
            yield EmbeddedRun(rows, looks_ahead, content, *layout)

    def _content(self, chunk: Any, size: int) -> bytes:
        if mtmd.mtmd_encode_chunk(self._eye, chunk):
            raise EngineError("llama.cpp failed to encode an image")
        content = ctypes.string_at(mtmd.mtmd_get_output_embd(self._eye), size)
        if not np.isfinite(np.frombuffer(content, "<f4")).all():
            raise EngineError("the model's encoder returned NaN or infinite values for this image")
        return content

    def release(self) -> None:
        """Free its memory."""
        self._opened.close()
        self._stack.close()
