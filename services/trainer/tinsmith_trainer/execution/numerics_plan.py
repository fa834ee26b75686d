"""How an operation was computed, as far as that changes its bits; stored with its result.

The engine's fingerprint names build, device and settings. The split into micro-batches belongs to
the operation: it is the engine's own unless memory ran out, and then a replay must use the same.
Stored as one text, such as `torch=2.9 dtype=float32;micro_batch_tokens=512`; without an exception
it is the fingerprint alone.
"""

from __future__ import annotations

from dataclasses import dataclass

_SPLIT_MARK = ";micro_batch_tokens="


@dataclass(frozen=True, slots=True)
class NumericsPlan:
    """What a replay must agree with.

    Attributes:
        fingerprint: Of the engine.
        micro_batch_tokens: The split; None for the engine's own.
    """

    fingerprint: str
    micro_batch_tokens: int | None = None

    def __str__(self) -> str:
        if not self.micro_batch_tokens:
            return self.fingerprint
        return f"{self.fingerprint}{_SPLIT_MARK}{self.micro_batch_tokens}"


def parse_plan(text: str) -> NumericsPlan:
    """Return the plan that a text stands for."""
    fingerprint, mark, split = text.rpartition(_SPLIT_MARK)
    if not mark or not split.isascii() or not split.isdecimal():
        return NumericsPlan(text)
    return NumericsPlan(fingerprint, int(split))
