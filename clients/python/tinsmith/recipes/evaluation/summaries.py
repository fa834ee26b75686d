"""Figures of those that played: means over tasks with their intervals, pass@k, reasons of ending.

A task may be played several times. Its reward is the mean of its plays, and intervals are over
tasks: plays of one task are alike, and would make them too narrow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tinsmith.recipes.experience import IS_SUCCESS, Scores
from tinsmith.recipes.kept_rollouts import OriginOf, RolloutKeeper
from tinsmith.recipes.policy_gradient import mean_of, paired_lower_95
from tinsmith.rollouts import GroupResult, TerminationReason, pass_at_k
from tinsmith.rollouts.records import EpisodeRecord
from tinsmith.rollouts.records.making import Decoder
from tinsmith.rollouts.records.record import PROBLEM
from tinsmith.sampling.sampler_forms import Sampler

LENGTH = "length"
"""Reason of an episode whose last turn was cut off at the limit of a turn."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over tasks, and the ends of its 95 % interval by the normal approximation."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float]) -> Interval:
        """Return that of the gains, task by task; of one task, the mean three times."""
        mean = mean_of(after) - mean_of(before)
        low = paired_lower_95(before, after)
        return cls(mean, low, 2 * mean - low) if math.isfinite(low) else cls(mean, mean, mean)


@dataclass(frozen=True, slots=True)
class Played:
    """What one of those that played did.

    Attributes:
        records: Its episodes that came to an end, by task.
        failures: Plays that were lost, by reason; each is played again a bounded number of times.
    """

    records: Mapping[str, Sequence[EpisodeRecord]]
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def rewards(self) -> dict[str, float]:
        """Mean reward of each task."""
        return {
            task: mean_of([each.reward for each in plays]) for task, plays in self.records.items()
        }

    @property
    def num_solved(self) -> dict[str, int]:
        """Plays of each task that solved it; empty where tasks do not say."""
        said = {
            task: [each.turns[-1].info.get(IS_SUCCESS) for each in plays if each.turns]
            for task, plays in self.records.items()
        }
        if all(value is None for values in said.values() for value in values):
            return {}
        return {task: sum(map(bool, values)) for task, values in said.items()}

    @property
    def scores(self) -> Scores:
        """Reward and share of success of each task, in the order of play."""
        shares = [count / len(self.records[task]) for task, count in self.num_solved.items()]
        return Scores(list(self.rewards.values()), shares)

    @property
    def ends(self) -> dict[str, int]:
        """Plays by the reason of their end, those that were lost among them."""
        ended = Counter(end_of(each) for plays in self.records.values() for each in plays)
        return dict((ended + Counter(self.failures)).most_common())


