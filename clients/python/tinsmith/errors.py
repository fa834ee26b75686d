"""What can go wrong, as exceptions: one class for each status code, with reason and remedy.

The one tree of errors: the SDK raises these classes, and pods derive theirs from them, in
`tinsmith_runtime.errors`. A class names a meaning, its base the status code. A failed call and a
failed operation carry the same `google.rpc.Status`, for which `rpc.error_codec` is the one codec.
Nothing here knows a transport.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.error_hints import REMEDIES


class ErrorCode(enum.StrEnum):
    """Canonical status codes by the names that `google.rpc.Code` gives them."""

    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    DATA_LOSS = "DATA_LOSS"
    UNAUTHENTICATED = "UNAUTHENTICATED"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that is wrong, and why."""

    field: str
    description: str


class TinsmithError(Exception):
    """Base of everything that the SDK raises and that a pod answers with.

    `str()` is one line: what happened, the reason and the remedy.

    Args:
        message: One sentence: what happened, to which resource.
        reason: Another reason than that of the class.
        retry_after_s: Another time than that of the class.
        field_violations: The fields of the request that are wrong.
        remedy: What to do; that of the reason by default.
        **metadata: Values quoted in the message, kept as strings.

    Attributes:
        message: What happened, to which resource.
        code: Canonical status code, such as `NOT_FOUND`; equal to its name as a string.
        reason: Why, as `errors.proto` lists it, such as `RUN_NOT_FOUND`.
        metadata: The values that the message quotes; `ErrorInfo.metadata` on the wire.
        retry_after_s: When the same request may succeed; None if it is not known to.
        field_violations: The fields of the request that are wrong.
        remedy: What to do about it; empty if the message says all.
    """

    code: ErrorCode = ErrorCode.UNKNOWN
    reason: str = ""
    default_retry_after_s: float | None = None

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        retry_after_s: float | None = None,
        field_violations: Sequence[FieldViolation] = (),
        remedy: str | None = None,
        **metadata: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s
        self.field_violations = tuple(field_violations)
        self.remedy = REMEDIES.get(self.reason, "") if remedy is None else remedy
        self.metadata = {key: str(value) for key, value in metadata.items()}

    def __str__(self) -> str:
        label = f" ({self.reason})" if self.reason else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{' '.join(self.message.split())}{label}{remedy}"


class ConfigurationError(TinsmithError, ValueError):
    """A setting of the client is missing or wrong."""

    code = ErrorCode.INVALID_ARGUMENT


class ClientClosedError(TinsmithError):
    """The client was closed before, or while, the call ran."""

    code = ErrorCode.CANCELLED


class OperationTimeoutError(TinsmithError, TimeoutError):
    """A result did not arrive in the time given; the operation itself goes on."""

    code = ErrorCode.DEADLINE_EXCEEDED


class RunUndeliverableError(TinsmithError):
    """An earlier operation of the run could not be delivered, so nothing after it can run."""

    code = ErrorCode.UNAVAILABLE


class CancelledError(TinsmithError):
    """The server gave the call up."""

    code = ErrorCode.CANCELLED


class UnknownError(TinsmithError):
    """The server failed in a way that it does not name."""

    code = ErrorCode.UNKNOWN


class InvalidArgumentError(TinsmithError):
    """The request is wrong whatever the state of the service."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "INVALID_FIELD"


class DeadlineExceededError(TinsmithError):
    """The server did not answer in time."""

    code = ErrorCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class NotFoundError(TinsmithError):
    """The named resource does not exist, or belongs to another project."""

    code = ErrorCode.NOT_FOUND
    reason = "RESOURCE_NOT_FOUND"


class AlreadyExistsError(TinsmithError):
    """A resource of this name exists."""

    code = ErrorCode.ALREADY_EXISTS
    reason = "RESOURCE_ALREADY_EXISTS"


class PermissionDeniedError(TinsmithError):
    """The key may not do this."""

    code = ErrorCode.PERMISSION_DENIED
    reason = "ROLE_MISSING"


class ResourceExhaustedError(TinsmithError):
    """A limit was reached; `retry_after_s` is set only if waiting may help."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    reason = "LIMIT_EXCEEDED"


class FailedPreconditionError(TinsmithError):
    """The request is right, the state is not; a retry alone does not help."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "WRONG_STATE"


class AbortedError(TinsmithError):
    """The request lost a race."""

    code = ErrorCode.ABORTED
    reason = "ABORTED"


class UnimplementedError(TinsmithError):
    """The server does not have this method."""

    code = ErrorCode.UNIMPLEMENTED
    reason = "METHOD_UNKNOWN"


class InternalError(TinsmithError):
    """A bug of the service: the message carries no internals, the log has the trace."""

    code = ErrorCode.INTERNAL
    reason = "INTERNAL"


class UnavailableError(TinsmithError):
    """The service cannot answer now; the same request may be sent again."""

    code = ErrorCode.UNAVAILABLE
    reason = "UNAVAILABLE"
    default_retry_after_s = 1.0


class DataLossError(TinsmithError):
    """Stored data is damaged."""

    code = ErrorCode.DATA_LOSS
    reason = "DATA_LOSS"


class UnauthenticatedError(TinsmithError):
    """The key is missing, unknown or revoked."""

    code = ErrorCode.UNAUTHENTICATED
    reason = "KEY_INVALID"


CLASSES: dict[ErrorCode, type[TinsmithError]] = {
    kind.code: kind
    for kind in (
        CancelledError,
        UnknownError,
        InvalidArgumentError,
        DeadlineExceededError,
        NotFoundError,
        AlreadyExistsError,
        PermissionDeniedError,
        ResourceExhaustedError,
        FailedPreconditionError,
        AbortedError,
        UnimplementedError,
        InternalError,
        UnavailableError,
        DataLossError,
        UnauthenticatedError,
    )
}
"""The class of each canonical status code that a server answers with."""
