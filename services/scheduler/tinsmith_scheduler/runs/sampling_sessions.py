"""Sampling sessions: handles on a base model, a checkpoint or a live run.

Only the source is stored. Addresses are looked up at each read, so that a handle survives restarts
of its workers: the samplers are those alive that may serve it, the trainer follows from the run. A
handle has no sampler of its own: each call goes to any of them (`tinsmith.replicas`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from tinsmith.names import CheckpointName, RunName, SamplingSessionName
from tinsmith_runtime.adapters import AdapterConfig
from tinsmith_runtime.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    ResourceExhaustedError,
    SamplingSessionNotFoundError,
    WorkerUnavailableError,
)
from tinsmith_runtime.records import RequestIdentity
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.runs.checkpoint_lookup import CheckpointSources
from tinsmith_scheduler.runs.run_store import (
    count_sampling_sessions,
    get_run,
    require_run,
    run_not_found,
)
from tinsmith_scheduler.runs.sessions import require_active
from tinsmith_scheduler.store.database import answer_once, next_serial, recall
from tinsmith_scheduler.store.records import (
    NewSamplingSession,
    Reach,
    Run,
    RunState,
    SamplerLoad,
    SamplingSession,
    WorkerRole,
)
from tinsmith_scheduler.store.tables import sampling_sessions
from tinsmith_scheduler.workers.placement import SamplerCandidate, eligible_samplers
from tinsmith_scheduler.workers.workers import Workers


@dataclass(frozen=True, slots=True)
class LocatedSession:
    """A sampling session and where its workers are now; empty if none is alive.

    Attributes:
        session: The handle.
        sampler_addresses: `host:port` of each sampler.
        sampler_loads: What those of them have to do that told it, by address.
        trainer_address: `host:port` of the trainer.
        adapter: Of the run, whose chat template is that of its checkpoints; None without a run.
    """

    session: SamplingSession
    sampler_addresses: list[str]
    sampler_loads: dict[str, SamplerLoad]
    trainer_address: str
    adapter: AdapterConfig | None = None


class SamplingSessions:
    """The sampling sessions of all projects.

    Args:
        database: Where they are kept.
        workers: The workers that are registered.
        sources: Finds checkpoints.
        max_per_project: Limits the sampling sessions of a project.
        wall_clock: Seconds since the epoch.
    """

    def __init__(
        self,
        database: Database,
        *,
        workers: Workers,
        sources: CheckpointSources,
        max_per_project: int,
        wall_clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._workers = workers
        self._sources = sources
        self._max_per_project = max_per_project
        self._wall_clock = wall_clock

    async def create(
        self,
        new: NewSamplingSession,
        request: RequestIdentity,
        encode: Callable[[LocatedSession], bytes],
    ) -> bytes:
        """Open a handle and return it encoded.

        Raises:
            SessionNotFoundError: If there is no such session.
            SessionFinishedError: If the session was finished, or lost its heartbeat.
            NotFoundError: If the source does not exist in the project of the session.
            WorkerUnavailableError: If no sampler of the base model is alive, or the trainer of the
                checkpoint cannot be asked.
            AlreadyExistsError: If the project has a handle of the chosen id.
            ResourceExhaustedError: If the project has as many handles as it may have.
        """
        known = await self._database.read(lambda connection: recall(connection, request))
        if known is not None:
            return known
        session = await self._database.read(
            lambda connection: require_active(connection, new.session)
        )
        base_model, run = await self._resolve(new)
        project, pool = new.session.project, session.pool
        self._workers.require_model(base_model, WorkerRole.SAMPLER, Reach(project, pool))
        handle = SamplingSession(
            name=str(SamplingSessionName(project, new.chosen_id or f"smp-{secrets.token_hex(6)}")),
            project=project,
            session=str(new.session),
            base_model=base_model,
            checkpoint=str(new.checkpoint or ""),
            run=str(new.run or ""),
            pool=pool,
        )
        located = self._locate(handle, run)
        if not located.sampler_addresses:
            raise WorkerUnavailableError(
                f"no sampler of the base model {base_model} is there at the moment; send the "
                "request again",
                base_model=base_model,
            )

        def insert(connection: sa.Connection) -> bytes:
            require_active(connection, new.session)
            if count_sampling_sessions(connection, project) >= self._max_per_project:
                raise ResourceExhaustedError(
                    f"project {project} has {self._max_per_project} sampling sessions, which is "
                    "its limit; finish a session, with which its sampling sessions end",
                    project=project,
                    limit=self._max_per_project,
                )
            taken = sa.select(sampling_sessions.c.name).where(
                sampling_sessions.c.name == handle.name
            )
            if connection.execute(taken).first() is not None:
                raise AlreadyExistsError(
                    f"sampling session {handle.name} exists",
                    sampling_session=handle.name,
                )
            connection.execute(
                sa.insert(sampling_sessions).values(
                    name=handle.name,
                    project=handle.project,
                    session=handle.session,
                    base_model=handle.base_model,
                    checkpoint=handle.checkpoint,
                    run=handle.run,
                    serial=next_serial(
                        sampling_sessions, sampling_sessions.c.session == handle.session
                    ),
                    pool=handle.pool,
                )
            )
            return encode(located)

        return await answer_once(self._database, request, insert, now_s=self._wall_clock())

    async def get(self, name: SamplingSessionName) -> LocatedSession:
        """Return a handle and where its workers are now.

        Raises:
            SamplingSessionNotFoundError: If there is none of this name.
        """

        def read(connection: sa.Connection) -> tuple[SamplingSession, Run | None] | None:
            query = sa.select(sampling_sessions).where(sampling_sessions.c.name == str(name))
            row = connection.execute(query).first()
            if row is None:
                return None
            handle = SamplingSession(**row._mapping)
            run_name = _run_name(handle)
            return handle, get_run(connection, run_name) if run_name else None

        found = await self._database.read(read)
        if found is None:
            raise sampling_session_not_found(name)
        return self._locate(*found)

    async def _resolve(self, new: NewSamplingSession) -> tuple[str, Run | None]:
        """Return the base model of a source and its run."""
        if new.run is not None:
            run = await self._active_run(new.run, new.session.project)
            return run.base_model, run
        if new.checkpoint is not None:
            found = await self._sources.find(new.checkpoint, new.session.project)
            return found.info.base_model, found.run
        return new.base_model or "", None

    async def _active_run(self, name: RunName, project: str) -> Run:
        if name.project != project:
            raise run_not_found(name)
        run = await self._database.read(lambda connection: require_run(connection, name))
        if run.state not in (RunState.ACTIVE, RunState.MOVING):
            raise FailedPreconditionError(
                f"run {name} is {run.state.value}; wait for its creation to succeed",
                run=name,
                state=run.state.value,
            )
        return run

    def _locate(self, handle: SamplingSession, run: Run | None) -> LocatedSession:
        alive = self._workers.alive(WorkerRole.SAMPLER, handle.base_model)
        addresses = {worker.name: worker.address for worker in alive}
        eligible = eligible_samplers(
            [
                SamplerCandidate(worker.name, worker.pool, worker.project, worker.checkpoint)
                for worker in alive
            ],
            project=handle.project,
            checkpoint=handle.checkpoint,
            run=handle.run,
            pool=handle.pool,
        )
        return LocatedSession(
            session=handle,
            sampler_addresses=[addresses[name] for name in sorted(eligible)],
            sampler_loads={
                addresses[name]: load
                for name in sorted(eligible)
                if (load := self._workers.load_of(name)) is not None
            },
            trainer_address=self._trainer_address(handle, run),
            adapter=None if run is None else run.adapter,
        )

    def _trainer_address(self, handle: SamplingSession, run: Run | None) -> str:
        """Return the trainer that is asked for the weights: for a checkpoint, any that knows it."""
        if run is None:
            return ""
        if handle.checkpoint:
            return self._workers.ledger_address(run)
        return self._workers.trainer_address(run)


def sampling_session_not_found(name: SamplingSessionName) -> SamplingSessionNotFoundError:
    """Return the error of a handle that does not exist, or is not the caller's."""
    return SamplingSessionNotFoundError(
        f"sampling session {name} does not exist, or its session ended; create one",
        sampling_session=name,
    )


def _run_name(handle: SamplingSession) -> str:
    if handle.checkpoint:
        return str(CheckpointName.parse(handle.checkpoint).run_name)
    return handle.run
