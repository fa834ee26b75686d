"""Token ids to text, piece by piece.

A piece never ends inside a character: what may still change is held back until more tokens or the
end of the sample decide. Nor does text leave that may be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tinsmith.text.partial_marks import held_length

_REPLACEMENT = "\ufffd"
# An unfinished character of UTF-8 is up to three bytes, and decoders show each or all as one.
_MAX_UNFINISHED = 3
# Bytes that never become text are let go of after this many tokens, so that each token costs the
# same; a character has at most four.
_MAX_WINDOW, _KEPT_WINDOW = 64, 4

Decode = Callable[[Sequence[int]], str]


class IncrementalDetokenizer:
    """Decodes the tokens of one sample as they come.

    Decoders look at neighbours (a first space, a run of bytes). A piece is therefore decoded behind
    the tokens of the piece before it, whose text is taken off again. For a byte-level tokenizer the
    pieces together are exactly the text of all tokens.

    Args:
        decode: The text of token ids.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._context_text = ""
        self._window: list[int] = []
        self._emitted = 0
        """Characters of the window that have left."""

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that is certain now."""
        return "".join([self._push_one(token) for token in tokens])

    def finish(self) -> str:
        """Return what was held back; the sample has ended."""
        text = self._text()
        self._window = []
        return text[self._emitted :]

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        if self._is_undecided():
            return ""
        text = self._text()
        certain = text.rstrip(_REPLACEMENT)
        num_certain = max(len(certain), len(text) - _MAX_UNFINISHED)
        piece = text[self._emitted : num_certain]
        self._emitted = max(self._emitted, num_certain)
        if len(certain) == len(text) and text:
            self._move(len(self._window))
        elif len(self._window) > _MAX_WINDOW:
            self._shorten()
        return piece

    def _is_undecided(self) -> bool:
        """Return whether the context reads differently with what follows, for now."""
        if len(self._window) > _MAX_WINDOW:
            return False
        return not self._decode([*self._context, *self._window]).startswith(self._context_text)

    def _text(self) -> str:
        """Return the text of the window."""
        whole = self._decode([*self._context, *self._window])
        if whole.startswith(self._context_text):
            return whole[len(self._context_text) :]
        return self._decode(self._window)

    def _move(self, end: int) -> None:
        self._context = self._window[:end]
        self._context_text = self._decode(self._context)
        self._window = self._window[end:]
        self._emitted = 0

    def _shorten(self) -> None:
        """Let go of the beginning of a window, at a place where the text falls apart."""
        text = self._text()
        for end in range(len(self._window) - _KEPT_WINDOW, 0, -1):
            head, tail = self._decode(self._window[:end]), self._decode(self._window[end:])
            if head + tail == text and len(head) <= self._emitted:
                self._emitted -= len(head)
                self._context, self._context_text = [], ""
                self._window = self._window[end:]
                return


class StopFilter:
    """Cuts a text before the first stop string, and holds back what may become one.

    Args:
        stops: The stop strings, none empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False
        """Whether a stop string was found; nothing comes after it."""
        self.stopped_by: str | None = None
        """Which one it was."""

    def push(self, text: str) -> str:
        """Return the text that may leave."""
        if self.is_stopped:
            return ""
        self._held += text
        ends = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            end, self.stopped_by = min(ends, key=lambda found: found[0])
            self.is_stopped = True
            text, self._held = self._held[:end], ""
            return text
        keep = held_length(self._held, self._stops)
        text, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return text

    def finish(self) -> str:
        """Return what was held back; the text has ended."""
        text, self._held = self._held, ""
        return text
