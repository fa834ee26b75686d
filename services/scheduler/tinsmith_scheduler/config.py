"""Settings of the scheduler pod."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinsmith.names import DEFAULT_PROJECT, is_valid_id
from tinsmith_runtime.config import is_loopback, require_positive
from tinsmith_runtime.errors import ConfigError, KeyInvalidError
from tinsmith_runtime.pod.settings import DatabaseConfig, GrpcConfig
from tinsmith_runtime.records import HISTORY_RETENTION_S
from tinsmith_runtime.rpc.auth import ApiKey
from tinsmith_runtime.variables import parse_variables

_POSITIVE_FIELDS = (
    "heartbeat_interval_s",
    "session_timeout_s",
    "worker_heartbeat_interval_s",
    "worker_timeout_s",
    "max_runs_per_project",
    "max_sessions_per_project",
    "max_sampling_sessions_per_project",
    "max_metrics_per_run",
    "max_metric_bytes_per_run",
    "max_metric_bytes_per_project",
    "max_metric_points_per_s",
    "placement_timeout_s",
    "placement_retry_s",
    "audit_retention_s",
    "ended_retention_s",
    "max_history_retention_s",
    "trainer_call_timeout_s",
    "reap_interval_s",
    "max_local_jobs",
    "local_job_stop_timeout_s",
    "cluster_call_timeout_s",
)
_LAUNCHERS = ("", "local", "kubernetes")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig(GrpcConfig, DatabaseConfig):
    """Settings of one scheduler."""

    bootstrap_key: str = field(default="", repr=False)
    """A whole key, `tsk_<id>_<secret>`, that exists from the start; empty makes none."""
    bootstrap_project: str = DEFAULT_PROJECT
    """The project of the operators: its admin keys manage the keys of every project."""
    heartbeat_interval_s: float = 10.0
    """How often a client is told to heartbeat its session."""
    session_timeout_s: float = 60.0
    """Life of a session without a heartbeat."""
    worker_heartbeat_interval_s: float = 3.0
    worker_timeout_s: float = 15.0
    """Time after which a silent worker counts as gone."""
    max_runs_per_project: int = 256
    """Training runs of a project that are live: held by a trainer, and their session goes on."""
    max_sessions_per_project: int = 4096
    """Sessions of a project that go on."""
    max_sampling_sessions_per_project: int = 32_768
    """Sampling sessions of a project; they end with their session."""
    max_metrics_per_run: int = 256
    """Names of metrics that a run may have."""
    max_metric_bytes_per_run: int = 64 * 2**20
    """What the metrics of a run may take in the database; 17 bytes a point, about."""
    max_metric_bytes_per_project: int = 4 * 2**30
    """What the metrics of all runs of a project may take."""
    max_metric_points_per_s: float = 5000.0
    """Points of metrics that the clients of a project may record; they may be a minute ahead."""
    placement_timeout_s: float = 60.0
    """Time that a run may take to be placed, and from a restart on again."""
    audit_retention_s: float = 400 * 24 * 3600.0
    """How long audit events are kept."""
    ended_retention_s: float = 30 * 24 * 3600.0
    """How long sessions that ended, the names of deleted runs and keys that are refused are kept.
    """
    max_history_retention_s: float = 90 * 24 * 3600.0
    """The longest time for which a run may have its past kept: requests, results and older
    snapshots, to be forked and played again."""
    placement_retry_s: float = 0.25
    """Pause between two attempts to place a run."""
    trainer_call_timeout_s: float = 20.0
    """Deadline of one call to a trainer."""
    reap_interval_s: float = 1.0
    """How often lost sessions and unconfirmed releases are looked after."""
    job_launcher: str = ""
    """What runs jobs: `local`, as processes of this machine; `kubernetes`, as resources of the
    cluster; empty for nothing."""
    job_address: str = ""
    """`host:port` that drivers on this machine connect to; the scheduler's own by default."""
    max_local_jobs: int = 2
    """Drivers that run at once on this machine."""
    local_job_stop_timeout_s: float = 60.0
    """Time that drivers on this machine get to save in when the scheduler stops."""
    allow_remote_jobs: bool = False
    """Whether jobs are processes of this machine also where others reach it: each user with a key
    is then a shell of the server's user."""
    job_variables: str = ""
    """Names of further variables of the scheduler that jobs on this machine get, separated by
    commas."""
    job_namespaces: str = ""
    """Namespace of the jobs of each project, `project=namespace`, separated by commas."""
    cluster_call_timeout_s: float = 10.0
    """Deadline of one call to the API server of the cluster."""

    def __post_init__(self) -> None:
        require_positive(self, *_POSITIVE_FIELDS)
        if self.max_history_retention_s < HISTORY_RETENTION_S:
            raise ConfigError(
                f"max_history_retention_s must be at least {HISTORY_RETENTION_S:g}, which is kept "
                f"in any case, got {self.max_history_retention_s:g}"
            )
        if self.session_timeout_s <= self.heartbeat_interval_s:
            raise ConfigError("session_timeout_s must be above heartbeat_interval_s")
        if self.worker_timeout_s <= self.worker_heartbeat_interval_s:
            raise ConfigError("worker_timeout_s must be above worker_heartbeat_interval_s")
        if not is_valid_id(self.bootstrap_project):
            raise ConfigError(f"bootstrap_project {self.bootstrap_project!r} is not a project id")
        if self.bootstrap_key:
            try:
                ApiKey.parse(self.bootstrap_key)
            except KeyInvalidError as error:
                raise ConfigError("bootstrap_key must have the form tsk_<id>_<secret>") from error
        if self.job_launcher not in _LAUNCHERS:
            raise ConfigError(
                f"job_launcher must be local, kubernetes or empty, got {self.job_launcher!r}"
            )
        if self.job_launcher == "kubernetes" and not self.namespaces():
            raise ConfigError("job_launcher kubernetes needs job_namespaces, project=namespace,...")
        host = self.listen_address.rpartition(":")[0]
        if self.job_launcher == "local" and not (self.allow_remote_jobs or is_loopback(host)):
            raise ConfigError(
                f"job_launcher local with the address {self.listen_address} would run programs of "
                "every user with a key as this user; listen on loopback, set job_launcher to "
                "kubernetes or empty, or set allow_remote_jobs"
            )
        self.further_variables()
        self.server()

    def further_variables(self) -> frozenset[str]:
        """Return the names of `job_variables`.

        Raises:
            ConfigError: If one of them is a setting of the pod.
        """
        return parse_variables("job_variables", self.job_variables)

    def namespaces(self) -> dict[str, str]:
        """Return the namespace of each project's jobs.

        Raises:
            ConfigError: If an entry is not `project=namespace`, or a project has two.
        """
        found: dict[str, str] = {}
        for entry in filter(None, (part.strip() for part in self.job_namespaces.split(","))):
            project, _, namespace = entry.partition("=")
            if not (is_valid_id(project) and namespace) or project in found:
                raise ConfigError(f"job_namespaces: {entry!r} is not project=namespace")
            found[project] = namespace
        return found
