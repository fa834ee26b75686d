"""What a client asks about its key, its project and the service."""

from __future__ import annotations

import datetime
from typing import Any

from google.protobuf import timestamp_pb2
from starlette.responses import JSONResponse, Response

from tinsmith.rpc.lists import pages
from tinsmith.v1 import audit_pb2, checkpoint_pb2, keys_pb2, scheduler_pb2
from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.tinker.promises import usage
from tinsmith_gateway.tinker.promises.usage import HOUR_S, HourlyUsage, UsageKey
from tinsmith_gateway.tinker.wire import ids
from tinsmith_gateway.tinker.wire.base_models import BaseModels
from tinsmith_gateway.tinker.wire.contract_calls import Native, iso_time, user_native
from tinsmith_gateway.upstream.routing import KEY_SERVICE
from tinsmith_runtime.errors import InvalidFieldError, RoleMissingError

_MAX_WINDOW = datetime.timedelta(days=14)
_DAY = datetime.timedelta(days=1)
_FIRST_YEAR, _LAST_YEAR = 1970, 9999
_GIGABYTE = 10**9
_AUDIT_RESOURCES = {
    "all": "",
    "checkpoints": "checkpoint",
    "projects": "project",
    "teams": "team",
    "organizations": "organization",
}


class Account:
    """The endpoints about keys, models and use.

    Args:
        models: Names of base models.
        usage_: What was used.
        client_config: Merged into the answer of `client/config`.
    """

    def __init__(
        self, models: BaseModels, usage_: HourlyUsage, client_config: dict[str, object]
    ) -> None:
        self._models = models
        self._usage = usage_
        self._client_config = client_config

    async def config(self, call: Call) -> Response:
        """Tell a client how to behave."""
        user_native(call)
        return JSONResponse(
            {
                "pjwt_auth_enabled": False,
                "custom_loss_server_side": False,
                "sample_join_sampling_session": False,
                **self._client_config,
            }
        )

    async def dynamic_config(self, call: Call) -> Response:
        """Tell a client what may change while it runs."""
        user_native(call)
        return JSONResponse(
            {
                "refresh_interval_sec": 300,
                "sample_cancel_enabled": True,
                "sample_cancel_max_batch_size": 64,
            }
        )

    async def telemetry(self, call: Call) -> Response:
        """Take what clients tell of themselves; nothing of it is kept."""
        user_native(call)
        return JSONResponse({"status": "accepted"})

    async def capabilities(self, call: Call) -> Response:
        """List the base models, under all their names."""
        native = user_native(call)
        request = scheduler_pb2.GetCapabilitiesRequest(parent=f"projects/{native.project}")
        found = await native.scheduler("GetCapabilities", request, scheduler_pb2.Capabilities)
        return JSONResponse(
            {
                "supported_models": [
                    {
                        "model_name": name,
                        "max_context_length": served.model.max_context_tokens,
                        "trainable": served.trainable,
                        "sampleable": served.sampleable,
                    }
                    for served in found.models
                    for name in self._models.names(served.model.base_model)
                ]
            }
        )

    async def key(self, call: Call) -> Response:
        """Describe the key of the call."""
        native = user_native(call)
        found = await _own_key(native)
        return JSONResponse(
            {
                # Clients want a number; the id of a key is 12 hexadecimal digits.
                "key_id": int(found.name.rpartition("/")[2], 36),
                "name": found.display_name or found.name,
                "note": "",
                "details": {
                    "org_details": {"id": native.project, "name": native.project},
                    "user_details": {"id": found.name, "name": found.display_name, "email": ""},
                },
            }
        )

    async def delete_key(self, call: Call) -> Response:
        """Revoke the key of the call."""
        native = user_native(call)
        found = await _own_key(native)
        request = keys_pb2.RevokeKeyRequest(name=found.name)
        await native.call(KEY_SERVICE, "RevokeKey", request, keys_pb2.Key)
        return JSONResponse({})

    async def audit(self, call: Call) -> Response:
        """List what was done in the project on a day, oldest first."""
        native = user_native(call)
        kind = call.request.query_params.get("event_type", "all")
        if kind not in _AUDIT_RESOURCES:
            raise InvalidFieldError("event_type", f"must be one of {', '.join(_AUDIT_RESOURCES)}")
        begin = _day(call.request.query_params.get("day"))
        wanted: dict[str, Any] = {
            "parent": f"projects/{native.project}",
            "start_time": _stamp(begin),
            "end_time": _stamp(begin + _DAY),
        }
        of_scheduler = pages(
            lambda request: native.scheduler(
                "ListAuditEvents", request, scheduler_pb2.ListAuditEventsResponse
            ),
            scheduler_pb2.ListAuditEventsRequest(**wanted),
        )
        of_checkpoints = pages(
            lambda request: native.checkpoint_service(
                "ListCheckpointEvents", request, checkpoint_pb2.ListCheckpointEventsResponse
            ),
            checkpoint_pb2.ListCheckpointEventsRequest(**wanted),
        )
        events = [event async for page in of_scheduler for event in page.events]
        events += [event async for page in of_checkpoints for event in page.events]
        events.sort(key=lambda event: (event.time.seconds, event.time.nanos))
        return JSONResponse(
            {
                "entries": [
                    _encode_audit(event)
                    for event in events
                    if _AUDIT_RESOURCES[kind] in event.action
                ]
            }
        )

    async def usage(self, call: Call) -> Response:
        """List what was used through this gateway, by hour."""
        native = user_native(call)
        begin = _hour(call, "starting_on")
        end = _hour(call, "ending_before")
        if not begin < end <= begin + _MAX_WINDOW:
            raise InvalidFieldError(
                "ending_before", "must be after starting_on, and at most 14 days"
            )
        counts = await self._usage.read(
            native.project, begin_s=begin.timestamp(), end_s=end.timestamp()
        )
        sessions = {key.session for key, _ in counts if key.session}
        return JSONResponse(
            {
                "data": [_encode_usage(key, count) for key, count in counts],
                "sessions": {session: {"user_metadata": None} for session in sorted(sessions)},
            }
        )

    async def storage(self, call: Call) -> Response:
        """Say how much the checkpoints of the project take."""
        native = user_native(call)
        wanted = call.request.query_params.get("project_id", native.project)
        if wanted != native.project:
            raise RoleMissingError(f"the key is of project {native.project}")
        checkpoints = await native.checkpoints(f"projects/{native.project}/trainingRuns/-")
        size = sum(checkpoint.size_bytes for checkpoint in checkpoints)
        return JSONResponse(
            {
                "data": [
                    {
                        "project_id": native.project,
                        "checkpoint_count": len(checkpoints),
                        "size_bytes": size,
                        "size_gigabytes": size / _GIGABYTE,
                    }
                ]
            }
        )


