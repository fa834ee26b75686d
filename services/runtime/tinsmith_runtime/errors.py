"""Errors that pods raise: one class for each meaning, below the bases of `tinsmith.errors`.

A class names a meaning; its base class names the status code, and `tinsmith.rpc.error_codec` is the
one place where that reaches the wire. Every error says what happened, to which resource, and what
to do: the keyword arguments of an error become the `ErrorInfo.metadata` that a client can read
without parsing the message. Pods take the bases from here too, so they have one module of errors.
"""

from __future__ import annotations

from typing import Any

from tinsmith.errors import AbortedError as AbortedError
from tinsmith.errors import AlreadyExistsError as AlreadyExistsError
from tinsmith.errors import CancelledError as CancelledError
from tinsmith.errors import DataLossError as DataLossError
from tinsmith.errors import DeadlineExceededError as DeadlineExceededError
from tinsmith.errors import ErrorCode as ErrorCode
from tinsmith.errors import FailedPreconditionError as FailedPreconditionError
from tinsmith.errors import FieldViolation
from tinsmith.errors import InternalError as InternalError
from tinsmith.errors import InvalidArgumentError as InvalidArgumentError
from tinsmith.errors import NotFoundError as NotFoundError
from tinsmith.errors import PermissionDeniedError as PermissionDeniedError
from tinsmith.errors import ResourceExhaustedError as ResourceExhaustedError
from tinsmith.errors import TinsmithError as TinsmithError
from tinsmith.errors import UnauthenticatedError as UnauthenticatedError
from tinsmith.errors import UnavailableError as UnavailableError
from tinsmith.errors import UnimplementedError as UnimplementedError


def internal_error() -> InternalError:
    """Return what a caller may learn of a bug: nothing but where to look."""
    return InternalError("internal error; the log of the pod has the trace")


def sentence_of(error: Exception) -> str:
    """Return what an operator reads of an error: its remedy is for users of the SDK."""
    return error.message if isinstance(error, TinsmithError) else str(error)


# Requests.


class InvalidFieldError(InvalidArgumentError):
    """One field of the request is missing or out of range."""

    def __init__(self, field: str, problem: str, **metadata: Any) -> None:
        super().__init__(
            f"{field} {problem}",
            field_violations=(FieldViolation(field, problem),),
            **{"field": field, **metadata},
        )


class MalformedRequestError(InvalidArgumentError):
    """The bytes of the request are not the protobuf message that the method takes."""

    reason = "MALFORMED_REQUEST"


class ShapeMismatchError(InvalidFieldError):
    """Tensors that belong together differ in length or type."""

    reason = "SHAPE_MISMATCH"


class TokenOutOfVocabularyError(InvalidFieldError):
    """A token id is negative or not below the model's vocabulary size."""

    reason = "TOKEN_OUT_OF_VOCABULARY"


class NotFiniteInputError(InvalidFieldError):
    """An input tensor or parameter holds NaN or infinity."""

    reason = "NOT_FINITE"


class EmptyBatchError(InvalidFieldError):
    """A batch without datums, or a datum without tokens."""

    reason = "EMPTY_BATCH"


class UnknownLossError(InvalidFieldError):
    """The service has no loss function of this name."""

    reason = "UNKNOWN_LOSS"


class MissingLossInputError(InvalidFieldError):
    """A datum lacks a tensor that the loss function needs."""

    reason = "MISSING_LOSS_INPUT"


class FileRefusedError(InvalidArgumentError):
    """A file from outside is not what its name says, or nothing that is taken."""

    reason = "FILE_REFUSED"


class AdapterUnsupportedError(InvalidArgumentError):
    """An adapter uses something that runs do not have."""

    reason = "ADAPTER_UNSUPPORTED"


class BatchTooLargeError(ResourceExhaustedError):
    """A batch exceeds the limits of one request; send it in parts."""

    reason = "BATCH_TOO_LARGE"


class SequenceTooLongError(ResourceExhaustedError):
    """One sequence exceeds the context length of the model, or the cache of a sampler."""

    reason = "SEQUENCE_TOO_LONG"


class RequestIdReusedError(FailedPreconditionError):
    """The request id was used before with another body."""

    reason = "REQUEST_ID_REUSED"


# Resources.


class ModelNotFoundError(NotFoundError):
    """No trainer or sampler serves this base model."""

    reason = "MODEL_NOT_FOUND"


class RunNotFoundError(NotFoundError):
    """No run has the given resource name."""

    reason = "RUN_NOT_FOUND"


class CheckpointNotFoundError(NotFoundError):
    """No checkpoint has the given resource name."""

    reason = "CHECKPOINT_NOT_FOUND"


class CheckpointExpiredError(NotFoundError):
    """The checkpoint expired; its files are gone."""

    reason = "CHECKPOINT_EXPIRED"


class UploadNotFoundError(NotFoundError):
    """No upload has the given resource name, or it was given up."""

    reason = "UPLOAD_NOT_FOUND"


