"""Calls as spans: the client's end of each, and the metadata by which the other end goes on.

What is asked again and again without an end (heartbeats, long polls, watches) is no span: it would
fill a trace and say nothing.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tinsmith.tracing import spans

_STANDING = frozenset(
    {
        "HeartbeatSession",
        "HeartbeatWorker",
        "HeartbeatEpisode",
        "RegisterWorker",
        "RecordRunMetrics",
        "WaitOperation",
        "WaitOperations",
        "GetOperation",
        "WatchEpisodes",
        "WatchMatch",
        "WatchTrainingJob",
        # A stream for the steps of many episodes; each step is a span of its episode's trace.
        "StepInstances",
        "VerifyKey",
        "Export",
    }
)
"""Methods that are asked again and again."""
_ends: set[asyncio.Task[None]] = set()


def is_standing(path: str) -> bool:
    """Whether a method is asked again and again, so that it has no spans."""
    return path.rpartition("/")[2] in _STANDING


def rpc_attributes(path: str) -> dict[str, spans.Value]:
    """Return what OpenTelemetry's conventions say of a call."""
    service, _, method = path.strip("/").partition("/")
    return {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}


class TracedMethod:
    """A method of a stub whose calls are spans.

    Args:
        method: Of the stub.
        path: `/service/method`.
        begins: Whether its calls begin traces; else they are parts of those that there are.
    """

    def __init__(self, method: Any, path: str, *, begins: bool) -> None:
        self._method = method
        self._path = path
        self._begins = begins
        self._is_standing = is_standing(path)

    def __call__(self, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        """Call, and end the span with the call."""
        if self._is_standing or not spans.is_on():
            return self._method(*args, metadata=metadata, **kwargs)
        if not self._begins and spans.current() is None:
            return self._method(*args, metadata=metadata, **kwargs)
        span = spans.begin(
            self._path.strip("/"), kind="client", attributes=rpc_attributes(self._path)
        )
        own = span.headers()
        names = {name for name, _ in own}
        others = tuple(entry for entry in metadata or () if entry[0] not in names)
        call = self._method(*args, metadata=(*others, *own), **kwargs)
        call.add_done_callback(lambda done: _note_end(span, done))
        return call


def _note_end(span: spans.Span, call: Any) -> None:
    task = asyncio.ensure_future(_end(span, call, time.time()))
    _ends.add(task)
    task.add_done_callback(_ends.discard)


async def _end(span: spans.Span, call: Any, end_s: float) -> None:
    code = (await call.code()).name
    span.set({"rpc.grpc.status_code": code})
    span.end(problem="" if code == "OK" else code, end_s=end_s)