async def _own_key(native: Native) -> keys_pb2.Key:
    request = keys_pb2.GetCallerKeyRequest()
    found: keys_pb2.Key = await native.call(KEY_SERVICE, "GetCallerKey", request, keys_pb2.Key)
    return found


def _encode_audit(event: audit_pb2.AuditEvent) -> dict[str, Any]:
    verb, _, noun = event.action.partition("_")
    details = {"resource": event.resource, "key_id": event.key_id}
    if event.checkpoint_kind:
        path = _path_of(event)
        details |= {"tinker_path": str(path), "model_id": path.model_id}
    return {
        "timestamp": iso_time(event.time),
        "event": f"{noun}_{verb}" if noun else verb,
        "event_details": details,
    }


def _path_of(event: audit_pb2.AuditEvent) -> ids.TinkerPath:
    """Return the path of the checkpoint of an event, which may be gone."""
    is_training = event.checkpoint_kind == "training"
    kinds = checkpoint_pb2.Checkpoint
    return ids.path_of(
        checkpoint_pb2.Checkpoint(
            name=event.resource.partition("/exports/")[0],
            kind=kinds.KIND_TRAINING if is_training else kinds.KIND_SAMPLER,
        )
    )


def _encode_usage(key: UsageKey, count: int) -> dict[str, Any]:
    moment = datetime.datetime.fromtimestamp(key.hour_s, tz=datetime.UTC)
    if key.kind == usage.CHECKPOINT:
        info: dict[str, Any] = {"type": "checkpoint", "count": count}
    elif key.kind in (usage.PREFILL, usage.PREFILL_CACHED):
        is_cached = key.kind == usage.PREFILL_CACHED
        info = {"type": "sampling_prefill", "cached": is_cached, "token_count": count}
    else:
        info = {"type": key.kind, "token_count": count}
    return {
        "bucket_start": moment.isoformat(),
        "bucket_end": (moment + datetime.timedelta(seconds=HOUR_S)).isoformat(),
        "base_model": key.base_model or None,
        "session_id": key.session or None,
        "project_id": key.project,
        "event_info": info,
    }


def _day(text: str | None) -> datetime.datetime:
    try:
        day = (
            datetime.datetime.now(tz=datetime.UTC).date()
            if text is None
            else datetime.date.fromisoformat(text)
        )
    except ValueError as error:
        raise InvalidFieldError("day", "must be a date as YYYY-MM-DD") from error
    begin = datetime.datetime.combine(day, datetime.time(), tzinfo=datetime.UTC)
    _check_year(begin, "day")
    return begin


def _hour(call: Call, name: str) -> datetime.datetime:
    text = call.request.query_params.get(name, "")
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidFieldError(name, f"must be a time in ISO 8601, got {text[:64]!r}") from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    _check_year(moment, name)
    if moment.timestamp() % HOUR_S:
        raise InvalidFieldError(name, "must be a whole hour, UTC")
    return moment


def _check_year(moment: datetime.datetime, field: str) -> None:
    # Nearer the ends of what a date can hold, a day more or an hour less is none.
    if not _FIRST_YEAR <= moment.year < _LAST_YEAR:
        raise InvalidFieldError(field, f"must be of a year from {_FIRST_YEAR} to {_LAST_YEAR}")


def _stamp(moment: datetime.datetime) -> timestamp_pb2.Timestamp:
    return timestamp_pb2.Timestamp(seconds=int(moment.timestamp()))
