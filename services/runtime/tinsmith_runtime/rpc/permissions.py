"""Which keys call which methods: one table of the whole contract, for users and pods.

A key of users has a role in its project. What a project holds is settled elsewhere, by the names in
a request; this table says only which methods a role calls at all. A pod's key acts for every
project, so its list is short: the calls that its code makes on its own behalf. Calls on behalf of a
client carry the client's key.

A call that the table does not allow is refused before its request is decoded. The authorization
matrix of the documentation is generated from here, and a method without a row fails a test.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from tinsmith_runtime.rpc.pod_identity import PodRole


class KeyRole(enum.StrEnum):
    """What the holder of a key may do in its project."""

    VIEWER = "viewer"
    """Reads everything but keys and audit events, and changes nothing."""
    AGENT = "agent"
    """Plays: samples, steps environments, claims and submits episodes. Trains nothing."""
    MEMBER = "member"
    """Trains, samples, keeps checkpoints, runs jobs."""
    ADMIN = "admin"
    """Manages keys and reads audit events besides."""


Access = frozenset[KeyRole]

PODS: Access = frozenset()
"""No key of users at all."""
MANAGE: Access = frozenset({KeyRole.ADMIN})
USE: Access = MANAGE | {KeyRole.MEMBER}
PLAY: Access = USE | {KeyRole.AGENT}
READ: Access = USE | {KeyRole.VIEWER}
ALL: Access = READ | PLAY


def _methods(service: str, *names: str) -> frozenset[str]:
    return frozenset(f"/{service}/{name}" for name in names)


_SCHEDULER = "tinsmith.v1.SchedulerService"
_KEYS = "tinsmith.v1.KeyService"
_WORKERS = "tinsmith.v1.WorkerService"
_JOBS = "tinsmith.v1.JobService"
_RUN_METRICS = "tinsmith.v1.RunMetricsService"
_USAGE = "tinsmith.v1.UsageService"
_TRAINER = "tinsmith.v1.TrainerService"
_CONTROL = "tinsmith.v1.TrainerControlService"
_CHECKPOINTS = "tinsmith.v1.CheckpointService"
_SAMPLER = "tinsmith.v1.SamplerService"
_ENVIRONMENTS = "tinsmith.v1.EnvironmentService"
_EPISODES = "tinsmith.v1.EpisodeService"
_MATCHES = "tinsmith.v1.CoordinatorService"
_OPERATIONS = "google.longrunning.Operations"


def _rows(service: str, rows: Mapping[Access, str]) -> dict[str, Access]:
    return {
        f"/{service}/{name}": access for access, names in rows.items() for name in names.split()
    }


KEY_PERMISSIONS: Mapping[str, Access] = {
    **_rows(
        _SCHEDULER,
        {
            ALL: "GetCapabilities GetSession GetSamplingSession GetTokenizer LocateCheckpoint "
            "GetTrainingRun ListTrainingRuns",
            READ: "ListSessions",
            PLAY: "CreateSession HeartbeatSession FinishSession CreateSamplingSession",
            USE: "ResumeSession CreateTrainingRun UpdateTrainingRun FinishTrainingRun "
            "ReopenTrainingRun DeleteTrainingRun",
            MANAGE: "ListAuditEvents",
        },
    ),
    **_rows(
        _KEYS,
        {
            ALL: "GetCallerKey RevokeKey",
            MANAGE: "CreateKey ListKeys",
            PODS: "VerifyKey",
        },
    ),
    **_rows(
        _WORKERS,
        {PODS: "RegisterWorker ListWorkers HeartbeatWorker DeregisterWorker"},
    ),
    **_rows(
        _JOBS,
        {
            READ: "GetTrainingJob ListTrainingJobs WatchTrainingJob ReadTrainingJobLog",
            USE: "CreateTrainingJob CancelTrainingJob SuspendTrainingJob ResumeTrainingJob "
            "RetryTrainingJob DeleteTrainingJob ReportTrainingJob GetTrainingJobReport",
            PODS: "ListTrainingJobReports DeleteTrainingJobReport EnsureJobKey RevokeJobKey "
            "ListJobKeys",
        },
    ),
    **_rows(
        _RUN_METRICS,
        {READ: "QueryRunMetrics ListRunMetrics", USE: "RecordRunMetrics"},
    ),
    **_rows(
        _USAGE,
        {
            READ: "ListUsage ListBudgets",
            MANAGE: "UpdateBudget DeleteBudget",
            PODS: "ReportUsage",
        },
    ),
    **_rows(
        _TRAINER,
        {
            ALL: "GetCapabilities",
            READ: "GetRunStatus WaitOperations",
            USE: "Forward ForwardBackward OptimStep SaveCheckpoint LoadCheckpoint",
        },
    ),
    **_rows(
        _CHECKPOINTS,
        {
            # The token of a download is a permission of its own.
            ALL: "DownloadCheckpointFile GetCheckpoint ListCheckpoints",
            READ: "CreateCheckpointDownload",
            USE: "UpdateCheckpoint PublishCheckpoint UnpublishCheckpoint CopyCheckpoint "
            "ExportCheckpoint CreateCheckpointUpload UploadCheckpointFile ImportCheckpoint "
            "DeleteCheckpoint",
            MANAGE: "ListCheckpointEvents",
        },
    ),
    **_rows(
        _CONTROL,
        {
            PODS: "AdoptRun ReleaseRun ForkRun SetHistoryRetention ListRunStatuses ResumeRun "
            "ExportWeights ReadWeights",
        },
    ),
    **_rows(
        _SAMPLER,
        {
            ALL: "GetCapabilities",
            READ: "ListLoadedWeights",
            PLAY: "Sample StreamSample ComputeLogprobs",
        },
    ),
    **_rows(
        _ENVIRONMENTS,
        {
            ALL: "ListEnvironments GetInstance ListEnvironmentStatistics",
            PLAY: "CreateInstance StepInstance StepInstances DeleteInstance "
            "ResetEnvironmentStatistics",
        },
    ),
    **_rows(
        _EPISODES,
        {
            ALL: "GetEpisode ListEpisodes WatchEpisodes",
            PLAY: "ClaimEpisode HeartbeatEpisode SubmitEpisode AbortEpisode",
            USE: "CreateEpisodes CancelEpisodes",
            PODS: "RecordModelCall VerifyEpisodeKey",
        },
    ),
    **_rows(
        _MATCHES,
        {
            ALL: "GetMatch ListMatches WatchMatch ListRolloutEpisodes WatchRolloutEpisodes",
            PLAY: "JoinMatch HeartbeatMember LeaveMatch TakeTurn AbandonGame ArriveAtBarrier",
            USE: "CreateMatch CancelMatch GenerateRollouts",
        },
    ),
    **_rows(
        _OPERATIONS,
        {
            READ: "GetOperation ListOperations WaitOperation",
            USE: "CancelOperation DeleteOperation",
        },
    ),
}
"""Roles of keys of users by full name of the method."""

_LISTED = _methods(_KEYS, "VerifyKey") | _methods(
    _WORKERS, "RegisterWorker", "HeartbeatWorker", "DeregisterWorker"
)

POD_PERMISSIONS: Mapping[PodRole, frozenset[str]] = {
    # What it measured of the steps of runs, of whatever project.
    PodRole.TRAINER: _LISTED
    | _methods(_RUN_METRICS, "RecordRunMetrics")
    | _methods(_USAGE, "ReportUsage"),
    PodRole.ENVIRONMENT: _LISTED,
    # Rollouts, which it plays for the project whose key asked for them.
    PodRole.COORDINATOR: _LISTED
    | _methods(_SCHEDULER, "GetCapabilities", "GetSamplingSession", "GetTokenizer")
    | _methods(_SAMPLER, "Sample")
    | _methods(
        _ENVIRONMENTS,
        "ListEnvironments",
        "CreateInstance",
        "StepInstance",
        "StepInstances",
        "DeleteInstance",
    ),
    PodRole.SAMPLER: _LISTED
    | _methods(_USAGE, "ReportUsage")
    | _methods(_SCHEDULER, "GetSamplingSession")
    | _methods(_CONTROL, "ExportWeights", "ReadWeights")
    | _methods(_CHECKPOINTS, "GetCheckpoint"),
    PodRole.GATEWAY: _methods(_KEYS, "VerifyKey")
    | _methods(_WORKERS, "ListWorkers")
    | _methods(
        _SCHEDULER,
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
    PodRole.SCHEDULER: _methods(
        _CONTROL,
        "AdoptRun",
        "ReleaseRun",
        "ForkRun",
        "SetHistoryRetention",
        "ResumeRun",
        "ListRunStatuses",
    )
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
"""Full names of methods by role of the pod."""


def may_call(role: KeyRole | PodRole, method: str) -> bool:
    """Whether a key of a role calls a method, given by its full name."""
    if isinstance(role, PodRole):
        return method in POD_PERMISSIONS[role]
    return role in KEY_PERMISSIONS.get(method, PODS)
