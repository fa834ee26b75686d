"""The audit trail: actions on the keys, sessions and runs of a project, each with its caller.

Each action is recorded by the transaction that makes it, so that the trail is complete and true. A
repeat that changes nothing is not an action, nor is a change without a caller, such as a session
that loses its heartbeat. Actions on checkpoints are recorded in the ledger of the trainers.
"""

from __future__ import annotations

import sqlalchemy as sa

from tinsmith_runtime.records import AuditEvent
from tinsmith_runtime.rpc.auth import Caller
from tinsmith_runtime.rpc.requests import decode_page_token, encode_page_token
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.auth.api_keys import Keys
from tinsmith_scheduler.store.records import PageRequest, TimeWindow
from tinsmith_scheduler.store.tables import audit

_EVENT = [audit.c[name] for name in ("serial", "time_s", "key_id", "action", "resource")]


class AuditTrail:
    """The audit events of all projects.

    Args:
        database: Where they are kept.
        keys: Says which callers manage a project.
    """

    def __init__(self, database: Database, *, keys: Keys) -> None:
        self._database = database
        self._keys = keys

    async def list(
        self, caller: Caller, project: str, window: TimeWindow, page: PageRequest
    ) -> tuple[list[AuditEvent], str]:
        """Return events of a project, oldest first, and the token that goes on.

        Raises:
            RoleMissingError: If the caller does not manage the project.
            InvalidFieldError: If the page token is not one of this list.
        """
        self._keys.require_manager(caller, project)
        list_name = f"projects/{project}/auditEvents"
        after = decode_page_token(list_name, page.token)
        query = (
            sa.select(*_EVENT)
            .where(audit.c.project == project)
            .order_by(audit.c.serial)
            .limit(page.size + 1)
        )
        if after is not None:
            query = query.where(audit.c.serial > after)
        if window.start_s is not None:
            query = query.where(audit.c.time_s >= window.start_s)
        if window.end_s is not None:
            query = query.where(audit.c.time_s < window.end_s)
        found = await self._database.read(
            lambda connection: [AuditEvent(**row._mapping) for row in connection.execute(query)]
        )
        shown = found[: page.size]
        more = len(found) > len(shown)
        return shown, encode_page_token(list_name, shown[-1].serial) if more else ""
