"""Runs as a list shows them: their trainer, their activity, and whether their sessions live."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tinsmith_runtime.errors import TinsmithError
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.runs import run_store
from tinsmith_scheduler.store.records import ListedRun, Run, RunStanding, RunState
from tinsmith_scheduler.workers.trainer_protocol import Trainers
from tinsmith_scheduler.workers.workers import Workers

logger = logging.getLogger(__name__)

_STANDINGS_TIMEOUT_S = 2.0


class RunListing:
    """Adds to runs what their trainers and sessions say."""

    def __init__(self, database: Database, *, workers: Workers, trainers: Trainers) -> None:
        self._database = database
        self._workers = workers
        self._trainers = trainers

    async def describe(self, project: str, runs: Sequence[Run]) -> list[ListedRun]:
        """Return runs of a project as a list shows them: with what goes on, and their sessions.

        Each trainer is asked once. One that does not answer soon holds up no list: nothing is then
        said of the operations of its runs.
        """
        addresses = {
            self._workers.trainer_address(run) for run in runs if run.state is RunState.ACTIVE
        }
        asked = [self._standings(address, project) for address in addresses if address]
        standings = {each.run: each for found in await asyncio.gather(*asked) for each in found}
        names = {name for run in runs for name in (run.session, run.reopened_in) if name}
        ended = await self._database.read(
            lambda connection: run_store.ended_sessions(connection, names)
        )
        return [
            ListedRun(
                run,
                standings.get(run.name),
                session_ended=run.session in ended,
                is_reopened=bool(run.reopened_in) and run.reopened_in not in ended,
            )
            for run in runs
        ]

    async def _standings(self, address: str, project: str) -> list[RunStanding]:
        try:
            return await self._trainers.list_standings(
                address, project, timeout_s=_STANDINGS_TIMEOUT_S
            )
        except TinsmithError as error:
            logger.info(
                "a trainer did not say how its runs stand",
                extra={"address": address, "problem": error.message},
            )
            return []
