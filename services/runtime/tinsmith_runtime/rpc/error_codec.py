"""Typed errors to `google.rpc.Status`, the one form in which an error leaves a pod.

Used for the status of a failed call and for `Operation.error`, so that a client decodes both alike.
"""

from __future__ import annotations

import math

from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from tinsmith.rpc.error_codec import decode_details
from tinsmith_runtime.errors import (
    InternalError,
    ResourceExhaustedError,
    TinsmithError,
)

_BASE_CLASSES: dict[int, type[TinsmithError]] = {
    base.code.value: base for base in TinsmithError.__subclasses__()
}

# gRPC drops a status whose trailers are over 8 KiB, and its meaning with it. A text may be in there
# four times, and is written as base64.
_MAX_TEXT_BYTES = 1000
_MAX_VIOLATIONS = 2


def internal_error() -> InternalError:
    """Return what a caller may learn of a bug: nothing but where to look."""
    return InternalError("internal error; the log of the pod has the trace")


def encode_status(error: TinsmithError, *, domain: str) -> status_pb2.Status:
    """Return the wire form of an error.

    Args:
        error: What happened.
        domain: The pod that raised it, such as `trainer.tinsmith`.

    Returns:
        A status whose details begin with `ErrorInfo`, followed by `BadRequest`, `QuotaFailure` and
        `RetryInfo` where they apply.
    """
    message = _bounded(error.message)
    status = status_pb2.Status(code=error.code.value, message=message)
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=domain,
        metadata={key: _bounded(value) for key, value in error.metadata.items()},
    )
    status.details.add().Pack(info)
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.violations[:_MAX_VIOLATIONS]:
            bad_request.field_violations.add(
                field=_bounded(violation.field), description=_bounded(violation.description)
            )
        status.details.add().Pack(bad_request)
    if isinstance(error, ResourceExhaustedError):
        quota = error_details_pb2.QuotaFailure()
        quota.violations.add(subject=error.reason, description=message)
        status.details.add().Pack(quota)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_after_s))
        status.details.add().Pack(retry)
    return status


def decode_status(status: status_pb2.Status) -> TinsmithError:
    """Return the error that a status was made from: an instance of the base class of its code.

    The exact class is not known here; compare `reason` to tell one meaning from another.
    """
    details = decode_details(status)
    error = _BASE_CLASSES.get(status.code, InternalError)(status.message)
    error.retry_after_s = details.retry_after_s
    error.violations = details.violations
    error.metadata = details.metadata
    error.reason = details.reason or "INTERNAL"
    return error


def _bounded(text: str) -> str:
    """Return a text of bounded size in UTF-8, since a message may quote what a client sent."""
    encoded = text.encode()
    if len(encoded) <= _MAX_TEXT_BYTES:
        return text
    return encoded[:_MAX_TEXT_BYTES].decode(errors="ignore") + "..."


def _duration(seconds: float) -> duration_pb2.Duration:
    fraction, whole = math.modf(seconds)
    return duration_pb2.Duration(seconds=int(whole), nanos=int(fraction * 1e9))
