"""Picture and audio files that a client may send: valid ones of all formats, and an attacker's mutations of them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from random import Random
from typing import Final

from PIL import Image

from tools.lab.mmproj import png_chunk, tone

_EXTREMES: Final = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_STRANGE: Final = (
    b"",
    b"\xff\xd8",
    b"\xff\xd8" + b"\xff" * 100_000,
    b"GIF89a",
    b"BM" + bytes(12),
    b"8BPS\0\1" + bytes(200),  # PSD
    b"#?RADIANCE\n" + bytes(200),
    b"\x53\x80\xf6\x34" + bytes(200),  # PIC
    b"P6 9 9 255\n" + bytes(300),
    b"\0\0\2" + bytes(9) + struct.pack("<HHBB", 9, 9, 24, 0) + bytes(300),  # TGA
    b"RIFF\x40\0\0\0WEBPVP8 " + bytes(60),
    b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
    b"\0\0\0\x18ftypmp42" + bytes(100),
    b"\x1a\x45\xdf\xa3" + bytes(100),  # Matroska
    b"ID3\4" + bytes(100),
    b"fLaC" + bytes(100),
    b"%PDF-1.7\n",
)
"""Files that are no picture, or of an unsupported format."""


def png_file(random: Random) -> bytes:
    """Return a file of any kind: grey, colours, palette, with transparency, of 1 to 16 bits, with its lines in any
    order."""
    width, height = random.randint(1, 40), random.randint(1, 40)
    kind, depths = random.choice(((0, (1, 2, 4, 8, 16)), (2, (8, 16)), (3, (1, 2, 4, 8)), (4, (8, 16)), (6, (8, 16))))
    depth = random.choice(depths)
    line = -(-width * depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind] // 8)
    lines = b"".join(bytes([random.randrange(5)]) + random.randbytes(line) for _ in range(height))
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))]
    if kind == 3:
        parts += [(b"PLTE", random.randbytes(3 << depth)), (b"tRNS", random.randbytes(1 << depth))]
    parts += [(b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*part) for part in parts)


def jpeg_file(random: Random) -> bytes:
    """Return a file with blocks of one colour each; with four components it is CMYK."""
    width, height, components = random.randint(1, 40), random.randint(1, 40), random.choice((1, 3, 3, 4))
    frame = struct.pack(">BHHB", 8, height, width, components)
    frame += b"".join(bytes((number + 1, 0x11, 0)) for number in range(components))
    scan = bytes([components]) + b"".join(bytes((number + 1, 0)) for number in range(components)) + b"\0\x3f\0"
    levels = bytes((0, 0, 0, 8, *[0] * 12, *range(8)))  # a code of 4 bits for each size of a difference
    end = bytes((1, *[0] * 15, 0))  # one of one bit, for the end of a block
    bits = ""
    for _ in range(-(-width // 8) * -(-height // 8) * components):
        size = random.randrange(4)
        bits += f"{size:04b}" + "".join(random.choice("01") for _ in range(size)) + "0"
    bits += "1" * (-len(bits) % 8)
    data = int(bits, 2).to_bytes(len(bits) // 8).replace(b"\xff", b"\xff\0")
    adobe = b"Adobe" + bytes((0, 100, 0, 0, 0, 0, random.choice((0, 2))))
    segments = [(0xEE, adobe)] * (components == 4)
    segments += [(0xDB, b"\0" + b"\x10" * 64), (random.choice((0xC0, 0xC0, 0xC1)), frame)]
    segments += [(0xC4, b"\0" + levels), (0xC4, b"\x10" + end), (0xDA, scan)]
    return b"\xff\xd8" + b"".join(_segment(*each) for each in segments) + data + b"\xff\xd9"


def _segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def gif_file(random: Random) -> bytes:
    """Return a file of up to four frames."""
    width, height = random.randint(1, 30), random.randint(1, 30)
    found = b"GIF89a" + struct.pack("<HHBBB", width, height, 0xF1, 0, 0) + random.randbytes(12)
    for _ in range(random.randint(1, 4)):
        pixels = [random.randrange(4) for _ in range(width * height)]
        codes = [code for at, pixel in enumerate(pixels) for code in ([4, pixel] if at % 2 == 0 else [pixel])] + [5]
        bits = "".join(f"{code:03b}" for code in reversed(codes))
        data = int(bits, 2).to_bytes(-(-len(bits) // 8), "little")
        blocks = b"".join(
            bytes([len(part)]) + part for part in (data[at : at + 255] for at in range(0, len(data), 255))
        )
        control = b"\x21\xf9\4" + bytes((random.randrange(16), 1, 0, 0, 0))
        found += control + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\2" + blocks + b"\0"
    return found + b";"


def webp_file(random: Random) -> bytes:
    """Return a file, lossy or lossless, with transparency or not, still or of some frames, with metadata or not."""
    width, height, mode = random.randint(1, 40), random.randint(1, 40), random.choice(("RGB", "RGBA"))
    frames = [
        Image.frombytes(mode, (width, height), random.randbytes(len(mode) * width * height))
        for _ in range(random.choice((1, 1, 3)))
    ]
    more = {"exif": b"Exif\0\0" + random.randbytes(20)} if random.random() < 0.2 else {}
    file = BytesIO()
    is_lossless, quality = random.random() < 0.4, random.randint(0, 100)
    frames[0].save(
        file, "WEBP", save_all=len(frames) > 1, append_images=frames[1:], lossless=is_lossless, quality=quality, **more
    )
    return file.getvalue()


def bmp_file(random: Random) -> bytes:
    """Return a file of 8, 24 or 32 bits, upside down or not."""
    width, height, bits = random.randint(1, 40), random.randint(1, 40), random.choice((8, 24, 32))
    palette = random.randbytes(1024) if bits == 8 else b""
    pixels = random.randbytes(-(-width * bits // 32) * 4 * height)
    info = struct.pack("<IiiHHIIiiII", 40, width, random.choice((1, -1)) * height, 1, bits, 0, len(pixels), 0, 0, 0, 0)
    return (
        b"BM" + struct.pack("<IHHI", 54 + len(palette) + len(pixels), 0, 0, 54 + len(palette)) + info + palette + pixels
    )


def bomb(random: Random) -> bytes:
    """Return some kB that decode to, or declare, as many pixels as a picture may have, or more."""
    if random.random() < 0.3:
        return _webp_bomb(random)
    width, height = random.choice(((5_000, 6_000), (1, 1 << 24), (1 << 24, 1), (40_000, 40_000), (5_700, 5_800)))
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    lines = zlib.compress(bytes(min((width // 8 + 2) * height, 1 << 25)), 9)
    parts = ((b"IHDR", head), (b"IDAT", lines), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*part) for part in parts)


def _webp_bomb(random: Random) -> bytes:
    """Return a canvas of many pixels around a frame of one pixel, or of the canvas's size."""
    frame = BytesIO()
    width, height = random.choice(((5_000, 6_000), (16_383, 2_048), (40_000, 40_000), (1 << 24, 1)))
    is_whole = width < 1 << 14 and random.random() < 0.5
    Image.new("L", (width, height) if is_whole else (1, 1)).save(frame, "WEBP", lossless=True)
    if is_whole:
        return frame.getvalue()
    sizes = b"".join(struct.pack("<I", each - 1)[:3] for each in (width, height))
    animated = b"ANIM" + struct.pack("<IIH", 6, 0, 0) + b"ANMF" + struct.pack("<I", 16 + len(frame.getvalue()) - 12)
    parts = b"WEBPVP8X" + struct.pack("<II", 10, 2) + sizes + animated + bytes(16) + frame.getvalue()[12:]
    return b"RIFF" + struct.pack("<I", len(parts)) + parts


