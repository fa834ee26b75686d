"""What can go wrong, as exceptions: one class for each status code, with reason and remedy.

A failed call and a failed operation carry the same `google.rpc.Status`, which `rpc.error_codec`
decodes to these classes. Nothing here knows a transport, so pods share `FieldViolation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tinsmith.error_hints import REMEDIES


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that is wrong, and why."""

    field: str
    description: str


class TinsmithError(Exception):
    """Base of everything that the SDK raises. `str()` is one line: what happened and the remedy.

    Attributes:
        message: What happened, to which resource.
        code: Canonical status code, such as `NOT_FOUND`.
        reason: Why, as `errors.proto` lists it, such as `RUN_NOT_FOUND`.
        metadata: The values that the message quotes.
        retry_after_s: When the same request may succeed; None if the server did not say.
        field_violations: The fields of the request that are wrong.
        remedy: What to do about it; empty if the message says all.
    """

    code: str = "UNKNOWN"
    default_reason: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        code: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        field_violations: Sequence[FieldViolation] = (),
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = " ".join(message.split())
        self.reason = reason or self.default_reason
        if code is not None:
            self.code = code
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s
        self.field_violations = tuple(field_violations)
        self.remedy = REMEDIES.get(self.reason, "") if remedy is None else remedy

    def __str__(self) -> str:
        label = f" ({self.reason})" if self.reason else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.message}{label}{remedy}"


class ConfigurationError(TinsmithError, ValueError):
    """A setting of the client is missing or wrong."""

    code = "INVALID_ARGUMENT"


class ClientClosedError(TinsmithError):
    """The client was closed before, or while, the call ran."""

    code = "CANCELLED"


class OperationTimeoutError(TinsmithError, TimeoutError):
    """A result did not arrive in the time given; the operation itself goes on."""

    code = "DEADLINE_EXCEEDED"


class RunUndeliverableError(TinsmithError):
    """An earlier operation of the run could not be delivered, so nothing after it can run."""

    code = "UNAVAILABLE"


class CancelledError(TinsmithError):
    """The server gave the call up."""

    code = "CANCELLED"


class UnknownError(TinsmithError):
    """The server failed in a way that it does not name."""

    code = "UNKNOWN"


class InvalidArgumentError(TinsmithError):
    """The request is wrong whatever the state of the service."""

    code = "INVALID_ARGUMENT"
    default_reason = "INVALID_FIELD"


class DeadlineExceededError(TinsmithError):
    """The server did not answer in time."""

    code = "DEADLINE_EXCEEDED"
    default_reason = "DEADLINE_EXCEEDED"


class NotFoundError(TinsmithError):
    """The resource does not exist in the caller's project."""

    code = "NOT_FOUND"
    default_reason = "RESOURCE_NOT_FOUND"


class AlreadyExistsError(TinsmithError):
    """A resource of this name exists."""

    code = "ALREADY_EXISTS"
    default_reason = "RESOURCE_ALREADY_EXISTS"


class PermissionDeniedError(TinsmithError):
    """The key may not do this."""

    code = "PERMISSION_DENIED"
    default_reason = "ROLE_MISSING"


class ResourceExhaustedError(TinsmithError):
    """A limit was reached; `retry_after_s` is set only if waiting may help."""

    code = "RESOURCE_EXHAUSTED"


class FailedPreconditionError(TinsmithError):
    """The request is right, the state is not; a retry alone does not help."""

    code = "FAILED_PRECONDITION"


class AbortedError(TinsmithError):
    """The request lost a race."""

    code = "ABORTED"
    default_reason = "ABORTED"


class UnimplementedError(TinsmithError):
    """The server does not have this method."""

    code = "UNIMPLEMENTED"


class InternalError(TinsmithError):
    """A bug of the service."""

    code = "INTERNAL"
    default_reason = "INTERNAL"


class UnavailableError(TinsmithError):
    """The service cannot answer now."""

    code = "UNAVAILABLE"
    default_reason = "UNAVAILABLE"


class DataLossError(TinsmithError):
    """Stored data is damaged."""

    code = "DATA_LOSS"
    default_reason = "DATA_LOSS"


class UnauthenticatedError(TinsmithError):
    """The key is missing, unknown or revoked."""

    code = "UNAUTHENTICATED"


CLASSES: dict[str, type[TinsmithError]] = {
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
