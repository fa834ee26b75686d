"""SchedulerService: one method for each call, which decodes, checks the tenant, calls, encodes.

The tenant check stands here and nowhere else: every name that a request carries belongs to a
project, and `require_project` answers a foreign one as if nothing had that name. Pods pass it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.longrunning import operations_pb2

from tinsmith.names import (
    CheckpointName,
    ProjectName,
    RunName,
    SamplingSessionName,
    SessionName,
)
from tinsmith.v1 import scheduler_pb2, scheduler_pb2_grpc
from tinsmith_runtime.errors import NotFoundError
from tinsmith_runtime.rpc.auth import Caller, current_caller
from tinsmith_runtime.rpc.requests import check_text, decode_identity, parse_name
from tinsmith_scheduler.auth.audit import AuditTrail
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_scheduler.rpc import codec, worker_codec
from tinsmith_scheduler.runs.checkpoint_lookup import CheckpointSources
from tinsmith_scheduler.runs.migration import Moves
from tinsmith_scheduler.runs.run_creation import Creations, run_closed
from tinsmith_scheduler.runs.run_listing import RunListing
from tinsmith_scheduler.runs.run_retention import RunRetention
from tinsmith_scheduler.runs.run_store import run_not_found
from tinsmith_scheduler.runs.runs import Runs
from tinsmith_scheduler.runs.sampling_sessions import SamplingSessions, sampling_session_not_found
from tinsmith_scheduler.runs.sessions import Sessions, session_not_found
from tinsmith_scheduler.runs.training_ends import TrainingEnds
from tinsmith_scheduler.store.records import Reach, Run, RunState, Session, WorkerRole
from tinsmith_scheduler.workers.workers import Workers

Context = grpc.aio.ServicerContext[Any, Any]

_ANY_PROJECT = "projects/-/trainingRuns/"


@dataclass(frozen=True, slots=True)
class Domain:
    """The parts of the scheduler that serve sessions and runs."""

    sessions: Sessions
    sampling_sessions: SamplingSessions
    runs: Runs
    run_listing: RunListing
    retention: RunRetention
    training_ends: TrainingEnds
    creations: Creations
    moves: Moves
    workers: Workers
    checkpoint_sources: CheckpointSources
    audit: AuditTrail


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Maps SchedulerService onto the domain.

    Args:
        domain: What is served.
        config: Intervals that are told to clients and workers.
    """

    def __init__(self, domain: Domain, config: SchedulerConfig) -> None:
        self._domain = domain
        self._config = config

    async def GetCapabilities(
        self, request: scheduler_pb2.GetCapabilitiesRequest, context: Context
    ) -> scheduler_pb2.Capabilities:
        """Return what is served and where."""
        project = parse_name(ProjectName, request.parent, "parent").project
        caller = _caller_of_project(project)
        workers, reach = self._domain.workers, _reach_of(caller)
        if reach is None and request.HasField("pool"):
            # Another pool may serve another model of the same name.
            reach = Reach(project, request.pool)
        # A pod acts for many projects, which it spreads as if they were its callers.
        spread = project if caller.is_pod else caller.key_id
        offers = workers.offers(await self._domain.runs.count_by_worker(), reach)
        return scheduler_pb2.Capabilities(
            models=[codec.encode_offer(offer) for offer in offers],
            environment_address=workers.shared_service(WorkerRole.ENVIRONMENT, caller.pool, spread),
            coordinator_address=workers.shared_service(
                WorkerRole.COORDINATOR, caller.pool, caller.project
            ),
        )

    async def CreateSession(
        self, request: scheduler_pb2.CreateSessionRequest, context: Context
    ) -> scheduler_pb2.Session:
        """Open a session."""
        new = codec.decode_new_session(request)
        caller = _caller_of_project(new.project)
        identity = decode_identity(request, new.project)
        encode = codec.serialized(self._encode_session)
        answer = await self._domain.sessions.create(new, identity, encode, caller)
        return scheduler_pb2.Session.FromString(answer)

    async def GetSession(
        self, request: scheduler_pb2.GetSessionRequest, context: Context
    ) -> scheduler_pb2.Session:
        """Return a session with what was created in it."""
        contents = await self._domain.sessions.get(_own_session(request.name, "name"))
        message = self._encode_session(contents.session)
        message.training_runs.extend(contents.runs)
        message.sampling_sessions.extend(contents.sampling_sessions)
        return message

    async def ListSessions(
        self, request: scheduler_pb2.ListSessionsRequest, context: Context
    ) -> scheduler_pb2.ListSessionsResponse:
        """List the sessions of a project."""
        project = parse_name(ProjectName, request.parent, "parent").project
        _caller_of_project(project)
        page = codec.decode_page(request.page_size, request.page_token)
        sessions, next_page_token = await self._domain.sessions.list(project, page)
        return scheduler_pb2.ListSessionsResponse(
            sessions=[self._encode_session(session) for session in sessions],
            next_page_token=next_page_token,
        )

    async def HeartbeatSession(
        self, request: scheduler_pb2.HeartbeatSessionRequest, context: Context
    ) -> scheduler_pb2.Session:
        """Keep a session alive."""
        name = _own_session(request.session, "session")
        return self._encode_session(await self._domain.sessions.heartbeat(name))

    async def ResumeSession(
        self, request: scheduler_pb2.ResumeSessionRequest, context: Context
    ) -> scheduler_pb2.ResumeSessionResponse:
        """Go on with a session and its runs."""
        name = _own_session(request.session, "session")
        session = await self._domain.sessions.resume(name)
        resumed = await self._domain.runs.resume(name)
        return scheduler_pb2.ResumeSessionResponse(
            session=self._encode_session(session),
            runs=[
                codec.encode_resumed_run(each, run=self._encode_run(each.run)) for each in resumed
            ],
        )

    async def FinishSession(
        self, request: scheduler_pb2.FinishSessionRequest, context: Context
    ) -> scheduler_pb2.Session:
        """End a session."""
        name = _own_session(request.session, "session")
        outcome = check_text(request.outcome, "outcome")
        return self._encode_session(
            await self._domain.sessions.finish(name, outcome, current_caller())
        )

    async def CreateSamplingSession(
        self, request: scheduler_pb2.CreateSamplingSessionRequest, context: Context
    ) -> scheduler_pb2.SamplingSession:
        """Open a handle to sample with."""
        session = _own_session(request.parent, "parent")
        identity = decode_identity(request, session.project)
        answer = await self._domain.sampling_sessions.create(
            worker_codec.decode_new_sampling_session(request),
            identity,
            codec.serialized(worker_codec.encode_sampling_session),
        )
        return scheduler_pb2.SamplingSession.FromString(answer)

    async def GetSamplingSession(
        self, request: scheduler_pb2.GetSamplingSessionRequest, context: Context
    ) -> scheduler_pb2.SamplingSession:
        """Return a sampling session."""
        name = parse_name(SamplingSessionName, request.name, "name")
        current_caller().require_project(name.project, lambda: sampling_session_not_found(name))
        return worker_codec.encode_sampling_session(await self._domain.sampling_sessions.get(name))

    async def GetTokenizer(
        self, request: scheduler_pb2.GetTokenizerRequest, context: Context
    ) -> scheduler_pb2.Tokenizer:
        """Return the tokenizer of a base model."""
        base_model = codec.decode_base_model(request.base_model, "base_model")
        # A pod of another pool may serve another model of the same name.
        reach = _reach_of(current_caller()) or Reach(request.project, request.pool)
        tokenizer = self._domain.workers.tokenizer(base_model, reach)
        return worker_codec.encode_tokenizer(tokenizer, known_digest=request.known_digest)

    async def CreateTrainingRun(
        self, request: scheduler_pb2.CreateTrainingRunRequest, context: Context
    ) -> operations_pb2.Operation:
        """Record a run and begin to place it."""
        session = _own_session(request.parent, "parent")
        identity = decode_identity(request, session.project)
        new = codec.decode_new_run(request, max_history_s=self._config.max_history_retention_s)
        encode = codec.serialized(self._encode_new_run)
        answer = await self._domain.runs.create(new, identity, encode, current_caller())
        return operations_pb2.Operation.FromString(answer)

    async def GetTrainingRun(
        self, request: scheduler_pb2.GetTrainingRunRequest, context: Context
    ) -> scheduler_pb2.TrainingRun:
        """Return a run; to pods one of whatever project, by its id alone."""
        if request.name.startswith(_ANY_PROJECT):
            caller = current_caller()
            if not caller.is_pod:
                raise caller.denied("runs of whatever project")
            run_id = request.name.removeprefix(_ANY_PROJECT)
            return self._encode_run(await self._domain.runs.get_anywhere(run_id))
        return self._encode_run(await self._domain.runs.get(_own_run(request.name)))

    async def ListTrainingRuns(
        self, request: scheduler_pb2.ListTrainingRunsRequest, context: Context
    ) -> scheduler_pb2.ListTrainingRunsResponse:
        """List the runs of a project."""
        project = parse_name(ProjectName, request.parent, "parent").project
        _caller_of_project(project)
        page = codec.decode_page(request.page_size, request.page_token)
        runs, next_page_token = await self._domain.runs.list(project, page)
        return scheduler_pb2.ListTrainingRunsResponse(
            training_runs=[
                codec.encode_listed_run(each, run=self._encode_run(each.run))
                for each in await self._domain.run_listing.describe(project, runs)
            ],
            next_page_token=next_page_token,
        )

    async def LocateCheckpoint(
        self, request: scheduler_pb2.LocateCheckpointRequest, context: Context
    ) -> scheduler_pb2.LocateCheckpointResponse:
        """Say which trainer answers for a checkpoint."""
        name = parse_name(CheckpointName, request.checkpoint, "checkpoint")
        caller = current_caller()
        found = await self._domain.checkpoint_sources.find(
            name, None if caller.is_pod else caller.project
        )
        return scheduler_pb2.LocateCheckpointResponse(trainer_address=found.trainer_address)

    async def UpdateTrainingRun(
        self, request: scheduler_pb2.UpdateTrainingRunRequest, context: Context
    ) -> scheduler_pb2.TrainingRun:
        """Change how long the past of a run is kept."""
        name = _own_run(request.name)
        history_retention_s = codec.decode_run_update(
            request, max_history_s=self._config.max_history_retention_s
        )
        return self._encode_run(
            await self._domain.retention.change(name, history_retention_s, current_caller())
        )

    async def FinishTrainingRun(
        self, request: scheduler_pb2.FinishTrainingRunRequest, context: Context
    ) -> scheduler_pb2.TrainingRun:
        """Note that the training of a run is done."""
        name = _own_run(request.run, "run")
        number = codec.decode_last_operation(request)
        run = await self._domain.training_ends.finish(name, number, current_caller())
        return self._encode_run(run)

    async def ReopenTrainingRun(
        self, request: scheduler_pb2.ReopenTrainingRunRequest, context: Context
    ) -> scheduler_pb2.TrainingRun:
        """Note that the training of a run goes on."""
        name = _own_run(request.run, "run")
        session = _own_session(request.session, "session")
        run = await self._domain.training_ends.reopen(name, session, current_caller())
        return self._encode_run(run)

    async def DeleteTrainingRun(
        self, request: scheduler_pb2.DeleteTrainingRunRequest, context: Context
    ) -> scheduler_pb2.TrainingRun:
        """Delete a run."""
        name = _own_run(request.name)
        return self._encode_run(await self._domain.runs.delete(name, current_caller()))

    async def ListAuditEvents(
        self, request: scheduler_pb2.ListAuditEventsRequest, context: Context
    ) -> scheduler_pb2.ListAuditEventsResponse:
        """List what was done to the resources of a project."""
        project = parse_name(ProjectName, request.parent, "parent").project
        page = codec.decode_page(request.page_size, request.page_token)
        events, next_page_token = await self._domain.audit.list(
            current_caller(), project, codec.decode_window(request), page
        )
        return scheduler_pb2.ListAuditEventsResponse(
            events=[codec.encode_audit_event(event) for event in events],
            next_page_token=next_page_token,
        )

    def _encode_session(self, session: Session) -> scheduler_pb2.Session:
        return codec.encode_session(
            session,
            heartbeat_interval_s=self._config.heartbeat_interval_s,
            timeout_s=self._config.session_timeout_s,
        )

    def _encode_run(self, run: Run) -> scheduler_pb2.TrainingRun:
        return codec.encode_run(
            run,
            trainer_address=self._domain.workers.trainer_address(run),
            checkpoint_address=self._domain.workers.ledger_address(run),
            waiting_for=self._waiting_for(run),
        )

    def _waiting_for(self, run: Run) -> str:
        if run.state is RunState.CREATING:
            return self._domain.creations.waiting_for(run.name)
        if run.state is RunState.MOVING:
            return self._domain.moves.waiting_for(run.name)
        return ""

    def _encode_new_run(self, run: Run) -> operations_pb2.Operation:
        return codec.encode_creation(
            run,
            trainer_address="",
            checkpoint_address="",
            waiting_for=self._domain.creations.waiting_for(run.name),
            closed=run_closed(run),
        )


def _caller_of_project(project: str) -> Caller:
    """Return the caller, which belongs to a project."""
    caller = current_caller()
    caller.require_project(
        project, lambda: NotFoundError(f"project {project} does not exist", project=project)
    )
    return caller


def _reach_of(caller: Caller) -> Reach | None:
    """Return whose workers a caller may use; None for a pod, which sees all."""
    return None if caller.is_pod else Reach(caller.project, caller.pool)


def _own_session(value: str, field: str) -> SessionName:
    name = parse_name(SessionName, value, field)
    current_caller().require_project(name.project, lambda: session_not_found(name))
    return name


def _own_run(value: str, field: str = "name") -> RunName:
    name = parse_name(RunName, value, field)
    current_caller().require_project(name.project, lambda: run_not_found(name))
    return name
