"""Decodes WebP pictures, which llama.cpp does not: with Pillow's WebP reader only, without its other formats.

Imported only in the picture process, with the first such file.
"""

from __future__ import annotations

from io import BytesIO

from PIL import WebPImagePlugin

from primad.engine.pictures.headers import Size


def decoded(data: bytes, size: Size) -> bytes:
    """Return the pixels (height, width, 3) of the file ``data``, whose header states ``size``; an animation's first
    frame.

    Transparent pixels have the colour that the file gives them, as in PNG. Raises ``ValueError`` for a damaged file.
    """
    if not WebPImagePlugin.SUPPORTED:
        raise ValueError("WebP images are not supported on this server; send PNG or JPEG")
    try:
        with WebPImagePlugin.WebPImageFile(BytesIO(data)) as picture:
            if picture.size != (size.width, size.height):
                raise ValueError
            return picture.convert("RGB").tobytes()
    except (SyntaxError, EOFError, OSError, ValueError, MemoryError):
        raise ValueError("the image cannot be decoded: its file is damaged") from None
