"""Encoded images, and how many tokens they take, found from their first bytes alone.

A model scales an image to whole tokens before it reads it. To how many follows from its size, and
the size stands in its header. So a client can count the tokens of an image without decoding it, and
needs no imaging library.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_JPEG_START, _JPEG_START_OF_SCAN = 0xD8, 0xDA
# Markers without a length: restarts, the start, and a marker of temporary use.
_JPEG_BARE = frozenset((*range(0xD0, 0xD9), 0x01))
MAX_IMAGE_BYTES = 20 << 20
MAX_IMAGES = 64
"""Of one prompt."""
MAX_SOURCE_PIXELS = 32 << 20
"""Of one image, before it is scaled."""
MAX_PROMPT_PIXELS = 64 << 20
"""Of all images of a prompt: a small file may decode to a large picture."""
MAX_ASPECT = 200
# Start of frame; three numbers between them mean tables.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


@dataclass(frozen=True, slots=True)
class ImageChunk:
    """An encoded image in a prompt."""

    data: bytes = field(repr=False)
    format: str
    """`png` or `jpeg`."""
    expected_tokens: int | None = None
    """How many tokens it takes by the caller's count; the server refuses another number."""

    @property
    def length(self) -> int:
        """Number of tokens that the caller counts for it; 0 if the caller does not know."""
        return self.expected_tokens or 0


class ImageError(ValueError):
    """Bytes are not the image that they are said to be."""


@dataclass(frozen=True, slots=True)
class ImageRules:
    """How a model turns images into tokens."""

    token_id: int
    """Stands for each token of an image."""
    token_side_pixels: int
    """Pixels along a side of a token."""
    min_pixels: int
    """Of a scaled image, at least."""
    max_pixels: int

    def num_tokens(self, data: bytes, format: str) -> int:  # noqa: A002  as in `ImageChunk`
        """Return how many tokens an image takes.

        Raises:
            ImageError: If it is no image of this format, or larger than a server takes.
        """
        width, height = served_size(data, format)
        rows, columns = token_grid(
            width,
            height,
            token_side_pixels=self.token_side_pixels,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )
        return rows * columns


def token_grid(
    width: int, height: int, *, token_side_pixels: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the rows and columns of tokens that an image is scaled to.

    Source: `smart_resize` of transformers' Qwen2-VL processor.
    """
    side = token_side_pixels
    rows, columns = round(height / side), round(width / side)
    pixels = rows * columns * side * side
    if pixels > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        rows = max(1, math.floor(height / beta / side))
        columns = max(1, math.floor(width / beta / side))
    elif pixels < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(length * beta / side) for length in (height, width))
    return rows, columns


def served_size(data: bytes, format: str) -> tuple[int, int]:  # noqa: A002  as in `ImageChunk`
    """Return width and height of an image that a server takes, from its header.

    Raises:
        ImageError: If it is no image of this format, or larger than a server takes.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise ImageError(f"the image has {len(data)} bytes, at most {MAX_IMAGE_BYTES} may be")
    width, height = image_size(data, format)
    problem = size_problem(width, height)
    if problem:
        raise ImageError(f"the image {problem}")
    return width, height


def size_problem(width: int, height: int) -> str:
    """Return why a server takes no image of this size, behind its name; empty if it takes one."""
    if width * height > MAX_SOURCE_PIXELS:
        return f"has {width} x {height} pixels, at most {MAX_SOURCE_PIXELS} may be"
    if max(width, height) > MAX_ASPECT * min(width, height):
        return f"is {width} x {height}, one side over {MAX_ASPECT} times the other"
    return ""


def image_size(data: bytes, format: str) -> tuple[int, int]:  # noqa: A002  as in `ImageChunk`
    """Return width and height of a PNG or JPEG from its header.

    Raises:
        ImageError: If it is no image of this format.
    """
    sizes = {"png": _png_size, "jpeg": _jpeg_size}
    if format not in sizes:
        raise ImageError(f"an image of format {format[:32]!r} is not read; use png or jpeg")
    try:
        width, height = sizes[format](data)
    except (struct.error, IndexError) as error:
        raise ImageError(f"the bytes are no {format}: they end inside of its header") from error
    if width == 0 or height == 0:
        raise ImageError(f"the {format} is {width} x {height} pixels")
    return width, height


def _png_size(data: bytes) -> tuple[int, int]:
    if not data.startswith(_PNG_SIGNATURE) or data[12:16] != b"IHDR":
        raise ImageError("the bytes are no png: it begins otherwise")
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _jpeg_size(data: bytes) -> tuple[int, int]:
    if data[:2] != bytes((0xFF, _JPEG_START)):
        raise ImageError("the bytes are no jpeg: it begins otherwise")
    position = 2
    while True:
        if data[position] != 0xFF:
            raise ImageError("the bytes are no jpeg: a marker is missing")
        while data[position] == 0xFF:
            position += 1
        marker = data[position]
        position += 1
        if marker in _JPEG_BARE:
            continue
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", data, position + 3)
            return width, height
        if marker == _JPEG_START_OF_SCAN:
            raise ImageError("the bytes are no jpeg: it has no frame")
        (length,) = struct.unpack_from(">H", data, position)
        position += max(2, length)
