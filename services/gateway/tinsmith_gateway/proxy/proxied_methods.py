"""The methods that the gateway passes through, as the contract describes them."""

from __future__ import annotations

from dataclasses import dataclass

from google.longrunning import operations_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor

from tinsmith.v1 import (
    checkpoint_pb2,
    coordinator_pb2,
    environment_pb2,
    episode_pb2,
    job_pb2,
    keys_pb2,
    run_metrics_pb2,
    sampler_pb2,
    scheduler_pb2,
    trainer_pb2,
    usage_pb2,
)

# TrainerControlService and WorkerService are for pods alone: they are not passed on.
_FILES = (
    operations_pb2,
    checkpoint_pb2,
    coordinator_pb2,
    environment_pb2,
    episode_pb2,
    job_pb2,
    keys_pb2,
    run_metrics_pb2,
    sampler_pb2,
    scheduler_pb2,
    trainer_pb2,
    usage_pb2,
)
_WAITS = frozenset(
    {
        "/google.longrunning.Operations/WaitOperation",
        "/tinsmith.v1.CoordinatorService/HeartbeatMember",
        "/tinsmith.v1.CoordinatorService/WatchMatch",
        "/tinsmith.v1.CoordinatorService/WatchRolloutEpisodes",
        "/tinsmith.v1.EpisodeService/HeartbeatEpisode",
        "/tinsmith.v1.EpisodeService/WatchEpisodes",
        "/tinsmith.v1.JobService/ReadTrainingJobLog",
        "/tinsmith.v1.JobService/WatchTrainingJob",
        "/tinsmith.v1.SchedulerService/HeartbeatSession",
        "/tinsmith.v1.TrainerService/WaitOperations",
    }
)
_SPREAD = frozenset({"/tinsmith.v1.EnvironmentService/CreateInstance"})
_SAMPLING = frozenset(
    f"/tinsmith.v1.SamplerService/{name}" for name in ("Sample", "StreamSample", "ComputeLogprobs")
)
_SHORT_SERVICES = frozenset(
    f"tinsmith.v1.{name}"
    for name in (
        "SchedulerService",
        "KeyService",
        "JobService",
        "RunMetricsService",
        "UsageService",
        "EpisodeService",
        "CoordinatorService",
    )
)
# They may wait for an episode or a barrier, and are not cut.
_LONG = frozenset(
    {
        "/tinsmith.v1.CoordinatorService/ArriveAtBarrier",
        "/tinsmith.v1.EpisodeService/ClaimEpisode",
    }
)
_SECRETS = frozenset({"api_key"})


@dataclass(frozen=True, slots=True)
class Method:
    """One method of the contract.

    Attributes:
        path: `/package.Service/Method`.
        service: Full name of its service.
        request: The message that it takes.
        streams_requests: Whether the client sends several messages.
        streams_responses: Whether the server does.
        is_named: Whether field 1 of the request is text, the name of a resource; a secret is none,
            or it would be on every line that the call logs.
        is_wait: Whether it waits for what goes on anyway, or keeps something alive: it costs
            little, may stay open for long, and may be cut and sent again at any time.
        is_short: Whether it asks or changes a few rows of a database, and so takes its turn with
            those of its project.
        is_sampling: Whether replicas share such calls by their prompt, field 2.
        is_spread: Whether pods of a role share such calls. Field 2 is the request id, and says
            which one: a repeat finds the pod that has the answer.
    """

    path: str
    service: str
    request: Descriptor
    streams_requests: bool
    streams_responses: bool
    is_named: bool
    is_wait: bool
    is_spread: bool
    is_sampling: bool
    is_short: bool


def _describe(method: MethodDescriptor) -> Method:
    service = method.containing_service.full_name
    path = f"/{service}/{method.name}"
    first = method.input_type.fields_by_number.get(1)
    return Method(
        path=path,
        service=service,
        request=method.input_type,
        streams_requests=method.client_streaming,
        streams_responses=method.server_streaming,
        is_named=(
            first is not None
            and first.type == FieldDescriptor.TYPE_STRING
            and first.name not in _SECRETS
        ),
        is_wait=path in _WAITS,
        is_spread=path in _SPREAD,
        is_sampling=path in _SAMPLING,
        is_short=service in _SHORT_SERVICES and path not in _WAITS | _LONG,
    )


METHODS: dict[str, Method] = {
    method.path: method
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in map(_describe, service.methods)
}
"""All methods by path."""
