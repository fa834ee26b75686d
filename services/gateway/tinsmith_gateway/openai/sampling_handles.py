"""Sampling sessions for callers that have none: one scheduler session for each project in use.

A session is heartbeated while a request uses it, and found out to have ended by the next one that
does; nothing runs for a project that is idle. What ended is created anew: a caller never notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from tinsmith.v1 import scheduler_pb2
from tinsmith_gateway.access.authentication import Credential
from tinsmith_gateway.openai.text.model_names import BaseModel, Checkpoint, LatestWeights, Source
from tinsmith_gateway.upstream.pod_client import Upstream
from tinsmith_gateway.upstream.routing import SCHEDULER_SERVICE
from tinsmith_runtime.errors import NotFoundError, TinsmithError

logger = logging.getLogger(__name__)

_MAX_PROJECTS = 1024
_MAX_SESSIONS = 256
_CLIENT_VERSION = "tinsmith-gateway"
_ENDED = frozenset({"SESSION_FINISHED", "SESSION_NOT_FOUND"})
_UNKNOWN = frozenset(
    {"MODEL_NOT_FOUND", "RUN_NOT_FOUND", "CHECKPOINT_NOT_FOUND", "CHECKPOINT_EXPIRED"}
)


@dataclass(frozen=True, slots=True)
class Handle:
    """What a request samples from.

    Attributes:
        sampling_session: Its resource name.
        base_model: The model whose tokenizer is used.
        chat_template: Of its run; empty if it is that of the base model.
        is_live: Whether the weights are those of a run that may step on.
    """

    sampling_session: str
    base_model: str
    chat_template: str
    is_live: bool

    @classmethod
    def of(cls, session: scheduler_pb2.SamplingSession) -> Handle:
        """Return the handle of a sampling session."""
        return cls(session.name, session.base_model, session.chat_template, bool(session.run))


@dataclass(eq=False, slots=True)
class _ProjectSession:
    name: str
    interval_s: float
    renewed_s: float
    has_ended: bool = False
    is_full: bool = False
    handles: dict[Source, Handle] = field(default_factory=dict)
    credentials: list[Credential] = field(default_factory=list)
    """Of the requests that use it now."""
    heartbeat: asyncio.Task[None] | None = None


_Owner = tuple[str, str]
"""Project and pool: a key of a pool reaches other workers than the rest of its project."""


def _owner_of(credential: Credential) -> _Owner:
    return credential.project, credential.caller.pool


class SamplingHandles:
    """Makes sampling sessions when they are needed, and keeps them.

    Args:
        upstream: Calls the scheduler.
        clock: Monotonic seconds.
    """

    def __init__(self, upstream: Upstream, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._upstream = upstream
        self._clock = clock
        self._sessions: OrderedDict[_Owner, _ProjectSession] = OrderedDict()
        self._locks: dict[_Owner, asyncio.Lock] = {}

    @contextlib.asynccontextmanager
    async def use(self, credential: Credential, sources: Sequence[Source]) -> AsyncIterator[Handle]:
        """Hold what the first source that exists is sampled by, alive while it is held.

        Args:
            credential: Whose session it is.
            sources: What a name may stand for, see `model_names`.

        Raises:
            NotFoundError: If none of them exists.
        """
        session, handle = await self._get(credential, sources)
        session.credentials.append(credential)
        if session.heartbeat is None:
            session.heartbeat = asyncio.create_task(self._keep(session))
        try:
            yield handle
        finally:
            session.credentials.remove(credential)
            if not session.credentials and session.heartbeat is not None:
                session.heartbeat.cancel()
                session.heartbeat = None

    def forget(self, credential: Credential, handle: Handle) -> None:
        """Make a new one next time, as when the sampler does not know it any more."""
        session = self._sessions.get(_owner_of(credential))
        if session is not None:
            session.handles = {
                source: kept for source, kept in session.handles.items() if kept != handle
            }
            # It is unknown because its session ended, more often than not.
            session.renewed_s = -float("inf")

    async def _get(
        self, credential: Credential, sources: Sequence[Source]
    ) -> tuple[_ProjectSession, Handle]:
        async with self._locks.setdefault(_owner_of(credential), asyncio.Lock()):
            missing: TinsmithError | None = None
            session = await self._session(credential)
            for source in sources:
                handle = session.handles.get(source)
                if handle is not None:
                    return session, handle
                try:
                    session, handle = await self._create(credential, session, source)
                except NotFoundError as error:
                    if error.reason not in _UNKNOWN:
                        raise
                    missing = missing or error
                else:
                    return session, handle
            raise missing or NotFoundError("the name stands for no model")

    async def _create(
        self, credential: Credential, session: _ProjectSession, source: Source
    ) -> tuple[_ProjectSession, Handle]:
        try:
            found = await self._create_handle(credential, session, source)
        except TinsmithError as error:
            if error.reason not in _ENDED:
                raise
            session = await self._open(credential)
            found = await self._create_handle(credential, session, source)
        if len(session.handles) >= _MAX_SESSIONS:
            # Sampling sessions end with their session alone: the next request begins another one,
            # and this one ends for want of a heartbeat once its requests have.
            session.is_full = True
        handle = session.handles[source] = Handle.of(found)
        return session, handle

    async def _create_handle(
        self, credential: Credential, session: _ProjectSession, source: Source
    ) -> scheduler_pb2.SamplingSession:
        request = scheduler_pb2.CreateSamplingSessionRequest(
            parent=session.name, request_id=str(uuid.uuid4())
        )
        match source:
            case BaseModel(name):
                request.base_model = name
            case Checkpoint(name):
                request.checkpoint = name
            case LatestWeights(name):
                request.run = name
        return await self._upstream.call(
            SCHEDULER_SERVICE,
            "CreateSamplingSession",
            request,
            scheduler_pb2.SamplingSession,
            credential,
        )

    async def _session(self, credential: Credential) -> _ProjectSession:
        session = self._sessions.get(_owner_of(credential))
        if session is None or session.has_ended or session.is_full:
            return await self._open(credential)
        self._sessions.move_to_end(_owner_of(credential))
        if self._clock() - session.renewed_s > session.interval_s:
            try:
                await self._renew(session, credential)
            except TinsmithError as error:
                if error.reason not in _ENDED:
                    raise
                return await self._open(credential)
        return session

    async def _open(self, credential: Credential) -> _ProjectSession:
        created = await self._upstream.call(
            SCHEDULER_SERVICE,
            "CreateSession",
            scheduler_pb2.CreateSessionRequest(
                parent=credential.project,
                request_id=str(uuid.uuid4()),
                display_name="OpenAI clients of the gateway",
                client_version=_CLIENT_VERSION,
            ),
            scheduler_pb2.Session,
            credential,
        )
        interval_s = created.heartbeat_interval.ToTimedelta().total_seconds() / 2
        session = _ProjectSession(created.name, interval_s, self._clock())
        self._sessions[_owner_of(credential)] = session
        while len(self._sessions) > _MAX_PROJECTS:
            owner, _ = self._sessions.popitem(last=False)
            self._locks.pop(owner, None)
        return session

    async def _renew(self, session: _ProjectSession, credential: Credential) -> None:
        await self._upstream.call(
            SCHEDULER_SERVICE,
            "HeartbeatSession",
            scheduler_pb2.HeartbeatSessionRequest(session=session.name),
            scheduler_pb2.Session,
            credential,
        )
        session.renewed_s = self._clock()

    async def _keep(self, session: _ProjectSession) -> None:
        while not session.has_ended:
            await asyncio.sleep(session.interval_s)
            try:
                await self._renew(session, session.credentials[-1])
            except TinsmithError as error:
                session.has_ended = error.reason in _ENDED
                logger.warning(
                    "heartbeat failed", extra={"session": session.name, "reason": error.reason}
                )
            except Exception:
                logger.exception("heartbeat failed by a bug", extra={"session": session.name})
