"""Sessions: opened, kept alive, ended, listed and searched."""

from __future__ import annotations

import datetime
from typing import Any

from starlette.responses import JSONResponse, Response

from tinsmith.rpc.lists import pages
from tinsmith.v1 import scheduler_pb2
from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.tinker.wire import bodies, ids, query_parameters
from tinsmith_gateway.tinker.wire.contract_calls import (
    Native,
    encode_labels,
    iso_time,
    user_labels,
    user_native,
)
from tinsmith_runtime.errors import (
    FailedPreconditionError,
    InvalidFieldError,
    NotFoundError,
    TinsmithError,
)

_TAGS_LABEL = "tinsmith.tags"
_GONE = 410
_SESSION_ENDED = frozenset({"SESSION_FINISHED", "SESSION_NOT_FOUND"})
_Session = scheduler_pb2.Session


class Sessions:
    """The endpoints of sessions."""

    async def create(self, call: Call) -> Response:
        """Open a session."""
        body = await call.parse(bodies.CreateSession)
        native = user_native(call)
        _check_project(native, body.project_id)
        labels = encode_labels(body.user_metadata)
        if body.tags:
            labels |= encode_labels({_TAGS_LABEL: ",".join(body.tags)}, "tags")
        request = scheduler_pb2.CreateSessionRequest(
            parent=f"projects/{native.project}",
            request_id=ids.random_request_id(),
            display_name=body.display_name or "",
            labels=labels,
            client_version=f"tinker/{body.sdk_version}",
        )
        session = await native.scheduler("CreateSession", request, _Session)
        return JSONResponse({"type": "create_session", "session_id": _id(session.name)})

    async def heartbeat(self, call: Call) -> Response:
        """Keep a session alive; 410 once it has ended, at which the SDK stops."""
        body = await call.parse(bodies.SessionHeartbeat)
        native = user_native(call)
        request = scheduler_pb2.HeartbeatSessionRequest(
            session=ids.session_name(native.project, body.session_id)
        )
        try:
            await native.scheduler("HeartbeatSession", request, _Session)
        except TinsmithError as error:
            if error.reason in _SESSION_ENDED:
                return JSONResponse(
                    {"error": error.message, "detail": error.message}, status_code=_GONE
                )
            raise
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, call: Call) -> Response:
        """End a session; the first reason counts."""
        body = await call.parse(bodies.FinishSession)
        native = user_native(call)
        request = scheduler_pb2.FinishSessionRequest(
            session=ids.session_name(native.project, call.request.path_params["session_id"]),
            outcome=body.reason.type,
        )
        await native.scheduler("FinishSession", request, _Session)
        return JSONResponse({})

    async def get(self, call: Call) -> Response:
        """Describe a session."""
        session = await self._get(call)
        return JSONResponse(
            {
                "training_run_ids": [ids.model_id_of(run) for run in session.training_runs],
                "sampler_ids": [_id(name) for name in session.sampling_sessions],
                "user_metadata": user_labels(session.labels, hidden=(_TAGS_LABEL,)),
                "display_name": session.display_name or None,
            }
        )

    async def list(self, call: Call) -> Response:
        """List sessions, newest first."""
        page = query_parameters.page(call.request)
        sessions = await _all_sessions(user_native(call))
        return JSONResponse({"sessions": [_id(one.name) for one in page.cut(sessions)]})

    async def assign_project(self, call: Call) -> Response:
        """Move a session to a project: the one that it is in, since a key is of one project."""
        body = await call.parse(bodies.SessionProject)
        await self._get(call)
        _check_project(user_native(call), body.project_id)
        return JSONResponse({})

    async def search(self, call: Call) -> Response:
        """Search sessions, newest first."""
        body = await call.parse(bodies.SearchSessions)
        native = user_native(call)
        if any(project != native.project for project in body.project_ids or []):
            raise NotFoundError(
                f"no project but {native.project} can be searched with this key",
                project=native.project,
            )
        found = [one for one in await _all_sessions(native) if _matches(one, body)]
        if body.cursor is not None:
            begin = _position(body.cursor)
            found = [one for one in found if _order(one) < begin]
        shown = found[: body.limit]
        summaries = [await _summary(native, one) for one in shown]
        cursor = None
        if len(found) > len(shown):
            last = shown[-1]
            cursor = {
                "last_created_at": iso_time(last.create_time),
                "last_session_id": _id(last.name),
            }
        return JSONResponse({"sessions": summaries, "next_cursor": cursor})

    async def _get(self, call: Call) -> scheduler_pb2.Session:
        native = user_native(call)
        name = ids.session_name(native.project, call.request.path_params["session_id"])
        session: scheduler_pb2.Session = await native.scheduler(
            "GetSession", scheduler_pb2.GetSessionRequest(name=name), _Session
        )
        return session


