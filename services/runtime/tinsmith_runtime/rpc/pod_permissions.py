"""Which methods the pods of a role may call with their own key.

A pod's key acts for every project, so what it may do is a short list: the calls that its code
makes on its own behalf. Calls on behalf of a client carry the client's key. A method that is not
listed is refused before its request is decoded. The authorization matrix of the documentation is
generated from this table and the contract.
"""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith_runtime.rpc.pod_identity import PodRole


def _methods(service: str, *names: str) -> frozenset[str]:
    return frozenset(f"/{service}/{name}" for name in names)


_SCHEDULER = "tinsmith.v1.SchedulerService"
_JOBS = "tinsmith.v1.JobService"
_TRAINER = "tinsmith.v1.TrainerService"
_CONTROL = "tinsmith.v1.TrainerControlService"
_CHECKPOINTS = "tinsmith.v1.CheckpointService"
_SAMPLER = "tinsmith.v1.SamplerService"
_EPISODES = "tinsmith.v1.EpisodeService"
_OPERATIONS = "google.longrunning.Operations"

_LISTED = _methods(_SCHEDULER, "RegisterWorker", "HeartbeatWorker", "DeregisterWorker", "VerifyKey")

POD_PERMISSIONS: Mapping[PodRole, frozenset[str]] = {
    PodRole.TRAINER: _LISTED,
    PodRole.ENVIRONMENT: _LISTED,
    PodRole.COORDINATOR: _LISTED,
    PodRole.SAMPLER: _LISTED
    | _methods(_SCHEDULER, "GetSamplingSession")
    | _methods(_CONTROL, "ExportWeights")
    | _methods(_CHECKPOINTS, "GetCheckpoint"),
    PodRole.GATEWAY: _methods(
        _SCHEDULER,
        "VerifyKey",
        "ListWorkers",
        "GetCapabilities",
        "GetSession",
        "GetSamplingSession",
        "GetTrainingRun",
        "LocateCheckpoint",
        "GetTokenizer",
    )
    # Samples that are drawn for the key of an episode, or again after a restart of the gateway.
    | _methods(_SAMPLER, "Sample", "StreamSample")
    # Links, whose holders have no key, and published checkpoints of other projects.
    | _methods(_CHECKPOINTS, "GetCheckpoint", "ListCheckpoints", "DownloadCheckpointFile")
    | _methods(_OPERATIONS, "ListOperations")
    | _methods(_EPISODES, "RecordModelCall", "VerifyEpisodeKey"),
    PodRole.SCHEDULER: _methods(_CONTROL, "AdoptRun", "ReleaseRun", "ResumeRun", "ListRunStatuses")
    | _methods(_TRAINER, "LoadCheckpoint")
    | _methods(_CHECKPOINTS, "GetCheckpoint")
    | _methods(_OPERATIONS, "WaitOperation"),
    PodRole.CONTROLLER: _methods(
        _JOBS,
        "EnsureJobKey",
        "RevokeJobKey",
        "ListJobKeys",
        "ListTrainingJobReports",
        "DeleteTrainingJobReport",
    ),
}
"""Full names of methods by role."""
