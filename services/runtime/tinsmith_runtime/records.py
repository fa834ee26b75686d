"""Values that more than one pod, or a pod and the ledger, have in common."""

from __future__ import annotations

import enum
from dataclasses import dataclass

HISTORY_RETENTION_S = 25 * 3600.0
"""How long the past of a run is kept after an operation ended, unless the run says longer. An
operation answers a repeated request for as long, of which the contract promises 24 h."""


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What makes a mutating call repeatable.

    Attributes:
        project: The project that the request is about; request ids are unique within it.
        request_id: A UUID in lower case.
        method: Name of the RPC, such as `CreateSession`.
        digest: SHA-256 of the bytes of the request as they came.
    """

    project: str
    request_id: str
    method: str
    digest: bytes


class ReleaseMode(enum.Enum):
    """What becomes of a run on the trainer that gives it up."""

    PARK = "park"
    HAND_OVER = "hand_over"
    DELETE = "delete"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditEvent:
    """One management action.

    Attributes:
        key_id: The key that it was done with; empty if that is not known.
        action: Such as `publish_checkpoint`.
        resource: Name of the resource that it concerns.
        checkpoint_kind: `training` or `sampler`; empty if the resource is no checkpoint.
        serial: Tells events of one moment apart; given by the database.
    """

    time_s: float
    key_id: str
    action: str
    resource: str
    checkpoint_kind: str = ""
    serial: int = 0

    @property
    def project(self) -> str:
        """Id of the project that owns the resource."""
        return self.resource.split("/")[1]
