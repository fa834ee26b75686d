"""Calls on the audit trail of a project, as coroutines of the background loop."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass

from tinsmith.checkpoints.tasks import checkpoint_endpoints
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.durations import encode_optional_time
from tinsmith.rpc.forms import call
from tinsmith.rpc.lists import read_pages
from tinsmith.v1 import audit_pb2, checkpoint_pb2, scheduler_pb2


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One action on a key, a session, a run or a checkpoint."""

    time: datetime.datetime
    action: str
    """Such as `create_key`, `delete_run` or `publish_checkpoint`."""
    resource: str
    """Resource name of what it was done to."""
    key_id: str
    """Key that it was done with; `pod` for a pod of the deployment."""


class AuditCalls:
    """The trail of what was done in a project; read with a key of the role `admin`.

    Example:
        >>> for event in client.audit.list():
        ...     print(event.time, event.action, event.resource, event.key_id)
    """

    def __init__(self, core: ClientCore) -> None:
        self._core = core

    @call
    async def _list(
        self,
        *,
        start_time: datetime.datetime | None = None,
        end_time: datetime.datetime | None = None,
    ) -> list[AuditEvent]:
        """Return what was done, oldest first: to keys, sessions, runs and checkpoints.

        Events of checkpoints are read where those of the project's runs are; see
        `client.checkpoints.list`.

        Args:
            start_time: Leaves out what happened before.
            end_time: Leaves out what happened then or later.

        Returns:
            The events; they are kept for 400 days unless the server is set otherwise.

        Raises:
            PermissionDeniedError: If the client's key may not read them.

        Example:
            >>> deleted = [e for e in client.audit.list() if e.action == "delete_run"]
        """
        start, end = encode_optional_time(start_time), encode_optional_time(end_time)
        of_scheduler = read_pages(
            self._core.transport,
            self._core.scheduler,
            lambda c: c.scheduler.ListAuditEvents,
            scheduler_pb2.ListAuditEventsRequest(
                parent=self._core.project, start_time=start, end_time=end
            ),
        )
        events = {event async for page in of_scheduler for event in _decode(page.events)}
        for endpoint in await checkpoint_endpoints(self._core):
            of_checkpoints = read_pages(
                self._core.transport,
                endpoint,
                lambda c: c.checkpoint.ListCheckpointEvents,
                checkpoint_pb2.ListCheckpointEventsRequest(
                    parent=self._core.project, start_time=start, end_time=end
                ),
            )
            # Trainers that share a ledger tell the same events.
            events |= {event async for page in of_checkpoints for event in _decode(page.events)}
        return sorted(events, key=lambda event: event.time)


def _decode(messages: Iterable[audit_pb2.AuditEvent]) -> list[AuditEvent]:
    return [
        AuditEvent(
            time=message.time.ToDatetime(tzinfo=datetime.UTC),
            action=message.action,
            resource=message.resource,
            key_id=message.key_id,
        )
        for message in messages
    ]
