"""Which requests begin, and which sequence gives its blocks up when there are too few.

Each project may have its part of the rows begun, and of what waits longest of it the first that
fits: a large group holds up nothing behind it. Samples of a group begin as they fit. A project
below its part of the blocks makes the youngest sequences of those above theirs give way. What
others passed too often begins before anything else, and then does not give way to younger ones.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinsmith_engine.sampling.schedule.sequence_cache import SequenceCache
from tinsmith_engine.sampling.schedule.sequences import (
    ActiveSequence,
    Reading,
    RequestState,
    WaitingGroup,
    WaitingGroups,
)
from tinsmith_runtime.fairness.deficit_round_robin import share_out

_LOOKED_AT = 16
"""Waiting groups of a project that are looked at for one that fits."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Samples of a group that could begin."""

    group: WaitingGroup
    num_samples: int
    num_tokens: int
    """Of its prompt, as far as they have to be read."""
    pushes: bool = False
    """Whether others have to give way."""


class SequenceAdmission:
    """The sequences that hold blocks, and the groups that wait.

    Args:
        cache: Of the blocks.
        max_sequences: How many sequences get a token at a time.
    """

    def __init__(self, cache: SequenceCache, max_sequences: int) -> None:
        self._cache = cache
        self._max_sequences = max_sequences
        self.waiting = WaitingGroups()
        self.active: list[ActiveSequence] = []
        self.reading: list[Reading] = []
        self.num_preemptions = 0
        """Sequences that gave way so far."""

    @property
    def has_work(self) -> bool:
        """Whether anything waits, is read or is sampled."""
        return bool(self.waiting or self.active or self.reading)

    def growing(self) -> list[ActiveSequence]:
        """Return the sequences that have begun, and not ended."""
        groups = [*self.waiting, *(one.group for one in self.reading)]
        return [*self.active, *(one.resumed for one in groups if one.resumed is not None)]

    def candidates(self) -> dict[str, list[Candidate]]:
        """Return what could begin, by project and in order."""
        if not self.waiting:
            return {}
        num_active = Counter(sequence.state.project for sequence in self.active)
        for reading in self.reading:
            num_active[reading.state.project] += len(reading.group.samples)
        demands = num_active.copy()
        for project in self.waiting.projects:
            demands[project] += self.waiting.num_samples(project)
        parts = share_out(self._max_sequences, demands)
        num_available, urgent = self._cache.num_available, self._urgent()
        found = {}
        for project in self.waiting.projects:
            num_places = parts[project] - num_active[project]
            if num_places > 0:
                found[project] = self._candidates(project, num_places, num_available, urgent)
        return {project: candidates for project, candidates in found.items() if candidates}

    def _candidates(
        self, project: str, num_places: int, num_available: int, urgent: WaitingGroup | None
    ) -> list[Candidate]:
        """Return what of a project could begin, in order; what waits for blocks is passed over."""
        found: list[Candidate] = []
        for group in self._looked_at(project):
            if num_places <= 0:
                break
            if (urgent is not None and group is not urgent) or self.is_being_read(group.state):
                continue
            num_samples = self._num_fitting(
                group, min(len(group.samples), num_places), num_available
            )
            pushes = False
            if not num_samples and not found and self._may_push(group):
                num_samples, pushes = 1, True
            if not num_samples:
                continue
            num_tokens = len(group.state.request.prompt_tokens)
            if self._cache.is_known(group.state):
                num_tokens = 0
            found.append(Candidate(group, num_samples, num_tokens, pushes))
            num_places -= num_samples
            num_available -= self._needed(group, num_samples)
        return found

    def is_being_read(self, state: RequestState) -> bool:
        """Whether the prompt of a request, or the same one of another, is being read."""
        return any(
            one.state is state or (state.key is not None and one.state.key == state.key)
            for one in self.reading
        )

    def _looked_at(self, project: str) -> Iterator[WaitingGroup]:
        return itertools.islice(self.waiting.of(project), _LOOKED_AT)

    def _needed(self, group: WaitingGroup, num_samples: int) -> int:
        """Return how many blocks samples of a group need to begin."""
        if group.resumed is not None:
            return self._cache.blocks_to_resume(group.resumed)
        return self._cache.blocks_to_begin(group.state, num_samples)

    def _num_fitting(self, group: WaitingGroup, num_samples: int, num_available: int) -> int:
        """Return how many samples of a group could begin in so many blocks."""
        if not self._cache.num_blocks:
            return num_samples
        num_over = max(self._needed(group, num_samples) - num_available, 0)
        num_fitting = num_samples - num_over
        fits = num_fitting > 0 and self._needed(group, num_fitting) <= num_available
        return num_fitting if fits else 0

    def _urgent(self) -> WaitingGroup | None:
        """Return the group that others have passed too often: nothing else begins before it."""
        looked_at = itertools.chain.from_iterable(map(self._looked_at, self.waiting.projects))
        return next((group for group in looked_at if group.is_urgent), None)

    def _may_push(self, group: WaitingGroup) -> bool:
        """Return whether a group's project is below its part of the blocks, and another above."""
        held = self._num_blocks_held()
        num_blocks = self._needed(group, 1)
        part = self._part_of_blocks(group.state.project)
        return held[group.state.project] + num_blocks <= part < max(held.values(), default=0)

    def _num_blocks_held(self) -> Counter[str]:
        held: dict[str, set[int]] = {}
        for sequence in self.active:
            held.setdefault(sequence.state.project, set()).update(sequence.blocks)
        for reading in self.reading:
            held.setdefault(reading.state.project, set()).update(reading.blocks)
        return Counter({project: len(blocks) for project, blocks in held.items()})

    def _part_of_blocks(self, project: str) -> int:
        holding: list[ActiveSequence | Reading] = [*self.active, *self.reading]
        projects = {project, *(one.state.project for one in holding)}
        return self._cache.num_blocks // len(projects)

    def can_begin(self, candidate: Candidate) -> bool:
        """Make room for a candidate; return whether there is."""
        group = candidate.group
        while not self._cache.make_room_for(group.state, candidate.num_samples):
            victim = self._above_part(group.state.project) if candidate.pushes else None
            if victim is None:
                return False
            self._give_way(victim)
        return True

    def begin(self, candidate: Candidate) -> WaitingGroup:
        """Take a candidate out of what waits; return the group of the samples that begin."""
        group = candidate.group
        for other in self._passed(group):
            other.num_passed += 1
        self.waiting.remove(group)
        return self.put_back(group, candidate.num_samples)

    def put_back(self, group: WaitingGroup, num_samples: int) -> WaitingGroup:
        """Let all but the first samples of a group wait on; return the group of those."""
        samples = group.samples
        if num_samples == len(samples):
            return group
        num_passed = group.num_passed
        rest = WaitingGroup(group.state, samples[num_samples:], num_passed=num_passed)
        self.waiting.add(rest, is_first=True)
        return WaitingGroup(group.state, samples[:num_samples], group.resumed, num_passed)

    def begin_reading(self, candidate: Candidate) -> Reading:
        """Begin to read the prompt of a candidate; there must be room for it."""
        # It is read with no other in between: what fails here leaves the group waiting.
        reading = self._cache.begin_reading(candidate.group)
        reading.group = self.begin(candidate)
        self.reading.append(reading)
        return reading

    def abandon(self, readings: Sequence[Reading]) -> None:
        """Let the groups of prompts wait again, and let go of their blocks."""
        for reading in reversed(readings):
            self.reading.remove(reading)
            self._cache.abandon(reading)
            self.waiting.add(reading.group, is_first=True)

    def cancel(self, state: RequestState) -> None:
        """Forget what a request has waiting, and its sequences."""
        for sequence in [one for one in self.active if one.state is state]:
            self.leave(sequence)
        self.abandon([one for one in self.reading if one.state is state])
        self.waiting.remove_state(state)

    def _passed(self, begun: WaitingGroup) -> Iterator[WaitingGroup]:
        """Yield the groups that wait for blocks while a younger one begins."""
        num_available = self._cache.num_available
        for project in self.waiting.projects:
            for group in self._looked_at(project):
                if group is begun:
                    break
                if not self._num_fitting(group, 1, num_available):
                    yield group

    def extended(self, chosen: Sequence[ActiveSequence]) -> list[ActiveSequence]:
        """Give sequences the block of their next token; return those that have it."""
        gone: set[int] = set()
        for sequence in chosen:
            while sequence.serial not in gone and not self._cache.extend(sequence):
                victim = self._least_entitled(sequence)
                self._give_way(victim)
                gone.add(victim.serial)
        return [sequence for sequence in chosen if sequence.serial not in gone]

    def _above_part(self, project: str) -> ActiveSequence | None:
        """Return the youngest sequence of the projects that have over their part of the blocks."""
        held, part = self._num_blocks_held(), self._part_of_blocks(project)
        found = [
            one
            for one in self.active
            if not one.is_kept and one.state.project != project and held[one.state.project] > part
        ]
        return max(found, key=lambda one: one.serial, default=None)

    def _least_entitled(self, growing: ActiveSequence) -> ActiveSequence:
        """Return the sequence that gives way to one that grows; it may be that one."""
        project = growing.state.project
        above = self._above_part(project)
        if above is not None:
            return above
        own = [one for one in self.active if one.state.project == project and not one.is_kept]
        return max(own or self.active, key=lambda one: one.serial)

    def _give_way(self, sequence: ActiveSequence) -> None:
        """Take a sequence's blocks; it begins again when there is room, before others."""
        self.num_preemptions += 1
        self.leave(sequence)
        # It reads what led to its logits again.
        sequence.num_cached, sequence.held = 0, None
        samples = range(sequence.sample_index, sequence.sample_index + 1)
        self.waiting.add(WaitingGroup(sequence.state, samples, sequence), is_first=True)

    def enter(self, begun: Sequence[ActiveSequence]) -> None:
        """Note sequences that have begun, or begun again."""
        self.active = sorted([*self.active, *begun], key=lambda one: one.serial)

    def leave(self, sequence: ActiveSequence) -> None:
        """Let go of a sequence and its blocks."""
        self.active = [other for other in self.active if other is not sequence]
        self._cache.leave(sequence)