class OperationNotFoundError(NotFoundError):
    """No operation has the given resource name."""

    reason = "OPERATION_NOT_FOUND"


class OperationExpiredError(FailedPreconditionError):
    """The operation ended, and its result was kept for as long as promised."""

    reason = "OPERATION_EXPIRED"


class StepNotFoundError(NotFoundError):
    """The run has no such optimizer step."""

    reason = "STEP_NOT_FOUND"


class StepExpiredError(FailedPreconditionError):
    """What the run did at that step is not kept any more."""

    reason = "STEP_EXPIRED"


class SessionNotFoundError(NotFoundError):
    """No session has the given resource name."""

    reason = "SESSION_NOT_FOUND"


class SamplingSessionNotFoundError(NotFoundError):
    """No sampling session has the given resource name."""

    reason = "SAMPLING_SESSION_NOT_FOUND"


class EnvironmentNotFoundError(NotFoundError):
    """No environment of this name is registered."""

    reason = "ENVIRONMENT_NOT_FOUND"


class InstanceNotFoundError(NotFoundError):
    """No environment instance has the given resource name."""

    reason = "INSTANCE_NOT_FOUND"


class EpisodeNotFoundError(NotFoundError):
    """No episode has the given resource name."""

    reason = "EPISODE_NOT_FOUND"


class MatchNotFoundError(NotFoundError):
    """No match has the given resource name."""

    reason = "MATCH_NOT_FOUND"


class RolloutBatchNotFoundError(NotFoundError):
    """No batch of rollouts has the given resource name, or its results were removed."""

    reason = "ROLLOUT_BATCH_NOT_FOUND"


class KeyNotFoundError(NotFoundError):
    """No API key has the given resource name."""

    reason = "KEY_NOT_FOUND"


class JobNotFoundError(NotFoundError):
    """No job of the caller's project has this name."""

    reason = "JOB_NOT_FOUND"


class CheckpointAlreadyExistsError(AlreadyExistsError):
    """A checkpoint of this kind and name exists in the run."""

    reason = "CHECKPOINT_ALREADY_EXISTS"


# State.


class SessionFinishedError(FailedPreconditionError):
    """The session was finished or expired; create a new one."""

    reason = "SESSION_FINISHED"


class RunClosedError(FailedPreconditionError):
    """The run was deleted and takes no more operations."""

    reason = "RUN_CLOSED"


class NoGradientError(FailedPreconditionError):
    """An optimizer step without a gradient to apply."""

    reason = "NO_GRADIENT"


class GradientIncompleteError(FailedPreconditionError):
    """A forward_backward of this accumulation failed unseen by the sender of the optim_step."""

    reason = "GRADIENT_INCOMPLETE"


class NonFiniteLossError(FailedPreconditionError):
    """A loss, gradient or update became NaN or infinite; the weights were left unchanged."""

    reason = "NON_FINITE_LOSS"


class CheckpointIncompatibleError(FailedPreconditionError):
    """The checkpoint belongs to another base model, rank or set of layers."""

    reason = "CHECKPOINT_INCOMPATIBLE"


class StoreMismatchError(FailedPreconditionError):
    """The files of a checkpoint are in another store than the one of this pod."""

    reason = "STORE_MISMATCH"


class UploadIncompleteError(FailedPreconditionError):
    """Pieces of an uploaded file are missing."""

    reason = "UPLOAD_INCOMPLETE"


class EpisodeEndedError(FailedPreconditionError):
    """The attempt at the episode is over: submitted, aborted or cancelled."""

    reason = "EPISODE_ENDED"


class MatchEndedError(FailedPreconditionError):
    """The match is over: completed, aborted or cancelled."""

    reason = "MATCH_ENDED"


class SeatTakenError(FailedPreconditionError):
    """Another client holds the seat of an agent, or the agent was dropped."""

    reason = "SEAT_TAKEN"


class OutOfTurnError(FailedPreconditionError):
    """It is not the agent's turn in a game, or not the turn of a barrier."""

    reason = "OUT_OF_TURN"


class ChatTemplateRefusedError(FailedPreconditionError):
    """The chat template of a model cannot render a conversation, or rewrites it."""

    reason = "CHAT_TEMPLATE_REFUSED"


class JobFinishedError(FailedPreconditionError):
    """The job has ended."""

    reason = "JOB_FINISHED"


class JobReplacedError(FailedPreconditionError):
    """Another job has the name now."""

    reason = "JOB_REPLACED"


class JobsDisabledError(FailedPreconditionError):
    """This deployment runs no jobs, or none of the project."""

    reason = "JOBS_DISABLED"


class JobLogMissingError(FailedPreconditionError):
    """A pod of a job has not printed anything yet, or is gone."""

    reason = "JOB_LOG_MISSING"


class ClusterRefusedError(FailedPreconditionError):
    """The API server of the cluster refuses the scheduler."""

    reason = "CLUSTER_REFUSED"


class LeaseLostError(AbortedError):
    """The lease of an episode or of a seat ran out; its holder has no say any more."""

    reason = "LEASE_LOST"


