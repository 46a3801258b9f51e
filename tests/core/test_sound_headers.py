"""Audio headers are judged before anything is decoded."""

from __future__ import annotations

import struct

import pytest

from primad.engine.pictures.headers import check_media
from primad.engine.pictures.sounds import MAX_SECONDS, check_samples, is_sound


def wav(samples=16_000, *, stated=None, rate=16_000, kind=1, channels=1, bits=16, frame=None, before=b""):
    size = 2 * samples if stated is None else stated
    form = struct.pack("<HHIIHH", kind, channels, rate, 0, channels * bits // 8 if frame is None else frame, bits)
    parts = b"WAVE" + struct.pack("<4sI", b"fmt ", 16) + form + before + struct.pack("<4sI", b"data", size)
    return struct.pack("<4sI", b"RIFF", 4 + len(parts) + size) + parts + bytes(2 * samples)


def flac(samples=16_000, rate=16_000, size=34, kind=0):
    numbers = (rate << 44 | 15 << 36 | samples).to_bytes(8)
    return b"fLaC" + bytes([kind]) + size.to_bytes(3) + bytes(10) + numbers + bytes(16) + bytes(100)


@pytest.mark.parametrize(
    "data",
    [
        wav(),
        wav(before=struct.pack("<4sI", b"LIST", 3) + b"abc\0"),
        wav(kind=3, bits=32),
        wav(kind=7, bits=8),
        flac(),
        b"ID3\4" + bytes(50),
        b"\xff\xfb\x90" + bytes(50),
    ],
)
def test_sounds_of_known_kinds_are_taken(data):
    assert is_sound(data)
    check_media(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (wav(stated=1 << 31), "ends before its audio"),
        (wav(rate=4_000, samples=4_000 * (MAX_SECONDS + 1)), "lasts 601 s"),
        (wav(samples=0), "lasts 0 s"),
        (wav(samples=100), "0.01 to 600 s"),
        (wav(kind=2), "unknown kind"),
        (wav(rate=0), "unknown kind"),
        (wav(channels=0), "unknown kind"),
        (wav(frame=1), "unknown kind"),
        (wav(before=wav()[12:36]), "two format headers"),
        (wav()[:30], "within its header"),
        (wav()[:12] + struct.pack("<4sI", b"LIST", 1 << 31), "within its header"),
        (b"RIFF" + bytes(4) + b"WAVE" + struct.pack("<4sI", b"data", 0), "ends before its audio"),
        (flac(samples=0), "lasts 0 s"),
        (flac(samples=(1 << 36) - 1), "600 s"),
        (flac(rate=0), "with its header"),
        (flac(size=33), "with its header"),
        (flac(kind=4), "with its header"),
        (flac()[:20], "within its header"),
        (b"ID3" + bytes(21 << 20), "20 MB"),
    ],
)
def test_sounds_that_must_not_be_decoded_are_refused_with_the_reason(data, why):
    assert is_sound(data)
    with pytest.raises(ValueError, match=why):
        check_media(data)


def test_a_sound_whose_length_is_known_only_later_is_judged_then():
    check_samples(bytes(4 * 100), 10_000)
    for count in (0, 1, 99, 10_000 * MAX_SECONDS + 1):
        with pytest.raises(ValueError, match="may last"):
            check_samples(bytes(4 * count), 10_000)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
def test_samples_that_nobody_hears_are_the_sounds_fault(value):
    with pytest.raises(ValueError, match="not numbers"):
        check_samples(struct.pack("<100f", *[0.0] * 99, value), 10_000)


def test_pictures_are_no_sounds():
    for data in (
        b"\xff\xd8\xff\xe0",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"BM",
        b"RIFF" + bytes(4) + b"WEBP",
        b"",
        b"\xff",
    ):
        assert not is_sound(data)
