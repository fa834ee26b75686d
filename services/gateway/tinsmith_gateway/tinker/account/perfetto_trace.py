"""The timeline of a session as a trace that https://ui.perfetto.dev opens.

Chrome's JSON form of it: one track for each run and each sampling session, one slice for each
operation from its acceptance to its end. It holds times and kinds, and nothing of what was trained
or sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf import timestamp_pb2
from starlette.responses import JSONResponse, Response

from tinsmith.rpc.lists import pages
from tinsmith.v1 import scheduler_pb2, trainer_pb2
from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.tinker.account.downloads import DOWNLOADS_PATH, Downloads
from tinsmith_gateway.tinker.promises.future_store import FutureStore, Span
from tinsmith_gateway.tinker.wire import ids
from tinsmith_gateway.tinker.wire.contract_calls import Native, user_native
from tinsmith_gateway.upstream.routing import OPERATIONS_SERVICE

_PROCESS = 1
_TRACE = "trace"


class Traces:
    """The endpoints of traces."""

    def __init__(self, store: FutureStore, downloads: Downloads) -> None:
        self._store = store
        self._downloads = downloads

    async def export(self, call: Call) -> Response:
        """Say where the trace of a session can be fetched; it is made when it is."""
        native = user_native(call)
        session = await _session(native, call.request.path_params["session_id"])
        link = self._downloads.link(call, f"{DOWNLOADS_PATH}/traces", _TRACE, session.name)
        return JSONResponse({"status": "ready", "url": link})

    async def fetch(self, call: Call) -> Response:
        """Return the trace of a session to the holder of its link."""
        [name] = await self._downloads.opened(call.request.path_params["link"], _TRACE)
        project, session_id = name.split("/")[1], name.split("/")[3]
        native = Native(call.services, call.services.callers.for_pods(project))
        session = await _session(native, session_id)
        events: list[dict[str, Any]] = []
        for track, run in enumerate(session.training_runs):
            spans = [_span(one) for one in await _operations(native, run)]
            events += _track(track, ids.model_id_of(run), spans)
        for track, handle in enumerate(session.sampling_sessions, len(session.training_runs)):
            spans = await self._store.spans(handle)
            events += _track(track, handle.rpartition("/")[2], spans)
        return Response(json.dumps({"traceEvents": events}), media_type="application/json")


def _track(track: int, name: str, spans: Iterable[Span]) -> list[dict[str, Any]]:
    place = {"pid": _PROCESS, "tid": track}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "args": {"name": name}, **place}
    ]
    for span in spans:
        # Spans of a track overlap, so each is an asynchronous one of its own.
        slice_ = {"cat": span.kind, "name": span.kind, "id": span.id, **place}
        events.append({"ph": "b", "ts": span.begin_s * 1e6, **slice_})
        if span.end_s is not None:
            events.append({"ph": "e", "ts": span.end_s * 1e6, **slice_})
    return events


async def _session(native: Native, session_id: str) -> scheduler_pb2.Session:
    request = scheduler_pb2.GetSessionRequest(name=ids.session_name(native.project, session_id))
    found: scheduler_pb2.Session = await native.scheduler(
        "GetSession", request, scheduler_pb2.Session
    )
    return found


async def _operations(native: Native, run: str) -> list[operations_pb2.Operation]:
    listed = pages(
        lambda each: native.call(
            OPERATIONS_SERVICE, "ListOperations", each, operations_pb2.ListOperationsResponse
        ),
        operations_pb2.ListOperationsRequest(name=run),
    )
    return [operation async for page in listed for operation in page.operations]


def _span(operation: operations_pb2.Operation) -> Span:
    metadata = trainer_pb2.OperationMetadata()
    operation.metadata.Unpack(metadata)
    end_s = _seconds(metadata.finish_time) if metadata.HasField("finish_time") else None
    return Span(operation.name, metadata.kind, _seconds(metadata.submit_time), end_s)


def _seconds(stamp: timestamp_pb2.Timestamp) -> float:
    return stamp.seconds + stamp.nanos / 1e9
