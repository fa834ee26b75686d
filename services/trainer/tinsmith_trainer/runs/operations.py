"""What an operation asks for, decoded: the domain's side of the five ordered calls."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinsmith_engine import AdamParams, BatchResult, Datum, OptimStepResult
from tinsmith_runtime.errors import TinsmithError
from tinsmith_runtime.ledger import CheckpointRecord
from tinsmith_runtime.usage import Quantity


class Kind(enum.StrEnum):
    """The method of an operation; the value is stored in the ledger."""

    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_CHECKPOINT = "save_checkpoint"
    LOAD_CHECKPOINT = "load_checkpoint"


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """Losses of a batch, and its gradient if `is_backward`."""

    batch: Sequence[Datum]
    loss: str
    loss_config: Mapping[str, float]
    is_backward: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, placeholders of images included: there is a target for each."""
        return sum(max(datum.tokens_T.size, len(datum.targets_T)) for datum in self.batch)


@dataclass(frozen=True, slots=True)
class OptimStepWork:
    """One optimizer step.

    Attributes:
        observed_sequence_number: See `OptimStepRequest`; None if what was delivered counts.
    """

    adam: AdamParams
    observed_sequence_number: int | None


@dataclass(frozen=True, slots=True)
class SaveCheckpointWork:
    """A save under a name; `kind` is `training` or `sampler`.

    Attributes:
        ttl_s: How long after the save the checkpoint expires; None keeps it.
    """

    checkpoint: str
    kind: str
    labels: Mapping[str, str]
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoadCheckpointWork:
    """A load of a checkpoint, named in full."""

    checkpoint: str
    include_optimizer: bool


Work = ForwardWork | OptimStepWork | SaveCheckpointWork | LoadCheckpointWork


def used_by(work: Work) -> frozenset[Quantity]:
    """Return what an operation uses up of budgets.

    A step uses none: a gradient that was paid for is to be applied. Nor does a load.
    """
    match work:
        case ForwardWork(is_backward=True):
            return frozenset({Quantity.TRAINED_TOKENS, Quantity.ENGINE_SECONDS})
        case ForwardWork():
            return frozenset({Quantity.PREFILLED_TOKENS, Quantity.ENGINE_SECONDS})
        case SaveCheckpointWork():
            return frozenset({Quantity.STORED_BYTES})
        case _:
            return frozenset()


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load left: optimizer steps of the loaded state."""

    version: int


Result = BatchResult | OptimStepResult | CheckpointRecord | LoadResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """An ordered call as it arrived.

    Attributes:
        digest: SHA-256 of the request, serialised deterministically.
        payload: The serialised request.
        key_id: The key that it is sent with; empty if that is not known.
    """

    run: str
    kind: Kind
    sequence_number: int
    request_id: str
    digest: bytes
    payload: bytes
    key_id: str = ""


class WireCodec(Protocol):
    """The stored form of requests and results, so that the domain needs no protobuf."""

    def decode_work(self, kind: Kind, payload: bytes) -> Work:
        """Return the work of a stored request."""
        ...

    def encode_result(self, kind: Kind, result: Result) -> bytes:
        """Return the serialised response; the same result gives the same bytes."""
        ...

    def decode_load(self, result: bytes) -> LoadResult:
        """Return what the serialised response of a load says."""
        ...

    def encode_error(self, error: TinsmithError) -> bytes:
        """Return the serialised `google.rpc.Status`."""
        ...
