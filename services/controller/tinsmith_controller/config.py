"""Settings of the controller pod."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tinsmith.names import is_valid_id
from tinsmith_controller.pods.author_policy import AuthorPolicy
from tinsmith_jobs.naming import POD_PATHS
from tinsmith_jobs.plan.limits import Limits
from tinsmith_runtime.config import require_positive
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.pod.settings import CertificateConfig
from tinsmith_runtime.rpc.pod_identity import POD_KEY_PREFIX

_POSITIVE = (
    "lease_ttl_s",
    "num_workers",
    "report_interval_s",
    "assignment_interval_s",
    "resync_interval_s",
    "backoff_base_s",
    "backoff_max_s",
    "refusal_s",
    "image_pull_s",
    "termination_s",
    "sync_timeout_s",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerConfig(CertificateConfig):
    """Settings of one controller."""

    namespaces: str
    """Namespaces of jobs and pools, separated by commas."""
    projects: str = ""
    """`namespace=project`, separated by commas; the project of another namespace has its name."""
    kubeconfig: str = ""
    """Path of a kubeconfig; empty uses the pod's service account."""
    scheduler_address: str
    """`host:port` of the scheduler."""
    gateway_address: str
    """`host:port` of the gateway, which drivers and agents call."""
    pod_key: str = field(repr=False)
    """The root secret of the deployment, which keys of pods and jobs are derived from."""
    previous_pod_key: str = field(default="", repr=False)
    """The root secret before the last rotation; its keys are valid as long as it is given."""
    database_secret_name: str = ""
    """Secret, in each namespace of jobs, with `trainer-` and `coordinator-database-url`; empty if
    there is none."""
    storage_uri: str
    """Where checkpoints go."""
    storage_claim_name: str = ""
    """PersistentVolumeClaim, in each namespace of jobs, with the files of all of them, for a
    `storage_uri` of `file:///storage` or below; empty for an object store."""
    pod_certificate_secrets: str = ""
    """Secrets `<this>-<role>` in each namespace of jobs, with `tls.crt`, `tls.key` and `ca.crt` of
    the pods of a role; empty where pods speak in clear."""
    storage_secret_name: str = ""
    """Secret with the variables of an S3 client; empty if none are needed."""
    image_repository: str
    """Images are `<repository>/<pod>:<tag>`."""
    image_tag: str
    image_pull_secrets: str = ""
    """Names, separated by commas."""
    protected_secret_names: str = ""
    """Other Secrets in namespaces of jobs that no job may ask for; names, separated by commas."""
    trusted_images: str = ""
    """Beginnings of names of images, separated by commas, that may run where the deployment's
    secrets are; besides those of `image_repository`. `*` trusts whatever authors of jobs write."""
    allowed_labels: str = ""
    """Labels with a prefix that jobs may give their pods, separated by commas; an entry that ends
    in `/` allows all names of that prefix. Those without a prefix need no permission."""
    allowed_annotations: str = ""
    """Likewise of annotations."""
    allowed_priority_classes: str = "*"
    """PriorityClasses that jobs may have; `*` allows all but Kubernetes' own, `system-…`."""
    allowed_tolerations: str = "nvidia.com/gpu"
    """Keys of taints that jobs may tolerate."""
    allowed_resources: str = ""
    """Resources that pods of jobs may ask for besides GPUs, processors, memory and disk."""
    allowed_service_accounts: str = ""
    """ServiceAccounts that drivers and workers of jobs may run under, separated by commas."""
    kueue: bool = False
    """Whether Kueue queues the jobs that have its label; without it they are refused."""
    service_account_name: str = ""
    """Of job pods; its token is not mounted."""
    volume_size: str = "64Gi"
    """What a pod of a job may write to its disk, in each of its volumes; a pod beyond it ends."""
    cache_size: str = "1Ti"
    """What a pod may fetch from a hub, where the job names no claim for it."""
    device: str = "cuda"
    """Where models compute in pods that have a GPU."""
    queues_path: Path | None = None
    """TOML file with queues and projects; see `queue_config`."""
    lease_namespace: str
    lease_name: str = "tinsmith-controller"
    identity: str = ""
    """Of this replica; the host's name by default."""
    lease_ttl_s: float = 15.0
    """After how long without a sign of life another replica takes over."""
    num_workers: int = 4
    """Workloads that are looked at at once."""
    report_interval_s: float = 3.0
    """How often drivers' reports are fetched."""
    assignment_interval_s: float = 0.1
    """Shortest time between two decisions about nodes."""
    resync_interval_s: float = 30.0
    """How often everything is looked at though nothing happened."""
    node_lost_s: float = 20.0
    """How long a node is not ready before its pods are given up; the cluster has waited before."""
    backoff_base_s: float = 10.0
    """Pause after a job's first failure; doubled by each further one."""
    backoff_max_s: float = 300.0
    refusal_s: float = 300.0
    """How long a node that refused a pod of a job gets no pods of that job."""
    image_pull_s: float = 600.0
    """How long a job holds nodes while an image of its pods cannot be pulled; then it fails."""
    termination_s: float = 300.0
    """How long a pod of a stopped job may take to be gone once its grace is over. Then the job ends
    without it: its keys are revoked, and a condition names the pod."""
    sync_timeout_s: float = 60.0
    """How long the first answer of the API server may take, and the first list of the cluster."""
    metrics_address: str | None = None
    health_address: str | None = None
    """`host:port` of `/healthz` and `/readyz`."""

    def __post_init__(self) -> None:
        require_positive(self, *_POSITIVE)
        if self.node_lost_s < 0:
            raise ConfigError(f"node_lost_s must be 0 or more, got {self.node_lost_s}")
        if not self.namespace_list():
            raise ConfigError("namespaces must name at least one namespace")
        if not self.pod_key:
            raise ConfigError("pod_key must not be empty")
        if self.pod_key.startswith(POD_KEY_PREFIX):
            raise ConfigError(
                "the controller derives keys of pods and jobs: pod_key must be the root secret"
            )
        path = PurePosixPath(self.storage_uri.removeprefix("file://"))
        is_on_claim = path.is_relative_to(POD_PATHS["storage"]) and ".." not in path.parts
        if self.storage_claim_name and not is_on_claim:
            raise ConfigError(
                f"storage_claim_name is {self.storage_claim_name}, which pods find at "
                f"{POD_PATHS['storage']}: storage_uri must be file://{POD_PATHS['storage']} or "
                f"below, got {self.storage_uri}"
            )
        projects = self.project_map()
        owned = [projects.get(namespace, namespace) for namespace in self.namespace_list()]
        twice = sorted({project for project in owned if owned.count(project) > 1})
        if twice:
            raise ConfigError(
                f"projects: {twice[0]} has two namespaces, whose jobs could have one name; give "
                "each project one"
            )

    def namespace_list(self) -> tuple[str, ...]:
        """Return the namespaces of jobs and pools."""
        return _names(self.namespaces)

    def project_map(self) -> dict[str, str]:
        """Return the project of each namespace that is given one.

        Raises:
            ConfigError: If an entry is not `namespace=project`.
        """
        found = {}
        for entry in _names(self.projects):
            namespace, _, project = entry.partition("=")
            if not namespace or not is_valid_id(project):
                raise ConfigError(f"projects: {entry!r} is not namespace=project")
            found[namespace] = project
        return found

    def limits(self) -> Limits:
        """Return what plans depend on."""
        return Limits(
            backoff_base_s=self.backoff_base_s,
            backoff_max_s=self.backoff_max_s,
            refusal_s=self.refusal_s,
            image_pull_s=self.image_pull_s,
            termination_s=self.termination_s,
            endpoint=self.gateway_address,
        )

    def pull_secrets(self) -> tuple[str, ...]:
        """Return the names of image pull secrets."""
        return _names(self.image_pull_secrets)

    def protected_secrets(self) -> tuple[str, ...]:
        """Return the names of other Secrets that no job may ask for."""
        return _names(self.protected_secret_names)

    def trusted_image_list(self) -> tuple[str, ...]:
        """Return images, and folders of a registry, that are trusted."""
        return (f"{self.image_repository}/", *_names(self.trusted_images))

    def author_policy(self) -> AuthorPolicy:
        """Return what authors of jobs may ask of Kubernetes."""
        return AuthorPolicy(
            labels=_names(self.allowed_labels),
            annotations=_names(self.allowed_annotations),
            priority_classes=_names(self.allowed_priority_classes),
            tolerations=_names(self.allowed_tolerations),
            resources=_names(self.allowed_resources),
            service_accounts=_names(self.allowed_service_accounts),
            has_kueue=self.kueue,
        )

    def replica(self) -> str:
        """Return the identity of this replica."""
        return self.identity or socket.gethostname()


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))
