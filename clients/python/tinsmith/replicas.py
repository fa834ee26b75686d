"""Which of several equal replicas a call goes to: the least loaded, and then the same again.

A new prompt goes to the replica with the fewest calls in flight. A prompt that continues one which
was sent before goes where that one went: its keys and values are there. It leaves that replica only
if it has far more to do than the others. Prompts alone decide, so clients need no name for a
conversation; a prompt that is sent again as it was is a new one, so that a group spreads.

Hashing prompts to replicas, as this module did before, fills some replicas whatever their load, and
long conversations stay on them. The benchmark of the policy is a simulation
(`tests/unit/sdk/test_replicas_simulation.py`). The load is what this process has in flight, and
what a replica has of others by its own last word. A word that is old counts no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tinsmith.v1 import trajectories_pb2

MAX_KNOWN = 32_768
"""Prompts whose replica is remembered; then the scope that has the most forgets the one that it
looked up longest ago."""
_MAX_HOLDERS = 16
_AVOIDED_S = 5.0
_MAX_REPORT_AGE_S = 15.0
"""A replica that says nothing for this long counts as gone to the scheduler, too."""
_BLOCK_BYTES, _NUM_BLOCKS, _LATER_BLOCK_BYTES = 256, 64, 4096
"""Borders of prefixes: 64 tokens apart at first, then 1,024."""
_MIN_KNOWN = 0.5
"""Of a prompt that continues another: a system prompt that all have in common is less."""
_FULL_FACTOR, _FULL_CALLS = 2.0, 4
"""A replica is full with over twice the mean of the calls in flight, and four more."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a call goes.

    Attributes:
        address: Of the replica.
        reason: `only_one` if there is no other; `sticky` if it knows the prompt's beginning;
            `least_loaded` if it has the least to do; `full` if another one knows the beginning, and
            is full; `failover` if another one would have been chosen, and failed a moment ago.
    """

    address: str
    reason: str


@dataclass(slots=True)
class _Known:
    """A prompt that was sent.

    Attributes:
        num_bytes: Its length.
        holders: Where it went, the latest last.
    """

    num_bytes: int
    holders: list[str] = field(default_factory=list)


def prompt_bytes(prompt: trajectories_pb2.ModelInput) -> bytes:
    """Return the content of a prompt, which begins like that of each prompt that continues it."""
    pieces = []
    for chunk in prompt.chunks:
        if chunk.HasField("tokens"):
            pieces.append(chunk.tokens.data)
        else:
            pieces.append(hashlib.blake2b(chunk.SerializeToString()).digest())
    return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class _Report:
    """What a replica has in flight of other processes, and until when that counts."""

    num_calls: int
    until_s: float


class Replicas:
    """The calls in flight of this process, by address, and where prompts went.

    Args:
        clock: Monotonic seconds.
        max_known: Prompts that are remembered.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, max_known: int = MAX_KNOWN
    ) -> None:
        self._clock = clock
        self._max_known = max_known
        self._loads: Counter[str] = Counter()
        self._reports: dict[str, _Report] = {}
        self._failed: dict[str, float] = {}
        self._known: dict[str, OrderedDict[bytes, _Known]] = {}
        self._num_known = 0

    def choose(self, addresses: Sequence[str], prompt: bytes, *, scope: str = "") -> Choice:
        """Return where a call goes.

        Args:
            addresses: Of the replicas; at least one.
            prompt: See `prompt_bytes`; empty for a call about none.
            scope: Whose prompt it is, such as a project. What one scope sent is nothing that
                another one continues: the reason of a choice tells no caller of others' prompts.
        """
        if len(addresses) == 1:
            return Choice(addresses[0], "only_one")
        now_s = self._clock()
        self._failed = {one: until for one, until in self._failed.items() if until > now_s}
        self._reports = {
            one: report for one, report in self._reports.items() if report.until_s > now_s
        }
        digests = _digests(prompt)
        known = self._known.get(scope, OrderedDict())
        choice = self._preferred(addresses, prompt, digests, known)
        usable = [one for one in addresses if one not in self._failed]
        if choice.address in self._failed and usable:
            choice = replace(self._preferred(usable, prompt, digests, known), reason="failover")
        if digests:
            self._note(scope, digests[-1][1], len(prompt), choice.address)
        return choice

    def note_loads(self, loads: Iterable[tuple[str, int, float]]) -> None:
        """Take in what replicas say that they have in flight, of all processes together.

        Args:
            loads: Address, calls, and the age of the word in seconds, of each that said something.
        """
        now_s = self._clock()
        for address, num_calls, age_s in loads:
            num_others = max(num_calls - self._loads[address], 0)
            self._reports[address] = _Report(num_others, now_s + _MAX_REPORT_AGE_S - age_s)

    def _preferred(
        self,
        usable: Sequence[str],
        prompt: bytes,
        digests: Sequence[tuple[int, bytes]],
        known: OrderedDict[bytes, _Known],
    ) -> Choice:
        holders = _holders(known, digests, usable, len(prompt))
        least = min(usable, key=lambda one: (self._load(one), _weight(prompt, one)))
        best = min(holders, key=self._load, default="")
        if not best:
            return Choice(least, "least_loaded")
        if self._is_full(best, usable):
            return Choice(least, "full")
        return Choice(best, "sticky")

    def _load(self, address: str) -> int:
        report = self._reports.get(address)
        return self._loads[address] + (report.num_calls if report is not None else 0)

    @contextlib.contextmanager
    def in_flight(self, address: str) -> Iterator[None]:
        """Count a call to an address while it runs."""
        self._loads[address] += 1
        try:
            yield
        finally:
            self._loads[address] -= 1
            if not self._loads[address]:
                del self._loads[address]

    def note_failure(self, address: str) -> None:
        """Prefer the other replicas for a while."""
        self._failed[address] = self._clock() + _AVOIDED_S

    def _is_full(self, address: str, usable: Sequence[str]) -> bool:
        mean = sum(map(self._load, usable)) / len(usable)
        return self._load(address) >= _FULL_FACTOR * mean + _FULL_CALLS

    def _note(self, scope: str, digest: bytes, num_bytes: int, address: str) -> None:
        of_scope = self._known.setdefault(scope, OrderedDict())
        if digest not in of_scope:
            of_scope[digest] = _Known(num_bytes)
            self._num_known += 1
        known = of_scope[digest]
        # Several prompts may end within one block: the shortest tells what continues them.
        known.num_bytes = min(known.num_bytes, num_bytes)
        if address in known.holders:
            known.holders.remove(address)
        known.holders.append(address)
        del known.holders[:-_MAX_HOLDERS]
        of_scope.move_to_end(digest)
        while self._num_known > self._max_known:
            self._forget_one()

    def _forget_one(self) -> None:
        largest = max(self._known, key=lambda scope: len(self._known[scope]))
        self._known[largest].popitem(last=False)
        self._num_known -= 1
        if not self._known[largest]:
            del self._known[largest]


