"""Looks for stop strings in a sample while it grows.

Each token is decoded once, behind the few tokens before it. Only the end of the text is kept in
which a stop string may have begun. The cost of a token does not depend on the sample's length.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinsmith_engine.sampling.request.sample_request import SampleRequest
from tinsmith_runtime.text.detokenizer import Decode, IncrementalDetokenizer


class StopSearch:
    """The stop strings of one sample.

    Args:
        stop_strings: What ends it; at least one, none empty.
        decode: The text of token ids.
    """

    def __init__(self, stop_strings: Sequence[str], decode: Decode) -> None:
        self._stop_strings = tuple(stop_strings)
        self._num_kept = max(map(len, stop_strings)) - 1
        self._detokenizer = IncrementalDetokenizer(decode)
        self._end = ""

    @classmethod
    def of(cls, request: SampleRequest) -> StopSearch | None:
        """Return a search for a request; None if it has no stop strings."""
        if not request.stop_strings or request.decode_text is None:
            return None
        return cls(request.stop_strings, request.decode_text)

    def pass_over(self, token: int) -> None:
        """Take a token in that ends nothing, nor is the beginning of what does."""
        self._detokenizer.push([token])
        self._end = ""

    def push(self, token: int) -> bool:
        """Return whether the text contains a stop string now, which it did not before."""
        piece = self._detokenizer.push([token])
        if not piece:
            return False
        text = self._end + piece
        self._end = text[-self._num_kept :] if self._num_kept else ""
        return any(stop in text for stop in self._stop_strings)
