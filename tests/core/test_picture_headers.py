"""An image is judged by its header before it is decoded."""

from __future__ import annotations

import struct

import pytest

from primad.engine.pictures.headers import MAX_BYTES, Size, check_picture

PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4s", 13, b"IHDR")
SEGMENT = b"\xff\xe0" + struct.pack(">H", 6) + b"JFIF"


def png(width, height):
    return PNG + struct.pack(">II", width, height)


def jpeg(width, height, frame=0xC0, before=SEGMENT):
    return b"\xff\xd8" + before + bytes((0xFF, frame)) + struct.pack(">HBHHB", 17, 8, height, width, 3)


def gif(width, height):
    return b"GIF89a" + struct.pack("<HH", width, height)


def bmp(width, height, header=40):
    sizes = struct.pack("<hh" if header == 12 else "<ii", width, height)
    return b"BM" + bytes(12) + struct.pack("<I", header) + sizes


def webp(kind, content):
    return b"RIFF" + struct.pack("<I", 12 + len(content)) + b"WEBP" + kind + struct.pack("<I", len(content)) + content


def lossy(width, height):
    return webp(b"VP8 ", b"\x10\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height))


def lossless(width, height):
    return webp(b"VP8L", struct.pack("<BI", 0x2F, width - 1 | (height - 1) << 14))


def canvas(width, height):
    sizes = b"".join(struct.pack("<I", each - 1)[:3] for each in (width, height))
    return webp(b"VP8X", b"\2\0\0\0" + sizes)


@pytest.mark.parametrize(
    "data",
    [
        lossy(30, 20),
        lossy(30 | 1 << 14, 20 | 3 << 14),  # scaling bits, which the decoder ignores
        lossless(30, 20),
        canvas(30, 20),
        png(30, 20),
        gif(30, 20),
        bmp(30, 20),
        bmp(30, -20),
        bmp(30, 20, header=12),
        jpeg(30, 20),
        jpeg(30, 20, frame=0xC2),
        jpeg(30, 20, before=SEGMENT + b"\0\xff\xff" + SEGMENT[1:]),
    ],
)
def test_the_header_of_each_known_format_gives_its_size(data):
    assert check_picture(data) == Size(30, 20)


@pytest.mark.parametrize("make", [png, jpeg, gif, bmp, canvas])
def test_more_pixels_than_may_be_are_refused_by_the_header(make):
    with pytest.raises(ValueError, match="40000 x 40000"):
        check_picture(make(40_000, 40_000))


@pytest.mark.parametrize("data", [png(0, 20), jpeg(30, 0), gif(0, 0), bmp(-30, 20), lossy(0, 20)])
def test_a_picture_has_pixels(data):
    with pytest.raises(ValueError, match="no pixels"):
        check_picture(data)


@pytest.mark.parametrize(
    "data",
    [
        png(30, 20)[:-1],
        gif(30, 20)[:9],
        bmp(30, 20)[:20],
        jpeg(30, 20)[:-4],
        b"\xff\xd8" + SEGMENT,
        *(make(30, 20)[:-1] for make in (lossy, lossless, canvas)),
    ],
)
def test_a_file_that_ends_within_its_header_is_refused(data):
    with pytest.raises(ValueError, match="ends within its header"):
        check_picture(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not an image"),
        (b"<svg/>", "not an image"),
        (b"P6 2 2 255 ", "not an image"),
        (b"ID3\x04", "not an image"),
        (b"RIFF\0\0\0\0WAVEfmt ", "not an image"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "ends within its header"),
        (b"RIFF\0\0\0\0WEBPVP9 " + bytes(40), "WebP of an unknown kind"),
        (b"RIFF\0\0\0\0WEBPVP8L" + bytes(40), "WebP of an unknown kind"),
        (lossy(30, 20).replace(b"\x10\0\0\x9d", b"\x11\0\0\x9d"), "WebP of an unknown kind"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\4CgBI" + bytes(40), "begin with its header"),
        (b"BM" + bytes(40), "unknown header"),
        (jpeg(30, 20, frame=0xC3), "C3"),
        (bytes(MAX_BYTES + 1), "20 MB"),
    ],
)
def test_a_picture_that_the_decoder_would_refuse_or_hand_to_other_decoders_is_refused(data, why):
    with pytest.raises(ValueError, match=why):
        check_picture(data)
