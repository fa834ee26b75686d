"""The audit trail of checkpoints: which key published, changed, copied, fetched or deleted one.

A change is recorded by the transaction that makes it, in the ledger. A grant of a download changes
no row, so its event is a write of its own, which is durable before the grant is given. Only the
owner does any of this: what other projects read of a published checkpoint is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tinsmith_runtime.errors import RoleMissingError
from tinsmith_runtime.ledger import CheckpointRecord, Ledger
from tinsmith_runtime.records import AuditEvent
from tinsmith_runtime.rpc.auth import Caller
from tinsmith_runtime.rpc.permissions import KeyRole
from tinsmith_runtime.rpc.requests import decode_position_token, encode_position_token, parse_serial


@dataclass(frozen=True, kw_only=True, slots=True)
class EventQuery:
    """Which events are asked for.

    Attributes:
        start_s: Leaves out what happened before; None for nothing.
        end_s: Leaves out what happened then or later; None for nothing.
    """

    project: str
    page_size: int
    page_token: str
    start_s: float | None
    end_s: float | None


class AuditTrail:
    """The events of all checkpoints.

    Args:
        ledger: Where they are kept.
        clock: Seconds since the epoch.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._clock = clock

    async def note_download(self, resource: str, checkpoint: CheckpointRecord, key_id: str) -> None:
        """Record a permission to fetch the files of a checkpoint, or of an export of it."""
        await self._ledger.record_event(
            AuditEvent(
                time_s=self._clock(),
                key_id=key_id,
                action="download_checkpoint",
                resource=resource,
                checkpoint_kind=checkpoint.kind,
            )
        )

    async def list(self, caller: Caller, query: EventQuery) -> tuple[list[AuditEvent], str]:
        """Return events of a project, oldest first, and the token that goes on.

        Raises:
            RoleMissingError: If the caller does not manage the project.
            InvalidFieldError: If the page token is not one of this list.
        """
        caller.require_role(KeyRole.ADMIN)
        if caller.project != query.project:
            raise RoleMissingError(
                f"the checkpoints of project {query.project} are managed by its own admins",
                key_id=caller.key_id,
            )
        list_name = f"projects/{query.project}/checkpointEvents"
        position = decode_position_token(list_name, query.page_token)
        found = await self._ledger.list_events(
            query.project,
            limit=query.page_size + 1,
            after=None if position is None else (position[0], parse_serial(position[1])),
            start_s=query.start_s,
            end_s=query.end_s,
        )
        shown = found[: query.page_size]
        if len(found) == len(shown):
            return shown, ""
        last = shown[-1]
        return shown, encode_position_token(list_name, last.time_s, str(last.serial))
