"""What `import tinsmith` offers; imported at the first use of any of it."""

from tinsmith import driver, pickling, types
from tinsmith.client import Client, ServiceClient
from tinsmith.environments.environment_calls import (
    Environment,
    EnvironmentInstance,
    EnvironmentStatistics,
    Observation,
    StepResult,
)
from tinsmith.environments.environment_forms import EnvironmentClient
from tinsmith.episodes.agent import (
    EpisodeAgent,
    HeldEpisode,
    OpenaiBaseUrlAndApiKey,
    WorkflowOutput,
)
from tinsmith.episodes.episode_forms import EpisodeClient
from tinsmith.episodes.types import Episode, EpisodeOutcome, EpisodeSpec, RecordedTrajectory
from tinsmith.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    ClientClosedError,
    ConfigurationError,
    DataLossError,
    DeadlineExceededError,
    ErrorCode,
    FailedPreconditionError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OperationTimeoutError,
    PermissionDeniedError,
    ResourceExhaustedError,
    RunUndeliverableError,
    TinsmithError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    UnknownError,
)
from tinsmith.rpc.futures import OperationFuture, ResultFuture
from tinsmith.rpc.gathering import as_completed, gather
from tinsmith.sampling.sample_stream import SampleStream
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.settings import RetryPolicy
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.training.custom_loss import CustomLoss, numpy_loss
from tinsmith.training.run_forms import TrainingRun
from tinsmith.types import (
    AdamParams,
    ApiKey,
    Checkpoint,
    CheckpointExport,
    CheckpointFile,
    Datum,
    DatumOutput,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageChunk,
    LoadWeightsResponse,
    ModelInfo,
    ModelInput,
    NewApiKey,
    OperationMetadata,
    OptimStepResponse,
    PromptAltTokens,
    SampleChunk,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
    TrainingRunInfo,
)
from tinsmith.version import __version__

# The names of the `tinker` SDK for the same things.
TrainingClient = TrainingRun
SamplingClient = Sampler
APIFuture = ResultFuture

pickling.register()

__all__ = [
    "APIFuture",
    "AbortedError",
    "AdamParams",
    "AlreadyExistsError",
    "ApiKey",
    "CancelledError",
    "Checkpoint",
    "CheckpointExport",
    "CheckpointFile",
    "Client",
    "ClientClosedError",
    "ConfigurationError",
    "CustomLoss",
    "DataLossError",
    "Datum",
    "DatumOutput",
    "DeadlineExceededError",
    "EncodedTextChunk",
    "Environment",
    "EnvironmentClient",
    "EnvironmentInstance",
    "EnvironmentStatistics",
    "Episode",
    "EpisodeAgent",
    "EpisodeClient",
    "EpisodeOutcome",
    "EpisodeSpec",
    "ErrorCode",
    "FailedPreconditionError",
    "FieldViolation",
    "ForwardBackwardOutput",
    "HeldEpisode",
    "ImageChunk",
    "InternalError",
    "InvalidArgumentError",
    "LoadWeightsResponse",
    "ModelInfo",
    "ModelInput",
    "NewApiKey",
    "NotFoundError",
    "Observation",
    "OpenaiBaseUrlAndApiKey",
    "OperationFuture",
    "OperationMetadata",
    "OperationTimeoutError",
    "OptimStepResponse",
    "PermissionDeniedError",
    "PromptAltTokens",
    "RecordedTrajectory",
    "ResourceExhaustedError",
    "ResultFuture",
    "RetryPolicy",
    "RunUndeliverableError",
    "SampleChunk",
    "SampleResponse",
    "SampleStream",
    "SampledSequence",
    "Sampler",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "StepResult",
    "TensorData",
    "TinsmithError",
    "Tokenizer",
    "TrainingClient",
    "TrainingRun",
    "TrainingRunInfo",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
    "WorkflowOutput",
    "__version__",
    "as_completed",
    "driver",
    "gather",
    "numpy_loss",
    "types",
]
