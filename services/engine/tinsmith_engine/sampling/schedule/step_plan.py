"""What goes into a step of the sampler: which prompts are read, and which sequences get a token.

A project that is alone gets all there is. Several share the time of the engine by deficit round
robin. A cycle is a step, and its unit a row: one token of one sequence. A prompt costs as many
rows as take the time of reading it. A step costs some time whatever is in it, and a cycle holds the
rows that take about a third of that time. So a project with one sequence waits less than twice as
long for a token as it does alone, however many sequences others have. Where rows are nearly free,
as on a GPU, a cycle holds all of them.

A long prompt is read piece by piece, each paid for by itself. Beside sequences that get tokens, a
step reads about as many prompt tokens as take the time of those sequences: a token then takes about
twice as long as without, however long the prompt.

What a row and a prompt cost is measured while sampling. It decides the order of the work and never
its numbers: bits do not depend on what shares a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tinsmith_engine.base.types import FloatArray
from tinsmith_engine.packing.packing import SEGMENT_ROWS
from tinsmith_engine.sampling.cache.block_pool import BLOCK_TOKENS
from tinsmith_runtime.fairness.deficit_round_robin import Backlog, FairQueue

_DECAY = 0.99
_PRIOR_WEIGHT = 4.0
_PRIOR_COSTS = (16.0, 1.0, 16.0, 0.125)
"""A step, a row, a prompt and a token of it, in rows: what holds until something was measured."""
_MAX_FACTOR = 8.0
"""How far a measured cost may be from the prior one: noise gives no project a step of its own."""
_CYCLE = 0.3
"""Rows of a cycle, as part of those that take as long as a step without any."""
_FIRST_CYCLES = 4
"""Cycles that a project without work before is given: a usual prompt is read at once."""
_MAX_SURPRISE = 1.5
_LONGEST_PIECE = 512
"""Tokens of a piece: products are at their full speed, and prompts behind it do not wait long."""
_RAISED_BELOW = 0.4
"""Part of the time that prompts may take, below which twice as many tokens fit."""
_WORTH_HALVING = 0.75
"""Half as many tokens take at most this part of the time, where halving shortens a step."""
_TRIED_AGAIN = 1.5
"""How much longer a piece takes when it is tried again."""


class StepCosts:
    """Learns what a step takes: decayed least squares over rows, prompts and their tokens."""

    def __init__(self) -> None:
        self._products = np.zeros((4, 4))
        self._times = np.zeros(4)
        self._costs: FloatArray = np.asarray(_PRIOR_COSTS)
        self._is_known = False

    @property
    def rows_of_step(self) -> float:
        """How many rows take as long as a step without any."""
        return float(self._costs[0] / self._costs[1])

    def rows_of_prompt(self, num_tokens: int) -> int:
        """Return how many rows take as long as reading a prompt."""
        if not num_tokens:
            return 1
        cost = float(self._costs[2] + self._costs[3] * num_tokens)
        return max(1, round(cost / float(self._costs[1])))

    def note(self, num_rows: int, prompts: Sequence[int], duration_s: float) -> None:
        """Learn from a step.

        Args:
            num_rows: Sequences that got a token.
            prompts: Tokens of each prompt that was read.
            duration_s: What it took.
        """
        work = np.asarray([float(num_rows > 0), num_rows, len(prompts), sum(prompts)])
        if self._is_known:
            # A pause of the machine says nothing about rows.
            duration_s = min(duration_s, _MAX_SURPRISE * float(work @ self._costs))
        self._products = _DECAY * self._products + np.outer(work, work)
        self._times = _DECAY * self._times + duration_s * work
        prior = np.asarray(_PRIOR_COSTS)
        # The prior in seconds: scaled to the time that all steps took.
        prior = prior * (self._times.sum() / float((self._products @ prior).sum()))
        weights = _PRIOR_WEIGHT * np.asarray(_PRIOR_COSTS) ** -2.0
        found = np.linalg.solve(self._products + np.diag(weights), self._times + weights * prior)
        self._costs = np.clip(found, prior / _MAX_FACTOR, prior * _MAX_FACTOR)
        self._is_known = True


class PieceBudget:
    """How many prompt tokens a step reads: as many as take the time of its sequences' tokens.

    The deeper in its prompt a piece lies, the longer it takes, so the number follows what the last
    steps took. Where more prompts are to be read than sequences get tokens, they get more time.
    Where weights take longer to read than to multiply, a piece of a few tokens takes as long as one
    of many: the number is not halved again where that was found, until its time has grown.

    Args:
        max_tokens: Of a step without sequences.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._beside_rows = BLOCK_TOKENS
        self._halved: _Piece | None = None
        """What the last step read, if the next one is to read half as much."""
        self._least: _Piece | None = None
        """Of which half would take as long."""

    def of_step(self, num_rows: int) -> int:
        """Return how many tokens a step with so many sequences reads."""
        return self._beside_rows if num_rows else self._max_tokens

    def of_piece(self, num_rows: int) -> int:
        """Return how many of them are of one prompt: whole segments, so that none is padded."""
        most = min(self.of_step(num_rows), _LONGEST_PIECE)
        return max(most // SEGMENT_ROWS, 1) * SEGMENT_ROWS

    def note(
        self, num_tokens: int, read_s: float, rows_s: float, *, num_prompts: int, num_rows: int
    ) -> None:
        """Learn from a step that read prompts beside sequences.

        Args:
            num_tokens: How many tokens of prompts it read.
            read_s: What that took.
            rows_s: What the tokens of the sequences took.
            num_prompts: Prompts that could be read.
            num_rows: The sequences.
        """
        piece = _Piece(num_tokens, read_s)
        halved, self._halved = self._halved, None
        if halved is not None and piece.is_half_of(halved) and not piece.is_shorter_than(halved):
            self._beside_rows, self._least = halved.num_tokens, halved
            return
        allowed_s = rows_s * max(1.0, num_prompts / num_rows)
        if read_s > allowed_s:
            if not self._is_least(piece):
                if num_tokens == self._beside_rows:
                    self._halved = piece
                self._beside_rows = max(self._beside_rows // 2, SEGMENT_ROWS)
        elif read_s < _RAISED_BELOW * allowed_s and 2 * num_tokens > self._beside_rows:
            most = max(self._max_tokens, BLOCK_TOKENS)
            self._beside_rows = min(2 * self._beside_rows, most)

    def _is_least(self, piece: _Piece) -> bool:
        least = self._least
        return (
            least is not None
            and piece.num_tokens <= least.num_tokens
            and piece.duration_s < _TRIED_AGAIN * least.duration_s
        )


class _Piece(NamedTuple):
    """What a step read, and how long that took."""

    num_tokens: int
    duration_s: float

    def is_half_of(self, other: _Piece) -> bool:
        return 2 * self.num_tokens == other.num_tokens

    def is_shorter_than(self, other: _Piece) -> bool:
        return self.duration_s <= _WORTH_HALVING * other.duration_s


@dataclass(frozen=True, slots=True)
class ProjectWork:
    """What a project could have done in a step.

    Attributes:
        num_rows: Its sequences.
        prompts: Tokens of each piece of a prompt that could be read, in order; 0 for a group that
            could begin behind a prompt that is known.
    """

    num_rows: int = 0
    prompts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What goes into a step, by project.

    Attributes:
        num_prompts: Pieces that are read, and groups that begin without one.
        num_rows: Sequences that get a token; None for all.
    """

    num_prompts: Mapping[str, int]
    num_rows: Mapping[str, int] | None = field(default=None)


class StepPlanner:
    """Decides, step by step.

    Args:
        max_prompt_tokens: Prompt tokens that one step reads for a project that is alone while no
            sequence gets a token; of pieces that are longer it reads one.
    """

    def __init__(self, max_prompt_tokens: int) -> None:
        self.budget = PieceBudget(max_prompt_tokens)
        self.costs = StepCosts()
        self._queue = FairQueue(int(self.costs.rows_of_step))

    def plan(self, work: Mapping[str, ProjectWork]) -> StepPlan:
        """Return what to do next; `work` holds the projects that have any."""
        if len(work) > 1:
            return self._share(work)
        return StepPlan({project: self._fitting(one) for project, one in work.items()})

    def give_back(self, project: str, num_tokens: int) -> None:
        """Note that a group did not begin after all."""
        self._queue.give_back(_prompts_of(project), self.costs.rows_of_prompt(num_tokens))

    def _fitting(self, work: ProjectWork) -> int:
        num_tokens = num_fitting = 0
        most = self.budget.of_step(work.num_rows)
        for length in work.prompts:
            num_tokens += length
            if num_fitting and num_tokens > most:
                break
            num_fitting += 1
        return num_fitting

    def _share(self, work: Mapping[str, ProjectWork]) -> StepPlan:
        num_rows = int(max(_CYCLE * self.costs.rows_of_step, 2 * len(work)))
        self._queue.cycle_tokens = num_rows
        self._queue.first_credit = _FIRST_CYCLES * num_rows
        backlogs = []
        for project, one in work.items():
            if one.num_rows:
                backlogs.append(Backlog(_rows_of(project), project, [1] * one.num_rows))
            if one.prompts:
                costs = [self.costs.rows_of_prompt(length) for length in one.prompts]
                backlogs.append(Backlog(_prompts_of(project), project, costs))
        parts = self._queue.take(backlogs).num_parts
        return StepPlan(
            {project: parts.get(_prompts_of(project), 0) for project in work},
            {project: parts.get(_rows_of(project), 0) for project in work},
        )


def _rows_of(project: str) -> str:
    return f"{project}/rows"


def _prompts_of(project: str) -> str:
    return f"{project}/prompts"
