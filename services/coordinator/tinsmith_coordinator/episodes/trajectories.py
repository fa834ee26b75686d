"""Model calls to trajectories: calls that continue one another token by token become one.

A call continues another if its prompt begins with everything that the other read and said, exactly,
images compared by content. What the agent added between them is masked. Whatever does not fit stays
apart: a template that rewrites its history, a second sample of the same prompt, a branch. An image
that is added later stays apart too, since a flat list of tokens cannot hold it.

Calls are taken by the length of their prompts, not by their arrival: what a call continues always
has a shorter prompt, so late records change nothing. Every sampled token ends up in one trajectory
as sampled; in another one it may occur in the prompt, as something that was read.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

TokenArray = NDArray[np.int64]
ScalarT = TypeVar("ScalarT", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image in a prompt."""

    data: bytes = field(repr=False)
    format: str


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """One sample and what it was sampled from.

    Attributes:
        index: Among the calls of the attempt, from 0.
        prompt: What the model read: token ids int64 [T], and images.
        tokens: What it said, int64 [T].
        logprobs: Natural-log probabilities of `tokens`, float32 [T].
        versions: Weights that produced each token, int64 [T].
    """

    index: int
    prompt: Sequence[TokenArray | Image]
    tokens: TokenArray
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A sequence that the model read and wrote; arrays have the shape [T].

    Attributes:
        prompt: Of its first call.
        tokens: Everything after that, sampled and added.
        mask: 1 where a token was sampled.
        logprobs: Of the sampled tokens; 0 for the others.
        versions: Of the sampled tokens; 0 for the others.
        call_indices: The calls that it holds.
        call_ends: Where, in `tokens`, what each call sampled ends.
    """

    prompt: Sequence[TokenArray | Image]
    tokens: TokenArray
    mask: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    call_indices: tuple[int, ...]
    call_ends: tuple[int, ...]


def merge_calls(calls: Iterable[ModelCall]) -> list[Trajectory]:
    """Return the trajectories of the calls of an attempt, in the order of their first calls."""
    numbers: dict[Image, int] = {}
    flat = [(_flatten(call.prompt, numbers), call) for call in calls]
    flat.sort(key=lambda pair: (pair[0].size, pair[1].index))
    chains: list[_Chain] = []
    ends = _Ends()
    for prompt, call in flat:
        chain = ends.take(prompt)
        if chain is None:
            chain = _Chain(len(chains), prompt, call)
            chains.append(chain)
        else:
            chain.append(prompt, call)
        ends.add(chain)
    chains.sort(key=lambda chain: chain.calls[0].index)
    return [chain.build() for chain in chains]


class _Chain:
    """Calls that continue one another.

    Attributes:
        number: Among the chains, in the order of their beginnings.
        text: All that was read and said up to the end of the last call; images are negative.
    """

    def __init__(self, number: int, prompt: TokenArray, call: ModelCall) -> None:
        self.number = number
        self.calls = [call]
        self.text = np.concatenate((prompt, call.tokens))
        self._added: list[TokenArray] = [prompt[:0]]

    def append(self, prompt: TokenArray, call: ModelCall) -> None:
        """Add a call whose prompt begins with `text`."""
        self.calls.append(call)
        self._added.append(prompt[self.text.size :])
        self.text = np.concatenate((prompt, call.tokens))

    def build(self) -> Trajectory:
        """Return the calls as one sequence."""
        parts = list(zip(self._added, self.calls, strict=True))
        ends = np.cumsum([added.size + call.tokens.size for added, call in parts])
        return Trajectory(
            prompt=self.calls[0].prompt,
            tokens=_join([(added, call.tokens) for added, call in parts], np.int64),
            mask=_join(
                [(np.zeros(added.size), np.ones(call.tokens.size)) for added, call in parts],
                np.float32,
            ),
            logprobs=_join(
                [(np.zeros(added.size), call.logprobs) for added, call in parts], np.float32
            ),
            versions=_join(
                [(np.zeros(added.size), call.versions) for added, call in parts], np.int64
            ),
            call_indices=tuple(call.index for call in self.calls),
            call_ends=tuple(int(end) for end in ends),
        )


class _Ends:
    """Chains that may be continued, by a digest of their text.

    Looking at each would take time with the square of their number, and an agent may make tens of
    thousands of short calls.
    """

    def __init__(self) -> None:
        self._chains: dict[bytes, list[tuple[int, _Chain]]] = {}
        self._sizes: list[int] = []
        """Of the texts, ascending."""

    def add(self, chain: _Chain) -> None:
        """Let a chain be continued, if it ends with something that was said."""
        if not chain.calls[-1].tokens.size:
            return
        size = chain.text.size
        place = bisect.bisect_left(self._sizes, size)
        if place == len(self._sizes) or self._sizes[place] != size:
            self._sizes.insert(place, size)
        digest = _digest(chain.text).digest()
        heapq.heappush(self._chains.setdefault(digest, []), (chain.number, chain))

    def take(self, prompt: TokenArray) -> _Chain | None:
        """Remove and return the longest chain that a prompt continues; of equal ones the first.

        A prompt continues a chain if it begins with all of its text, and adds no image to it.
        """
        images = np.flatnonzero(prompt < 0)
        min_size = int(images[-1]) + 1 if images.size else 0
        hashed, begin, found = _digest(prompt[:0]), 0, b""
        for size in self._sizes[: bisect.bisect_right(self._sizes, prompt.size)]:
            hashed.update(prompt[begin:size].tobytes())
            begin = size
            digest = hashed.digest()
            if size >= min_size and digest in self._chains:
                found = digest
        if not found:
            return None
        _, chain = heapq.heappop(self._chains[found])
        if not self._chains[found]:
            del self._chains[found]
        return chain


def _digest(tokens: TokenArray) -> hashlib._Hash:
    return hashlib.sha256(tokens.tobytes())


def _flatten(prompt: Sequence[TokenArray | Image], numbers: dict[Image, int]) -> TokenArray:
    """Return a prompt as one array, in which equal images are equal negative numbers."""
    parts: list[TokenArray] = [np.zeros(0, dtype=np.int64)]
    for piece in prompt:
        if isinstance(piece, Image):
            number = numbers.setdefault(piece, -1 - len(numbers))
            parts.append(np.asarray([number], dtype=np.int64))
        else:
            parts.append(piece)
    return np.concatenate(parts)


def _join(
    parts: Sequence[tuple[NDArray[Any], NDArray[Any]]], dtype: type[ScalarT]
) -> NDArray[ScalarT]:
    return np.concatenate([array.astype(dtype, copy=False) for pair in parts for array in pair])
