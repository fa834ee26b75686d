"""Exceptions to `google.rpc.Status` and back: the one codec, for the SDK and for pods.

A status is that of a failed call, or `Operation.error`. Its details carry reason, metadata, time of
a retry and the fields that are wrong. Which class an error has when it is read is decided by its
code; the reason tells one meaning from another.
"""

from __future__ import annotations

import grpc
from google.protobuf import message as protobuf_message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from tinsmith.addresses import host_of, proxy_of
from tinsmith.errors import (
    CLASSES,
    ErrorCode,
    FieldViolation,
    ResourceExhaustedError,
    TinsmithError,
    UnavailableError,
    UnknownError,
)
from tinsmith.rpc.durations import decode_duration, encode_duration

_NOT_CONNECTED = "failed to connect to all addresses"

# gRPC drops a status whose trailers are over 8 KiB, and its meaning with it. A text may be in there
# four times, and is written as base64.
_MAX_TEXT_BYTES = 1000
_MAX_VIOLATIONS = 2


def encode_code(code: ErrorCode) -> int:
    """Return the number that a status code has on the wire."""
    number: int = code_pb2.Code.Value(code.name)
    return number


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
    status = status_pb2.Status(code=encode_code(error.code), message=message)
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=domain,
        metadata={key: _bounded(value) for key, value in error.metadata.items()},
    )
    status.details.add().Pack(info)
    if error.field_violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.field_violations[:_MAX_VIOLATIONS]:
            bad_request.field_violations.add(
                field=_bounded(violation.field), description=_bounded(violation.description)
            )
        status.details.add().Pack(bad_request)
    if isinstance(error, ResourceExhaustedError):
        quota = error_details_pb2.QuotaFailure()
        quota.violations.add(subject=error.reason, description=message)
        status.details.add().Pack(quota)
    if error.retry_after_s is not None:
        delay = encode_duration(error.retry_after_s)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def decode_status(status: status_pb2.Status) -> TinsmithError:
    """Return the exception of a status; details of types that we do not send are left out.

    A delay is known only if the status has one, whatever the class has by default.
    """
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad_request = error_details_pb2.BadRequest()
    for detail in status.details:
        any(detail.Unpack(message) for message in (info, retry, bad_request))
    known = code_pb2.Code.Name(status.code) if status.code in code_pb2.Code.values() else "UNKNOWN"
    error = _class_of(known)(
        status.message or known,
        reason=info.reason or None,
        field_violations=[
            FieldViolation(violation.field, violation.description)
            for violation in bad_request.field_violations
        ],
    )
    error.metadata = dict(info.metadata)
    has_delay = retry.HasField("retry_delay")
    error.retry_after_s = decode_duration(retry.retry_delay) if has_delay else None
    return error


def status_of(error: grpc.RpcError) -> status_pb2.Status | None:
    """Return the status that a server made of a failed call; None if the transport failed it."""
    try:
        found: status_pb2.Status | None = rpc_status.from_call(error)
    except (ValueError, protobuf_message.DecodeError):
        # The transport replaced the code of a status that it could not pass whole.
        return None
    return found


def decode_rpc_error(
    error: grpc.aio.AioRpcError, *, address: str = "", server: str = ""
) -> TinsmithError:
    """Return the exception of a failed call.

    Args:
        error: What grpc raised.
        address: Where the call went; named in errors that no Tinsmith server wrote.
        server: The address that the user gave, which is named as well where the call went to a pod.
    """
    status = status_of(error)
    if status is not None:
        return decode_status(status)
    code, text = error.code(), error.details() or ""
    if address and code is grpc.StatusCode.UNAVAILABLE and _NOT_CONNECTED in text:
        proxy = proxy_of(address)
        named = address if server in ("", address) else f"{server} (its pod {address})"
        found: TinsmithError = UnavailableError(
            f"no server answers at {named}: {text.rpartition(': ')[2]}"
            if proxy is None
            else f"no server answers at {address} through {proxy[0]}={proxy[1]}:"
            f" {text.rpartition(': ')[2]}; if it is reached directly, export"
            f" no_proxy={host_of(address)}"
        )
    else:
        kind = UnavailableError if _is_broken_stream(code, text) else _class_of(code.name)
        where = f"{address}: " if address else ""
        found = kind(f"{where}{text or code.name}")
    found.retry_after_s = None
    return found


def _class_of(code: str) -> type[TinsmithError]:
    return CLASSES[ErrorCode(code)] if code in CLASSES else UnknownError


def _is_broken_stream(code: grpc.StatusCode, text: str) -> bool:
    """Say whether grpc reports a connection that died under the call as something else."""
    return code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and (
        "RST_STREAM" in text or "Stream removed" in text or "GOAWAY" in text
    )


def _bounded(text: str) -> str:
    """Return a text of bounded size in UTF-8, since a message may quote what a client sent."""
    encoded = text.encode()
    if len(encoded) <= _MAX_TEXT_BYTES:
        return text
    return encoded[:_MAX_TEXT_BYTES].decode(errors="ignore") + "..."