class NoRolloutsError(AbortedError):
    """Not one group of a batch of rollouts is complete."""

    reason = "NO_ROLLOUTS"


class RolloutsCancelledError(CancelledError):
    """A batch of rollouts was cancelled."""

    reason = "ROLLOUTS_CANCELLED"


class SequenceNumberReusedError(AbortedError):
    """Another request already holds this sequence number."""

    reason = "SEQUENCE_NUMBER_REUSED"


class SequenceGapError(AbortedError):
    """A lower sequence number never arrived in time."""

    reason = "SEQUENCE_GAP"


class PoisonOperationError(AbortedError):
    """The operation was running when the trainer died, again and again; it is not tried again."""

    reason = "POISON_OPERATION"


class CheckpointCorruptError(DataLossError):
    """The files of a checkpoint do not match its manifest."""

    reason = "CHECKPOINT_CORRUPT"


# Limits and availability.


class QueueFullError(ResourceExhaustedError):
    """Too many operations are waiting; nothing was accepted."""

    reason = "QUEUE_FULL"


class RateLimitedError(ResourceExhaustedError):
    """The key has too much in flight; the request may be sent again when some of it has ended."""

    reason = "RATE_LIMITED"
    default_retry_after_s = 1.0


class BudgetExceededError(ResourceExhaustedError):
    """A project has used as much as its budget lets it; nothing was accepted."""

    reason = "BUDGET_EXCEEDED"


class CapacityExhaustedError(ResourceExhaustedError):
    """All places for runs or instances are taken."""

    reason = "CAPACITY_EXHAUSTED"


class OutOfMemoryError(ResourceExhaustedError):
    """One operation does not fit into the memory of the device."""

    reason = "OUT_OF_MEMORY"


class StorageFullError(ResourceExhaustedError):
    """The disk or bucket is full; free space, the request may then be sent again."""

    reason = "STORAGE_FULL"
    default_retry_after_s = 10.0


class DrainingError(UnavailableError):
    """The pod is shutting down; another one will answer."""

    reason = "DRAINING"


class WorkerUnavailableError(UnavailableError):
    """The pod that holds the resource cannot be reached."""

    reason = "WORKER_UNAVAILABLE"


class StorageBusyError(UnavailableError):
    """Another program holds the database; nothing was written, the request may be sent again."""


class StorageUnavailableError(UnavailableError):
    """The database or object store does not answer; nothing was written.

    What needs it waits or is refused, the rest goes on.
    """

    reason = "STORAGE_UNAVAILABLE"
    default_retry_after_s = 2.0


class StorageRefusedError(StorageUnavailableError):
    """The object store refuses this pod: its operator must act, no caller can.

    For callers it is as if the store were away: what was acknowledged waits until it is mended.
    """

    default_retry_after_s = 30.0


class OutcomeUnknownError(UnavailableError):
    """The connection was lost during a commit; the same request finds out whether it was made."""

    reason = "OUTCOME_UNKNOWN"


class RunMovedError(UnavailableError):
    """Another trainer holds the run, or is about to; the scheduler says where it is."""

    reason = "RUN_MOVED"


class RunHeldError(UnavailableError):
    """Another trainer holds the run, and its lease has not expired."""

    reason = "RUN_HELD"


class RanksLostError(UnavailableError):
    """A process of the engine died, or its state may differ from the others'; all must restart."""


class ClusterUnavailableError(UnavailableError):
    """The API server of the cluster does not answer."""

    reason = "CLUSTER_UNAVAILABLE"


class VersionNotLoadedError(UnavailableError):
    """The sampler does not hold weights as new as the request asks for."""

    reason = "VERSION_NOT_LOADED"


class EnvironmentFailedError(AbortedError):
    """The code of an environment raised or its worker process died; the episode is lost."""

    reason = "ENVIRONMENT_FAILED"


# Credentials.


class KeyMissingError(UnauthenticatedError):
    """The call carries no API key."""

    reason = "KEY_MISSING"


class KeyInvalidError(UnauthenticatedError):
    """The API key is malformed or unknown."""

    reason = "KEY_INVALID"


class KeyRevokedError(UnauthenticatedError):
    """The API key was revoked."""

    reason = "KEY_REVOKED"


class KeyExpiredError(UnauthenticatedError):
    """The API key has expired."""

    reason = "KEY_EXPIRED"


class DownloadTokenInvalidError(PermissionDeniedError):
    """A download token is forged, for something else, or too old."""

    reason = "DOWNLOAD_TOKEN_INVALID"


class WorkerForeignError(PermissionDeniedError):
    """A pod registers, or speaks for, a worker that its key is not for."""

    reason = "WORKER_FOREIGN"


class RoleMissingError(PermissionDeniedError):
    """The role of the API key does not call this method."""

    reason = "ROLE_MISSING"


class ConfigError(ValueError):
    """A setting of a pod is unknown or out of range; raised before anything is served."""


class ExactnessUnavailableError(ConfigError):
    """This machine cannot compute a model so that neighbours leave a tenant's bits alone."""