def _holders(
    known: OrderedDict[bytes, _Known],
    digests: Sequence[tuple[int, bytes]],
    usable: Sequence[str],
    num_bytes: int,
) -> list[str]:
    """Return the replicas that know what a prompt continues; none if it is a new one."""
    for position, digest in reversed(digests):
        if position < _MIN_KNOWN * num_bytes:
            break
        found = known.get(digest)
        if found is not None and found.num_bytes < num_bytes:
            known.move_to_end(digest)
            return [one for one in found.holders if one in usable]
    return []


def _digests(prompt: bytes) -> list[tuple[int, bytes]]:
    """Return the digests of the prefixes that end at a border, the shortest first."""
    found: list[tuple[int, bytes]] = []
    state = hashlib.blake2b(digest_size=16)
    position = 0
    while True:
        size = _BLOCK_BYTES if len(found) < _NUM_BLOCKS else _LATER_BLOCK_BYTES
        if position + size > len(prompt):
            return found
        state.update(prompt[position : position + size])
        position += size
        found.append((position, state.digest()))


def _weight(prompt: bytes, address: str) -> bytes:
    """Break ties alike each time, so that a short prompt finds the replica that it had before."""
    return hashlib.blake2b(prompt[:_BLOCK_BYTES] + address.encode(), digest_size=8).digest()
