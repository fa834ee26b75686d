"""Model calls to trajectories: calls that continue one another token by token become one.

A call continues another if its prompt begins with everything that the other read and said, exactly,
images compared by content. What the agent added between them is masked. Whatever does not fit stays
apart: a template that rewrites its history, a second sample of the same prompt, a branch, and an
image that is added later, which a flat list of tokens can not hold.

Calls are taken by the length of their prompts, not by their arrival: what a call continues always
has a shorter prompt, so late records change nothing. Every sampled token ends up in one trajectory
as sampled; in another one it may occur in the prompt, as something that was read.
"""

from __future__ import annotations

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
    for prompt, call in flat:
        continued = _continued_by(chains, prompt)
        if continued is None:
            chains.append(_Chain(prompt, call))
        else:
            continued.append(prompt, call)
    chains.sort(key=lambda chain: chain.calls[0].index)
    return [chain.build() for chain in chains]


class _Chain:
    """Calls that continue one another.

    Attributes:
        text: All that was read and said up to the end of the last call; images are negative.
    """

    def __init__(self, prompt: TokenArray, call: ModelCall) -> None:
        self.calls = [call]
        self.text = np.concatenate((prompt, call.tokens))
        self._added: list[TokenArray] = [prompt[:0]]

    def append(self, prompt: TokenArray, call: ModelCall) -> None:
        """Add a call whose prompt begins with `text`."""
        self.calls.append(call)
        self._added.append(prompt[self.text.size :])
        self.text = np.concatenate((prompt, call.tokens))

    def is_continued_by(self, prompt: TokenArray) -> bool:
        """Return whether a prompt begins with all of `text`, and adds no image to it."""
        size = self.text.size
        if not self.calls[-1].tokens.size or size > prompt.size:
            return False
        # The last token differs most often, and is compared first.
        if self.text[-1] != prompt[size - 1] or not np.array_equal(self.text, prompt[:size]):
            return False
        return not np.any(prompt[size:] < 0)

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


def _continued_by(chains: Sequence[_Chain], prompt: TokenArray) -> _Chain | None:
    """Return the longest chain that a prompt continues; of equal ones the first."""
    fitting = [chain for chain in chains if chain.is_continued_by(prompt)]
    return max(fitting, key=lambda chain: chain.text.size, default=None)


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
