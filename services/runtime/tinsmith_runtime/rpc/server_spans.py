"""The server's end of a call as a span, and the trace that a metric is an example of."""

from __future__ import annotations

from typing import Any

from tinsmith.rpc.traced_calls import is_standing, rpc_attributes
from tinsmith.tracing import spans


def begin_call(
    service: str, method: str, metadata: Any, *, begins: bool = False
) -> spans.Span | None:
    """Begin the span of a call that is served, and have the current task go on within it.

    Args:
        service: The pod that serves it.
        method: `/service/method`.
        metadata: Of the call.
        begins: Whether a call that is part of no trace begins one.
    """
    if is_standing(method):
        return None
    headers = {str(key): value for key, value in metadata or () if isinstance(value, str)}
    above = spans.received(headers)
    if above is None and not begins:
        return None
    spans.bind_service(service)
    span = spans.begin(
        method.strip("/"),
        kind="server",
        parent=above,
        is_root=above is None,
        attributes=rpc_attributes(method),
    )
    span.enter()
    return span


def end_call(span: spans.Span, code: str) -> None:
    """End the span of a call with its status."""
    span.set({"rpc.grpc.status_code": code})
    span.end(problem="" if code == "OK" else code)


def exemplar_of(span: spans.Span | None) -> dict[str, str] | None:
    """Return the labels by which a metric names a trace; None without one."""
    return None if span is None else {"trace_id": span.trace_id}
