"""Which slots of a sampler hold a prompt that was read before.

A prompt's keys and values stay in a slot after its sequence has ended, until another prompt takes
the slot; while the sequence decodes, it writes behind them. A request with the same prompt, weights
and scope takes a copy, and the logits that were computed after the prompt: the bits that it would
have computed itself.

Only whole prompts are reused. The rest of a prompt behind a known prefix would have to attend to
the cache. Products then have other shapes than those of a prompt read in one pass, which round
differently: the result would depend on what happened to be known.

A scope keeps a project from finding out, by the time that its request takes, what others sampled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tinsmith_engine.base.types import Published

# Each keeps a row of logits besides its slot.
_MAX_PROMPTS = 32


@dataclass(frozen=True, slots=True)
class PromptKey:
    """What must be equal for a prompt to be known."""

    scope: str
    weights: Published | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """A prompt that a slot holds."""

    slot: int
    last_logits: Tensor
    """After its last token, [1, V]."""


class PromptCache:
    """Prompts in slots, the most recently used last."""

    def __init__(self, max_prompts: int = _MAX_PROMPTS) -> None:
        self._max_prompts = max_prompts
        self._known: OrderedDict[PromptKey, KnownPrompt] = OrderedDict()

    def find(self, key: PromptKey) -> KnownPrompt | None:
        """Return where a prompt is, if it is known."""
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
        return known

    def add(self, key: PromptKey, slot: int, last_logits: Tensor) -> None:
        """Note that a slot holds a prompt; the least recently used one may be forgotten."""
        self._known[key] = KnownPrompt(slot, last_logits)
        self._known.move_to_end(key)
        if len(self._known) > self._max_prompts:
            self._known.popitem(last=False)

    def forget(self, slots: Iterable[int]) -> None:
        """Note that slots are about to be written to."""
        written = set(slots)
        for key in [key for key, known in self._known.items() if known.slot in written]:
            del self._known[key]

    def clear(self) -> None:
        """Forget all prompts."""
        self._known.clear()

    def rank(self, slots: Iterable[int]) -> Sequence[int]:
        """Return slots in the order in which to give them away.

        Those without a prompt come first, lowest first, so that samples of a prompt tend to lie
        side by side; then those whose prompt was not used for the longest time.
        """
        use = {known.slot: rank for rank, known in enumerate(self._known.values(), start=1)}
        return sorted(slots, key=lambda slot: (use.get(slot, 0), slot))