async def _all_sessions(native: Native) -> list[scheduler_pb2.Session]:
    request = scheduler_pb2.ListSessionsRequest(parent=f"projects/{native.project}")
    listed = pages(
        lambda each: native.scheduler("ListSessions", each, scheduler_pb2.ListSessionsResponse),
        request,
    )
    return [session async for page in listed for session in page.sessions]


def _matches(session: scheduler_pb2.Session, body: bodies.SearchSessions) -> bool:
    """Return whether a session is searched for: by id or name if given, and all the rest."""
    labels = dict(session.labels)
    if any(labels.get(key) != value for key, value in body.user_metadata.items()):
        return False
    if body.statuses is not None and not any(
        _has_status(session, status) for status in body.statuses
    ):
        return False
    if body.session_id is None and body.display_name is None:
        return True
    name = session.display_name.lower()
    is_named = body.display_name is not None and all(
        word in name for word in body.display_name.lower().split()
    )
    return is_named or (body.session_id is not None and _id(session.name) == body.session_id)


def _has_status(session: scheduler_pb2.Session, status: bodies.StatusQuery) -> bool:
    match status.type:
        case "active":
            return session.state == _Session.STATE_ACTIVE
        case "client_finished":
            is_finished = session.state == _Session.STATE_FINISHED
            return is_finished and (status.reasons is None or session.outcome in status.reasons)
        case "failed" | "cancelled":
            return False
    raise InvalidFieldError("statuses.type", f"is no status: {status.type[:64]!r}")


async def _summary(native: Native, session: scheduler_pb2.Session) -> dict[str, Any]:
    whole: scheduler_pb2.Session = await native.scheduler(
        "GetSession", scheduler_pb2.GetSessionRequest(name=session.name), _Session
    )
    checkpoints = [
        checkpoint for run in whole.training_runs for checkpoint in await native.checkpoints(run)
    ]
    return {
        "session_id": _id(session.name),
        "created_at": iso_time(session.create_time),
        "owner": native.project,
        "project_id": native.project,
        "status": _status(session),
        "checkpoints_count": len(checkpoints),
        "display_name": session.display_name or None,
        "user_metadata": user_labels(session.labels, hidden=(_TAGS_LABEL,)),
        "checkpoint_storage_bytes": sum(checkpoint.size_bytes for checkpoint in checkpoints),
    }


def _status(session: scheduler_pb2.Session) -> dict[str, Any] | None:
    if session.state == _Session.STATE_ACTIVE:
        return {"type": "active"}
    if session.state == _Session.STATE_FINISHED:
        reason = session.outcome if session.outcome in ("errored", "interrupted") else "success"
        return {"type": "client_finished", "reason": {"type": reason}}
    return None


def _order(session: scheduler_pb2.Session) -> tuple[float, str]:
    stamp = session.create_time
    return stamp.seconds + stamp.nanos / 1e9, _id(session.name)


def _position(cursor: bodies.SearchCursor) -> tuple[float, str]:
    try:
        seconds = datetime.datetime.fromisoformat(cursor.last_created_at).timestamp()
    except (ValueError, OverflowError) as error:
        raise InvalidFieldError("cursor.last_created_at", "is no time") from error
    return seconds, cursor.last_session_id


def _check_project(native: Native, project_id: str | None) -> None:
    if project_id is not None and project_id != native.project:
        raise FailedPreconditionError(
            f"the key is of project {native.project}, not of {project_id[:128]}; use a key of that "
            "project",
            project=native.project,
        )


def _id(name: str) -> str:
    return name.rpartition("/")[2]
