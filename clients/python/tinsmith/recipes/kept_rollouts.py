"""The rollouts of an experiment, kept in its folder: the setting `keep_rollouts`.

`rollouts/train-000003.jsonl` holds what was played after three steps, `rollouts/validation-000010`
what was scored after ten. A step that is played again after a restart replaces its file. Of several
policies, each has files of its own name.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tinsmith.recipes.experiment.experiment import ROLLOUTS
from tinsmith.rollouts import GroupResult, NoRolloutsError, RolloutConfig, Trajectory
from tinsmith.rollouts.keeping import keep_before_error
from tinsmith.rollouts.records import (
    EpisodeRecord,
    Origin,
    make_record,
    record_result,
    write_records,
)
from tinsmith.rollouts.records.files import check_path
from tinsmith.rollouts.records.making import Decoder, Weights, make_origin
from tinsmith.types import SamplingParams

LAYOUTS = ("jsonl", "parquet")
TRAIN, VALIDATION = "train", "validation"

OriginOf = Callable[[Any], Origin]
"""Returns how the episodes of a task were played, apart from phase and step."""


class RolloutKeeper:
    """Writes the rollouts of one policy; without a layout, nothing.

    Args:
        folder: Of the experiment.
        layout: One of `LAYOUTS`; empty keeps nothing.
        weights: The sampler of the policy; None where nothing is kept.
        agent: Which of several policies.

    Raises:
        ConfigurationError: If the layout needs a package that is not installed.
    """

    def __init__(
        self, folder: Path, layout: str, weights: Weights | None = None, agent: str = ""
    ) -> None:
        self._folder = folder
        self._layout = layout
        self._weights = weights
        self._agent = agent
        if layout:
            check_path(self._path(TRAIN, 0))

    def of(self, agent: str, weights: Weights) -> RolloutKeeper:
        """Return the keeper of one of several policies."""
        return RolloutKeeper(self._folder, self._layout, weights, agent)

    def origin(
        self, params: SamplingParams, config: RolloutConfig | None = None, **facts: Any
    ) -> Origin:
        """Return how the policy plays; see `make_origin`."""
        assert self._weights is not None, "what is kept is of a policy"
        return make_origin(self._weights, params, config, agent=self._agent, **facts)

    def keep(self, phase: str, num_done: int, records: Iterable[EpisodeRecord]) -> None:
        """Write what was played; without a layout the records are not even made.

        Args:
            phase: `train` or `validation`.
            num_done: Optimizer steps that were done before.
            records: What was played; phase and step are set here.

        Raises:
            ConfigurationError: If the file cannot be written.
        """
        if not self._layout:
            return

        def placed(record: EpisodeRecord) -> EpisodeRecord:
            origin = dataclasses.replace(record.origin, phase=phase, step=num_done)
            return dataclasses.replace(record, origin=origin)

        write_records(self._path(phase, num_done), map(placed, records))

    def keep_result(
        self,
        phase: str,
        num_done: int,
        result: GroupResult[Any],
        decoder: Decoder,
        origin_of: OriginOf,
    ) -> None:
        """Write the episodes of groups; see `keep`."""
        self.keep(phase, num_done, record_result(result, decoder, origin_of))

    @contextlib.contextmanager
    def keeping_failures(
        self, phase: str, num_done: int, decoder: Decoder, origin_of: OriginOf
    ) -> Iterator[None]:
        """Write what was played where not one group survives; see `keep`."""
        try:
            yield
        except NoRolloutsError as error:
            keep_before_error(
                lambda result: self.keep_result(phase, num_done, result, decoder, origin_of),
                error.unused,
            )
            raise

    def keep_episodes(
        self,
        phase: str,
        num_done: int,
        episodes: Iterable[tuple[Trajectory, Origin, float | None]],
        decoder: Decoder,
    ) -> None:
        """Write episodes with their origins and advantages; see `keep`."""
        records = (
            make_record(trajectory, origin, advantage=advantage, decoder=decoder)
            for trajectory, origin, advantage in episodes
        )
        self.keep(phase, num_done, records)

    def _path(self, phase: str, num_done: int) -> Path:
        name = "-".join(filter(None, (phase, f"{num_done:06d}", self._agent)))
        return self._folder / ROLLOUTS / f"{name}.{self._layout}"


KEEP_NOTHING = RolloutKeeper(Path(), "")