def wav_file(random: Random) -> bytes:
    """Return a file of 8 to 32 bits, integers, floats or mu-law."""
    (kind, bits), channels = random.choice(((1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (7, 8))), random.randint(1, 3)
    rate, frame = random.choice((8_000, 16_000, 22_050, 44_100, 48_000)), channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * frame, frame, bits)
    data = random.randbytes(frame * random.randint(rate // 50, rate // 20))
    if kind == 3:
        data = struct.pack(f"<{len(data) // 4}f", *(random.uniform(-1, 1) for _ in range(len(data) // 4)))
    parts = b"WAVE" + struct.pack("<4sI", b"fmt ", 16) + form + struct.pack("<4sI", b"data", len(data)) + data
    return struct.pack("<4sI", b"RIFF", len(parts)) + parts


def flac_file(random: Random) -> bytes:
    """Return a file of verbatim blocks, or of constant ones."""
    blocks, size, rate = random.randint(4, 6), random.randint(160, 256), random.choice((8_000, 16_000, 44_100))
    info = struct.pack(">HH", size, size) + bytes(6) + (rate << 44 | 15 << 36 | blocks * size).to_bytes(8) + bytes(16)
    found = b"fLaC" + b"\x80" + len(info).to_bytes(3) + info
    for number in range(blocks):
        head = b"\xff\xf8\x60\0" + bytes((number, size - 1))
        same = random.random() < 0.3
        block = b"\0" + random.randbytes(2) if same else b"\2" + random.randbytes(2 * size)
        frame = head + bytes([_crc(head, 8, 0x07)]) + block
        found += frame + _crc(frame, 16, 0x8005).to_bytes(2)
    return found


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    found = 0
    for byte in data:
        found ^= byte << (bits - 8)
        for _ in range(8):
            found = (found << 1 ^ (polynomial if found >> (bits - 1) else 0)) & ((1 << bits) - 1)
    return found


def mp3_file(random: Random) -> bytes:
    """Return a file of silence, with a tag before it or not."""
    tag = b"ID3\4\0\0\0\0\0\x0a" + random.randbytes(10)
    return tag * random.randrange(2) + (b"\xff\xfb\x90\0" + bytes(413)) * random.randint(3, 12)


def long_sound(random: Random) -> bytes:
    """Return a MB that decodes to, or declares, hours of audio."""
    slow = b"\xff\xe3\x18\xc4" + bytes(68)  # 8 kbit a second
    lying = wav_file(random)[:40] + b"\xff" * 4 + bytes(1 << 20)
    return random.choice((slow * 14_000, lying, flac_file(random)[:18] + b"\0\0\x1f\x4f" + b"\xff" * 9_000))


_Maker = Callable[[Random], bytes]
GOOD: Final[tuple[_Maker, ...]] = (png_file, jpeg_file, gif_file, bmp_file, webp_file)
GOOD_SOUNDS: Final[tuple[_Maker, ...]] = (wav_file, flac_file, mp3_file)


def cases(seed: int, good: Sequence[_Maker] = GOOD, *, bombs: bool = True) -> Iterator[tuple[str, bytes]]:
    """Yield files without end, made from ``good`` ones, each with its mutation; the same for the same ``seed``."""
    explode = bomb if good is GOOD else long_sound
    number = 0
    while True:
        random = Random(f"{seed} {number}")
        number += 1
        if bombs and number % 50 == 0:
            yield "bomb", explode(random)
        elif number % 20 == 0:
            yield "strange", random.choice((*_STRANGE, tone(number, 0.01)))
        else:
            data = random.choice(good)(random)
            done = [random.choice(_CHANGES) for _ in range(random.choice((0, 1, 1, 2, 4)))]
            for change in done:
                data = change(random, data)
            yield " ".join(change.__name__.strip("_") for change in done) or "good", data


def _truncated(random: Random, data: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _flipped(random: Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(random.choice((1, 3, 30)) if found else 0):
        found[random.randrange(len(found))] ^= 1 << random.randrange(8)
    return bytes(found)


def _lying(random: Random, data: bytes) -> bytes:
    """Replace a number in the header, or anywhere else, by an extreme one."""
    form = random.choice(("<H", ">H", "<I", ">I", "B"))
    size = struct.calcsize(form)
    if len(data) < size:
        return data
    found = bytearray(data)
    at = random.randrange(min(len(data), random.choice((40, len(data)))) - size + 1) if len(data) >= 40 else 0
    struct.pack_into(form, found, at, random.choice(_EXTREMES) & ((1 << 8 * size) - 1))
    return bytes(found)


def _spliced(random: Random, data: bytes) -> bytes:
    """Join the first part and the last part of two files of any formats."""
    other = random.choice((*GOOD, *GOOD_SOUNDS))(random)
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other)) :]


def _joined(random: Random, data: bytes) -> bytes:
    """Append another file, so that readers from the front and from the end see different ones."""
    return data + random.choice((*(make(random) for make in (*GOOD, *GOOD_SOUNDS)), *_STRANGE))


def _repeated(random: Random, data: bytes) -> bytes:
    first, last = sorted((random.randrange(len(data) + 1), random.randrange(len(data) + 1)))
    return data[:last] + data[first:last] * random.choice((1, 2, 50)) + data[last:]


def _emptied(random: Random, data: bytes) -> bytes:
    first, last = sorted((random.randrange(len(data) + 1), random.randrange(len(data) + 1)))
    return data[:first] + random.choice((b"\0", b"\xff")) * (last - first) + data[last:]


_CHANGES: Final[tuple[Callable[[Random, bytes], bytes], ...]] = (
    _truncated,
    _flipped,
    _lying,
    _lying,
    _spliced,
    _joined,
    _repeated,
    _emptied,
)
