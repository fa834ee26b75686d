"""A recorded episode as text that shows what the model said: coloured, or in brackets."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from tinsmith.rollouts.records import EpisodeRecord

_SAID, _PLAIN = "\x1b[32m", "\x1b[0m"
_FIRST_PICTURE = 0x2400
_DELETE = 0x7F
_DELETE_PICTURE = "\u2421"


def masked_lines(record: EpisodeRecord, *, coloured: bool, width: int = 80) -> Iterator[str]:
    """Yield the lines of an episode, none wider than `width`.

    Args:
        record: The episode.
        coloured: Whether what was sampled is coloured; it stands in brackets otherwise.
        width: Columns of a line.
    """
    starts = record.sample_starts
    for number, start in enumerate(starts):
        if len(starts) > 1:
            yield f"--- sample {number + 1} of {len(starts)} ---"
        end = starts[number + 1] if number + 1 < len(starts) else len(record.tokens)
        yield from _wrap(_cells(record, start, end, coloured=coloured), width, coloured=coloured)


def visible(text: str) -> str:
    """Return text with pictures of control characters: a terminal must not obey a model."""
    shown = []
    for sign in text:
        if sign != "\n" and ord(sign) < ord(" "):
            shown.append(chr(_FIRST_PICTURE + ord(sign)))
        elif ord(sign) == _DELETE:
            shown.append(_DELETE_PICTURE)
        elif _DELETE < ord(sign) < _DELETE + 0x21:
            shown.append(f"<{ord(sign):02x}>")
        else:
            shown.append(sign)
    return "".join(shown)


def _cells(
    record: EpisodeRecord, start: int, end: int, *, coloured: bool
) -> Iterator[tuple[str, bool]]:
    """Yield each character with whether it was sampled; brackets are characters too."""
    images = {image.position: image for image in record.images}
    hidden = {
        index
        for image in record.images
        for index in range(image.position, image.position + image.num_tokens)
    }
    is_said = False
    for index in range(start, end):
        if bool(record.mask[index]) != is_said:
            is_said = not is_said
            if not coloured:
                yield ("[" if is_said else "]"), is_said
        text = "" if index in hidden else visible(record.texts[index])
        if index in images:
            image = images[index]
            text = f"<{image.format} {image.width}x{image.height}, {image.num_tokens} tokens>"
        for sign in text:
            yield sign, is_said
    if is_said and not coloured:
        yield "]", True


def _wrap(cells: Iterator[tuple[str, bool]], width: int, *, coloured: bool) -> Iterator[str]:
    line: list[tuple[str, bool]] = []
    num_columns = 0
    for sign, is_said in cells:
        wide = _num_columns(sign)
        if sign == "\n" or num_columns + wide > width:
            yield _paint(line, coloured=coloured)
            line, num_columns = [], 0
        if sign != "\n":
            line.append((sign, is_said))
            num_columns += wide
    if line:
        yield _paint(line, coloured=coloured)


def _num_columns(sign: str) -> int:
    if unicodedata.combining(sign):
        return 0
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1


def _paint(line: list[tuple[str, bool]], *, coloured: bool) -> str:
    if not coloured:
        return "".join(sign for sign, _ in line)
    text = ""
    was_said = False
    for sign, is_said in line:
        if is_said != was_said:
            text += _SAID if is_said else _PLAIN
            was_said = is_said
        text += sign
    return text + (_PLAIN if was_said else "")
