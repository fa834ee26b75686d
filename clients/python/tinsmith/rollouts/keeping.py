"""Keeps the episodes of served environments in a file: `keep_in` of the calls that play."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tinsmith.environments.naming import NamedEnvironment
from tinsmith.errors import TinsmithError
from tinsmith.rollouts.batch_codec import EnvironmentTask
from tinsmith.rollouts.groups import GroupResult, UnusedPlay, without_groups
from tinsmith.rollouts.machine import RolloutConfig
from tinsmith.rollouts.records import record_result, write_records
from tinsmith.rollouts.records.files import check_path
from tinsmith.rollouts.records.making import Decoder, Weights, make_origin
from tinsmith.rollouts.records.record import LOCAL, SERVED, Origin
from tinsmith.types import SamplingParams

logger = logging.getLogger(__name__)

KeepResult = Callable[[GroupResult[EnvironmentTask]], None]
"""Blocks while it writes: coroutines call it on a thread."""


def keep_before_error(
    keep: Callable[[GroupResult[Any]], None], unused: Sequence[UnusedPlay[Any]]
) -> None:
    """Keep what was played by a batch that fails; what goes wrong here hides no other error."""
    if not unused:
        return  # A file that is there already stays.
    try:
        keep(without_groups(unused))
    except Exception as error:
        is_bug = not isinstance(error, TinsmithError)
        logger.warning("what was played is not kept: %s", error, exc_info=is_bug)


def keep_nothing(result: GroupResult[EnvironmentTask]) -> None:
    """Keep nothing."""
    del result


def seeded(params: SamplingParams) -> SamplingParams:
    """Return parameters with a seed, so that what is kept can be played again."""
    if params.seed is not None:
        return params
    return dataclasses.replace(params, seed=secrets.randbits(53))


def kind_of(environment: NamedEnvironment) -> str:
    """Return how records call the play of an environment."""
    return SERVED if environment.environment_class is None else LOCAL


def keep_in_file(
    path: Path | str,
    decoder: Decoder,
    sampler: Weights,
    *,
    environment: str,
    params: SamplingParams,
    config: RolloutConfig,
    kind: str = SERVED,
) -> KeepResult:
    """Return what writes the episodes of a result to a file.

    Args:
        path: Ends with `.jsonl` or `.parquet`.
        decoder: Says what each token is as text.
        sampler: Whose weights play.
        environment: What is played.
        params: How tokens are drawn.
        config: Limits of an episode.
        kind: Where the environment is; see `kind_of`.

    Raises:
        ConfigurationError: If the name of the file says no known layout.
    """
    check_path(Path(path))

    def origin_of(task: EnvironmentTask) -> Origin:
        return make_origin(
            sampler,
            params,
            config,
            kind=kind,
            environment=environment,
            environment_config=dict(task.config),
            environment_seed=task.seed,
        )

    def keep(result: GroupResult[EnvironmentTask]) -> None:
        write_records(path, record_result(result, decoder, origin_of))

    return keep
