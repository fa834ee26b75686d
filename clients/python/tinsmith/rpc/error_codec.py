"""`google.rpc.Status` to exceptions: the one decoder, for the SDK and for pods that call pods.

The details of a status carry reason, metadata, time of a retry and the fields that are wrong. Which
class an error has is decided by its code; the reason tells one meaning from another.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf import message as protobuf_message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from tinsmith.errors import (
    CLASSES,
    FieldViolation,
    TinsmithError,
    UnavailableError,
    UnknownError,
)

_DETAILS_KEY = "grpc-status-details-bin"
_NOT_CONNECTED = "failed to connect to all addresses"


@dataclass(frozen=True, slots=True)
class StatusDetails:
    """What the details of a status say.

    Attributes:
        reason: As `errors.proto` lists it; empty if the status has no `ErrorInfo`.
        metadata: The values that the message quotes.
        retry_after_s: When the same request may succeed; None if the server did not say.
        violations: The fields of the request that are wrong.
    """

    reason: str
    metadata: dict[str, str]
    retry_after_s: float | None
    violations: tuple[FieldViolation, ...]


def decode_details(status: status_pb2.Status) -> StatusDetails:
    """Return what the details of a status say; details of other types are left out."""
    reason = ""
    metadata: dict[str, str] = {}
    retry_after_s: float | None = None
    violations: list[FieldViolation] = []
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad_request = error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
        elif detail.Unpack(bad_request):
            violations += [
                FieldViolation(violation.field, violation.description)
                for violation in bad_request.field_violations
            ]
    return StatusDetails(reason, metadata, retry_after_s, tuple(violations))


def decode_status(status: status_pb2.Status) -> TinsmithError:
    """Return the exception of a `google.rpc.Status`."""
    code = code_pb2.Code.Name(status.code) if status.code in code_pb2.Code.values() else "UNKNOWN"
    if code not in CLASSES:
        code = "UNKNOWN"
    details = decode_details(status)
    return CLASSES[code](
        status.message or code,
        reason=details.reason,
        metadata=details.metadata,
        retry_after_s=details.retry_after_s,
        field_violations=details.violations,
    )


def decode_rpc_error(error: grpc.aio.AioRpcError, *, address: str = "") -> TinsmithError:
    """Return the exception of a failed call.

    Args:
        error: What grpc raised.
        address: Where the call went; named in errors that no Tinsmith server wrote.
    """
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return decode_status(status_pb2.Status.FromString(value))
            except protobuf_message.DecodeError:
                break
    code = error.code()
    if (
        address
        and code is grpc.StatusCode.UNAVAILABLE
        and _NOT_CONNECTED in (error.details() or "")
    ):
        cause = (error.details() or "").rpartition(": ")[2]
        return UnavailableError(f"no server answers at {address}: {cause}")
    where = f"{address}: " if address else ""
    kind = CLASSES.get(code.name, UnknownError)
    if _is_broken_stream(error):
        kind = UnavailableError
    return kind(f"{where}{error.details() or code.name}")


def _is_broken_stream(error: grpc.aio.AioRpcError) -> bool:
    """Say whether grpc reports a connection that died under the call as something else."""
    details = error.details() or ""
    return error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and (
        "RST_STREAM" in details or "Stream removed" in details or "GOAWAY" in details
    )