@dataclass(frozen=True, slots=True)
class Summary:
    """What came out for one of those that played.

    Attributes:
        weights: What played, by its short name.
        reward: Mean over tasks.
        reward_low: Lower end of its 95 % interval.
        reward_high: Upper end.
        num_tasks: Tasks that were scored.
        num_samples: Plays that were asked for, of each task.
        is_success: Share of the plays that solved their task; None where tasks do not say.
        pass_at: By k, the chance that one of k plays solves a task; empty for one play of each, and
            where tasks do not say.
        ends: Plays by the reason of their end: a `TerminationReason`, `length`, or why it was lost.
        num_pairs: Tasks that the first one played as well; None for the first, as is what follows.
        gain: Mean of what it earned above the first one, task by task.
        gain_low: Lower end of its 95 % interval.
        gain_high: Upper end.
    """

    weights: str
    reward: float
    reward_low: float
    reward_high: float
    num_tasks: int
    is_success: float | None
    num_samples: int = 1
    pass_at: Mapping[int, Interval] = field(default_factory=dict)
    ends: Mapping[str, int] = field(default_factory=dict)
    num_pairs: int | None = None
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None

    @property
    def figures(self) -> dict[str, float]:
        """The numbers of its line in `metrics.jsonl`."""
        return {
            name: float(value)
            for name, value in self.to_row({}).items()
            if isinstance(value, int | float) and name != "step"
        }

    def to_row(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return the line of `metrics.jsonl`: `pass@4`, `pass@4_low`, `ends/done` and so on."""
        row = {"step": 0, **metrics, **asdict(self)}
        del row["pass_at"], row["ends"]
        for k, interval in self.pass_at.items():
            row[f"pass@{k}"] = interval.mean
            row[f"pass@{k}_low"], row[f"pass@{k}_high"] = interval.low, interval.high
        return row | {f"ends/{reason}": count for reason, count in self.ends.items()}


class RememberingKeeper(RolloutKeeper):
    """Keeps rollouts in memory too.

    Args:
        folder: Of the evaluation.
        layout: As of `RolloutKeeper`.
        weights: The sampler.
        agent: Which of several.
    """

    def __init__(self, folder: Path, layout: str, weights: Sampler, agent: str) -> None:
        super().__init__(folder, layout, weights, agent)
        self._records: dict[str, list[EpisodeRecord]] = {}
        self._failures: Counter[str] = Counter()

    def keep(self, phase: str, num_done: int, records: Iterable[EpisodeRecord]) -> None:
        """Note the records, and write them if that is asked for."""
        noted = list(records)
        for record in noted:
            if not record.is_used:
                continue
            self._records.setdefault(task_of(record), []).append(record)
        super().keep(phase, num_done, noted)

    def keep_result(
        self,
        phase: str,
        num_done: int,
        result: GroupResult[Any],
        decoder: Decoder,
        origin_of: OriginOf,
    ) -> None:
        """Note the plays that were lost too; see `keep`."""
        self._failures.update(result.report.failures)
        super().keep_result(phase, num_done, result, decoder, origin_of)

    @property
    def played(self) -> Played:
        """What was played so far."""
        return Played(self._records, self._failures)


def task_of(record: EpisodeRecord) -> str:
    """Return what names the task of an episode for all that play it."""
    origin = record.origin
    if origin.environment_seed is not None:
        return f"seed {origin.environment_seed}"
    # The plays of a problem are numbered behind it.
    return record.episode.partition("/")[0] if origin.kind == PROBLEM else record.episode


def end_of(record: EpisodeRecord) -> str:
    """Return why an episode ended: what its record says, or `length`."""
    is_cut = record.turns and record.turns[-1].stop_reason == LENGTH
    if record.reason == TerminationReason.DONE.value and is_cut:
        return LENGTH
    return record.reason


def summarize(weights: str, played: Played, num_samples: int, first: Played | None) -> Summary:
    """Return the figures of one of those that played.

    Args:
        weights: Its short name.
        played: What it did.
        num_samples: Plays that were asked for, of each task.
        first: What it is compared with; None for the first itself.
    """
    rewards = played.rewards
    found = Interval.of([0.0] * len(rewards), list(rewards.values()))
    scores = played.scores
    summary = Summary(
        weights=weights,
        reward=found.mean,
        reward_low=found.low,
        reward_high=found.high,
        num_tasks=len(rewards),
        is_success=mean_of(scores.successes) if scores.successes else None,
        num_samples=num_samples,
        pass_at=_pass_at(played, num_samples) if num_samples > 1 else {},
        ends=played.ends,
    )
    if first is None:
        return summary
    # An episode that failed was played by one of them alone.
    before = first.rewards
    common = [task for task in before if task in rewards]
    gain = Interval.of([before[task] for task in common], [rewards[task] for task in common])
    return replace(
        summary,
        num_pairs=len(common),
        gain=gain.mean,
        gain_low=gain.low,
        gain_high=gain.high,
    )


def _pass_at(played: Played, num_samples: int) -> dict[int, Interval]:
    """Return pass@k for 1, 2, 4 and so on, and for all samples.

    A task some of whose plays were lost counts for the k that it has plays for.
    """
    counts = [(len(played.records[task]), solved) for task, solved in played.num_solved.items()]
    found = {}
    for k in sorted({num_samples, *(2**power for power in range(num_samples.bit_length()))}):
        chances = [pass_at_k(count, solved, k) for count, solved in counts if count >= k]
        if k <= num_samples and chances:
            found[k] = Interval.of([0.0] * len(chances), chances)
    return found
