"""The futures of the Tinker wire.

A training call is a native operation that the trainer keeps. Its future holds the name of that
operation and how to render its result. Nothing is stored here, so a gateway that restarts has lost
nothing. Samples and the like, which no other pod keeps, have rows of their own
(`sample_futures`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tinsmith_runtime.errors import InvalidFieldError

_OPERATION = re.compile(
    r"op\.([A-Za-z0-9][A-Za-z0-9._-]*)/(create|\d{1,18})/([a-z_]+)(?:/(\d{1,9}))?"
)

FORWARD_BACKWARD = "forward_backward"
OPTIM_STEP = "optim_step"
SAVE_WEIGHTS = "save_weights"
SAVE_FOR_SAMPLER = "save_for_sampler"
SNAPSHOT_CLIENT = "snapshot_client"
INFLIGHT_CLIENT = "inflight_client"
SAVE_EXTERNAL = "save_external"
LOAD_WEIGHTS = "load_weights"
CREATE_MODEL = "create_model"
CREATE_FROM_WEIGHTS = "create_from_weights"
_KINDS = frozenset(
    {
        FORWARD_BACKWARD,
        OPTIM_STEP,
        SAVE_WEIGHTS,
        SAVE_FOR_SAMPLER,
        SNAPSHOT_CLIENT,
        INFLIGHT_CLIENT,
        SAVE_EXTERNAL,
        LOAD_WEIGHTS,
        CREATE_MODEL,
        CREATE_FROM_WEIGHTS,
    }
)


@dataclass(frozen=True, slots=True)
class OperationFuture:
    """A future that is an operation of a run.

    Attributes:
        run_id: Id of the run.
        operation: Its sequence number on the run, or `create`.
        kind: What the client asked for; decides the form of the answer.
        number: Of the sampling session that is to be made of a save; None for none.
    """

    run_id: str
    operation: str
    kind: str
    number: int | None = None

    def __str__(self) -> str:
        tail = "" if self.number is None else f"/{self.number}"
        return f"op.{self.run_id}/{self.operation}/{self.kind}{tail}"

    @classmethod
    def parse(cls, value: str) -> OperationFuture | None:
        """Return the operation of a future; None if it is of another sort.

        Raises:
            InvalidFieldError: If it looks like one and is none.
        """
        if not value.startswith("op."):
            return None
        match = _OPERATION.fullmatch(value)
        if match is None or match[3] not in _KINDS:
            raise InvalidFieldError("request_id", f"was not given out here: {value[:128]!r}")
        return cls(match[1], match[2], match[3], None if match[4] is None else int(match[4]))

    def name(self, project: str) -> str:
        """Return the resource name of the operation."""
        return f"projects/{project}/trainingRuns/{self.run_id}/operations/{self.operation}"
