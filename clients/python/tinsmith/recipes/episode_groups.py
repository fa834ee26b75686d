"""Groups of episodes: registered, waited for, replaced where they were lost.

An episode that died says nothing about the policy: it leaves its group, another one is registered
in its place, and it is never a reward of zero. What has not ended at the deadline is cancelled, so
that a step takes no longer than it was given, whatever agents do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from tinsmith.episodes.episode_forms import EpisodeClient
from tinsmith.episodes.types import Episode, EpisodeSpec
from tinsmith.errors import AbortedError, OperationTimeoutError
from tinsmith.recipes.tasks.episode_tasks import AgentTask
from tinsmith.sampling.sampler_forms import Sampler

_FIRST_LOOK_S = 5.0
_LAST_LOOK_S = 60.0
"""How long nothing is looked for that does not happen; twice as long each time."""


@dataclass(frozen=True, slots=True)
class PlayedGroups:
    """What became of the episodes of some tasks.

    Attributes:
        groups: The submitted episodes of each task.
        num_replaced: Episodes that were lost and registered again.
        num_lost: Episodes that were lost and could not be replaced.
        num_late: Episodes that had not ended at the deadline.
    """

    groups: list[list[Episode]]
    num_replaced: int
    num_lost: int
    num_late: int

    @property
    def rewards_PG(self) -> NDArray[np.float64]:
        """Reward of each episode, [P, G]; NaN where one is missing."""
        width = max((len(group) for group in self.groups), default=0)
        rewards = np.full((len(self.groups), width), np.nan)
        for row, group in zip(rewards, self.groups, strict=True):
            row[: len(group)] = [_reward(episode) for episode in group]
        return rewards


class EpisodeGroups:
    """Plays tasks on one queue, which is this loop's own.

    Args:
        episodes: The episodes of the project.
        queue: Where agents claim; episodes of an earlier loop that are left in it are cancelled.
        sampler: What model calls of the episodes use.
        model: The name that agents give as `model`.
        replaced_share: Lost episodes that are registered again, as a share of all.
        say: Is told that no agent plays, while that is so.
    """

    def __init__(
        self,
        episodes: EpisodeClient,
        *,
        queue: str,
        sampler: Sampler | str,
        model: str,
        replaced_share: float = 1.0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._say = say
        self._episodes = episodes
        self._queue = queue
        self._sampler = sampler
        self._model = model
        self._replaced_share = replaced_share
        self._revision = episodes.cancel_queue(queue).revision

    def play(
        self, tasks: Sequence[AgentTask], *, group_size: int, episode_type: str, timeout_s: float
    ) -> PlayedGroups:
        """Let agents play each task some times; return what was submitted in time.

        Raises:
            OperationTimeoutError: If nothing was submitted in time: no agent plays this queue.
            AbortedError: If all that agents played died.
        """
        deadline_s = time.monotonic() + timeout_s
        groups: list[list[Episode]] = [[] for _ in tasks]
        wanted = [index for index in range(len(tasks)) for _ in range(group_size)]
        num_spare = int(self._replaced_share * len(wanted))
        num_replaced = num_lost = 0
        still_open = self._register(tasks, wanted, episode_type)
        for episode in self._ended(deadline_s, still_open, episode_type):
            self._revision = episode.revision
            index = still_open.pop(episode.name, None)
            if index is None:
                continue
            if episode.state == "submitted":
                groups[index].append(episode)
            elif num_replaced < num_spare:
                num_replaced += 1
                still_open |= self._register(tasks, [index], episode_type)
            else:
                num_lost += 1
            if not still_open:
                break
        self._episodes.cancel(list(still_open))
        if not any(groups):
            self._raise_nothing(episode_type, timeout_s, num_lost=num_lost + num_replaced)
        return PlayedGroups(groups, num_replaced, num_lost, len(still_open))

    def _ended(
        self, deadline_s: float, still_open: Mapping[str, int], episode_type: str
    ) -> Iterator[Episode]:
        """Yield episodes as they end, and say in between if no agent plays them."""
        pause_s = _FIRST_LOOK_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            yield from self._episodes.watch(
                self._queue, after_revision=self._revision, timeout_s=min(left_s, pause_s)
            )
            if self._say is not None and still_open:
                self._look(self._say, len(still_open), episode_type)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)

    def _look(self, say: Callable[[str], None], num_open: int, episode_type: str) -> None:
        if not self._episodes.list(queue=self._queue, states=["claimed"]):
            say(
                f"waiting for agents: {num_open} {episode_type} "
                f"{'episode is' if num_open == 1 else 'episodes are'} open on queue {self._queue} "
                "and no agent plays; agents claim them with "
                f'Client().episodes.agent(queue="{self._queue}").episode()'
            )

    def _raise_nothing(self, episode_type: str, timeout_s: float, *, num_lost: int) -> NoReturn:
        what = f"no {episode_type} episode of queue {self._queue} was submitted"
        if num_lost:
            raise AbortedError(
                f"{what}; {num_lost} died",
                remedy="Client.episodes.list(states=['dead']) says in failures what agents met",
            )
        raise OperationTimeoutError(
            f"{what} within {timeout_s:g} s",
            remedy=f"start agents that claim {episode_type} episodes from this queue",
        )

    def _register(
        self, tasks: Sequence[AgentTask], indices: Sequence[int], episode_type: str
    ) -> dict[str, int]:
        """Register an episode of each task; return which one is of which."""
        created = self._episodes.create(
            [EpisodeSpec(tasks[i].content, tasks[i].task_id, episode_type) for i in indices],
            queue=self._queue,
            sampler=self._sampler,
            model=self._model,
        )
        return {episode.name: index for episode, index in zip(created, indices, strict=True)}


def _reward(episode: Episode) -> float:
    assert episode.outcome is not None, "a submitted episode has an outcome"
    return episode.outcome.reward
