"""What sits at the other seat in self-play: named for each game, kept beside the checkpoints.

A script plays every game, or the policy as it is now plays every game, or a league takes a share of
them. The league grows by a snapshot of the policy every so many steps. It is written with each save
of the run, so that a run that goes on meets the opponents that it would have met.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from tinsmith.client import Client
from tinsmith.errors import AlreadyExistsError
from tinsmith.games import League, LeaguePlayer
from tinsmith.recipes.game_source import SELF
from tinsmith.recipes.kept_states import KeptStates
from tinsmith.rollouts import RoleBaselines
from tinsmith.rollouts.adapters import ServiceSampler
from tinsmith.rollouts.interfaces import Sampler
from tinsmith.training.run_forms import TrainingRun

LEAGUE = "league"
"""The setting under which past selves play."""


class OpponentConfig(Protocol):
    """The settings that decide what plays."""

    @property
    def opponent(self) -> str: ...  # noqa: D102
    @property
    def league_share(self) -> float: ...  # noqa: D102
    @property
    def snapshot_every(self) -> int: ...  # noqa: D102
    @property
    def max_snapshots(self) -> int: ...  # noqa: D102
    @property
    def num_imitation_steps(self) -> int: ...  # noqa: D102
    @property
    def baseline_decay(self) -> float: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class _Kept:
    """States of league and baselines after a step."""

    step: int
    league: dict[str, Any]
    baselines: dict[str, float]


class Opponents:
    """Opponents of one run.

    Args:
        config: What plays.
        client: Opens snapshots.
        run: The learner; snapshots are taken of it.
        folder: Where the league is kept.
        first_step: Steps that an earlier part of the run did.

    Raises:
        ConfigurationError: If the folder does not say what plays after those steps.
    """

    def __init__(
        self,
        config: OpponentConfig,
        client: Client,
        run: TrainingRun,
        folder: Path,
        *,
        first_step: int,
    ) -> None:
        self._config = config
        self._client = client
        self._run = run
        self._states = KeptStates(folder)
        self._samplers: dict[str, Sampler] = {}
        self.baselines = RoleBaselines(decay=config.baseline_decay)
        self.league = League(max_snapshots=config.max_snapshots)
        if first_step:
            kept = self._states.read(first_step)
            self.league = League.from_state(kept["league"])
            self.baselines.restore(kept["baselines"])
        self._keep(first_step)

    def name(self, step: int, num_games: int) -> list[str]:
        """Return the opponent of each game of a step; equal seeds and results name equal ones."""
        config = self._config
        if config.opponent != LEAGUE:
            return [config.opponent] * num_games
        num_drawn = round(config.league_share * num_games) if self.league.players else 0
        if not num_drawn:
            return [SELF] * num_games
        drawn = self.league.draw(num_drawn, choice="hardest", seed=config.seed * 1_000_003 + step)
        names = [*(player.name for player in drawn), *[SELF] * (num_games - num_drawn)]
        # Spread over both seats, which alternate from game to game.
        return names[::2] + names[1::2]

    def end_step(self, num_done: int) -> None:
        """Note that a step is done: take a snapshot where one is due, and what `save` will keep.

        Again for the same step, it does nothing.
        """
        if self._kept.step == num_done:
            return
        config = self._config
        num_played = num_done - config.num_imitation_steps
        # The first snapshot is of the warm start, where there was one.
        is_due = num_played >= 0 and num_played % config.snapshot_every == 0
        if config.opponent == LEAGUE and is_due:
            self._take_snapshot(num_done)
        self._keep(num_done)

    def open_snapshot(self, player: LeaguePlayer) -> Sampler:
        """Return the sampler of a snapshot, which stays at its weights."""
        if player.name not in self._samplers:
            sampler = self._client.create_sampling_client(player.source)
            self._samplers[player.name] = ServiceSampler(sampler)
        return self._samplers[player.name]

    def save(self, step: int) -> None:
        """Keep league and baselines as they were after a step, for a run that goes on from it.

        Call it before the weights are saved. What was played after the step is not in it.
        """
        self.end_step(step)
        self._states.write(asdict(self._kept))

    def _take_snapshot(self, num_done: int) -> None:
        name = f"opponent-{num_done}"
        path = f"{self._run.name}/checkpoints/{name}"
        try:
            self._run.save_weights_for_sampler(name).result()
        except AlreadyExistsError:
            # Taken by a part of this run that ended before its next save.
            self._client.checkpoints.delete(path)
            self._run.save_weights_for_sampler(name).result()
        leaving = self.league.add(LeaguePlayer(name, "snapshot", path, num_done))
        if leaving is not None:
            self._samplers.pop(leaving.name, None)

    def _keep(self, step: int) -> None:
        self._kept = _Kept(step, self.league.state, self.baselines.state)
