"""The gradient between two steps: which parts failed, and what the senders of others knew.

A step must not apply a gradient that lacks a part unless its client left the part out on purpose.
Two kinds of client say so in two ways. One looks at each result itself and names the failures that
it has seen with the step. The other fetches all results in the background, so no word of it tells
what its program has looked at. For that one a failure counts as seen by what was sent after the
failure was delivered. If the step and every part that succeeded were, they are a new accumulation.
One that was sent before belongs to the batch whose part failed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Accumulation:
    """What is known of the parts of a gradient.

    Attributes:
        failures: Sequence numbers of the forward_backward calls that failed, ascending.
        parts_seen_through: The least that the sender of a part could know; see
            `OperationRecord.seen_through`. None if no part succeeded.
    """

    failures: tuple[int, ...] = ()
    parts_seen_through: int | None = None

    def fail(self, number: int) -> Accumulation:
        """Return the accumulation with one more failure."""
        return replace(self, failures=(*self.failures, number))

    def add_part(self, seen_through: int) -> Accumulation:
        """Return the accumulation with one more part, whose sender could know this much."""
        known = self.parts_seen_through
        least = seen_through if known is None else min(known, seen_through)
        return replace(self, parts_seen_through=least)

    def through(self, number: int) -> Accumulation:
        """Return the accumulation without failures above a number."""
        return replace(self, failures=tuple(each for each in self.failures if each <= number))

    def unseen_failures(self, observed: int | None, seen_through: int) -> list[int]:
        """Return the failures that keep a step from being applied.

        Args:
            observed: Up to which number its client says to know every outcome; None if what was
                delivered counts.
            seen_through: What the sender of the step could know by what was delivered.
        """
        if observed is None:
            parts = self.parts_seen_through
            observed = seen_through if parts is None else min(parts, seen_through)
        return [number for number in self.failures if number > observed]
