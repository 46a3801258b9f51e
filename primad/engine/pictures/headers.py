"""Checks the header of a picture before anything of it is decoded.

The attack: a file of some kB that states, or hides, 40,000 x 40,000 pixels. So the formats that the decoders
(stb_image, libwebp) know are recognised as they recognise them, by their first bytes, and the pixels are bounded by the
same numbers that they will use. Anything else is refused: libmtmd would pass it to ffmpeg.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from primad.engine.pictures.messages import MAX_BYTES
from primad.engine.pictures.sounds import check_sound, is_sound
from primad.errors import RequestError

MAX_PIXELS: Final = 1 << 25
"""33 million: 100 MB once decoded."""
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_BMP_HEADERS: Final = frozenset((12, 40, 56, 108, 124))
_LOSSLESS: Final = 0x2F
_KEY_FRAME: Final = b"\x9d\x01\x2a"
_SIZED: Final = frozenset((0xC0, 0xC1, 0xC2))
"""JPEG frames that the decoder accepts: baseline, extended and progressive."""
_SKIPPED: Final = frozenset((0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))
"""JPEG segments that it skips on the way to the frame."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a picture in pixels."""

    width: int
    height: int


def check_media(data: bytes) -> None:
    """Raise ``ValueError`` for a picture or sound file that must not be decoded."""
    if is_sound(data):
        _check_bytes(data)
        check_sound(data)
    else:
        check_picture(data)


def check_sent(data: bytes, called: str) -> None:
    """Check a file as ``check_media`` does, for the request field ``called``. Raises ``RequestError``."""
    try:
        check_media(data)
    except ValueError as exc:
        raise RequestError(f"{called}: {exc}", param=called) from exc


def check_picture(data: bytes) -> Size:
    """Return the size in the header of the picture ``data``. Raises ``ValueError`` if it must not be decoded."""
    _check_bytes(data)
    try:
        size = _size_of(data)
    except (struct.error, IndexError):
        raise ValueError("the image's file ends within its header") from None
    if size.width < 1 or size.height < 1:
        raise ValueError(f"the image has no pixels: its header says {size.width} x {size.height}")
    if size.width * size.height > MAX_PIXELS:
        raise ValueError(f"an image may have {MAX_PIXELS:,} pixels; this one has {size.width} x {size.height}")
    return size


def is_webp(data: bytes) -> bool:
    """Whether the file ``data`` is for libwebp."""
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def _check_bytes(data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise ValueError(f"a file may have {MAX_BYTES >> 20} MB; this one has {len(data) / (1 << 20):.1f} MB")


def _size_of(data: bytes) -> Size:
    if data.startswith(_PNG):
        if data[12:16] != b"IHDR":
            raise ValueError("the PNG does not begin with its header")
        return Size(*struct.unpack_from(">II", data, 16))
    if data.startswith((b"GIF87a", b"GIF89a")):
        return Size(*struct.unpack_from("<HH", data, 6))
    if data.startswith(b"BM"):
        return _bmp_size(data)
    if data.startswith(b"\xff\xd8"):
        return _jpeg_size(data)
    if is_webp(data):
        return _webp_size(data)
    raise ValueError("not an image of a known format; send PNG, JPEG, WebP, GIF or BMP")


def _webp_size(data: bytes) -> Size:
    kind = data[12:16]
    if kind == b"VP8X":  # animations and files with metadata begin with this; the size is the canvas's
        sizes = struct.unpack_from("<HBHB", data, 24)
        return Size(1 + sizes[0] + (sizes[1] << 16), 1 + sizes[2] + (sizes[3] << 16))
    if kind == b"VP8L":
        mark, bits = struct.unpack_from("<BI", data, 20)
        if mark == _LOSSLESS:
            return Size(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 ":
        tag, mark, width, height = struct.unpack_from("<3s3sHH", data, 20)
        if not tag[0] & 1 and mark == _KEY_FRAME:
            return Size(width & 0x3FFF, height & 0x3FFF)
    raise ValueError("a WebP of an unknown kind")


def _bmp_size(data: bytes) -> Size:
    header = struct.unpack_from("<I", data, 14)[0]
    if header not in _BMP_HEADERS:
        raise ValueError("a BMP with an unknown header")
    width, height = struct.unpack_from("<hh" if header == 12 else "<ii", data, 18)
    return Size(width, abs(height))  # upside down where it is negative


def _jpeg_size(data: bytes) -> Size:
    at = 2
    while True:
        while data[at] != 0xFF:  # the decoder skips bytes between segments
            at += 1
        while data[at] == 0xFF:
            at += 1
        marker, length = data[at], struct.unpack_from(">H", data, at + 1)[0]
        if marker in _SIZED:
            height, width = struct.unpack_from(">HH", data, at + 4)
            return Size(width, height)
        if marker not in _SKIPPED:
            raise ValueError(f"a JPEG of a kind that cannot be decoded (segment {marker:02X})")
        at += 1 + max(length, 2)
