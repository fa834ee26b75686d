"""Runs: created, read, listed, deleted.

A creation is acknowledged once the run is on disk; `run_creation` places it in the background. A
deleted run stays as a tombstone, so that a repeated deletion is told apart from a wrong name: it is
not found by any read, and `delete` answers with it again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import sqlalchemy as sa

from tinsmith.names import CheckpointName, RunName, SessionName
from tinsmith_runtime import failpoints
from tinsmith_runtime.adapters import AdapterConfig, LoraConfig
from tinsmith_runtime.errors import (
    AlreadyExistsError,
    CheckpointIncompatibleError,
    ErrorCode,
    FailedPreconditionError,
    InvalidFieldError,
    ResourceExhaustedError,
    RunNotFoundError,
    TinsmithError,
    WorkerUnavailableError,
)
from tinsmith_runtime.keyed_locks import KeyedLocks
from tinsmith_runtime.records import ReleaseMode, RequestIdentity
from tinsmith_runtime.rpc.auth import Caller
from tinsmith_runtime.rpc.requests import decode_page_token, encode_page_token
from tinsmith_runtime.shielded import see_through
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.runs import run_store
from tinsmith_scheduler.runs.checkpoint_lookup import CheckpointSources
from tinsmith_scheduler.runs.run_creation import Creations
from tinsmith_scheduler.runs.sessions import Sessions, require_active
from tinsmith_scheduler.store.database import answer_once, recall, record_action
from tinsmith_scheduler.store.records import (
    Fork,
    NewRun,
    PageRequest,
    Reach,
    ResumedRun,
    Run,
    RunState,
    WorkerRole,
)
from tinsmith_scheduler.workers.trainer_protocol import Trainers
from tinsmith_scheduler.workers.workers import Workers

_MAX_CONCURRENT_RESUMES = 16
_AWAY_CODES = frozenset(
    # A trainer that does not know the run is about to learn of it, or not the right one any more.
    {ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.NOT_FOUND}
)


class Runs:
    """The runs of all projects.

    Args:
        database: Where they are kept.
        workers: The workers that are registered.
        trainers: Asked to delete runs.
        creations: Places new runs.
        sources: Finds the checkpoints that runs begin from.
        sessions: Those that are silent make room for new runs.
        max_runs_per_project: Limits the live runs of a project: those whose session goes on.
        wall_clock: Seconds since the epoch.
    """

    def __init__(
        self,
        database: Database,
        *,
        workers: Workers,
        trainers: Trainers,
        creations: Creations,
        sources: CheckpointSources,
        sessions: Sessions,
        max_runs_per_project: int,
        wall_clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._workers = workers
        self._trainers = trainers
        self._creations = creations
        self._sources = sources
        self._sessions = sessions
        self._max_runs_per_project = max_runs_per_project
        self._wall_clock = wall_clock
        self._delete_locks = KeyedLocks()

    async def create(
        self,
        new: NewRun,
        request: RequestIdentity,
        encode: Callable[[Run], bytes],
        caller: Caller,
    ) -> bytes:
        """Record a run, begin to place it, and return it encoded.

        Raises:
            SessionNotFoundError: If there is no such session.
            SessionFinishedError: If the session was finished, or lost its heartbeat.
            ModelNotFoundError: If no trainer serves the base model.
            NotFoundError: If the source checkpoint or run does not exist for the project.
            FailedPreconditionError: If the source run is not active, or of another pool.
            InvalidFieldError: If base model or adapter are not those of the source checkpoint.
            CheckpointIncompatibleError: If the source has no optimizer state, which is asked for.
            ResourceExhaustedError: If the project has as many runs as it may have.
            AlreadyExistsError: If the project has a run of the chosen id, or had one: files and
                ledgers carry the name of a run that was deleted.
        """
        known = await self._database.read(lambda connection: recall(connection, request))
        if known is not None:
            return known
        session = await self._database.read(
            lambda connection: require_active(connection, new.session)
        )
        project, pool = new.session.project, session.pool
        if new.source is not None:
            new = await self._from_source(new, new.source, pool)
        if new.fork is not None:
            new = await self._from_run(new, new.fork, pool)
        self._workers.require_model(new.base_model, WorkerRole.TRAINER, Reach(project, pool))
        run = Run(
            name=str(RunName(project, new.chosen_id or f"run-{secrets.token_hex(6)}")),
            project=project,
            state=RunState.CREATING,
            session=str(new.session),
            base_model=new.base_model,
            adapter=new.adapter,
            display_name=new.display_name,
            labels=new.labels,
            create_time_s=self._wall_clock(),
            # As if it had been asked before: it is kept while it lives and has room.
            worker=new.preferred_worker,
            epoch=1 if new.preferred_worker else 0,
            source_checkpoint=str(new.source or ""),
            include_optimizer=new.include_optimizer,
            pool=pool,
            source_run=str(new.fork.run) if new.fork is not None else "",
            source_step=new.fork.step if new.fork is not None else 0,
            reruns_step=new.fork is not None and new.fork.reruns_step,
            history_retention_s=new.history_retention_s,
        )

        is_new = False

        def insert(connection: sa.Connection) -> bytes:
            require_active(connection, new.session)
            if run_store.count_project_runs(connection, project) >= self._max_runs_per_project:
                raise ResourceExhaustedError(
                    f"project {project} has {self._max_runs_per_project} live runs, which is its "
                    "limit, and their clients were heard of; finish a session or delete a run",
                    project=project,
                    limit=self._max_runs_per_project,
                )
            if run_store.get_run(connection, run.name) is not None:
                raise AlreadyExistsError(f"run {run.name} exists or was deleted", run=run.name)
            run_store.insert_run(connection, run)
            record_action(
                connection,
                caller,
                "fork_run" if run.source_run else "create_run",
                run.name,
                project=project,
                now_s=run.create_time_s,
            )
            nonlocal is_new
            is_new = True
            return encode(run)

        async def record() -> bytes:
            while True:
                try:
                    answer = await answer_once(
                        self._database, request, insert, now_s=run.create_time_s
                    )
                    break
                except ResourceExhaustedError:
                    # Sessions whose clients are silent make room, one after the other.
                    if not await self._sessions.end_longest_silent(project, keep=new.session):
                        raise
            if is_new:
                # A repeat of the request finds the run of a chosen id, whose placement goes on.
                self._creations.start(run)
            return answer

        failpoints.passing("scheduler.create")
        # Not ended with this call, which its client may give up: what is committed is placed.
        return await see_through(record())

    async def _from_source(self, new: NewRun, source: CheckpointName, pool: str) -> NewRun:
        """Return a wanted run with the base model and adapter of its source."""
        found = await self._sources.find(source, new.session.project)
        info = found.info
        if new.base_model not in ("", info.base_model):
            raise InvalidFieldError(
                "base_model",
                f"is {new.base_model}, the source checkpoint is of {info.base_model}; leave it out",
            )
        if new.include_optimizer and not info.has_optimizer:
            raise CheckpointIncompatibleError(
                f"checkpoint {source} holds no optimizer state; leave include_optimizer out, or "
                "use a training checkpoint",
                checkpoint=source,
            )
        return replace(
            new,
            base_model=info.base_model,
            adapter=_agreed(new, info.adapter),
            preferred_worker=found.run.worker if found.run.pool == pool else "",
        )

    async def _from_run(self, new: NewRun, fork: Fork, pool: str) -> NewRun:
        """Return a wanted run with the base model and adapter of the run that it forks."""
        if fork.run.project != new.session.project:
            raise run_store.run_not_found(fork.run)
        source = await self.get(fork.run)
        if source.state not in (RunState.ACTIVE, RunState.MOVING):
            raise FailedPreconditionError(
                f"run {source.name} is {source.state.value}; only a run that was created is forked",
                run=source.name,
                state=source.state.value,
            )
        if source.pool != pool:
            raise FailedPreconditionError(
                f"run {source.name} is of pool {source.pool!r} and the session of pool {pool!r}; "
                "fork it with a key of its pool",
                run=source.name,
            )
        return replace(new, base_model=source.base_model, adapter=source.adapter)

    async def get(self, name: RunName) -> Run:
        """Return a run.

        Raises:
            RunNotFoundError: If there is none of this name, or it was deleted.
        """
        return await self._database.read(lambda connection: run_store.require_run(connection, name))

    async def get_anywhere(self, run_id: str) -> Run:
        """Return the run of an id, whatever its project.

        Raises:
            RunNotFoundError: If there is none, or several projects have one.
        """
        found = await self._database.read(
            lambda connection: run_store.list_by_id(connection, run_id)
        )
        if len(found) != 1:
            raise RunNotFoundError(
                f"run {run_id[:128]} does not exist, or several projects have one", run=run_id[:128]
            )
        return found[0]

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
        """Count the live runs on each trainer."""
        return await self._database.read(run_store.count_runs_by_worker)

    async def resume(self, session: SessionName) -> Sequence[ResumedRun]:
        """Let a new client go on with the runs of a session, and say where they stand.

        Raises:
            WorkerUnavailableError: If a run has no trainer at the moment, or it does not answer.
        """
        found = await self._database.read(
            lambda connection: run_store.list_session_runs(connection, str(session))
        )
        slots = asyncio.Semaphore(_MAX_CONCURRENT_RESUMES)

        async def resume_one(run: Run) -> ResumedRun:
            async with slots:
                return ResumedRun(run, await self._resume_on_trainer(run))

        return await asyncio.gather(*(resume_one(run) for run in found))

    async def _resume_on_trainer(self, run: Run) -> bytes:
        address = self._workers.trainer_address(run) if run.state is RunState.ACTIVE else ""
        why = "is being placed" if run.state is not RunState.ACTIVE else "has lost its trainer"
        try:
            if address:
                return await self._trainers.resume_run(address, run=run.name)
        except TinsmithError as error:
            if error.code not in _AWAY_CODES:
                raise
            why = f"cannot be asked: {error.message}"
        raise WorkerUnavailableError(f"run {run.name} {why}; send the request again", run=run.name)

    async def delete(self, name: RunName, caller: Caller) -> Run:
        """Delete a run with all that its trainer holds of it; repeating it succeeds.

        Raises:
            RunNotFoundError: If there never was a run of this name.
            WorkerUnavailableError: If its trainer could not be reached; nothing was deleted.
        """
        async with self._delete_locks.of(str(name)):
            now_s = self._wall_clock()

            def record(connection: sa.Connection) -> None:
                record_action(
                    connection, caller, "delete_run", str(name), project=name.project, now_s=now_s
                )

            def withdraw(connection: sa.Connection) -> Run | None:
                before = run_store.get_run(connection, str(name))
                after = run_store.withdraw_run(connection, str(name))
                if before != after:
                    record(connection)
                return after

            run = await self._database.write(withdraw)
            if run is None:
                raise run_store.run_not_found(name)
            if run.state is RunState.DELETED:
                return run
            await self._delete_on_trainer(run)

            def delete(connection: sa.Connection) -> Run:
                record(connection)
                return run_store.delete_run(connection, run)

            return await self._database.write(delete)

    async def _delete_on_trainer(self, run: Run) -> None:
        # Each trainer on the ledger can delete a run that no trainer holds any more.
        address = self._workers.ledger_address(run)
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


def _agreed(new: NewRun, stored: AdapterConfig) -> AdapterConfig:
    """Return the adapter of a source, if it is the one that was asked for.

    The seed may differ: it is of initial weights, which the source replaces.

    Raises:
        InvalidFieldError: If another one was asked for; names the field.
    """
    if new.adapter.chat_template not in ("", stored.chat_template):
        raise InvalidFieldError(
            "adapter.chat_template", "is that of the source checkpoint; leave it out"
        )
    if new.given_adapter_fields is None:
        return stored
    if not isinstance(stored, LoraConfig) or not isinstance(new.adapter, LoraConfig):
        if type(stored) is not type(new.adapter):
            raise InvalidFieldError(
                "adapter", "is of another kind than the source checkpoint; leave it out"
            )
        return stored
    for field in sorted(new.given_adapter_fields - {"seed"}):
        wanted, found = getattr(new.adapter, field), getattr(stored, field)
        if wanted != found:
            raise InvalidFieldError(
                f"adapter.lora.{field}",
                f"is {wanted}, the source checkpoint has {found}; leave it out",
            )
    if "seed" in new.given_adapter_fields:
        return replace(stored, seed=new.adapter.seed)
    return stored
