"""Small figures, drawn with numpy alone: outlines, and lengths in digits beside them.

A figure is 84 pixels along a side, nine tokens of a Qwen2.5-VL. The shape stands in the upper
right; lengths are written where its base and its left side are. Equal figures give equal bytes.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Shape = Literal["rectangle", "triangle", "circle"]

SIDE = 84
"""Pixels along a side of a figure."""

_CELL = SIDE // 3
_SCALE = 3
_GLYPHS = {
    "0": ("###", "#.#", "#.#", "#.#", "###"),
    "1": (".#.", "##.", ".#.", ".#.", "###"),
    "2": ("###", "..#", "###", "#..", "###"),
    "3": ("###", "..#", "###", "..#", "###"),
    "4": ("#.#", "#.#", "###", "..#", "..#"),
    "5": ("###", "#..", "###", "..#", "###"),
    "6": ("###", "#..", "###", "#.#", "###"),
    "7": ("###", "..#", ".#.", ".#.", ".#."),
    "8": ("###", "#.#", "###", "#.#", "###"),
    "9": ("###", "#.#", "###", "..#", "###"),
}
_INK = (20, 20, 20)
OUTLINES = ((30, 80, 200), (180, 40, 40), (20, 130, 60))
"""Colours of outlines."""

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Figure:
    """What is drawn.

    Attributes:
        shape: The outline.
        base: Length that is written below; of a circle its radius.
        height: Length that is written at the left; a circle has none, 0.
        colour: Index in `OUTLINES`.
        shift: Pixels that lengths are moved right and down, each 0 or 1.
    """

    shape: Shape
    base: int
    height: int = 0
    colour: int = 0
    shift: tuple[int, int] = (0, 0)


def draw(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    pixels = np.full((SIDE, SIDE, 3), 255, dtype=np.uint8)
    colour = OUTLINES[figure.colour]
    left, bottom = _CELL + 4, 2 * _CELL - 4
    if figure.shape == "circle":
        radius = 5 + 2 * figure.base
        _draw_circle(pixels, 2 * _CELL, _CELL, min(radius, _CELL - 4), colour)
        _draw_line(pixels, (2 * _CELL, _CELL), (2 * _CELL + radius, _CELL), colour)
    else:
        right, top = left + 6 + 4 * figure.base, bottom - 6 - 4 * figure.height
        corners = [(left, bottom), (right, bottom), (right, top), (left, top)]
        if figure.shape == "triangle":
            corners = [(left, bottom), (right, bottom), (left, top)]
        for begin, end in zip(corners, [*corners[1:], corners[0]], strict=True):
            _draw_line(pixels, begin, end, colour)
        _write(pixels, str(figure.height), 0, _CELL, figure.shift)
    _write(pixels, str(figure.base), _CELL, 2 * _CELL, figure.shift)
    return encode_png(pixels)


def encode_png(pixels: Pixels) -> bytes:
    """Return an image as PNG.

    Args:
        pixels: Red, green and blue, uint8 [height, width, 3].
    """
    height, width, _ = pixels.shape
    rows = b"".join(b"\x00" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


def _draw_line(
    pixels: Pixels, begin: tuple[int, int], end: tuple[int, int], colour: tuple[int, int, int]
) -> None:
    num_points = 2 * max(abs(end[0] - begin[0]), abs(end[1] - begin[1])) + 1
    columns = np.linspace(begin[0], end[0], num_points)
    rows = np.linspace(begin[1], end[1], num_points)
    _set(pixels, columns, rows, colour)


def _draw_circle(
    pixels: Pixels, column: int, row: int, radius: int, colour: tuple[int, int, int]
) -> None:
    angles = np.linspace(0.0, 2.0 * np.pi, 16 * radius)
    _set(pixels, column + radius * np.cos(angles), row + radius * np.sin(angles), colour)


def _set(
    pixels: Pixels,
    columns: NDArray[np.float64],
    rows: NDArray[np.float64],
    colour: tuple[int, int, int],
) -> None:
    """Set points two pixels wide; what lies outside is left out."""
    for down in (0, 1):
        for right in (0, 1):
            x, y = np.rint(columns).astype(int) + right, np.rint(rows).astype(int) + down
            is_inside = (x >= 0) & (x < SIDE) & (y >= 0) & (y < SIDE)
            pixels[y[is_inside], x[is_inside]] = colour


def _write(pixels: Pixels, text: str, left: int, top: int, shift: tuple[int, int]) -> None:
    """Write digits into the middle of a cell."""
    width = (4 * len(text) - 1) * _SCALE
    column = left + (_CELL - width) // 2 + shift[0]
    row = top + (_CELL - 5 * _SCALE) // 2 + shift[1]
    for digit in text:
        for y, line in enumerate(_GLYPHS[digit]):
            for x, mark in enumerate(line):
                if mark == "#":
                    begin_row, begin_column = row + y * _SCALE, column + x * _SCALE
                    pixels[begin_row : begin_row + _SCALE, begin_column : begin_column + _SCALE] = (
                        _INK
                    )
        column += 4 * _SCALE
