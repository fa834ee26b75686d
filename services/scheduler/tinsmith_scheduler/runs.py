"""Runs: created, read, listed, deleted.

A creation is acknowledged once the run is on disk; `creations` places it in the background. A
deleted run stays as a tombstone, so that a repeated deletion is told apart from a wrong name: it is
not found by any read, and `delete` answers with it again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from weakref import WeakValueDictionary

import sqlalchemy as sa

from tinsmith.names import RunName
from tinsmith_runtime import failpoints
from tinsmith_runtime.auth import Caller
from tinsmith_runtime.errors import (
    ErrorCode,
    ResourceExhaustedError,
    RunNotFoundError,
    TinsmithError,
    WorkerUnavailableError,
)
from tinsmith_runtime.sql import Database
from tinsmith_scheduler import run_store
from tinsmith_scheduler.creations import Creations
from tinsmith_scheduler.records import (
    NewRun,
    PageRequest,
    ReleaseMode,
    RequestIdentity,
    Run,
    RunState,
    WorkerRole,
)
from tinsmith_scheduler.sessions import require_active
from tinsmith_scheduler.store import (
    answer_once,
    decode_page_token,
    encode_page_token,
    recall,
    record_action,
)
from tinsmith_scheduler.trainers import Trainers
from tinsmith_scheduler.workers import Workers


class Runs:
    """The runs of all projects.

    Args:
        database: Where they are kept.
        workers: The workers that are registered.
        trainers: Asked to delete runs.
        creations: Places new runs.
        max_runs_per_project: Limits the runs of a project that are neither failed nor deleted.
        wall_clock: Seconds since the epoch.
    """

    def __init__(
        self,
        database: Database,
        *,
        workers: Workers,
        trainers: Trainers,
        creations: Creations,
        max_runs_per_project: int,
        wall_clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._workers = workers
        self._trainers = trainers
        self._creations = creations
        self._max_runs_per_project = max_runs_per_project
        self._wall_clock = wall_clock
        self._delete_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def create(
        self, new: NewRun, request: RequestIdentity, encode: Callable[[Run], bytes]
    ) -> bytes:
        """Record a run, begin to place it, and return it encoded.

        Raises:
            SessionNotFoundError: If there is no such session.
            SessionFinishedError: If the session was finished, or lost its heartbeat.
            ModelNotFoundError: If no trainer serves the base model.
            ResourceExhaustedError: If the project has as many runs as it may have.
        """
        known = await self._database.read(lambda connection: recall(connection, request))
        if known is not None:
            return known
        await self._database.read(lambda connection: require_active(connection, new.session))
        self._workers.require_model(new.base_model, WorkerRole.TRAINER)
        project = new.session.project
        run = Run(
            name=str(RunName(project, f"run-{secrets.token_hex(6)}")),
            project=project,
            state=RunState.CREATING,
            session=str(new.session),
            base_model=new.base_model,
            adapter=new.adapter,
            display_name=new.display_name,
            labels=new.labels,
            create_time_s=self._wall_clock(),
        )

        def insert(connection: sa.Connection) -> bytes:
            require_active(connection, new.session)
            if run_store.count_project_runs(connection, project) >= self._max_runs_per_project:
                raise ResourceExhaustedError(
                    f"project {project} has {self._max_runs_per_project} runs, which is its "
                    "limit; delete one",
                    project=project,
                    limit=self._max_runs_per_project,
                )
            run_store.insert_run(connection, run)
            return encode(run)

        failpoints.passing("scheduler.create")
        # Begun by the creation itself and not by this call, which its client may give up.
        committed = asyncio.ensure_future(
            answer_once(self._database, request, insert, now_s=run.create_time_s)
        )
        self._creations.start(run, after=committed)
        return await asyncio.shield(committed)

    async def get(self, name: RunName) -> Run:
        """Return a run.

        Raises:
            RunNotFoundError: If there is none of this name, or it was deleted.
        """
        run = await self.find(name)
        if run is None or run.state is RunState.DELETED:
            raise run_not_found(name)
        return run

    async def find(self, name: RunName) -> Run | None:
        """Return a run in whatever state, or None."""
        return await self._database.read(
            lambda connection: run_store.get_run(connection, str(name))
        )

    async def list(self, project: str, page: PageRequest) -> tuple[list[Run], str]:
        """Return runs of a project, newest first, and the token that goes on.

        Raises:
            InvalidFieldError: If the page token is not one of this list.
        """
        list_name = f"projects/{project}/trainingRuns"
        before = decode_page_token(list_name, page.token)
        found = await self._database.read(
            lambda connection: run_store.list_runs(
                connection, project, before=before, limit=page.size + 1
            )
        )
        shown = found[: page.size]
        more = len(found) > len(shown)
        return shown, encode_page_token(list_name, shown[-1].serial) if more else ""

    async def count_by_worker(self) -> dict[str, int]:
        """Count the runs on each trainer."""
        return await self._database.read(run_store.count_runs_by_worker)

    async def delete(self, name: RunName, caller: Caller) -> Run:
        """Delete a run with all that its trainer holds of it; repeating it succeeds.

        Raises:
            RunNotFoundError: If there never was a run of this name.
            WorkerUnavailableError: If its trainer could not be reached; nothing was deleted.
        """
        async with self._delete_lock(str(name)):
            now_s = self._wall_clock()

            def withdraw(connection: sa.Connection) -> Run | None:
                record_action(connection, caller, "delete_run", str(name), now_s=now_s)
                return run_store.withdraw_run(connection, str(name))

            run = await self._database.write(withdraw)
            if run is None:
                raise run_not_found(name)
            if run.state is RunState.DELETED:
                return run
            await self._delete_on_trainer(run)
            return await self._database.write(
                lambda connection: run_store.delete_run(connection, run)
            )

    async def _delete_on_trainer(self, run: Run) -> None:
        address = self._workers.trainer_address(run)
        if not address:
            raise WorkerUnavailableError(
                f"the trainer of run {run.name} is not there at the moment; send the request again",
                run=run.name,
            )
        try:
            await self._trainers.release_run(
                address, run=run.name, epoch=run.epoch, mode=ReleaseMode.DELETE
            )
        except TinsmithError as error:
            # Not found after an answer that was lost: the trainer deleted it the first time.
            if error.code is not ErrorCode.NOT_FOUND:
                raise

    def _delete_lock(self, name: str) -> asyncio.Lock:
        lock = self._delete_locks.get(name)
        if lock is None:
            lock = self._delete_locks[name] = asyncio.Lock()
        return lock


def run_not_found(name: RunName) -> RunNotFoundError:
    """Return the error of a run that does not exist, or is not the caller's."""
    return RunNotFoundError(
        f"run {name} does not exist; ListTrainingRuns lists those that do", run=name
    )
