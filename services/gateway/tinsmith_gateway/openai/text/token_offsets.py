"""Where each token begins in the text of a choice.

The texts of tokens alone do not add up to it. A first space is left out, and a special token may
be. Tokens that make one character together all begin where it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tinsmith_runtime.text.detokenizer import IncrementalDetokenizer


class SampleOffsets:
    """Counts the text of one sample, piece by piece.

    Args:
        decode: Turns tokens into the text of the choice.
        begin: Where the sample begins in that text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], begin: int = 0) -> None:
        self._detokenizer = IncrementalDetokenizer(decode)
        self._end = begin

    def push(self, tokens: Sequence[int]) -> list[int]:
        """Return where each of the next tokens begins."""
        offsets = []
        for token in tokens:
            offsets.append(self._end)
            self._end += len(self._detokenizer.push([token]))
        return offsets


def prompt_offsets(
    tokens: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """Return where each token of a prompt begins in its text.

    A token whose text is not there, such as one that the tokenizer puts before every text, takes no
    room.
    """
    detokenizer = IncrementalDetokenizer(decode)
    offsets = []
    position = 0
    for token in tokens:
        offsets.append(position)
        piece = detokenizer.push([token])
        for written in (piece, piece.lstrip(" ")):
            if text.startswith(written, position):
                position += len(written)
                break
    return offsets
