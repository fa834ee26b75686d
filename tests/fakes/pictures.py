"""Small images, encoded."""

from __future__ import annotations

import io
from functools import cache

from PIL import Image

import tinsmith


@cache
def picture(width: int, height: int, shade: int = 0, kind: str = "png") -> tinsmith.ImageChunk:
    """Return an image of one colour."""
    stream = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 64, 128)).save(stream, format=kind)
    return tinsmith.ImageChunk(stream.getvalue(), kind)
