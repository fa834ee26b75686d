"""The client's session: opened or resumed at connect, kept by a heartbeat, finished at close."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping

from tinsmith.errors import TinsmithError
from tinsmith.rpc.event_loop_thread import BackgroundLoop
from tinsmith.rpc.transport import Endpoint, Transport
from tinsmith.v1 import scheduler_pb2

_LOG = logging.getLogger(__name__)

_DEFAULT_HEARTBEAT_S = 10.0
_ENDED_REASONS = frozenset({"SESSION_FINISHED", "SESSION_NOT_FOUND"})


class Session:
    """Keeps one session alive. Runs in the background loop."""

    def __init__(
        self, background: BackgroundLoop, transport: Transport, scheduler: Endpoint
    ) -> None:
        self._background = background
        self._transport = transport
        self._scheduler = scheduler
        self._name = ""
        self._ended: TinsmithError | None = None
        self._heartbeat: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Resource name of the session.

        Raises:
            TinsmithError: If the session ended; what it held was released.
        """
        if self._ended is not None:
            raise self._ended
        return self._name

    async def open(
        self, project: str, *, display_name: str, labels: Mapping[str, str], version: str
    ) -> None:
        """Create the session and begin its heartbeat."""
        request = scheduler_pb2.CreateSessionRequest(
            parent=project,
            request_id=str(uuid.uuid4()),
            display_name=display_name,
            labels=dict(labels),
            client_version=f"tinsmith-python/{version}",
        )
        session = await self._transport.call(
            self._scheduler, lambda c: c.scheduler.CreateSession, request
        )
        self._begin(session)

    async def resume(self, name: str) -> list[scheduler_pb2.ResumedRun]:
        """Go on with a session whose client is gone, and begin its heartbeat; return its runs.

        A run whose trainer is away is waited for, as long as calls are sent again.
        """
        answer = await self._transport.call(
            self._scheduler,
            lambda c: c.scheduler.ResumeSession,
            scheduler_pb2.ResumeSessionRequest(session=name),
        )
        self._begin(answer.session)
        return list(answer.runs)

    def _begin(self, session: scheduler_pb2.Session) -> None:
        self._name = session.name
        interval = session.heartbeat_interval
        interval_s = interval.seconds + interval.nanos / 1e9
        self._heartbeat = self._background.spawn(
            self._keep_alive((interval_s or _DEFAULT_HEARTBEAT_S) / 2)
        )

    async def close(self, outcome: str) -> None:
        """Finish the session; a server that does not answer is let be, the heartbeat ends it."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if not self._name or self._ended is not None:
            return
        request = scheduler_pb2.FinishSessionRequest(session=self._name, outcome=outcome)
        try:
            await self._transport.call_once(
                self._scheduler,
                lambda c: c.scheduler.FinishSession,
                request,
                timeout_s=min(5.0, self._transport.settings.call_timeout_s),
            )
        except TinsmithError as error:
            _LOG.info("session not finished", extra={"session": self._name, "error": str(error)})

    async def _keep_alive(self, interval_s: float) -> None:
        request = scheduler_pb2.HeartbeatSessionRequest(session=self._name)
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self._transport.call(
                    self._scheduler,
                    lambda c: c.scheduler.HeartbeatSession,
                    request,
                    timeout_s=min(max(interval_s, 1.0), self._transport.settings.call_timeout_s),
                )
            except TinsmithError as error:
                if error.reason in _ENDED_REASONS:
                    self._ended = type(error)(
                        f"session {self._name} ended: {error.message}", reason=error.reason
                    )
                    _LOG.error("session ended", extra={"session": self._name})
                    return
                _LOG.warning("heartbeat failed", extra={"error": str(error)})
