"""Checks the header of a sound before anything of it is decoded: the decoder allocates as much memory as it states.

The attack: a file of some bytes that states a length of hours. The length of an MP3 is known only after decoding, which
takes no more memory than ``MAX_BYTES`` of the lowest rate.
"""

from __future__ import annotations

import struct
from typing import Final

MIN_SECONDS: Final = 0.01
MAX_SECONDS: Final = 600
MAX_SAMPLE: Final = 1000.0
"""Full scale is 1."""
_WAV_KINDS: Final = frozenset((1, 3, 6, 7, 0xFFFE))
"""Samples of equal size: PCM, floats, A-law and mu-law, and kinds named in an extension."""
_RATES: Final = range(4_000, 384_001)
_STREAM_INFO_BYTES: Final = 34


def is_sound(data: bytes) -> bool:
    """Whether libmtmd would treat the file ``data`` as a sound."""
    is_mp3 = data[:3] == b"ID3" or (data[:1] == b"\xff" and data[1:2] >= b"\xe0")
    return is_mp3 or data[:4] == b"fLaC" or (data[:4] == b"RIFF" and data[8:12] == b"WAVE")


def check_sound(data: bytes) -> None:
    """Raise ``ValueError`` for a sound that must not be decoded."""
    try:
        if data[:4] == b"RIFF":
            check_seconds(_wav_seconds(data))
        elif data[:4] == b"fLaC":
            check_seconds(_flac_seconds(data))
    except struct.error:
        raise ValueError("the audio file ends within its header") from None


def check_seconds(seconds: float) -> None:
    """Raise ``ValueError`` for a sound that is too long or too short: on a single sample llama.cpp aborts."""
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise ValueError(f"audio may last {MIN_SECONDS:g} to {MAX_SECONDS} s; this one lasts {seconds:.3g} s")


def check_samples(samples: bytes, rate: int) -> None:
    """Raise ``ValueError`` for a decoded float32 sound that is empty or has implausible values."""
    import numpy as np  # not for commands, which only check headers

    found = np.frombuffer(samples, np.float32)
    check_seconds(len(found) / rate)
    if not np.abs(found).max() <= MAX_SAMPLE:  # refuses NaN as well
        raise ValueError("the audio has samples that are not numbers, or beyond any that can be heard")


def _wav_seconds(data: bytes) -> float:
    at, rate, frame = 12, 0, 0
    while True:
        name, size = struct.unpack_from("<4sI", data, at)
        if name == b"fmt ":
            if frame:
                raise ValueError("a WAV with two format headers")
            kind, channels, rate, _, frame, bits = struct.unpack_from("<HHIIHH", data, at + 8)
            if kind not in _WAV_KINDS or rate not in _RATES or not channels or frame * 8 != channels * bits:
                raise ValueError("a WAV with samples of an unknown kind")
        if name == b"data":
            if not frame or at + 8 + size > len(data):
                raise ValueError("the WAV ends before its audio does")
            seconds: float = size / frame / rate
            return seconds
        at += 8 + size + size % 2


def _flac_seconds(data: bytes) -> float:
    kind, size = data[4:5], int.from_bytes(data[5:8])
    numbers = int.from_bytes(struct.unpack_from(">8s", data, 18)[0])
    rate, samples = numbers >> 44, numbers & ((1 << 36) - 1)
    if kind not in (b"\0", b"\x80") or size != _STREAM_INFO_BYTES or rate not in _RATES:
        raise ValueError("the FLAC does not begin with its header")
    return samples / rate
